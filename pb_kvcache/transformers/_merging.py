"""Merging in a cache: the rows that a layer keeps of a prompt take in the ones that it evicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._merge import merge

if TYPE_CHECKING:
    from ._selection import Scoring

#: A head merges only where so many of its rows may take others in: fewer make answers worse.
LEAST_ROWS = 8

#: The ways, as :func:`pb_kvcache.merge` names them.
MERGES = {"nearest": "nearest", "fitted": "fitted", "macro": "macro"}


def merged_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: Any,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    method: str,
    protect: int,
) -> tuple[Any, Any, Any] | None:
    """Return the kept rows of one sequence with the evicted ones in them, and their biases.

    Parameters
    ----------
    keys, values
        ``(kv_heads, n, head_dim)``, the whole prompt.
    kept
        Positions that stay, ``(kv_heads, k)`` or a vector for each head, ascending.
    query
        The prompt's last queries after rotation, ``(q_heads, window or fewer, head_dim)``.
    scoring
        What makes attention of their products.
    method
        As :func:`pb_kvcache.merge` names it.
    protect
        Last rows of each head that take nothing in.

    Returns
    -------
    Keys, values and biases, each indexed by head. None where no head has rows enough.
    """
    kv_heads, n = keys.shape[:2]
    counts = [len(positions) for positions in kept]
    protected = [count if count == n or count - protect < LEAST_ROWS else protect for count in counts]
    if protected == counts:
        return None
    queries = query.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    lse = scoring.normaliser(query, keys).unflatten(0, (kv_heads, -1)).flatten(1, 2)
    return merge(keys, values, kept, queries, protect=protected, method=method, lse=lse, scale=scoring.scale)
