"""The choice of the best: ties, minus zero, the last bit, NaN and infinities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference


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


def test_scores_that_are_not_finite():
    scores = np.array([[1, 2, np.nan, 3]], np.float32)
    with pytest.raises(ValueError, match=r"scores\[0, 2\] = nan: every score must be finite"):
        pb.select_top(scores, 2)
    assert pb.select_top(scores, 4, nan="lowest").tolist() == [[0, 1, 2, 3]]
    assert pb.select_top(scores, 3, nan="lowest").tolist() == [[0, 1, 3]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pb.select_top(np.zeros((2, 5)), 3), TypeError, "scores: .* not float64"),
        (lambda: pb.select_top(np.zeros((2, 5), np.float32), -1), ValueError, "k = -1: must be at least 0"),
        (lambda: pb.select_top(np.zeros((), np.float32), 1), ValueError, "scores: must have at least 1 dimension"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_scores_give_no_positions():
    assert pb.select_top(np.zeros((2, 0), np.float32), 3).shape == (2, 0)
    assert pb.select_top(np.zeros((0, 5), np.float32), 3).shape == (0, 3)
    assert pb.select_top(np.zeros((2, 5), np.float32), 0).shape == (2, 0)
