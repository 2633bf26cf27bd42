"""Scores of a prompt's positions that do not come from its last queries.

Expected attention of the next queries, distance of a key from the others, attention while the context is repeated.
:func:`select_from_scores` chooses by them as by the window's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._arrays import (
    float32,
    float64,
    in_float32,
    library,
    query_group,
    read,
    refuse_not_finite,
    same_shape,
    zeros,
)
from ._options import at_least, logit_scale
from ._tensor import dense, is_torch, torch_module

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Array, Scores

#: Keys that are multiplied together: 512 KB of them stay in the second cache at head_dim 128.
_TILE = 1024

#: Elements of a block of logits in :func:`repeat_scores`: 8 MiB of float32, of which tensors take two.
_BLOCK = 1 << 21


@overload
def expected_scores(
    keys: Array, mean: Array, covariance: Array, cos: Array, sin: Array, *, scale: float | None = None
) -> Scores: ...


@overload
def expected_scores(
    keys: Tensor, mean: Tensor, covariance: Tensor, cos: Tensor, sin: Tensor, *, scale: float | None = None
) -> Tensor: ...


def expected_scores(keys: Any, mean: Any, covariance: Any, cos: Any, sin: Any, *, scale: float | None = None) -> Any:
    """Return the attention that each position can expect from the next queries: Expected Attention, arXiv 2510.00636.

    The next queries are taken to be Gaussian, with the moments of the prompt's own queries before rotation, turned to
    the next positions by the average ``R`` of their rotations: ``mu' = R mu``, ``Sigma' = R Sigma R^T``. A key ``k``
    then has the logit ``scale * k . mu' + scale^2 / 2 * k . Sigma' k``, the log of the mean of ``exp(scale * k . q)``.
    A softmax over the positions makes scores of the logits of one query head. A KV head's scores are the mean over its
    group's. They add up to 1. No query is needed, and no value: the paper multiplies the scores by the values' norms
    afterwards.

    Parameters
    ----------
    keys
        ``(kv_heads, n, head_dim)``, float32, float16 or bfloat16, with their rotary embedding applied. The paper's code
        leaves out the first 4 positions and always keeps them. Here they compete unless ``keys[:, 4:]`` is given.
    mean, covariance
        ``(q_heads, head_dim)`` and ``(q_heads, head_dim, head_dim)``, from :func:`query_moments` or
        :class:`QueryMoments`. Query heads ``h*g .. h*g+g-1`` belong to KV head ``h``.
    cos, sin
        ``(positions, rotary_dim)``: the model's rotary embedding of the next positions, ``n``, ``n + 1`` and so on.
        The paper's code takes 512 of them, the figures of this package 256. The layout is that of ``rotate_half``:
        element ``i`` of the first half turns with element ``i`` of the second. `rotary_dim` is `head_dim`, or smaller
        where the model turns only the first elements.
    scale
        What products of queries and keys are multiplied by. None means ``head_dim ** -0.5``.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, n)`` float32.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, a value that is not finite, or logits too large for float32.

    Examples
    --------
    Two positions whose keys a query of mean (1, 0) tells apart, without rotation:

    >>> keys = np.array([[[2, 0], [0, 2]]], np.float32)
    >>> mean, covariance = np.array([[1, 0]], np.float32), np.zeros((1, 2, 2), np.float32)
    >>> cos, sin = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
    >>> expected_scores(keys, mean, covariance, cos, sin, scale=0.5).round(3)
    array([[0.731, 0.269]], dtype=float32)
    """
    # Arguments.
    keys = read("keys", keys, "kv_heads, n, head_dim")
    like = ("keys", keys)
    mean = read("mean", mean, "q_heads, head_dim", like=like)
    covariance = read("covariance", covariance, "q_heads, head_dim, head_dim", like=like)
    cos = read("cos", cos, "positions, rotary_dim", like=like)
    sin = read("sin", sin, "positions, rotary_dim", like=like)
    kv_heads, n, head_dim = keys.shape
    q_heads, rotary_dim = mean.shape[0], cos.shape[1]
    group = query_group(q_heads, kv_heads, "mean")
    same_shape("mean", mean, (q_heads, head_dim), "keys")
    same_shape("covariance", covariance, (q_heads, head_dim, head_dim), "mean")
    same_shape("sin", sin, tuple(cos.shape), "cos")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos: has rotary_dim = {rotary_dim}, must be even and at most head_dim, {head_dim}")
    factor = logit_scale(head_dim**-0.5 if scale is None else scale)
    for name, array in (("keys", keys), ("mean", mean), ("covariance", covariance), ("cos", cos), ("sin", sin)):
        refuse_not_finite(name, array)
    with in_float32(keys):
        # The moments at the next positions, with the scale in them.
        turn = float64(cos).mean(axis=0), float64(sin).mean(axis=0)
        ahead = float32(_turned(float64(mean), *turn) * factor)
        spread = _turned(_turned(float64(covariance), *turn).swapaxes(1, 2), *turn)
        spread = float32(spread * (factor * factor / 2))
        # One KV head after the other, its keys by tiles.
        scores = zeros((kv_heads, n), keys)
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            logits = zeros((group, n), keys)
            for start in range(0, n, _TILE):
                tile = float32(keys[head, start : start + _TILE])
                quadratic = (library(keys).matmul(tile, spread[mine]) * tile).sum(axis=-1)
                logits[:, start : start + _TILE] = library(keys).matmul(ahead[mine], tile.T) + quadratic
            if not bool(library(keys).isfinite(logits).all()):
                raise ValueError(f"keys: the logits of KV head {head} are too large for float32")
            scores[head] = _softmax(logits).mean(axis=0)
        return scores


def _turned(vectors: Any, cos: Any, sin: Any) -> Any:
    """Return vectors ``(..., head_dim)`` turned by a rotary embedding ``(rotary_dim,)``, halves against halves."""
    half = len(cos) // 2
    lead = vectors[..., : 2 * half]
    across = library(vectors).concatenate((-lead[..., half:], lead[..., :half]), axis=-1)
    return library(vectors).concatenate((lead * cos + across * sin, vectors[..., 2 * half :]), axis=-1)


def _softmax(logits: Any) -> Any:
    """Return the softmax of finite logits or -inf over their last axis. An array's is in its own memory."""
    if is_torch(logits):  # 12 ms at 2048 x 2048 on one thread, where exp alone takes 21
        return torch_module().softmax(logits, dim=-1)
    logits -= np.amax(logits, axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


@overload
def mixed_scores(window: Scores, expected: Scores) -> Scores: ...


@overload
def mixed_scores(window: Tensor, expected: Tensor) -> Tensor: ...


def mixed_scores(window: Any, expected: Any) -> Any:
    """Return the window's scores plus the expected attention: what was asked last, and what will be asked.

    Both are attention probabilities averaged over queries, so each adds up to at most 1 over all positions. They are
    added as they are. The rule ``"mixed"`` multiplies the sum by the values' weights.

    Parameters
    ----------
    window
        ``(kv_heads, m)``: from :func:`window_scores` or :func:`scores_from_qk` with ``reduce="mean"``.
    expected
        ``(kv_heads, n)``, n at least m: from :func:`expected_scores`. Its first m positions are those of `window`, and
        the others, the window's own, are left out.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, m)`` float32.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule.

    Examples
    --------
    >>> window, expected = np.array([[0.5, 0.25]], np.float32), np.array([[0, 0.5, 0.5]], np.float32)
    >>> mixed_scores(window, expected).tolist()
    [[0.5, 0.75]]
    """
    window = read("window", window, "kv_heads, m")
    expected = read("expected", expected, "kv_heads, n", like=("window", window))
    kv_heads, m = window.shape
    if expected.shape[0] != kv_heads or expected.shape[1] < m:
        raise ValueError(
            f"expected: has shape {tuple(expected.shape)}, must have the {kv_heads} heads of window and at least its "
            f"{m} positions"
        )
    refuse_not_finite("window", window)
    refuse_not_finite("expected", expected)
    return float32(window) + float32(expected[:, :m])


@overload
def keydiff_scores(keys: Array) -> Scores: ...


@overload
def keydiff_scores(keys: Tensor) -> Tensor: ...


def keydiff_scores(keys: Any) -> Any:
    """Return how little each key points where the keys point on average: KeyDiff, arXiv 2504.15364.

    The score is minus the cosine between a key and the mean of all keys at length 1, between -1 and 1. A key like the
    others scores low. A key of length 0, or a mean of length 0, makes a cosine of 0. Neither queries nor values are
    needed.

    Parameters
    ----------
    keys
        ``(kv_heads, n, head_dim)``, float32, float16 or bfloat16, with their rotary embedding applied.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, n)`` float32, finite.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a value that is not finite.

    Examples
    --------
    >>> keys = np.array([[[1, 0], [2, 0], [0, -1], [1, 0]]], np.float32)
    >>> keydiff_scores(keys).round(2)
    array([[-0.95, -0.95, -0.32, -0.95]], dtype=float32)
    """
    keys = read("keys", keys, "kv_heads, n, head_dim")
    refuse_not_finite("keys", keys)
    kv_heads, n, head_dim = keys.shape
    with in_float32(keys):
        scores = zeros((kv_heads, n), keys)
        for head in range(kv_heads):
            tiles = [slice(start, start + _TILE) for start in range(0, n, _TILE)]
            total = zeros((head_dim,), keys)
            for tile in tiles:  # the mean's length does not matter, so their sum will do
                total = total + _directions(float32(keys[head, tile])).sum(axis=0)
            anchor = _directions(total)
            for tile in tiles:
                scores[head, tile] = -library(keys).matmul(_directions(float32(keys[head, tile])), anchor)
        return scores


def _directions(vectors: Any) -> Any:
    """Return finite vectors ``(..., head_dim)`` at length 1, zeros where they are zeros.

    They are divided by their largest element first: squares of 1e20 and of 1e-30 are no float32.
    """
    largest = library(vectors).amax(abs(vectors), axis=-1, keepdims=True)
    vectors = vectors / library(vectors).where(largest > 0, largest, 1.0)
    lengths = library(vectors).sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    return vectors / library(vectors).where(lengths > 0, lengths, 1.0)


@overload
def repeat_scores(
    queries: Array, keys: Array, *, own: int = 0, scale: float | None = None, out: Scores | None = None
) -> Scores: ...


@overload
def repeat_scores(
    queries: Tensor, keys: Tensor, *, own: int = 0, scale: float | None = None, out: Tensor | None = None
) -> Tensor: ...


def repeat_scores(queries: Any, keys: Any, *, own: int = 0, scale: float | None = None, out: Any = None) -> Any:
    """Return the largest attention that each position gets while the context is repeated: KVzip, arXiv 2505.23416.

    The context is fed once more, behind a request to repeat it, and its queries are given here, all at once or in
    blocks. A position's score is the largest attention over all these queries and over the group's query heads. It
    needs no question. The model's part costs about two more prefills. The logits are held in blocks of 8 MiB, or of
    one query where that is more.

    Parameters
    ----------
    queries
        ``(q_heads, Q, head_dim)``, float32, float16 or bfloat16: of the repetition, with their rotary embedding
        applied. Query heads ``h*g .. h*g+g-1`` belong to KV head ``h``.
    keys
        ``(kv_heads, n + own, head_dim)``, rotated: of the context's ``n`` positions, then of the repetition. The
        paper's code gives a block of the repetition the context's part that it repeats, behind the first 4 positions.
    own
        How many rows at the end of `keys` are of the repetition. They take part in the softmax and get no score. The
        queries are those of the last ``Q`` of them, and see no later one. So `own` is at least ``Q``, or 0: then the
        queries see the context alone.
    scale
        What products are multiplied by. None means ``head_dim ** -0.5``.
    out
        ``(kv_heads, n)`` float32, the scores of earlier blocks: raised in place to the new ones where these are
        larger, and returned.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, n)`` float32, between 0 and 1. `out` where it was given.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, a value that is not finite, or products too large for float32. `out` is as it
        was.

    Examples
    --------
    >>> keys = np.array([[[0, 0], [1, 0], [1, 1]]], np.float32)
    >>> first, second = np.array([[[9, 0]]], np.float32), np.array([[[0, 9]]], np.float32)
    >>> scores = repeat_scores(first, keys, scale=1.0)
    >>> scores.round(2).tolist()
    [[0.0, 0.5, 0.5]]
    >>> repeat_scores(second, keys, scale=1.0, out=scores).round(2).tolist()
    [[0.0, 0.5, 1.0]]
    """
    # Arguments.
    queries = read("queries", queries, "q_heads, Q, head_dim")
    keys = read("keys", keys, "kv_heads, n + own, head_dim", like=("queries", queries))
    q_heads, count, head_dim = queries.shape
    kv_heads, columns, _ = keys.shape
    same_shape("keys", keys, (kv_heads, columns, head_dim), "queries")
    group = query_group(q_heads, kv_heads, "queries")
    own = at_least("own", own, 0)
    if 0 < own < count or own >= columns:
        raise ValueError(
            f"own = {own}: must be 0 or at least the {count} queries, and less than the {columns} rows of keys"
        )
    n = columns - own
    factor = logit_scale(head_dim**-0.5 if scale is None else scale)
    refuse_not_finite("queries", queries)
    refuse_not_finite("keys", keys)
    best = None if out is None else _running(out, (kv_heads, n), keys)
    with in_float32(keys):
        # One KV head after the other, its group's queries by blocks.
        scores = zeros((kv_heads, n), keys)
        rows = max(1, _BLOCK // columns)
        for head in range(kv_heads):
            mine = float32(keys[head])
            flat = queries[head * group : (head + 1) * group].reshape(group * count, head_dim)
            for start in range(0, group * count, rows):
                block = float32(flat[start : start + rows]) * factor
                weights = _attention(library(keys).matmul(block, mine.T), n, start, count)
                largest = library(keys).amax(weights[:, :n], axis=0)
                if not bool(library(keys).isfinite(largest).all()):  # a row is all NaN where one of its logits is
                    raise ValueError(f"queries: their products with KV head {head} of keys are too large for float32")
                library(keys).maximum(scores[head], largest, out=scores[head])
        if best is None:
            return scores
        library(keys).maximum(best, scores, out=best)
        return out


def _attention(logits: Any, n: int, start: int, count: int) -> Any:
    """Return the softmax of a block of logits ``(rows, n + own)``, the first of query `start` of ``group * count``."""
    own = logits.shape[1] - n
    if own:
        query = np.arange(start, start + logits.shape[0]) % count
        later = np.arange(own) > (own - count + query)[:, None]
        if is_torch(logits):
            logits[:, n:].masked_fill_(torch_module().from_numpy(later).to(logits.device), -np.inf)
        else:
            np.copyto(logits[:, n:], -np.inf, where=later)
    return _softmax(logits)


def _running(out: Any, shape: tuple[int, int], keys: Any) -> Any:
    """Return checked scores of earlier blocks in the caller's own memory."""
    like = ("keys", keys)
    checked = read("out", out, "kv_heads, n", like=like)
    if not str(checked.dtype).endswith("float32"):
        raise TypeError(f"out: must be of float32, not {checked.dtype}")
    same_shape("out", checked, shape, "keys without own")
    refuse_not_finite("out", checked)
    if is_torch(out):
        return dense("out", out)
    if not out.flags.writeable:
        raise ValueError("out: is read-only, must be writable")
    return out
