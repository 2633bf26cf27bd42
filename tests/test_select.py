"""The prefill selection against plain float64, its rules on ties, padding and numbers that are none, and bad input."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference

# Two roundings in the product and the difference, one ulp of the exponential, a relative 2^-20 of the sum.
CLOSE = {"rtol": 4e-6, "atol": 1e-37}


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 4))
    window = draw(st.integers(1, 9))
    n = window + draw(st.one_of(st.integers(1, 40), st.integers(1000, 1100)))
    return kv_heads, group, window, n


def logits_of(shape, seed, spread=4.0):
    kv_heads, group, window, n = shape
    return (np.random.default_rng(seed).normal(size=(kv_heads * group, window, n)) * spread).astype(np.float32)


def dyadic_of(shape, seed, levels=8):
    """Probabilities whose sums are exact in float32, with many ties."""
    kv_heads, group, window, n = shape
    weights = np.random.default_rng(seed).integers(0, levels, size=(kv_heads * group, window, n))
    return (weights / 64).astype(np.float32)


def as_kind(array, kind):
    if kind == "bfloat16":
        return array.astype(pytest.importorskip("ml_dtypes").bfloat16)
    return array.astype(kind)


# ---- Scores ----


@settings(max_examples=40, deadline=None)
@given(shapes(), st.sampled_from(["mean", "max", "sum"]), st.sampled_from([1.0, 0.125, 0.3]), st.integers(0, 2**32))
def test_scores_of_logits_are_the_softmax_averaged(shape, reduce, scale, seed):
    logits = logits_of(shape, seed)
    before = logits.copy()
    got = pb.window_scores(logits, num_kv_heads=shape[0], reduce=reduce, from_logits=True, scale=scale)
    want = reference.window_scores(logits, shape[0], reduce, True, float(np.float32(scale)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, **CLOSE)
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=25, deadline=None)
@given(shapes(), st.sampled_from(["mean", "max", "sum"]), st.integers(0, 2**32))
def test_scores_of_probabilities_are_their_mean(shape, reduce, seed):
    weights = np.random.default_rng(seed).random((shape[0] * shape[1], shape[2], shape[3]), np.float32)
    got = pb.window_scores(weights, num_kv_heads=shape[0], reduce=reduce)
    np.testing.assert_allclose(got, reference.window_scores(weights, shape[0], reduce), rtol=3e-6)


@settings(max_examples=25, deadline=None)
@given(
    shapes(),
    st.sampled_from(["mean", "max", "sum"]),
    st.sampled_from([1.0, 0.3, 17.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_scores_are_the_definition_to_the_bit(shape, reduce, scale, from_logits, absent, seed):
    attn = logits_of(shape, seed)
    if not from_logits:
        attn = np.abs(attn)
    if absent:
        rng = np.random.default_rng(seed)
        for bad in (np.nan, np.inf, -np.inf) if from_logits else (np.nan, np.inf):
            attn[rng.random(attn.shape) < 0.02] = bad
    got = pb.window_scores(
        attn,
        num_kv_heads=shape[0],
        reduce=reduce,
        from_logits=from_logits,
        scale=scale,
        nan="lowest" if absent else "raise",
    )
    want = reference.exact_scores(attn, shape[0], reduce, from_logits, scale, absent)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(0, 40).map(lambda half: 2 * half + 1), st.integers(0, 2**32))
def test_averages_are_the_definition_to_the_bit(n, kernel, seed):
    scores = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    np.testing.assert_array_equal(pb.pool_scores(scores, kernel, "avg"), reference.exact_average(scores, kernel))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("from_logits", [False, True])
def test_half_precision_is_read_as_the_float32_that_it_is(kind, from_logits):
    shape = (2, 3, 5, 1500)
    values = as_kind(logits_of(shape, 1) if from_logits else dyadic_of(shape, 1) + np.float32(0.01), kind)
    options = {"num_kv_heads": 2, "from_logits": from_logits, "scale": 0.5}
    np.testing.assert_array_equal(
        pb.window_scores(values, **options), pb.window_scores(values.astype(np.float32), **options)
    )


def test_every_half_and_every_bfloat16_is_converted_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    for kind in ("float16", "bfloat16"):
        values = as_kind(np.zeros(1, np.float32), kind).dtype
        halves = bits.view(values)
        floats = halves.astype(np.float32)
        good = np.isfinite(floats) & (floats >= 0)
        row = np.concatenate([halves[good], halves[good][:1]])
        got = pb.window_scores(row.reshape(1, 1, -1), num_kv_heads=1)[0]
        np.testing.assert_array_equal(got, floats[good])


def test_the_window_is_causal_and_its_own_columns_do_not_matter_to_probabilities():
    logits = np.zeros((1, 3, 8), np.float32)
    # Query w of three sees 6 + w positions, each with 1 / (6 + w).
    want = np.float32(np.float32(1 / 6) + np.float32(1 / 7) + np.float32(1 / 8)) / np.float32(3)
    np.testing.assert_allclose(pb.window_scores(logits, num_kv_heads=1, from_logits=True), [[want] * 5], rtol=2e-7)
    future = logits.copy()
    future[0, 0, 6:] = np.nan
    future[0, 1, 7] = np.inf
    np.testing.assert_array_equal(
        pb.window_scores(future, num_kv_heads=1, from_logits=True),
        pb.window_scores(logits, num_kv_heads=1, from_logits=True),
    )
    weights = np.full((1, 3, 8), 0.125, np.float32)
    weights[..., 5:] = np.nan
    assert pb.window_scores(weights, num_kv_heads=1).tolist() == [[0.125] * 5]


# ---- Pooling ----


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 40).map(lambda half: 2 * half + 1),
    st.sampled_from(["max", "avg"]),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_pooling_is_over_the_neighbours_that_exist(n, kernel, pooling, seed, absent):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2, n)).astype(np.float32)
    if absent:
        scores[rng.random((2, n)) < 0.3] = rng.choice([np.nan, np.inf, -np.inf])
    got = pb.pool_scores(scores, kernel, pooling, nan="lowest" if absent else "raise")
    want = [reference.pool(row, kernel, pooling) for row in scores]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    if pooling == "max":
        np.testing.assert_array_equal(got, np.array(want, np.float32))


def test_an_average_of_equal_scores_is_that_score_at_the_edges_too():
    for value in (0.1, 1 / 3, 3e38, 1e-44):
        row = np.full((1, 9), value, np.float32)
        np.testing.assert_array_equal(pb.pool_scores(row, 5, "avg"), row)


# ---- Choice ----


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 700), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_the_best_are_chosen_with_ties_to_the_lower_position_and_ascending(n, k, levels, seed, absent):
    rng = np.random.default_rng(seed)
    scores = (rng.integers(-levels, levels, size=(2, n)) / 7).astype(np.float32)
    if absent:
        for odd in (np.nan, np.inf, -np.inf):
            scores[rng.random((2, n)) < 0.2] = odd
    got = pb.select_top(scores, k, nan="lowest" if absent else "raise")
    assert got.dtype == np.uint32
    assert got.tolist() == [reference.top(row, k) for row in scores]


def test_minus_zero_and_zero_tie():
    assert pb.select_top(np.array([-0.0, 0.0, -0.0, 0.0, -1.0], np.float32), 2).tolist() == [0, 1]


def test_scores_that_differ_in_the_last_bit_are_told_apart():
    scores = np.full(5000, 0.7, np.float32)
    scores[[11, 4000, 4999]] = np.nextafter(np.float32(0.7), np.float32(1))
    assert pb.select_top(scores, 3).tolist() == [11, 4000, 4999]
    assert pb.select_top(scores, 5).tolist() == [0, 1, 11, 4000, 4999]


# ---- The chain ----


@settings(max_examples=60, deadline=None)
@given(
    shapes(),
    st.sampled_from([1, 3, 7, 31]),
    st.sampled_from(["max", "avg"]),
    st.sampled_from(["mean", "max", "sum"]),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.floats(0, 1.1),
)
def test_the_chain_keeps_what_its_parts_keep_and_exact_input_what_the_reference_keeps(
    shape, kernel, pooling, reduce, seed, threads, share
):
    kv_heads, group, window, n = shape
    weights = dyadic_of(shape, seed)
    budget = window + int(share * (n - window))
    options = {"num_kv_heads": kv_heads, "window": window, "kernel": kernel, "pooling": pooling, "reduce": reduce}
    got = pb.select(weights, budget, threads=threads, **options)
    pooled = pb.pool_scores(pb.window_scores(weights, num_kv_heads=kv_heads, reduce=reduce), kernel, pooling)
    tail = list(range(n - window, n))
    parts = [[*row, *tail] for row in pb.select_top(pooled, max(0, min(budget, n) - window)).tolist()]
    assert got.tolist() == parts
    if pooling == "max" and kernel < 31 and group & (group - 1) == 0 and window & (window - 1) == 0:
        want = reference.select(weights, budget, kv_heads, window, kernel, reduce=reduce)
        assert got.tolist() == want
    added = pb.select(weights, max(0, budget - window), window_in_budget=False, **options)
    assert added.tolist() == got.tolist()


def test_32_query_heads_over_8_kv_heads_give_8_lists():
    weights = dyadic_of((8, 4, 4, 60), 3)
    kept = pb.select(weights, 16, num_kv_heads=8, window=4)
    assert kept.shape == (8, 16)
    alone = [pb.select(weights[4 * h : 4 * h + 4], 16, num_kv_heads=1, window=4)[0] for h in range(8)]
    np.testing.assert_array_equal(kept, alone)


def test_equal_scores_keep_the_window_and_the_lowest_positions():
    for value in (0.0, 0.25):
        weights = np.full((2, 3, 20), value, np.float32)
        assert pb.select(weights, 8, num_kv_heads=1, window=3).tolist() == [[0, 1, 2, 3, 4, 17, 18, 19]]


def test_a_budget_of_the_window_keeps_the_window_and_one_of_n_everything():
    weights = dyadic_of((2, 1, 3, 20), 0)
    assert pb.select(weights, 3, num_kv_heads=2, window=3).tolist() == [[17, 18, 19]] * 2
    weights[:] = np.nan  # is not even read
    for budget in (20, 21, 2**40):
        assert pb.select(weights, budget, num_kv_heads=2, window=3).tolist() == [list(range(20))] * 2


def test_one_budget_per_head():
    weights = dyadic_of((3, 2, 4, 50), 5)
    kept = pb.select(weights, [4, 17, 99], num_kv_heads=3, window=4)
    assert [row.tolist() for row in kept] == [
        pb.select(weights, budget, num_kv_heads=3, window=4)[head].tolist() for head, budget in enumerate([4, 17, 99])
    ]
    assert all(row.dtype == np.uint32 for row in kept)
    same = pb.select(weights, np.array([9, 9, 9]), num_kv_heads=3, window=4)
    assert isinstance(same, list)


@pytest.mark.parametrize("seed", range(20))
def test_one_head_keeps_what_the_decode_policy_keeps(seed):
    """With the window as both observation and recent window, SnapKV started from the prompt holds the same positions.

    On a tie the policy drops the lower position where the selection keeps it, so the tied case is mirrored.
    """
    rng = np.random.default_rng(seed)
    window, n = int(rng.integers(1, 9)), int(rng.integers(20, 90))
    past = n - window
    budget, kernel = int(rng.integers(window + 1, n)), int(rng.integers(0, 5)) * 2 + 1
    mirror = np.concatenate([np.arange(past)[::-1], np.arange(past, n)])

    def kept_by_policy(weights, kernel):
        policy = pb.SnapKV(budget=n, recent_window=window, obs_window=window, pool_kernel=kernel)
        policy.seed(np.arange(n), weights)
        policy.evict(budget)
        return policy.kept.tolist()

    distinct = np.zeros((1, window, n), np.float32)
    distinct[..., :past] = rng.permutation(past * window).reshape(window, past) / 2**14
    distinct[0, 0, :past] += rng.permutation(past)
    alone = pb.select(distinct, budget, num_kv_heads=1, window=window, kernel=1)
    assert alone[0].tolist() == kept_by_policy(distinct[0], 1)

    weights = dyadic_of((1, 1, window, n), seed, levels=int(rng.integers(2, 20)))
    # The policy pools over the window's columns too: nobody looked at them, so they add nothing to their neighbours.
    weights[..., past:] = 0
    mirrored = np.ascontiguousarray(weights[..., mirror])
    kept = pb.select(mirrored, budget, num_kv_heads=1, window=window, kernel=kernel)
    assert sorted(mirror[kept[0]].tolist()) == kept_by_policy(weights[0], kernel)


# ---- Padding ----


@settings(max_examples=40, deadline=None)
@given(shapes(), st.booleans(), st.integers(0, 2**32), st.integers(1, 3), st.sampled_from(["left", "right", "holes"]))
def test_a_padded_batch_keeps_what_each_sequence_keeps_alone(shape, from_logits, seed, threads, side):
    kv_heads, _, window, n = shape
    rng = np.random.default_rng(seed)
    batch = 3
    make = logits_of if from_logits else dyadic_of
    attn = np.stack([make(shape, seed + b) for b in range(batch)])
    lengths = rng.integers(1, n + 1, size=batch)
    budget = int(rng.integers(window, n + 1))
    masks = np.zeros((batch, n), bool)
    for b, length in enumerate(lengths):
        if side == "holes":
            masks[b, rng.permutation(n)[:length]] = True
        else:
            masks[b, : length if side == "right" else None] = True
            masks[b, : n - length if side == "left" else 0] = False
    for b in range(batch):
        attn[b][..., ~masks[b]] = rng.choice([np.nan, np.inf, -1.0, 1e30])  # padding is not read
    options = {"num_kv_heads": kv_heads, "window": window, "from_logits": from_logits}
    kept = pb.select(attn, budget, valid=masks, threads=threads, **options)
    for b, length in enumerate(lengths):
        columns = np.flatnonzero(masks[b])
        if length <= budget:
            alone = np.tile(columns, (kv_heads, 1))
        else:
            alone = columns[pb.select(np.ascontiguousarray(attn[b][..., columns]), budget, **options)]
        np.testing.assert_array_equal(kept[b], alone)
    if side == "right":
        by_length = pb.select(attn, budget, valid=lengths, **options)
        assert all(np.array_equal(x, y) for x, y in zip(by_length, kept, strict=True))


def test_a_batch_is_its_sequences():
    attn = np.stack([dyadic_of((2, 2, 4, 40), b) for b in range(3)])
    options = {"num_kv_heads": 2, "window": 4}
    np.testing.assert_array_equal(pb.select(attn, 12, **options), [pb.select(one, 12, **options) for one in attn])
    np.testing.assert_array_equal(
        pb.window_scores(attn, num_kv_heads=2), [pb.window_scores(one, num_kv_heads=2) for one in attn]
    )
    ragged = pb.select(attn, [5, 12], **options)
    assert [[len(head) for head in one] for one in ragged] == [[5, 12]] * 3


# ---- Numbers that are none ----


def test_nan_and_infinity_are_refused_where_they_are_seen():
    logits = logits_of((2, 2, 3, 30), 0)
    for bad in (np.nan, np.inf):
        logits[3, 1, 4] = bad
        with pytest.raises(ValueError, match=r"attn\[3, 1, 4\] = (nan|inf): no logit"):
            pb.select(logits, 10, num_kv_heads=2, window=3, from_logits=True)
        with pytest.raises(ValueError, match=r"attn\[1, 3, 1, 4\]"):
            pb.window_scores(np.stack([np.zeros_like(logits), logits]), num_kv_heads=2, from_logits=True)
    weights = dyadic_of((2, 2, 3, 30), 0)
    for bad in (np.nan, np.inf, -np.inf, -1e-30):
        weights[1, 2, 7] = bad
        with pytest.raises(ValueError, match=r"attn\[1, 2, 7\] = .*: every probability must be finite and >= 0"):
            pb.select(weights, 10, num_kv_heads=2, window=3)
    for bad in (-np.inf, -0.5):
        weights[1, 2, 7] = bad
        with pytest.raises(ValueError, match=r"attn\[1, 2, 7\]"):
            pb.select(weights, 10, num_kv_heads=2, window=3, nan="lowest")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_nan_lowest_ranks_below_everything_and_leaves_the_rest_alone(kind, reduce):
    logits = as_kind(logits_of((2, 2, 3, 40), 7), kind)
    bad = logits.copy()
    bad[0, 1, 4] = np.nan
    bad[1, 2, 9] = np.inf
    masked = logits.copy()  # what the softmax of the rest is
    masked[0, 1, 4] = -np.inf
    masked[1, 2, 9] = -np.inf
    options = {"num_kv_heads": 2, "from_logits": True, "reduce": reduce}
    got = pb.window_scores(bad, nan="lowest", **options)
    want = pb.window_scores(masked, **options)
    want[0, [4, 9]] = -np.inf
    np.testing.assert_array_equal(got, want)
    kept = pb.select(bad, 38, window=3, nan="lowest", **options)
    assert kept[0].tolist() == [i for i in range(40) if i not in (4, 9)]
    weights = as_kind(dyadic_of((2, 2, 3, 40), 7), kind)
    weights[0, 0, 3] = np.nan
    weights[3, 2, 0] = np.inf
    kept = pb.select(weights, 39, num_kv_heads=2, window=3, reduce=reduce, nan="lowest")
    assert kept.tolist() == [[i for i in range(40) if i != 3], list(range(1, 40))]


def test_a_position_that_is_not_seen_has_weight_zero_and_a_query_that_sees_nothing_is_refused():
    logits = logits_of((1, 1, 2, 20), 1)
    logits[0, :, 5] = -np.inf
    assert pb.window_scores(logits, num_kv_heads=1, from_logits=True)[0, 5] == 0
    logits[0, 1] = -np.inf
    with pytest.raises(ValueError, match=r"attn\[0, 1\]: every query must see a position"):
        pb.window_scores(logits, num_kv_heads=1, from_logits=True)
    one = pb.window_scores(logits, num_kv_heads=1, from_logits=True, nan="lowest")
    first = pb.window_scores(logits[:, :1, :19], num_kv_heads=1, from_logits=True)
    np.testing.assert_array_equal(one, first[:, :18] / np.float32(2))
    logits[0, 1, 3] = np.nan
    assert pb.window_scores(logits, num_kv_heads=1, from_logits=True, nan="lowest")[0, 3] == -np.inf


def test_float16_logits_that_overflow_are_refused_not_ranked_first():
    with np.errstate(over="ignore"):
        logits = (logits_of((1, 1, 2, 30), 0) * 3e4).astype(np.float16)
    assert np.isinf(logits).any()
    with pytest.raises(ValueError, match="no logit may be NaN or"):
        pb.select(logits, 10, num_kv_heads=1, window=2, from_logits=True)


def test_logits_that_overflow_with_the_scale():
    logits = np.zeros((1, 1, 6), np.float32)
    logits[0, 0, 2] = 1e38
    with pytest.raises(ValueError, match=r"attn\[0, 0, 2\] = .*: no logit may be NaN or \+inf, nor become so times"):
        pb.window_scores(logits, num_kv_heads=1, from_logits=True, scale=1e3)
    got = pb.window_scores(logits, num_kv_heads=1, from_logits=True, scale=1e3, nan="lowest")
    assert got[0, 2] == -np.inf
    np.testing.assert_allclose(got[0, [0, 1, 3, 4]], 0.2, rtol=1e-6)


def test_sums_that_overflow_are_refused():
    weights = np.full((2, 2, 9), 3e38, np.float32)
    with pytest.raises(ValueError, match="too large for float32"):
        pb.window_scores(weights, num_kv_heads=1)


def test_scores_that_are_not_finite():
    scores = np.array([[1, 2, np.nan, 3]], np.float32)
    for call in (lambda: pb.select_top(scores, 2), lambda: pb.pool_scores(scores, 3)):
        with pytest.raises(ValueError, match=r"scores\[0, 2\] = nan: every score must be finite"):
            call()
    assert pb.select_top(scores, 4, nan="lowest").tolist() == [[0, 1, 2, 3]]
    assert pb.select_top(scores, 3, nan="lowest").tolist() == [[0, 1, 3]]


def test_extreme_logits_neither_overflow_nor_vanish():
    logits = np.array([[[3e38, -3e38, 3e38, -3e38, 0, 0]]], np.float32)
    got = pb.window_scores(logits, num_kv_heads=1, from_logits=True)
    assert got.tolist() == [[0.5, 0.0, 0.5, 0.0, 0.0]]
    shifted = np.array([[[1000, 999, 998, 1000]]], np.float32)
    total = math.fsum([1, math.exp(-1), math.exp(-2), 1])
    np.testing.assert_allclose(
        pb.window_scores(shifted, num_kv_heads=1, from_logits=True)[0],
        [1 / total, math.exp(-1) / total, math.exp(-2) / total],
        rtol=3e-7,
    )


# ---- Layouts ----


def test_any_strides_are_read_in_place_and_a_last_axis_that_is_not_contiguous_is_copied():
    whole = dyadic_of((2, 2, 8, 60), 2)
    options = {"num_kv_heads": 2, "window": 4}
    plain = pb.select(whole[:, ::2].copy(), 20, **options)
    big = np.zeros((9, 5, 80), np.float32)
    big[1::2, 1:5, 10:70] = whole[:, ::2]
    for same in (
        whole[:, ::2],
        big[1::2, 1:5, 10:70],
        np.asfortranarray(whole[:, ::2]),
        whole[:, ::2].copy()[::-1].copy()[::-1],
        np.ascontiguousarray(whole[:, ::2].transpose(1, 0, 2)).transpose(1, 0, 2),
    ):
        np.testing.assert_array_equal(pb.select(same, 20, **options), plain)
    unaligned = np.frombuffer(b"x" + whole[:, ::2].tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 4, 60)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(pb.select(unaligned, 20, **options), plain)
    read_only = whole[:, ::2].copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(pb.select(read_only, 20, **options), plain)


def test_the_result_does_not_depend_on_the_number_of_threads():
    logits = np.stack([logits_of((5, 2, 4, 2000), b) for b in range(2)])
    options = {"num_kv_heads": 5, "from_logits": True}
    one = pb.window_scores(logits, **options)
    kept = pb.select(logits, 100, window=4, **options)
    for threads in (2, 3, 7, 64):
        np.testing.assert_array_equal(pb.window_scores(logits, threads=threads, **options), one)
        np.testing.assert_array_equal(pb.select(logits, 100, window=4, threads=threads, **options), kept)


# ---- Compaction ----


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 2**32),
    st.sampled_from(["float32", "float16", "int8", "float64"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_compaction_equals_a_gather(heads, n, dim, seed, kind, threads, positions_outside):
    rng = np.random.default_rng(seed)
    values = rng.integers(-100, 100, size=(heads, n, dim)).astype(kind)
    kv = values.transpose(1, 0, 2).copy().transpose(1, 0, 2) if positions_outside else values.copy()
    keep = int(rng.integers(0, n + 1))
    indices = np.sort(np.stack([rng.permutation(n)[:keep] for _ in range(heads)]), axis=1).astype(np.uint32)
    front = pb.compact(kv, indices, threads=threads)
    assert front.shape == (heads, keep, dim)
    assert keep == 0 or np.shares_memory(front, kv)
    np.testing.assert_array_equal(front, np.take_along_axis(values, indices[..., None].astype(np.int64), axis=1))
    np.testing.assert_array_equal(kv[:, :keep], front)


def test_compaction_of_a_batch_and_of_ragged_heads():
    values = np.arange(2 * 3 * 10 * 2, dtype=np.float32).reshape(2, 3, 10, 2)
    kv = values.copy()
    indices = pb.select(np.stack([dyadic_of((3, 1, 2, 10), b) for b in range(2)]), 5, num_kv_heads=3, window=2)
    front = pb.compact(kv, indices)
    assert front.shape == (2, 3, 5, 2)
    np.testing.assert_array_equal(front, np.take_along_axis(values, indices[..., None].astype(np.int64), axis=2))
    kv = values.copy()
    rows = [[[0], [1, 2, 9], []], [[5, 6], [7], [8]]]
    fronts = pb.compact(kv, rows)
    for b in range(2):
        for h in range(3):
            np.testing.assert_array_equal(fronts[b][h], values[b, h, rows[b][h]])


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([[0, 5], [1, 1]], r"indices\[1\]\[1\] = 1: must be greater than the one before it, 1"),
        ([[0, 5], [2, 1]], r"indices\[1\]\[1\] = 1: must be greater"),
        ([[0, 6], [1, 2]], r"indices\[0\]\[1\] = 6: must be smaller than 6"),
        ([[-1, 5], [1, 2]], r"indices\[0\]\[0\] = -1: must be between"),
        ([[0, 5]], r"indices: has 1 heads"),
    ],
)
def test_compaction_refuses_positions_that_do_not_ascend_or_exist(indices, message):
    kv = np.arange(24.0).reshape(2, 6, 2)
    before = kv.copy()
    with pytest.raises(ValueError, match=message):
        pb.compact(kv, indices)
    np.testing.assert_array_equal(kv, before)


def test_compaction_refuses_rows_that_overlap_and_arrays_that_cannot_be_written():
    base = np.zeros(100, np.float32)
    overlapping = np.lib.stride_tricks.as_strided(base, (2, 6, 4), (96, 8, 4))
    with pytest.raises(ValueError, match="overlap"):
        pb.compact(overlapping, [[0, 3], [1, 2]])
    broadcast = np.lib.stride_tricks.as_strided(base, (2, 6, 4), (0, 16, 4))
    with pytest.raises(ValueError, match="overlap"):
        pb.compact(broadcast, [[0, 3], [1, 2]])
    read_only = np.zeros((2, 6, 4))
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pb.compact(read_only, [[0, 3], [1, 2]])
    with pytest.raises(ValueError, match="last axis"):
        pb.compact(np.zeros((2, 6, 8))[..., ::2], [[0, 3], [1, 2]])
    with pytest.raises(TypeError, match="kv"):
        pb.compact([[1.0]], [[0]])


# ---- For paged engines ----


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 200), max_size=60), st.integers(1, 20))
def test_blocks_ranges_and_masks_say_the_same_as_the_positions(positions, size):
    kept = sorted(positions)
    blocks, fill = pb.to_blocks(kept, size)
    assert dict(zip(blocks.tolist(), fill.tolist(), strict=True)) == {
        block: sum(p // size == block for p in kept) for block in {p // size for p in kept}
    }
    assert blocks.tolist() == sorted(blocks.tolist())
    ranges = pb.to_ranges(np.array(kept, np.uint32))
    assert [p for start, stop in ranges.tolist() for p in range(start, stop)] == kept
    assert all(before[1] < after[0] for before, after in zip(ranges.tolist(), ranges.tolist()[1:], strict=False))
    assert np.flatnonzero(pb.to_mask(kept, 201)).tolist() == kept


def test_rows_of_positions_give_one_answer_each():
    rows = np.array([[0, 1, 5], [2, 3, 4]], np.uint32)
    assert [blocks.tolist() for blocks, _ in pb.to_blocks(rows, 2)] == [[0, 2], [1, 2]]
    assert [ranges.tolist() for ranges in pb.to_ranges(rows)] == [[[0, 2], [5, 6]], [[2, 5]]]
    assert pb.to_mask(rows, 6).shape == (2, 6)
    assert pb.to_mask([[0], [1, 2]], 3).tolist() == [[True, False, False], [False, True, True]]
    assert pb.to_ranges([2**32 - 2, 2**32 - 1]).tolist() == [[2**32 - 2, 2**32]]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 30),
    st.integers(1, 120),
    st.integers(0, 2**32),
    st.sampled_from(["max", "mean", "sum"]),
)
def test_whole_blocks_are_kept_by_their_scores_and_the_window_always(size, window, scored, seed, reduce):
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, 6, size=(2, scored)) / 8).astype(np.float32)
    total = -(-(scored + window) // size)
    safe = scored // size
    keep = int(rng.integers(total - safe, total + 1))
    got = pb.block_select(scores, keep * size, block_size=size, window=window, reduce=reduce)
    fold = {"max": max, "sum": sum, "mean": lambda values: sum(values) / Fraction(size)}[reduce]
    for row, blocks in zip(scores.tolist(), got.tolist(), strict=True):
        ranked = sorted(range(safe), key=lambda b: (-fold([Fraction(x) for x in row[b * size : (b + 1) * size]]), b))
        assert blocks == sorted(ranked[: keep - (total - safe)]) + list(range(safe, total))
    held = {p // size for p in range(scored, scored + window)}
    assert held <= set(got[0].tolist())


def test_block_selection_refuses_a_budget_below_the_windows_blocks():
    scores = np.zeros((1, 30), np.float32)
    with pytest.raises(ValueError, match="budget = 15: must be at least the 2 blocks of the window"):
        pb.block_select(scores, 15, block_size=8, window=8)


# ---- From queries and keys ----


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_scores_from_queries_and_keys(kind):
    rng = np.random.default_rng(4)
    q = as_kind(rng.normal(size=(2, 6, 5, 16)).astype(np.float32), kind)
    k = as_kind(rng.normal(size=(2, 2, 70, 16)).astype(np.float32), kind)
    got = pb.scores_from_qk(q, k, threads=2)
    assert got.shape == (2, 2, 65)
    for b in range(2):
        wide_q, wide_k = q[b].astype(np.float64), np.repeat(k[b].astype(np.float64), 3, axis=0)
        logits = np.einsum("hwd,hnd->hwn", wide_q, wide_k)
        np.testing.assert_allclose(got[b], reference.window_scores(logits, 2, "mean", True, 0.25), rtol=2e-5)
        np.testing.assert_array_equal(pb.scores_from_qk(q[b], k[b]), got[b])


def test_keys_that_are_no_numbers_are_refused_or_rank_lowest():
    q, k = np.ones((2, 3, 8), np.float32), np.ones((2, 20, 8), np.float32)
    k[1, 7, 2] = np.nan
    with pytest.raises(ValueError, match=r"q and k: in the products of KV head 1, attn\[0, 0, 7\] = nan"):
        pb.scores_from_qk(q, k)
    scores = pb.scores_from_qk(q, k, nan="lowest")
    assert np.flatnonzero(scores == -np.inf).tolist() == [17 + 7]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "options", "message"),
    [
        ((2, 3, 8), (2, 20, 7), {}, r"k: has shape .*must agree with q"),
        ((1, 2, 3, 8), (2, 2, 20, 8), {}, r"k: has shape .*must agree with q"),
        ((3, 3, 8), (2, 20, 8), {}, "k: has 2 heads, must divide the 3 of q"),
        ((2, 20, 8), (2, 20, 8), {}, "q: has 20 queries, must have at least 1 and fewer than the 20"),
        ((2, 0, 8), (2, 20, 8), {}, "q: has 0 queries"),
        ((2, 3, 0), (2, 20, 0), {}, "q: has head_dim = 0"),
        ((3, 8), (20, 8), {}, "q and k: must have shapes"),
        ((2, 3, 8), (2, 20, 8), {"scale": 0.0}, "scale = 0.0"),
        ((2, 3, 8), (2, 20, 8), {"reduce": "min"}, "reduce = 'min'"),
        ((2, 3, 8), (2, 20, 8), {"nan": "no"}, "nan = 'no'"),
        ((2, 3, 8), (2, 20, 8), {"threads": 0}, "threads = 0"),
    ],
)
def test_bad_queries_and_keys_are_named(q_shape, k_shape, options, message):
    with pytest.raises(ValueError, match=message):
        pb.scores_from_qk(np.ones(q_shape, np.float32), np.ones(k_shape, np.float32), **options)


# ---- Bad input ----


def good_call(**changes):
    arguments = {"attn": dyadic_of((2, 2, 4, 40), 0), "budget": 12, "num_kv_heads": 2, "window": 4, **changes}
    return pb.select(arguments.pop("attn"), arguments.pop("budget"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": 3}, ValueError, "window = 3: must be the number of queries"),
        ({"window": 2.0}, TypeError, "window = 2.0: must be an integer"),
        ({"attn": np.zeros((4, 0, 40), np.float32), "window": 0}, ValueError, "window = 0: must be greater than 0"),
        ({"attn": np.zeros((4, 4, 4), np.float32)}, ValueError, "window = 4: .*smaller than n = 4"),
        ({"attn": np.zeros((4, 40), np.float32)}, ValueError, r"attn: must have shape"),
        ({"attn": np.zeros((4, 4, 40))}, TypeError, "attn: must be .* of float32, float16 or bfloat16, not float64"),
        ({"attn": np.zeros((4, 4, 40), ">f4")}, TypeError, "attn: .* foreign byte order"),
        ({"attn": np.zeros((4, 4, 40), np.int32)}, TypeError, "attn: .* not int32"),
        ({"attn": [[1.0]]}, TypeError, "attn: .* not list"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads = 3: must divide the 4 query heads"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"num_kv_heads": 8}, ValueError, "num_kv_heads = 8"),
        ({"num_kv_heads": -2}, ValueError, "num_kv_heads = -2"),
        ({"budget": 3}, ValueError, "budget = 3: must be at least the window, 4"),
        ({"budget": -1, "window_in_budget": False}, ValueError, "budget = -1: must be 0 or more"),
        ({"budget": 7.5}, TypeError, "budget = 7.5: must be an integer"),
        ({"budget": [12]}, ValueError, "budget: has 1 numbers, must have one per KV head, 2"),
        ({"budget": [12, 3]}, ValueError, r"budget\[1\] = 3: must be at least the window"),
        ({"budget": [12, True]}, TypeError, r"budget\[1\] = True"),
        ({"kernel": 4}, ValueError, "kernel = 4: must be odd"),
        ({"kernel": 0}, ValueError, "kernel = 0: must be odd"),
        ({"kernel": -3}, ValueError, "kernel = -3: must be odd"),
        ({"pooling": "median"}, ValueError, "pooling = 'median': must be one of max, avg"),
        ({"reduce": "min"}, ValueError, "reduce = 'min': must be one of mean, max, sum"),
        ({"nan": "ignore"}, ValueError, "nan = 'ignore': must be one of raise, lowest"),
        ({"from_logits": True, "scale": 0.0}, ValueError, "scale = 0.0: must be finite and greater than 0"),
        ({"from_logits": True, "scale": -1.0}, ValueError, "scale = -1.0"),
        ({"from_logits": True, "scale": float("nan")}, ValueError, "scale = nan"),
        ({"from_logits": True, "scale": 1e39}, ValueError, "scale = 1e.39"),
        ({"from_logits": True, "scale": 1e-50}, ValueError, "scale = 1e-50"),
        ({"from_logits": True, "scale": "1"}, TypeError, "scale = '1'"),
        ({"threads": 0}, ValueError, "threads = 0: must be at least 1"),
        ({"threads": 1.5}, TypeError, "threads = 1.5"),
        ({"valid": [40]}, ValueError, "valid: is for a batch"),
        ({"attn": np.ma.zeros((4, 4, 40), np.float32)}, TypeError, "attn: .*masked"),
        ({"kernel": 10**5000}, ValueError, "kernel = .*: must be odd"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        good_call(**changes)


@pytest.mark.parametrize(
    ("valid", "error", "message"),
    [
        ([40], ValueError, r"valid: has shape \(1,\), must have one length per sequence, \(2,\)"),
        ([40, 41], ValueError, r"valid\[1\] = 41: must be between 0 and n = 40"),
        ([-1, 4], ValueError, r"valid\[0\] = -1"),
        ([1.0, 4.0], TypeError, "valid: must be a boolean mask or integer lengths"),
        (np.ones((2, 39), bool), ValueError, r"valid: has shape \(2, 39\), must be \(batch, n\) = \(2, 40\)"),
    ],
)
def test_bad_valid_is_named(valid, error, message):
    attn = np.stack([dyadic_of((2, 2, 4, 40), b) for b in range(2)])
    with pytest.raises(error, match=message):
        pb.select(attn, 12, num_kv_heads=2, window=4, valid=valid)


def test_a_kernel_wider_than_everything_is_the_whole():
    weights = dyadic_of((2, 2, 4, 40), 0)
    for kernel in (71, 73, 2**33 + 1, 2**70 + 1):
        np.testing.assert_array_equal(
            pb.select(weights, 12, num_kv_heads=2, window=4, kernel=kernel, pooling="avg"),
            pb.select(weights, 12, num_kv_heads=2, window=4, kernel=71, pooling="avg"),
        )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pb.pool_scores(np.zeros((2, 5), np.float32), 2), ValueError, "kernel = 2: must be odd"),
        (lambda: pb.pool_scores(np.zeros((2, 5), np.float16), 3), TypeError, "scores: .* of float32, not float16"),
        (lambda: pb.select_top(np.zeros((2, 5)), 3), TypeError, "scores: .* not float64"),
        (lambda: pb.select_top(np.zeros((2, 5), np.float32), -1), ValueError, "k = -1: must be at least 0"),
        (lambda: pb.select_top(np.zeros((), np.float32), 1), ValueError, "scores: must have at least 1 dimension"),
        (lambda: pb.to_blocks([3, 1], 2), ValueError, r"indices\[1\] = 1: must be greater"),
        (lambda: pb.to_blocks([1, 3], 0), ValueError, "block_size = 0"),
        (lambda: pb.to_blocks([0.5], 2), TypeError, "indices: must be integers"),
        (lambda: pb.to_mask([3], 3), ValueError, r"indices\[0\] = 3: must be smaller than 3"),
        (lambda: pb.to_ranges([[0], [2, 2]]), ValueError, r"indices\[1\]\[1\] = 2"),
    ],
)
def test_bad_input_of_the_parts_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_scores_give_no_positions():
    empty = np.zeros((2, 0), np.float32)
    assert pb.select_top(empty, 3).shape == (2, 0)
    assert pb.pool_scores(empty, 3).shape == (2, 0)
    assert pb.select_top(np.zeros((0, 5), np.float32), 3).shape == (0, 3)
    assert pb.select_top(np.zeros((2, 5), np.float32), 0).shape == (2, 0)
    assert pb.to_ranges([]).shape == (0, 2)
