"""AdaKV, arXiv 2407.11550: a layer's positions go to the heads whose scores are highest, with a floor for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._checks import real
from ._choose import select_top
from ._options import at_least
from ._pool import pool_scores

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Scores


def adakv_budgets(
    scores: Scores | Tensor,
    budget: int,
    *,
    window: int,
    kernel: int = 7,
    pooling: str = "max",
    edge: str = "count",
    alpha: float = 0.2,
) -> npt.NDArray[np.int64]:
    """Return what every KV head of one layer keeps of a prompt, by the scores of all of them together.

    Every head is sure of its best ``floor(alpha * (budget - window))`` positions before the window. The rest of the
    layer's positions are the best of all heads. Ties go to the lower head, then to the lower position. The heads keep
    ``budget`` positions on average, exactly. It needs no calibration. On budgets per layer that were calibrated it does
    harm.

    Parameters
    ----------
    scores
        ``(kv_heads, n - window)`` float32, from :func:`window_scores` or :func:`scores_from_qk`.
    budget
        Positions that a head keeps on average, the window counted: at least `window`. ``n`` or more keeps everything.
    window
        How many positions follow the scored ones. They are always kept.
    kernel, pooling, edge
        As for :func:`pool_scores`.
    alpha
        The part that every head is sure of, between 0 and 1. 1 gives every head the same.

    Returns
    -------
    numpy.ndarray
        Positions of every head, the window counted, int64, shape ``(kv_heads,)``: budgets for
        :func:`select_from_scores`.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule. The message says which.

    Examples
    --------
    >>> adakv_budgets(np.array([[5, 4, 3, 2], [1, 1, 1, 0]], np.float32), 4, window=2, kernel=1)
    array([6, 2])
    >>> adakv_budgets(np.array([[5, 4, 3, 2], [1, 1, 1, 0]], np.float32), 4, window=2, kernel=1, alpha=0.5)
    array([5, 3])
    """
    last = at_least("window", window, 1)
    average = at_least("budget", budget, last)
    share = real("alpha", alpha)
    if not 0 <= share <= 1:
        raise ValueError(f"alpha = {share:g}: must be between 0 and 1")
    shape = tuple(np.shape(scores)) if not hasattr(scores, "shape") else tuple(scores.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"scores: has shape {shape}, must be (kv_heads, n - window) with one or more of each")
    heads, scored = shape
    free = average - last
    if free >= scored:
        return np.full(heads, scored + last, np.int64)
    pooled: Any = pool_scores(scores, kernel, pooling, edge=edge)  # type: ignore[arg-type, unused-ignore]
    sure = int(share * free)
    if sure:
        best = select_top(pooled, sure)
        top = float(np.finfo(np.float32).max)
        if isinstance(pooled, np.ndarray):
            np.put_along_axis(pooled, best.astype(np.int64), np.float32(top), axis=1)
        else:
            pooled.scatter_(1, best, top)
    together = select_top(pooled.reshape(1, -1), free * heads)
    owners = np.asarray(together if isinstance(together, np.ndarray) else together.cpu().numpy()).ravel() // scored
    return np.bincount(owners.astype(np.int64), minlength=heads).astype(np.int64) + last
