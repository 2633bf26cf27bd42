"""Kept positions as blocks, runs and masks, and the choice of whole blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_blocks as reference

SCORES = np.zeros((1, 30), np.float32)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 200), max_size=60), st.integers(1, 20))
def test_blocks_ranges_and_masks_say_the_same_as_the_positions(positions, size):
    kept = sorted(positions)
    blocks, fill = pb.to_blocks(kept, size)
    assert (blocks.tolist(), fill.tolist()) == reference.to_blocks(kept, size)
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
    keep = int(rng.integers(total - scored // size, total + 1))
    got = pb.block_select(scores, keep * size, block_size=size, window=window, reduce=reduce)
    assert got.tolist() == reference.block_select(scores.tolist(), keep * size, size, window, reduce)
    held = {p // size for p in range(scored, scored + window)}
    assert held <= set(got[0].tolist())


@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
def test_blocks_with_a_nan_are_kept_last_or_by_their_other_scores(reduce):
    scores = np.array([[9, np.nan, 1, 0, 2, 0, 0, 0], [np.nan, -np.inf, -9, -9, np.inf, -8, 0, 0]], np.float32)
    got = pb.block_select(scores, 4, block_size=2, window=2, reduce=reduce, nan="lowest")
    assert got.tolist() == reference.block_select(scores.tolist(), 4, 2, 2, reduce)
    assert got.tolist() == ([[0, 4], [3, 4]] if reduce == "max" else [[2, 4], [3, 4]])
    with pytest.raises(ValueError, match=r"scores\[0, 1\] = nan: every score must be finite"):
        pb.block_select(scores, 4, block_size=2, window=2, reduce=reduce)


def test_a_sum_beyond_float32_is_the_largest_and_not_the_lowest():
    scores = np.full((1, 6), np.finfo(np.float32).max)
    scores[0, :2] = 1
    assert pb.block_select(scores, 6, block_size=2, window=2, reduce="sum").tolist() == [[1, 2, 3]]
    assert pb.block_select(-scores, 4, block_size=2, window=2, reduce="sum").tolist() == [[0, 3]]


@st.composite
def evictions(draw):
    """Rows that an eviction left, the table of the cache, and its block size."""
    size, blocks = draw(st.integers(1, 7)), draw(st.integers(0, 6))
    rows = draw(st.sets(st.integers(0, blocks * size - 1))) if blocks else []
    table = draw(st.lists(st.integers(0, 20), min_size=blocks, max_size=blocks, unique=True))
    return sorted(rows), table, size


@settings(max_examples=200, deadline=None)
@given(evictions())
def test_after_the_moves_every_row_is_in_one_place_and_all_blocks_but_the_last_are_full(eviction):
    rows, table, size = eviction
    done = pb.block_moves(rows, table, size)
    used = -(-len(rows) // size)
    assert len(done.table) == used
    assert sorted([*done.table.tolist(), *done.freed.tolist()]) == sorted(table)
    # What was in the engine's memory, copied all at once
    slots = np.array([table[row // size] * size + row % size for row in rows], np.intp)
    memory = np.full(21 * size, -1)
    memory[slots] = rows
    sources, targets = done.moves[:, 0].astype(int), done.moves[:, 1].astype(int)
    assert not set(targets.tolist()) & set(slots.tolist())  # only holes are filled
    memory[targets] = memory[sources]
    read = [memory[done.table[i // size] * size + i % size] for i in range(len(rows))]
    assert read == done.order.tolist()
    assert sorted(read) == rows


@settings(max_examples=200, deadline=None)
@given(evictions())
def test_no_choice_of_blocks_moves_fewer_rows(eviction):
    rows, table, size = eviction
    assert len(pb.block_moves(rows, table, size).moves) == reference.fewest_moves(rows, len(table), size)


@settings(max_examples=200, deadline=None)
@given(evictions())
def test_of_equal_choices_it_is_the_one_that_the_rule_names(eviction):
    rows, table, size = eviction
    done = pb.block_moves(rows, table, size)
    got = [done.order.tolist(), done.moves.tolist(), done.table.tolist(), done.freed.tolist()]
    assert got == list(reference.block_moves(rows, table, size))


def test_attention_over_a_cache_in_blocks_survives_its_evictions():
    """Steps, evictions and moves, beside a policy: what the table reads is what the policy keeps."""
    size, rng = 4, np.random.default_rng(1)
    policy = pb.SnapKV(budget=10, recent_window=2, obs_window=3, pool_kernel=1)
    pool = list(range(8))
    memory = np.full(8 * size, -1)
    table, positions = [pool.pop()], np.array([0], np.uint32)
    memory[table[0] * size] = 0
    for pos in range(1, 60):
        weights = rng.random(len(positions)).astype(np.float32)  # by row, as attention gives them
        policy.on_decode_step(pos, weights[np.argsort(positions)])
        if len(positions) == len(table) * size:
            table.append(pool.pop())
        memory[table[len(positions) // size] * size + len(positions) % size] = pos
        positions = np.append(positions, np.uint32(pos))
        victims = policy.evict()
        if len(victims):
            done = pb.block_moves(np.flatnonzero(~np.isin(positions, victims)), table, size)
            memory[done.moves[:, 1]] = memory[done.moves[:, 0]]
            table, positions = done.table.tolist(), positions[done.order]
            pool += done.freed.tolist()
        assert len(table) == -(-len(positions) // size)
        assert memory[[table[row // size] * size + row % size for row in range(len(positions))]].tolist() == (
            positions.tolist()
        )
        assert np.sort(positions).tolist() == policy.kept.tolist()


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
        (lambda: pb.block_moves([0, 8], [1, 2], 4), ValueError, r"rows\[1\] = 8: must be smaller than 8"),
        (lambda: pb.block_moves([2, 1], [1, 2], 4), ValueError, r"rows\[1\] = 1: must be greater"),
        (lambda: pb.block_moves([0], [1, 1], 4), ValueError, "table: must hold each block once"),
        (lambda: pb.block_moves([0], [2**30], 4), ValueError, r"table\[0\] = 1073741824: must be below 1073741824"),
        (lambda: pb.block_moves([0], [-1], 4), ValueError, r"table\[0\] = -1"),
        (lambda: pb.block_moves([0], [1.5], 4), TypeError, "table: must be integers"),
        (lambda: pb.block_moves([0], [1], 0), ValueError, "block_size = 0"),
        (lambda: pb.block_moves([0], [0], 2**32), ValueError, "block_size = 4294967296: must be at most"),
        (
            lambda: pb.block_select(SCORES, 16, block_size=8, window=2**32),
            ValueError,
            "window = 4294967296: must leave",
        ),
        (lambda: pb.block_select(SCORES, 16, block_size=8, window=8, reduce="min"), ValueError, "reduce = 'min'"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_positions_are_no_runs():
    assert pb.to_ranges([]).shape == (0, 2)
