"""For paged engines: kept positions as blocks, runs or a mask, and the choice of whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ._calls import ScoreRows
from ._checks import UINT32_MAX, integer, shown
from ._choose import select_top
from ._native import lib
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
    tuple of numpy.ndarray, or list of tuples
        ``(blocks, fill)``, uint32: ascending blocks and how many positions are kept in each, 1 to `block_size`. For
        rows a list with one such pair per row.
    """
    size = min(at_least("block_size", block_size, 1), UINT32_MAX + 1)

    def one(name: str, row: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        blocks, fill = np.unique(ascending(name, row) // np.uint64(size), return_counts=True)
        return blocks.astype(np.uint32), fill.astype(np.uint32)

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
    size = at_least("block_size", block_size, 1)
    last = at_least("window", window, 1)
    positions = integer("budget", budget)
    choice("reduce", reduce, REDUCE)
    fold = np.maximum if reduce == "max" else np.add
    device = scores.device if on_other_device("scores", scores) else None
    if device is not None:
        scores = scores.detach().cpu()
    rule = choice("nan", nan, NAN)
    given = ScoreRows(scores)
    rows = given.rows
    scored = given.shape[-1]
    if scored < 1:
        raise ValueError(f"scores: has shape {given.shape}, must hold at least one score a row")
    total = -(-(scored + last) // size)
    safe = scored // size  # the first block with a position of the window
    keep = min(positions // size, total)
    if keep < total - safe:
        raise ValueError(
            f"budget = {shown(positions)}: must be at least the {total - safe} blocks of the window, {size} each"
        )
    if rule == NAN["raise"] and not np.isfinite(rows).all():
        raise given.refusal(lib.PB_KVCACHE_ERROR_SCORE)
    always = np.broadcast_to(np.arange(safe, total, dtype=np.uint32), (len(rows), total - safe))
    whole = np.where(np.isfinite(rows), rows, np.float32(-np.inf))[:, : safe * size].reshape(len(rows), safe, size)
    folded = np.asarray(fold.reduce(whole, axis=-1), np.float32)
    if reduce == "mean":
        folded /= np.float32(size)
    best = np.asarray(select_top(np.ascontiguousarray(folded), keep - (total - safe), nan="lowest"))
    blocks = np.concatenate([best, always], axis=1)
    result = given.give(blocks, *given.shape[:-1], keep)
    return result if device is None else result.to(device)
