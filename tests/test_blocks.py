"""Kept positions as blocks, runs and masks, and the choice of whole blocks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

SCORES = np.zeros((1, 30), np.float32)


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
    with pytest.raises(ValueError, match="budget = 15: must be at least the 2 blocks of the window"):
        pb.block_select(SCORES, 15, block_size=8, window=8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pb.to_blocks([3, 1], 2), ValueError, r"indices\[1\] = 1: must be greater"),
        (lambda: pb.to_blocks([1, 3], 0), ValueError, "block_size = 0"),
        (lambda: pb.to_blocks([0.5], 2), TypeError, "indices: must be integers"),
        (lambda: pb.to_mask([3], 3), ValueError, r"indices\[0\] = 3: must be smaller than 3"),
        (lambda: pb.to_ranges([[0], [2, 2]]), ValueError, r"indices\[1\]\[1\] = 2"),
        (lambda: pb.block_select(SCORES, 16, block_size=8, window=8, reduce="min"), ValueError, "reduce = 'min'"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_positions_are_no_runs():
    assert pb.to_ranges([]).shape == (0, 2)
