"""Shapes of the prefill selection's arrays, checked: the native functions and the torch path read the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, integer, shown
from ._options import at_least
from ._tensor import plain_array


class AttentionShape(NamedTuple):
    """What the shape of `attn` says, ``(q_heads, window, n)`` or ``(batch, q_heads, window, n)``.

    Attributes
    ----------
    batched
        Whether there is a batch dimension. Without one `batch` is 1.
    """

    batched: bool
    batch: int
    q_heads: int
    kv_heads: int
    window: int
    n: int

    @classmethod
    def of(cls, shape: Sequence[int], num_kv_heads: Any, window: Any = None) -> AttentionShape:
        """Check the shape of `attn` against the arguments. A `window` of None is not checked.

        Raises
        ------
        TypeError, ValueError
            Where they do not agree.
        """
        shape = tuple(shape)
        if len(shape) not in (3, 4):
            raise ValueError(f"attn: must have shape (q_heads, window, n) or (batch, q_heads, window, n), not {shape}")
        batched = len(shape) == 4
        batch, q_heads, queries, n = shape if batched else (1, *shape)
        kv_heads = integer("num_kv_heads", num_kv_heads)
        if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"num_kv_heads = {shown(kv_heads)}: must divide the {q_heads} query heads of attn")
        if window is not None and integer("window", window) != queries:
            raise ValueError(
                f"window = {shown(integer('window', window))}: must be the number of queries in attn, shape {shape}"
            )
        if not 0 < queries <= n:
            raise ValueError(f"window = {queries}: must be greater than 0 and at most n = {n}")
        if n > UINT32_MAX:
            raise ValueError(f"attn: has n = {n} positions, must have at most {UINT32_MAX}")
        return cls(batched, batch, q_heads, kv_heads, queries, n)

    def token_columns(self, valid: Any) -> list[npt.NDArray[np.intp] | None]:
        """Return the columns of each sequence that are tokens. None means all.

        Parameters
        ----------
        valid
            A boolean mask ``(batch, n)``, or how many columns from the left, ``(batch,)``, or None for all.

        Raises
        ------
        TypeError, ValueError
            For another kind or shape, or without a batch dimension.
        """
        if valid is None:
            return [None] * self.batch
        if not self.batched:
            raise ValueError("valid: is for a batch, attn has no batch dimension")
        mask = plain_array("valid", valid, "booleans or lengths")
        if mask.dtype == np.bool_:
            if mask.shape != (self.batch, self.n):
                raise ValueError(f"valid: has shape {mask.shape}, must be (batch, n) = {(self.batch, self.n)}")
            return [np.flatnonzero(row) for row in mask]
        if mask.dtype.kind not in "iu":
            raise TypeError(f"valid: must be a boolean mask or integer lengths, not {mask.dtype}")
        if mask.shape != (self.batch,):
            raise ValueError(f"valid: has shape {mask.shape}, must have one length per sequence, ({self.batch},)")
        for sequence, length in enumerate(mask):
            if not 0 <= length <= self.n:
                raise ValueError(f"valid[{sequence}] = {length}: must be between 0 and n = {self.n}")
        return [np.arange(length) for length in mask]


def prompt_length(shape: Sequence[int], protect: Any) -> int:
    """Return how many positions a prompt has whose scores have the shape ``(..., kv_heads, n - protect)``.

    Raises
    ------
    TypeError, ValueError
        For a `protect` that is not a positive integer, or a shape without a head or a score.
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(f"scores: must have at least 2 dimensions, (..., kv_heads, n - protect), not shape {shape}")
    if shape[-2] < 1 or shape[-1] < 1:
        raise ValueError(f"scores: has shape {shape}, must hold at least one KV head and one score a row")
    n = shape[-1] + at_least("protect", protect, 1)
    if n > UINT32_MAX:
        raise ValueError(
            f"protect = {shown(n - shape[-1])}: must leave n, which is as many and {shape[-1]} scores, "
            f"at most {UINT32_MAX}"
        )
    return n


def by_head(kept: Any, counts: Sequence[int]) -> Any:
    """Return a list with the first ``counts[h]`` positions of each head h, of ``(kv_heads, most)``.

    Axes in front of the heads become lists of such lists.
    """
    if kept.ndim > 2:
        return [by_head(one, counts) for one in kept]
    return [row[:count] for row, count in zip(kept, counts, strict=True)]
