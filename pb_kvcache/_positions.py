"""Kept positions that a caller gives back, checked: ascending and in range."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, uint32_array
from ._tensor import as_numpy


def ascending(name: str, value: Any, n: int | None = None) -> npt.NDArray[np.uint32]:
    """Return positions, ``(kept,)``: strictly ascending, and below `n` where it is given.

    Raises
    ------
    TypeError, ValueError
        For anything else. The message names the first position that breaks a rule.
    """
    array = uint32_array(name, value, 1)
    beyond = np.flatnonzero(array >= n) if n is not None and n <= UINT32_MAX else np.empty(0, np.intp)
    if beyond.size:
        raise ValueError(f"{name}[{beyond[0]}] = {array[beyond[0]]}: must be smaller than {n}")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if falls.size:
        at = int(falls[0]) + 1
        raise ValueError(f"{name}[{at}] = {array[at]}: must be greater than the one before it, {array[at - 1]}")
    return array


def ascending_rows(name: str, value: Any, heads: int, n: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return one sequence's positions as rows of one width, ``(heads, most)``, and how many each head has.

    Raises
    ------
    TypeError, ValueError
        For another number of heads, or positions that are not ascending and below `n`.
    """
    if len(value) != heads:
        raise ValueError(f"{name}: has {len(value)} heads, must have one row per KV head, {heads}")
    whole = _whole(name, value, n)
    if whole is not None:
        return whole, np.full(heads, whole.shape[1], np.uint32)
    rows = [ascending(f"{name}[{head}]", row, n) for head, row in enumerate(value)]
    counts = np.array([len(row) for row in rows], np.uint32)
    padded = np.zeros((max(1, heads), max([1, *counts.tolist()])), np.uint32)
    for head, row in enumerate(rows):
        padded[head, : len(row)] = row
    return padded, counts


def _whole(name: str, value: Any, n: int) -> npt.NDArray[np.uint32] | None:
    """Return one array of positions that are in range and ascending, checked at once. None for anything else."""
    array = as_numpy(name, value)
    if type(array) is not np.ndarray or array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        return None
    ascends = bool((array[:, 1:] > array[:, :-1]).all())
    if not ascends or int(array[:, 0].min()) < 0 or int(array[:, -1].max()) >= n:
        return None
    return np.ascontiguousarray(array, np.uint32)
