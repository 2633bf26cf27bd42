"""The pool behind a layer's paged cache: every block has one owner, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("openvino")

from pb_kvcache import block_moves
from pb_kvcache.openvino import BlockPool
from pb_kvcache.openvino._blocks import LayerBlocks


class FakeTensor:
    """An OpenVINO tensor as far as the pool knows one."""

    def __init__(self, blocks: int, rows: int) -> None:
        self.data = np.full((blocks, 2, rows, 3), np.nan, np.float32)


def of_rows(rows: int) -> LayerBlocks:
    return LayerBlocks(lambda is_key, blocks: FakeTensor(blocks, rows), rows)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "shrink", "go", "cut"]), st.integers(0, 7), st.randoms(use_true_random=False)),
    max_size=40,
)


@given(EVENTS)
def test_blocks_have_one_owner_and_are_never_lost(events):
    pool = BlockPool(4)
    owners: list[np.ndarray] = []
    for event, number, random in events:
        if event == "come":
            if number > pool.free:
                pool.grow(number - pool.free)
            owners.append(pool.take(number))
        elif event == "shrink" and owners:
            index = random.randrange(len(owners))
            pool.give(owners[index][number:])
            owners[index] = owners[index][:number]
        elif event == "go" and owners:
            pool.give(owners.pop(random.randrange(len(owners))))
        elif event == "cut":
            old = pool.cut(number)
            assert pool.free <= number
            new = {int(block): index for index, block in enumerate(old)}
            owners = [np.array([new[int(block)] for block in owner], np.uint32) for owner in owners]
        held = [int(block) for owner in owners for block in owner]
        assert len(set(held)) == len(held)
        assert pool.used == len(held)
        assert all(block < pool.capacity for block in held)


def test_the_lowest_free_blocks_are_taken_first():
    pool = BlockPool(5)
    assert pool.take(4).tolist() == [0, 1, 2, 3]
    pool.give([2, 0])
    assert pool.take(3).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([3], "blocks: 3 is not taken"), ([0, 9], "blocks: 9 is not taken"), ([1, 1], "must hold each block once")],
)
def test_a_block_that_is_not_taken_is_not_taken_back(blocks, message):
    pool = BlockPool(5)
    pool.take(3)
    with pytest.raises(ValueError, match=message):
        pool.give(blocks)
    assert pool.used == 3


def test_more_blocks_than_are_free_are_refused():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="count = 3: must be at most the 2 free blocks"):
        pool.take(3)
    assert pool.free == 2


def values(layer: LayerBlocks, table: np.ndarray, rows: int) -> np.ndarray:
    """Return a cache's keys in the order of its rows, ``(rows, heads, width)``."""
    return layer.tensors[0].data[table].transpose(0, 2, 1, 3).reshape(-1, 2, 3)[:rows]


def test_rows_stay_what_they_are_when_memory_grows_shrinks_and_closes_its_holes():
    layer = of_rows(4)
    rng = np.random.default_rng(0)
    tables, wanted = [], []
    for count in (5, 3):
        table, replaced = layer.take(count)
        assert replaced
        for tensor in layer.tensors:
            tensor.data[table] = rng.normal(size=(count, 2, 4, 3))
        tables.append(table)
        wanted.append(values(layer, table, 4 * count).copy())
    moves = block_moves([1, 2, 5, 9, 13, 17, 18], tables[0], 4)
    layer.move(moves)
    tables[0], wanted[0] = moves.table, wanted[0][moves.order]
    number = layer.trim(1)
    tables = [number[table] for table in tables]
    assert layer.pool.capacity == 2 + 3 + 1
    assert layer.nbytes == 2 * 6 * 4 * 2 * 3 * 4
    for table, rows in zip(tables, wanted, strict=True):
        np.testing.assert_array_equal(values(layer, table, len(rows)), rows)
    assert layer.trim(1) is None
    assert np.isfinite(layer.tensors[1].data).all()  # what is free is no NaN
