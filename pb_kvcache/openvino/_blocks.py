"""The blocks of a layer: which are free, and the memory behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._blocks import BlockMoves
from .._checks import natural, uint32_array

Blocks = npt.NDArray[np.uint32]


class BlockPool:
    """Which blocks are free. A block is taken by one owner at a time and has to be given back before another takes it.

    The free block with the lowest number is taken first, so that the end of the memory is what empties.

    Parameters
    ----------
    capacity
        Blocks to begin with, all free.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._taken = np.zeros(natural("capacity", capacity), bool)

    @property
    def capacity(self) -> int:
        """Blocks, free and taken."""
        return len(self._taken)

    @property
    def used(self) -> int:
        """Blocks that are taken."""
        return int(np.count_nonzero(self._taken))

    @property
    def free(self) -> int:
        """Blocks that are free."""
        return self.capacity - self.used

    def grow(self, count: int) -> None:
        """Add so many free blocks behind the others."""
        self._taken = np.concatenate([self._taken, np.zeros(natural("count", count), bool)])

    def take(self, count: int) -> Blocks:
        """Return so many free blocks, ascending, which are no longer free.

        Raises
        ------
        ValueError
            There are not so many. None is taken.
        """
        found = np.flatnonzero(~self._taken)[: natural("count", count)].astype(np.uint32)
        if len(found) < count:
            raise ValueError(f"count = {count}: must be at most the {len(found)} free blocks")
        self._taken[found] = True
        return found

    def give(self, blocks: npt.ArrayLike) -> None:
        """Take blocks back.

        Raises
        ------
        ValueError
            A block that is not taken, is none of the pool's, or is there twice. None is taken back.
        """
        given = uint32_array("blocks", blocks, 1)
        known = given < self.capacity
        if not known.all() or not self._taken[given].all():
            wrong = given[~known] if not known.all() else given[~self._taken[given]]
            raise ValueError(f"blocks: {wrong[0]} is not taken")
        if len(np.unique(given)) != len(given):
            raise ValueError("blocks: must hold each block once")
        self._taken[given] = False

    def cut(self, spare: int = 0) -> Blocks:
        """Drop the free blocks but for `spare` of them, and number the taken ones anew, in their order.

        Returns
        -------
        numpy.ndarray
            The old numbers of the taken blocks, ascending: block ``old[i]`` is now block ``i``.
        """
        old = np.flatnonzero(self._taken).astype(np.uint32)
        self._taken = np.zeros(min(self.capacity, len(old) + natural("spare", spare)), bool)
        self._taken[: len(old)] = True
        return old


class LayerBlocks:
    """The keys and values of a layer in blocks, for all sequences: memory that grows and shrinks with what is held.

    Parameters
    ----------
    make
        Returns a tensor of so many blocks, with its memory as ``data``: an OpenVINO tensor of shape
        ``(blocks, kv_heads, block, head_dim)``. Called once for keys (True) and once for values (False).
    block
        Rows of a block.

    Attributes
    ----------
    pool
        Which blocks are free.
    tensors
        Keys and values. Others from :meth:`take` and :meth:`trim` on, where these answer so.
    """

    def __init__(self, make: Any, block: int) -> None:
        self._make = make
        self.block = block
        self.pool = BlockPool()
        self.tensors: tuple[Any, Any] = (make(True, 0), make(False, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, free blocks included."""
        return sum(int(tensor.data.nbytes) for tensor in self.tensors)

    def take(self, count: int) -> tuple[Blocks, bool]:
        """Return so many blocks, and whether the tensors are others now, because they had to grow for it."""
        missing = count - self.pool.free
        if missing > 0:
            rows = np.arange(self.pool.capacity, dtype=np.uint32)
            self._replace(rows, self.pool.capacity + missing)
            self.pool.grow(missing)
        return self.pool.take(count), missing > 0

    def move(self, moves: BlockMoves) -> None:
        """Close the holes that an eviction left, in place, and take the freed blocks back."""
        (from_block, from_row), (to_block, to_row) = (
            np.divmod(moves.moves[:, side].astype(np.int64), self.block) for side in (0, 1)
        )
        for tensor in self.tensors:
            memory = tensor.data
            memory[to_block, :, to_row] = memory[from_block, :, from_row]
        self.pool.give(moves.freed)

    def trim(self, spare: int) -> Blocks | None:
        """Give the memory of free blocks back to the system, but for `spare` of them.

        Returns
        -------
        numpy.ndarray or None
            For each old number of a block its new one: shape ``(old capacity,)``. None where nothing has changed.
        """
        if self.pool.free <= spare:
            return None
        number = np.zeros(self.pool.capacity, np.uint32)
        old = self.pool.cut(spare)
        number[old] = np.arange(len(old), dtype=np.uint32)
        self._replace(old, self.pool.capacity)
        return number

    def _replace(self, blocks: Blocks, capacity: int) -> None:
        """Put other tensors in place of these, which begin with these blocks of them."""
        made = []
        for is_key, tensor in zip((True, False), self.tensors, strict=True):
            new = self._make(is_key, capacity)
            np.take(tensor.data, blocks, axis=0, out=new.data[: len(blocks)], mode="clip")
            # Rows behind a sequence's last one are multiplied by weights of 0: they must be no NaN.
            new.data[len(blocks) :] = 0
            made.append(new)
        self.tensors = (made[0], made[1])
