"""Window scores against plain float64 and, to the bit, against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference
from .attention import as_kind, dyadic_of, logits_of, shapes

# Two roundings in the product and the difference, one ulp of the exponential, a relative 2^-20 of the sum.
CLOSE = {"rtol": 4e-6, "atol": 1e-37}


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
    st.data(),
)
def test_scores_are_the_definition_to_the_bit(shape, reduce, scale, from_logits, absent, seed, data):
    attn = logits_of(shape, seed)
    if shape[2] > 1 and data.draw(st.booleans()):  # a prompt of the window alone
        attn = np.ascontiguousarray(attn[..., : shape[2]])
    protect = data.draw(st.one_of(st.none(), st.integers(1, shape[2] + 2)))
    n = attn.shape[-1]
    protect = min(protect, n - 1) if protect is not None else None if shape[2] < n else 1
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
        protect=protect,
        nan="lowest" if absent else "raise",
    )
    want = reference.exact_scores(attn, shape[0], reduce, from_logits, scale, absent, protect)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


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


def test_a_position_of_the_window_has_the_sum_over_the_queries_that_see_it_divided_by_the_window():
    weights = np.array([[[0.5, 0.5, np.nan, -1], [0.25, 0.25, 0.5, np.inf], [0.25, 0, 0.5, 0.25]]], np.float32)
    # Position 0 has three queries, of which the first row is the one at position 1.
    assert pb.window_scores(weights, num_kv_heads=1).tolist() == [[np.float32(1) / np.float32(3)]]
    assert pb.window_scores(weights * 3, num_kv_heads=1, protect=1).tolist() == [[1.0, 0.75, 1.0]]
    # What a query does not see is not read: only the NaN that one does see is refused.
    weights[0, 1, 2] = np.nan
    assert pb.window_scores(weights * 3, num_kv_heads=1, protect=2).tolist() == [[1.0, 0.75]]
    with pytest.raises(ValueError, match=r"attn\[0, 1, 2\] = nan: every probability must be finite and >= 0"):
        pb.window_scores(weights, num_kv_heads=1, protect=1)
    lowest = pb.window_scores(weights * 3, num_kv_heads=1, protect=1, nan="lowest")
    assert lowest.tolist() == [[1.0, 0.75, -np.inf]]
    # Equal logits: query w of three sees 2 + w positions, each with 1 / (2 + w).
    got = pb.window_scores(np.zeros((1, 3, 4), np.float32), num_kv_heads=1, from_logits=True, protect=1)
    third, quarter = 1 / 3, 1 / 4
    want = [(0.5 + third + quarter) / 3, (0.5 + third + quarter) / 3, (third + quarter) / 3]
    np.testing.assert_allclose(got[0], want, rtol=2e-7)


def test_more_than_the_window_may_be_protected_and_no_less_than_one_position():
    logits = logits_of((2, 2, 3, 30), 5)
    scores = pb.window_scores(logits, num_kv_heads=2, from_logits=True)
    longer = pb.window_scores(logits, num_kv_heads=2, from_logits=True, protect=10)
    np.testing.assert_array_equal(longer, scores[:, :20])
    for protect in (0, -1):
        with pytest.raises(ValueError, match=f"protect = {protect}: must be at least 1"):
            pb.window_scores(logits, num_kv_heads=2, from_logits=True, protect=protect)
    with pytest.raises(ValueError, match="protect = 30: must be greater than 0 and smaller than n = 30"):
        pb.window_scores(logits, num_kv_heads=2, from_logits=True, protect=30)
    with pytest.raises(TypeError, match=r"protect = 2\.0: must be an integer"):
        pb.window_scores(logits, num_kv_heads=2, from_logits=True, protect=2.0)


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
