"""For paged engines: kept positions as blocks, runs or a mask, whole blocks kept, and holes closed at decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ._calls import OK, ScoreRows, floats, scratch, words, workspace_size
from ._checks import UINT32_MAX, integer, shown, uint32_array
from ._errors import status_text
from ._native import ffi, lib
from ._options import NAN, REDUCE, at_least, choice
from ._positions import ascending
from ._tensor import as_numpy, on_other_device

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Positions, Scores


def to_blocks(indices: Any, block_size: int) -> Any:
    """Return the blocks that hold kept positions, and how many each holds.

    Parameters
    ----------
    indices
        Ascending positions, ``(kept,)``, or rows of them, one per KV head.
    block_size
        Positions per block. Position ``p`` is in block ``p // block_size``.

    Returns
    -------
    tuple of numpy.ndarray, or list of tuple
        ``(blocks, fill)``, uint32: ascending blocks and how many positions are kept in each, 1 to `block_size`. For
        rows a list with one such pair per row.
    """
    size = min(at_least("block_size", block_size, 1), UINT32_MAX + 1)

    def one(name: str, row: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        positions = ascending(name, row)
        blocks, fill = np.empty_like(positions), np.empty_like(positions)
        found = ffi.new("size_t *")
        status = lib.pb_kvcache_to_blocks(
            words(positions), len(positions), size, words(blocks), words(fill), len(positions), found
        )
        if status != OK:
            raise RuntimeError(status_text(status))
        return blocks[: found[0]].copy(), fill[: found[0]].copy()

    return _each_row("indices", indices, one)


def to_ranges(indices: Any) -> Any:
    """Return kept positions as runs: ``(runs, 2)`` int64, each ``start, stop`` with `stop` excluded.

    For rows of positions, one per KV head, a list with one array per row.
    """

    def one(name: str, row: Any) -> npt.NDArray[np.int64]:
        array = ascending(name, row).astype(np.int64)
        if not array.size:
            return np.empty((0, 2), np.int64)
        cuts = np.flatnonzero(np.diff(array) != 1)
        starts = array[np.concatenate(([0], cuts + 1))]
        stops = array[np.concatenate((cuts, [len(array) - 1]))] + 1
        return np.stack([starts, stops], axis=1)

    return _each_row("indices", indices, one)


def to_mask(indices: Any, n: int) -> npt.NDArray[np.bool_]:
    """Return kept positions as a boolean mask: ``(n,)``, or for rows of positions ``(rows, n)``."""
    length = at_least("n", n, 0)

    def one(name: str, row: Any) -> npt.NDArray[np.bool_]:
        mask = np.zeros(length, np.bool_)
        mask[ascending(name, row, length)] = True
        return mask

    masks = _each_row("indices", indices, one)
    return np.stack(masks) if isinstance(masks, list) and masks else np.asarray(masks, np.bool_)


def _each_row(name: str, value: Any, one: Callable[[str, Any], Any]) -> Any:
    """Apply `one` to a vector of positions, or to each of several."""
    if isinstance(value, (list, tuple)):
        nested = len(value) > 0 and not np.isscalar(value[0]) and np.ndim(value[0]) > 0
    else:
        ndim = np.ndim(as_numpy(name, value))
        if ndim not in (1, 2):
            raise ValueError(f"{name}: must have 1 or 2 dimensions, not {ndim}")
        nested = ndim == 2
    return [one(f"{name}[{i}]", row) for i, row in enumerate(value)] if nested else one(name, value)


@overload
def block_select(
    scores: Scores, budget: int, *, block_size: int, window: int, reduce: str = "max", nan: str = "raise"
) -> Positions: ...


@overload
def block_select(
    scores: Tensor, budget: int, *, block_size: int, window: int, reduce: str = "max", nan: str = "raise"
) -> Tensor: ...


def block_select(
    scores: Any, budget: int, *, block_size: int, window: int, reduce: str = "max", nan: str = "raise"
) -> Any:
    """Return the blocks that each KV head keeps: whole blocks, scored by the positions in them.

    Parameters
    ----------
    scores
        ``(..., n - window)`` float32, from :func:`window_scores` or :func:`pool_scores`. Where heads share one page
        table, reduce them first: ``scores.max(axis=0, keepdims=True)``.
    budget
        Positions kept at most, window included: ``budget // block_size`` blocks. At least the window's blocks.
    block_size
        Positions per block. The last block may be partial.
    window
        Positions behind the scored ones. The blocks that hold one of them are always kept.
    reduce
        ``"max"``, ``"mean"`` or ``"sum"`` of the scores in a block.
    nan
        As for :func:`select_top`.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., blocks)``, ascending block numbers, uint32 or (torch) int64.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    size = min(at_least("block_size", block_size, 1), UINT32_MAX + 1)
    last = at_least("window", window, 1)
    positions = integer("budget", budget)
    fold, rule = choice("reduce", reduce, REDUCE), choice("nan", nan, NAN)
    device = scores.device if on_other_device("scores", scores) else None
    if device is not None:
        scores = scores.detach().cpu()
    given = ScoreRows(scores)
    rows = given.rows
    scored = given.shape[-1]
    if scored < 1:
        raise ValueError(f"scores: has shape {given.shape}, must hold at least one score a row")
    n = scored + last
    if n > UINT32_MAX:
        raise ValueError(f"window = {shown(last)}: must leave n, the window and {scored} scores, at most {UINT32_MAX}")
    total = -(-n // size)
    of_window = total - scored // size
    keep = min(positions // size, total)
    if keep < of_window:
        raise ValueError(
            f"budget = {shown(positions)}: must be at least the {of_window} blocks of the window, {size} each"
        )
    blocks = np.empty((len(rows), keep), np.uint32)
    if rows.size:
        needed = workspace_size(lib.pb_kvcache_block_select_workspace_size, n, last, size)
        status = lib.pb_kvcache_block_select(
            floats(rows),
            scored,
            len(rows),
            n,
            last,
            size,
            fold,
            rule,
            words(np.full(len(rows), min(positions, UINT32_MAX), np.uint32)),
            scratch(needed),
            needed,
            words(blocks),
            keep,
            blocks.size,
        )
        if status != OK:
            raise given.refusal(status)
    result = given.give(blocks, *given.shape[:-1], keep)
    return result if device is None else result.to(device)


@dataclass(frozen=True, eq=False)
class BlockMoves:
    """How the holes of a cache in blocks close after an eviction: what :func:`block_moves` returns.

    Attributes
    ----------
    moves
        ``(moves, 2)`` uint32: the slots, ``block * block_size + row in the block``, that each row is copied from and
        to. No slot is read and written, so that they can be copied in any order or all at once:
        ``memory[moves[:, 1]] = memory[moves[:, 0]]``.
    order
        ``(kept,)`` uint32: for each row of the new cache the row that it was. What the caller holds by row goes along:
        ``positions = positions[order]``.
    table
        ``(blocks,)`` uint32: the blocks of the new cache, of which all but the last are full.
    freed
        uint32: the blocks that are free.
    """

    moves: npt.NDArray[np.uint32]
    order: npt.NDArray[np.uint32]
    table: npt.NDArray[np.uint32]
    freed: npt.NDArray[np.uint32]


def block_moves(rows: Any, table: Any, block_size: int) -> BlockMoves:
    """Return which rows of a cache in blocks move after an eviction, and which blocks become free.

    What is left is ``ceil(len(rows) / block_size)`` blocks: all full but the last, whose rows are at its front. Rows of
    a full block stay where they are, and no choice of blocks copies fewer rows.

    Parameters
    ----------
    rows
        The rows that the eviction left, ascending. Row ``r`` is in block ``table[r // block_size]``.
    table
        The cache's blocks, each once.
    block_size
        Rows per block.

    Returns
    -------
    BlockMoves
        The copies, the new order of the rows, the new table and the free blocks.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule.

    Notes
    -----
    Rows change places with respect to each other. Attention does not depend on that, as long as their positions go
    along. Where several choices copy as few rows, the last block is the one furthest back in the table. Of the other
    blocks the fuller ones stay, and of equals the first in the table.
    """
    size = at_least("block_size", block_size, 1)
    blocks = uint32_array("table", table, 1).copy()
    slots = UINT32_MAX + 1
    if size > UINT32_MAX:
        raise ValueError(f"block_size = {shown(size)}: must be at most {UINT32_MAX}")
    beyond = np.flatnonzero(blocks >= slots // size)
    if beyond.size:
        raise ValueError(
            f"table[{beyond[0]}] = {blocks[beyond[0]]}: must be below {slots // size}, so that slots, {size} a block, "
            "have numbers below 2**32"
        )
    if len(np.unique(blocks)) != len(blocks):
        raise ValueError("table: must hold each block once")
    kept = ascending("rows", rows, len(blocks) * size)
    count = len(kept)
    order = np.empty_like(kept)
    moves = np.empty((count, 2), np.uint32)
    found = ffi.new("size_t *")
    needed = workspace_size(lib.pb_kvcache_block_moves_workspace_size, len(blocks))
    status = lib.pb_kvcache_block_moves(
        words(blocks),
        len(blocks),
        words(kept),
        count,
        size,
        scratch(needed),
        needed,
        words(order),
        ffi.cast("pb_kvcache_move *", words(moves)),
        count,
        found,
    )
    if status != OK:
        raise RuntimeError(status_text(status))
    used = -(-count // size)
    return BlockMoves(moves[: found[0]].copy(), order, blocks[:used], blocks[used:])
