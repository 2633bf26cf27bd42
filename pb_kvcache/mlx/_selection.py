"""Which positions of a prompt a layer keeps: scores by the library's own kernels, on arrays of NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .._qk import scores_from_qk
from .._score import window_scores
from .._scores import keydiff_scores
from .._select import select_from_scores
from .._selection import Selection

#: The scores that a layer can make of what it sees: queries and keys after rotation, and values.
_KNOWN_SCORES = ("window", "keydiff")


def check_rule(rule: Selection) -> None:
    """Refuse a rule that needs more of a prompt than a cache sees here.

    Raises
    ------
    ValueError
        Scores that need queries before rotation or another pass over the context, or a second hop.
    """
    if rule.score not in _KNOWN_SCORES:
        raise ValueError(
            f"selection: has score = {rule.score!r}; a cache in mlx-lm sees queries after rotation only and makes "
            f"{' or '.join(map(repr, _KNOWN_SCORES))}"
        )
    if rule.second_hop:
        raise ValueError(
            f"selection: has second_hop = {rule.second_hop:g}, which needs all queries of a prompt; mlx-lm reads it in "
            "chunks, so use second_hop=0"
        )


def choose(
    queries: mx.array,
    keys: mx.array,
    keep: int,
    *,
    rule: Selection,
    scale: float,
    sinks: mx.array | None,
    weights: mx.array | None,
) -> npt.NDArray[np.uint32]:
    """Choose the positions of every sequence and KV head.

    Parameters
    ----------
    queries
        The last ones of the prompt, ``(batch, q_heads, window or fewer, head_dim)``.
    keys
        ``(batch, kv_heads, n, head_dim)``.
    keep
        How many. More than the rule always keeps, and less than `n`.
    rule
        What ranks.
    scale
        What products are multiplied by.
    sinks
        One logit per query head that takes part in the softmax and has no position. None without.
    weights
        What scores are multiplied by, ``(batch, kv_heads, n)`` float32. None for nothing.

    Returns
    -------
    numpy.ndarray
        ``(batch, kv_heads, keep)``, ascending.
    """
    seen, n = queries.shape[2], keys.shape[2]
    if seen < min(rule.window, n):  # tokens were taken back: those that are left choose
        rule = dataclasses.replace(rule, window=seen, protect=rule.protected)
    chosen = np.empty((keys.shape[0], keys.shape[1], keep), np.uint32)
    for sequence in range(len(chosen)):
        scores = _scores(queries[sequence], keys[sequence], rule, scale, sinks)
        of_values = None if weights is None else np.asarray(weights[sequence])
        chosen[sequence] = select_from_scores(scores, keep, selection=rule, weights=of_values)
    return chosen


def _scores(queries: mx.array, keys: mx.array, rule: Selection, scale: float, sinks: mx.array | None) -> Any:
    """Return the scores of one sequence's positions that are not protected, ``(kv_heads, n - protected)``."""
    if rule.score == "keydiff":
        return np.ascontiguousarray(keydiff_scores(_arrays(keys)[0])[:, : keys.shape[1] - rule.protected])
    if sinks is None:
        q, k = _arrays(queries, keys)
        return scores_from_qk(q, k, scale=scale, selection=rule)
    attention = np.asarray(_attention(queries, keys, scale, sinks))
    return window_scores(attention, num_kv_heads=keys.shape[0], selection=rule)


def _arrays(*arrays: mx.array) -> list[npt.NDArray[Any]]:
    """Return arrays of NumPy, without a copy where memory is shared: all float32, or all float16."""
    kinds = {array.dtype for array in arrays}
    if kinds != {mx.float16}:
        arrays = tuple(array.astype(mx.float32) for array in arrays)
    return [np.asarray(array) for array in arrays]


def _attention(queries: mx.array, keys: mx.array, scale: float, sinks: mx.array) -> mx.array:
    """Return the attention of the last queries, ``(q_heads, window, n)`` float32, with a sink in every softmax."""
    q_heads, window, head_dim = queries.shape
    kv_heads, n = keys.shape[:2]
    grouped = queries.astype(mx.float32).reshape(kv_heads, -1, head_dim)
    logits = (grouped @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(q_heads, window, n) * scale
    visible = mx.arange(n)[None] <= mx.arange(n - window, n)[:, None]
    logits = mx.where(visible, logits, -mx.inf)
    sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(-1, 1, 1), (q_heads, window, 1))
    return mx.softmax(mx.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
