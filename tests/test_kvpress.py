"""Presses of kvpress as contestants of ``pb-kvcache evaluate``: their rows, their bytes, and what is refused."""

from __future__ import annotations

import importlib.metadata
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pb_kvcache import Selection  # noqa: E402
from pb_kvcache.lab import _kvpress, _variants  # noqa: E402
from pb_kvcache.lab.evaluate import make_variants  # noqa: E402
from pb_kvcache.transformers import HeldPrompt  # noqa: E402

from .test_evaluate import folder, item, pair, run, untimed  # noqa: E402, F401
from .test_transformers import _one_thread  # noqa: E402, F401

SNAPKV, ADAKV, PYRAMID = "kvpress:SnapKVPress", "kvpress:AdaKVPress:SnapKVPress", "kvpress:PyramidKVPress"
needs_kvpress = pytest.mark.usefixtures("kvpress")


@pytest.fixture
def kvpress():
    return pytest.importorskip("kvpress", reason="needs kvpress, which needs transformers below 5.3")


def row_of(rows, variant):
    return next(row for row in rows if row["variant"] == variant)


# --- what is run


@needs_kvpress
def test_a_press_keeps_the_budget_and_its_bytes_are_real(pair, tmp_path):  # noqa: F811
    rows = run(pair, tmp_path, [item(0)], budgets=["72"], variants=make_variants([SNAPKV, ADAKV]))
    full, snapkv, adakv = (row_of(rows, name) for name in ("full", SNAPKV, ADAKV))
    assert snapkv["rows"] == 72 == adakv["rows"]
    assert snapkv["bytes"] == full["bytes"] * 72 // 94
    assert adakv["bytes"] == full["bytes"]  # kvpress masks what this one drops, and holds all of it


@needs_kvpress
@pytest.mark.parametrize("question", ["seen", "hidden"])
def test_a_press_does_what_the_librarys_own_rule_of_the_same_settings_does(
    pair,  # noqa: F811
    tmp_path,
    monkeypatch,
    question,
):
    rule = Selection(window=64, kernel=5, pooling="avg", protect=64, edge="kernel")
    monkeypatch.setattr(_variants, "rule_named", lambda name: rule if name == "output" else Selection.named(name))
    variants = make_variants(["uniform"], ["output"]) + make_variants([SNAPKV])
    rows = run(pair, tmp_path, [item(0), item(2)], budgets=["70", "80"], variants=variants, question=question)
    ours = [row for row in rows if row["variant"] == "uniform output"]
    theirs = [row for row in rows if row["variant"] == SNAPKV]
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one["kl"], other["kl"], rtol=2e-3, atol=1e-5)
        assert one["prediction"] == other["prediction"]


@needs_kvpress
def test_a_press_at_the_whole_prompt_changes_nothing(pair, tmp_path):  # noqa: F811
    rows = run(pair, tmp_path, [item(0)], budgets=["94"], variants=make_variants([SNAPKV, ADAKV]))
    for name in (SNAPKV, ADAKV):
        np.testing.assert_allclose(row_of(rows, name)["kl"], 0, atol=1e-6)
        assert row_of(rows, name)["prediction"] == row_of(rows, "full")["prediction"]


@needs_kvpress
@pytest.mark.parametrize("name", [SNAPKV, PYRAMID, ADAKV])
def test_tokens_together_are_fed_as_one_at_a_time(pair, name):  # noqa: F811
    model = pair[0]
    prompt, fed = list(item(0).context), [5, 9, 13, 17]
    with torch.inference_mode():
        cache = _kvpress.pressed(model, prompt, name, 70)
        single = cache.copy()
        together = cache.feed(model, fed)
        one_by_one = torch.cat([single.feed(model, [token]) for token in fed])
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-4)
    assert cache.seen == single.seen == len(prompt) + len(fed)


@needs_kvpress
def test_a_press_leaves_the_model_as_it_was(pair, tmp_path):  # noqa: F811
    variants = make_variants(["uniform"], ["output"])
    without = run(pair, tmp_path / "a", [item(0)], budgets=["72"], variants=variants)
    presses = make_variants([ADAKV, SNAPKV])
    among = run(pair, tmp_path / "b", [item(0)], budgets=["72"], variants=[*presses, *variants])
    kept = [row for row in among if not row["variant"].startswith("kvpress:")]
    assert untimed(kept) == untimed(without)
    assert HeldPrompt.read(pair[0], item(0).context).length == 90  # still with caches that are compressed


@needs_kvpress
def test_a_press_takes_part_once_whatever_the_rules(kvpress):
    variants = make_variants(["uniform", SNAPKV], ["snapkv", "output"], ["none", "fitted"])
    assert [variant.label for variant in variants if variant.is_press] == [SNAPKV]
    assert len(variants) == 5


@needs_kvpress
def test_other_versions_of_kvpress_are_another_variant(pair, tmp_path, monkeypatch):  # noqa: F811
    run(pair, tmp_path, [item(0)], budgets=["72"], variants=make_variants([SNAPKV]))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == "kvpress" else version(name))
    with pytest.raises(ValueError, match="was made with another kvpress:SnapKVPress"):
        run(pair, tmp_path, [item(0)], budgets=["72"], variants=make_variants([SNAPKV]))


# --- what is refused


@needs_kvpress
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kvpress:SnapKVPres", "kvpress has no SnapKVPres; did you mean SnapKVPress"),
        ("kvpress:", "kvpress has no press without a name"),
        ("kvpress:AdaKVPress", "AdaKVPress goes around another press, as in kvpress:AdaKVPress:SnapKVPress"),
        ("kvpress:SnapKVPress:KnormPress", "SnapKVPress takes no other press"),
        ("kvpress:AdaKVPress:ThinKPress", "AdaKVPress cannot be made from its defaults: AdaKVPress requires"),
        ("kvpress:DuoAttentionPress:", "kvpress has no press without a name"),
    ],
)
def test_a_press_that_cannot_be_made_is_refused(name, message):
    with pytest.raises(ValueError, match="plan = ") as refused:
        make_variants([name])
    assert message in str(refused.value)


@needs_kvpress
def test_what_a_press_says_of_a_prompt_names_the_press(pair, tmp_path):  # noqa: F811
    short = item(0, context=50, question=0, answers=())  # below the 64 queries that the press looks at
    with pytest.raises(ValueError, match=r"kvpress:SnapKVPress at 40 of 49 positions: Query length 49 should be"):
        run(pair, tmp_path, [short], budgets=["40"], variants=make_variants([SNAPKV]))


def test_without_kvpress_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ImportError, match=r"plan = 'kvpress:SnapKVPress': needs kvpress.*an environment of its own"):
        make_variants([SNAPKV])
