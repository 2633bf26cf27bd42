"""Compaction against a gather, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from .attention import dyadic_of


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


@pytest.mark.parametrize(
    ("shape", "indices", "front"),
    [
        ((0, 5, 2), np.zeros((0, 3), np.uint32), (0, 3, 2)),
        ((0, 5, 2), [], (0, 0, 2)),
        ((2, 0, 2), np.zeros((2, 0), np.uint32), (2, 0, 2)),
        ((2, 0, 2), [[], []], (2, 0, 2)),
        ((2, 5, 0), [[1, 2], [0, 4]], (2, 2, 0)),
        ((0, 2, 5, 2), np.zeros((0, 2, 3), np.uint32), (0, 2, 3, 2)),
        ((0, 2, 5, 2), [], (0, 2, 0, 2)),
        ((3, 0, 5, 2), np.zeros((3, 0, 2), np.uint32), (3, 0, 2, 2)),
        ((3, 2, 0, 2), [[[], []]] * 3, (3, 2, 0, 2)),
    ],
)
def test_an_array_without_elements_has_an_empty_front(shape, indices, front):
    for kv in (np.zeros(shape), np.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]):
        assert pb.compact(kv, indices).shape == front
        with pytest.raises((TypeError, ValueError), match="threads = 0"):
            pb.compact(kv, indices, threads=0)


def test_an_array_without_elements_has_one_front_per_head_where_they_differ():
    fronts = pb.compact(np.zeros((2, 5, 0)), [[1], [0, 4]])
    assert [one.shape for one in fronts] == [(1, 0), (2, 0)]
    fronts = pb.compact(np.zeros((1, 2, 5, 0)), [[[1], [0, 4]]])
    assert [one.shape for one in fronts[0]] == [(1, 0), (2, 0)]


def test_positions_for_an_array_without_elements_are_checked():
    with pytest.raises(ValueError, match=r"indices\[0\]\[0\] = 0: must be smaller than 0"):
        pb.compact(np.zeros((1, 0, 2)), [[0]])
    with pytest.raises(ValueError, match="has 1 sequences, must have one per sequence of kv, 0"):
        pb.compact(np.zeros((0, 1, 4, 2)), [[[0]]])


@pytest.mark.parametrize("indices", [5, None, iter([[1]])])
def test_indices_that_are_no_rows_are_refused_by_name(indices):
    for shape in ((1, 5, 2), (1, 1, 5, 2)):
        with pytest.raises(TypeError, match="indices: must be rows of positions"):
            pb.compact(np.zeros(shape), indices)
