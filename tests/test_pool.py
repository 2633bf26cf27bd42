"""Pooling against plain loops, at the edges and with NaN and infinities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 40).map(lambda half: 2 * half + 1),
    st.sampled_from(["max", "avg"]),
    st.sampled_from(["count", "kernel"]),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_pooling_is_over_the_neighbours_that_exist_and_the_zeros_that_edge_adds(n, kernel, pooling, edge, seed, absent):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2, n)).astype(np.float32)
    if absent:
        scores[rng.random((2, n)) < 0.3] = rng.choice([np.nan, np.inf, -np.inf])
    got = pb.pool_scores(scores, kernel, pooling, edge=edge, nan="lowest" if absent else "raise")
    want = [reference.pool(row, kernel, pooling, edge) for row in scores]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    if pooling == "max":
        np.testing.assert_array_equal(got, np.array(want, np.float32))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 40).map(lambda half: 2 * half + 1),
    st.sampled_from(["count", "kernel"]),
    st.integers(0, 2**32),
)
def test_averages_are_the_definition_to_the_bit(n, kernel, edge, seed):
    scores = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    got = pb.pool_scores(scores, kernel, "avg", edge=edge)
    np.testing.assert_array_equal(got, reference.exact_average(scores, kernel, edge))


def test_an_average_of_equal_scores_is_that_score_at_the_edges_too():
    for value in (0.1, 1 / 3, 3e38, 1e-44):
        row = np.full((1, 9), value, np.float32)
        np.testing.assert_array_equal(pb.pool_scores(row, 5, "avg"), row)


def test_edge_kernel_divides_by_the_kernel_at_both_ends():
    row = np.array([[6, 3, 0, 9, 12]], np.float32)
    assert pb.pool_scores(row, 3, "avg", edge="count").tolist() == [[4.5, 3, 4, 7, 10.5]]
    assert pb.pool_scores(row, 3, "avg", edge="kernel").tolist() == [[3, 3, 4, 7, 7]]
    assert pb.pool_scores(row, 15, "avg", edge="kernel").tolist() == [[2] * 5]
    row[0, 0] = np.nan  # left out, and no zero: (3 + 0) / 2
    assert pb.pool_scores(row, 3, "avg", edge="kernel", nan="lowest").tolist() == [[-np.inf, 1.5, 4, 7, 7]]


def test_edge_changes_no_maximum():
    row = -np.arange(1, 6, dtype=np.float32)[None]  # all below the zeros that are not there
    assert pb.pool_scores(row, 3, edge="kernel").tolist() == [[-1, -1, -2, -3, -4]]


@pytest.mark.parametrize("n", [1, 2, 4, 50])
@pytest.mark.parametrize("kernel", [1, 3, 5, 101])
def test_edge_kernel_is_avg_pool1d_of_torch(n, kernel):
    torch = pytest.importorskip("torch", reason="needs torch")
    scores = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n))
    want = torch.nn.functional.avg_pool1d(scores.double(), kernel, stride=1, padding=kernel // 2)
    torch.testing.assert_close(pb.pool_scores(scores, kernel, "avg", edge="kernel"), want.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pb.pool_scores(np.zeros((2, 5), np.float32), 2), ValueError, "kernel = 2: must be odd"),
        (
            lambda: pb.pool_scores(np.zeros((2, 5), np.float32), 3, edge="zeros"),
            ValueError,
            "edge = 'zeros': must be one of count, kernel",
        ),
        (
            lambda: pb.pool_scores(np.zeros((2, 5), np.float32), 2**40 + 1, "avg", edge="kernel"),
            ValueError,
            'kernel = 1099511627777: must be at most 8589934591 with edge="kernel"',
        ),
        (lambda: pb.pool_scores(np.zeros((2, 5), np.float16), 3), TypeError, "scores: .* of float32, not float16"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_nan_among_the_scores_is_refused():
    with pytest.raises(ValueError, match=r"scores\[0, 2\] = nan: every score must be finite"):
        pb.pool_scores(np.array([[1, 2, np.nan, 3]], np.float32), 3)


def test_no_scores_are_pooled_to_none():
    assert pb.pool_scores(np.zeros((2, 0), np.float32), 3).shape == (2, 0)
