"""The second half of the selection, which starts from scores: it is what `select` does with the scores of a window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference
from .attention import dyadic_of, logits_of, shapes

kernels = st.sampled_from([1, 3, 7, 31, 2**40 + 1])
poolings = st.sampled_from(["max", "avg"])
edges = st.sampled_from(["count", "kernel"])


def scores_of(*shape, seed=0, levels=9):
    """Random scores, with ties."""
    return (np.random.default_rng(seed).integers(0, levels, size=shape) / 8).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(shapes(), kernels, poolings, st.booleans(), st.booleans(), st.integers(0, 2**32), st.floats(0, 1.1), st.data())
def test_it_keeps_what_select_keeps_of_the_same_attention(
    shape, kernel, pooling, window_in_budget, absent, seed, share, data
):
    kv_heads, _, window, n = shape
    logits = logits_of(shape, seed)
    nan = "lowest" if absent else "raise"
    if absent:
        logits[np.random.default_rng(seed).random(logits.shape) < 0.02] = np.nan
    budget = int(share * (n - window)) + (window if window_in_budget else 0)
    if data.draw(st.booleans()):
        least = window if window_in_budget else 0
        budget = data.draw(st.lists(st.integers(least, n + 2), min_size=kv_heads, max_size=kv_heads))
    choosing = {"kernel": kernel, "pooling": pooling, "window_in_budget": window_in_budget, "nan": nan}
    scores = pb.window_scores(logits, num_kv_heads=kv_heads, from_logits=True, nan=nan)
    got = pb.select_from_scores(scores, budget, window, **choosing)
    want = pb.select(logits, budget, num_kv_heads=kv_heads, window=window, from_logits=True, **choosing)
    assert type(got) is type(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == np.uint32
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 20).map(lambda half: 2 * half + 1),
    poolings,
    edges,
    st.booleans(),
    st.integers(0, 2**32),
    st.data(),
)
def test_it_keeps_what_the_reference_keeps(kv_heads, scored, window, kernel, pooling, edge, absent, seed, data):
    scores = scores_of(kv_heads, scored, seed=seed)
    if absent:
        for value in (np.nan, np.inf, -np.inf):
            scores[np.random.default_rng(seed).random(scores.shape) < 0.1] = value
    top = scored + window + 2
    budgets = data.draw(st.lists(st.integers(window, top), min_size=kv_heads, max_size=kv_heads))
    before = scores.copy()
    got = pb.select_from_scores(scores, budgets, window, kernel=kernel, pooling=pooling, edge=edge, nan="lowest")
    exact = not absent or pooling == "max"  # the reference's averages beside a NaN are not to the bit
    want = reference.select_from_scores(scores, budgets, window, kernel, pooling, edge, exact=True)
    for ours, theirs, budget in zip(got, want, budgets, strict=True):
        assert len(ours) == min(budget, scored + window)
        if exact:
            assert ours.tolist() == theirs
    np.testing.assert_array_equal(scores, before)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 9),
    kernels,
    poolings,
    edges,
    st.booleans(),
    st.integers(0, 2**32),
    st.data(),
)
def test_sinks_and_weights_keep_what_the_reference_keeps(
    kv_heads, scored, protect, kernel, pooling, edge, absent, seed, data
):
    rng = np.random.default_rng(seed)
    scores = scores_of(kv_heads, scored, seed=seed)
    if absent:
        scores[rng.random(scores.shape) < 0.1] = np.nan
        scores[rng.random(scores.shape) < 0.1] = -np.inf
        pooling = "max"  # the reference's averages beside a NaN are not to the bit
    n = scored + protect
    sinks = data.draw(st.integers(0, min(4, scored)))
    weights = (rng.integers(0, 9, size=(kv_heads, data.draw(st.sampled_from([scored, n])))) / 4).astype(np.float32)
    budgets = data.draw(st.lists(st.integers(protect + sinks, n + 2), min_size=kv_heads, max_size=kv_heads))
    choosing = {"kernel": min(kernel, 99), "pooling": pooling, "edge": edge, "sinks": sinks, "weights": weights}
    before = weights.copy()
    got = pb.select_from_scores(scores, budgets, protect, nan="lowest", **choosing)
    want = reference.select_from_scores(scores, budgets, protect, exact=True, **choosing)
    assert [row.tolist() for row in got] == want
    np.testing.assert_array_equal(weights, before)


def test_weights_have_the_axes_of_the_scores():
    scores, weights = scores_of(2, 3, 4, 30), scores_of(2, 3, 4, 35, seed=1)
    kept = pb.select_from_scores(scores, 12, 5, weights=weights[..., ::-1], sinks=2)
    for i in range(2):
        for j in range(3):
            own = np.ascontiguousarray(weights[i, j, :, ::-1][:, :30])
            np.testing.assert_array_equal(kept[i, j], pb.select_from_scores(scores[i, j], 12, 5, weights=own, sinks=2))
    weights[1, 2, 3, 34] = np.nan  # the weight of position 0 of the reversed row
    with pytest.raises(ValueError, match=r"weights\[1, 2, 3, 0\] = nan: every weight must be finite and >= 0"):
        pb.select_from_scores(scores, 12, 5, weights=weights[..., ::-1])
    assert pb.select_from_scores(scores[:0], 12, 5, weights=weights[:0]).shape == (0, 3, 4, 12)
    scores[0, 0, 1, 7] = np.inf
    with pytest.raises(ValueError, match=r"scores\[0, 0, 1, 7\] = inf: every score must be finite"):
        pb.select_from_scores(scores, 12, 5, weights=weights)


def test_a_budget_of_everything_does_not_look_at_the_scores():
    scores = scores_of(2, 20)
    scores[1] = np.nan
    for budget in (23, 24, 2**40):
        assert pb.select_from_scores(scores, budget, 3).tolist() == [list(range(23))] * 2
    assert pb.select_from_scores(scores, 20, 3, window_in_budget=False).tolist() == [list(range(23))] * 2
    kept = pb.select_from_scores(scores, [5, 23], 3)
    assert kept[0].tolist() == pb.select_from_scores(scores[:1], 5, 3)[0].tolist()
    assert kept[1].tolist() == list(range(23))
    with pytest.raises(ValueError, match=r"scores\[1, 0\] = nan: every score must be finite"):
        pb.select_from_scores(scores, [23, 5], 3)


def test_a_budget_of_the_window_keeps_the_window():
    assert pb.select_from_scores(scores_of(2, 20), 3, 3).tolist() == [[20, 21, 22]] * 2
    assert pb.select_from_scores(scores_of(2, 20), 0, 3, window_in_budget=False).tolist() == [[20, 21, 22]] * 2


def test_axes_in_front_of_the_heads_are_kept():
    scores = scores_of(2, 3, 4, 30)
    kept = pb.select_from_scores(scores, 12, 5)
    assert kept.shape == (2, 3, 4, 12)
    for i in range(2):
        np.testing.assert_array_equal(kept[i], pb.select_from_scores(scores[i], 12, 5))
        for j in range(3):
            np.testing.assert_array_equal(kept[i, j], pb.select_from_scores(scores[i, j], 12, 5))
    ragged = pb.select_from_scores(scores, [5, 9, 12, 99], 5)
    assert [[[len(row) for row in heads] for heads in one] for one in ragged] == [[[5, 9, 12, 35]] * 3] * 2
    for head, row in enumerate(pb.select_from_scores(scores[1, 2], [5, 9, 12, 99], 5)):
        np.testing.assert_array_equal(ragged[1][2][head], row)
    assert pb.select_from_scores(scores[:0], 12, 5).shape == (0, 3, 4, 12)
    assert pb.select_from_scores(scores[:0], [5, 9, 12, 99], 5) == []


def test_a_batch_of_attention_gives_what_its_scores_give():
    attn = np.stack([dyadic_of((2, 2, 4, 40), b) for b in range(3)])
    scores = pb.window_scores(attn, num_kv_heads=2)
    np.testing.assert_array_equal(pb.select_from_scores(scores, 12, 4), pb.select(attn, 12, num_kv_heads=2, window=4))


def test_scores_with_any_strides_are_read():
    whole = scores_of(3, 4, 60)
    for view in (whole[1, :, ::2], whole[:, 2, 5:], whole[::-1, 0], np.asfortranarray(whole[0])):
        np.testing.assert_array_equal(
            pb.select_from_scores(view, 12, 5), pb.select_from_scores(np.ascontiguousarray(view), 12, 5)
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": np.zeros(30, np.float32)}, ValueError, "scores: must have at least 2 dimensions"),
        ({"scores": np.zeros((), np.float32)}, ValueError, "scores: must have at least 1 dimension"),
        ({"scores": np.zeros((2, 0), np.float32)}, ValueError, r"scores: has shape \(2, 0\), must hold at least one"),
        ({"scores": np.zeros((0, 9), np.float32)}, ValueError, r"scores: has shape \(0, 9\), must hold at least one"),
        ({"scores": np.zeros((2, 30))}, TypeError, "scores: .* of float32, not float64"),
        ({"scores": np.zeros((2, 30), ">f4")}, TypeError, "scores: .* foreign byte order"),
        ({"scores": [[1.0, 2.0]]}, TypeError, "scores: .* not list"),
        ({"protect": 0}, ValueError, "protect = 0: must be at least 1"),
        ({"protect": 2.0}, TypeError, "protect = 2.0: must be an integer"),
        ({"protect": 2**32 - 30}, ValueError, "protect = 4294967266: must leave n"),
        ({"protect": 10**5000}, ValueError, "protect = .*: must leave n"),
        ({"budget": 3}, ValueError, "budget = 3: must be at least what is always kept, 4"),
        ({"budget": -1, "window_in_budget": False}, ValueError, "budget = -1: must be 0 or more"),
        ({"budget": 7.5}, TypeError, "budget = 7.5: must be an integer"),
        ({"budget": [12]}, ValueError, "budget: has 1 numbers, must have one per KV head, 2"),
        ({"budget": [12, 3]}, ValueError, r"budget\[1\] = 3: must be at least what is always kept, 4"),
        ({"kernel": 4}, ValueError, "kernel = 4: must be odd"),
        ({"sinks": 9}, ValueError, "budget = 12: must be at least what is always kept, 13: protect 4 and sinks 9"),
        ({"sinks": 1.0}, TypeError, "sinks = 1.0: must be an integer"),
        (
            {"weights": np.ones((2, 33), np.float32)},
            ValueError,
            r"weights: has shape .*, must be \(2, 30\) or \(2, 34\)",
        ),
        ({"weights": np.ones((2, 30), np.float16)}, TypeError, "weights: must be .* of float32, not float16"),
        ({"kernel": 3.0}, TypeError, "kernel = 3.0: must be an integer"),
        ({"pooling": "median"}, ValueError, "pooling = 'median': must be one of max, avg"),
        ({"nan": "ignore"}, ValueError, "nan = 'ignore': must be one of raise, lowest"),
        ({"scores": np.full((2, 30), -np.inf, np.float32)}, ValueError, r"scores\[0, 0\] = -inf: every score"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"scores": scores_of(2, 30), "budget": 12, "protect": 4, **changes}
    with pytest.raises(error, match=message):
        pb.select_from_scores(**arguments)
