"""AdaKV, arXiv 2407.11550: a layer's positions go to the heads whose scores are highest, with a floor for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _torch_path
from ._checks import real
from ._choose import select_top
from ._options import at_least
from ._pool import pool_scores
from ._position_weights import require_weights, weighted_scores
from ._selection import DEFAULT, Selection, rule_of_scores
from ._tensor import on_other_device

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Array, Scores


def adakv_budgets(
    scores: Scores | Tensor,
    budget: int,
    *,
    protect: int | None = None,
    selection: Selection | str | None = None,
    kernel: int = DEFAULT.kernel,
    pooling: str = DEFAULT.pooling,
    edge: str = DEFAULT.edge,
    sinks: int = DEFAULT.sinks,
    weights: Array | Tensor | None = None,
    alpha: float = 0.2,
) -> npt.NDArray[np.int64]:
    """Return what every KV head of one layer keeps of a prompt, by the scores of all of them together.

    Every head is sure of its best ``floor(alpha * (budget - protect - sinks))`` positions beside those that are always
    kept. The rest of the
    layer's positions are the best of all heads. Ties go to the lower head, then to the lower position. The heads keep
    ``budget`` positions on average, exactly. It needs no calibration. On budgets per layer that were calibrated it does
    harm.

    Parameters
    ----------
    scores
        ``(kv_heads, n - protect)`` float32, from :func:`window_scores` or :func:`scores_from_qk`.
    budget
        Positions that a head keeps on average, what is always kept counted: at least ``protect + sinks``. ``n`` or more
        keeps everything.
    protect, selection, kernel, pooling, edge, sinks, weights
        As for :func:`select_from_scores`.
    alpha
        The part that every head is sure of, between 0 and 1. 1 gives every head the same.

    Returns
    -------
    numpy.ndarray
        Positions of every head, what is always kept counted, int64, shape ``(kv_heads,)``: budgets for
        :func:`select_from_scores`.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule. The message says which.

    Examples
    --------
    >>> adakv_budgets(np.array([[5, 4, 3, 2], [1, 1, 1, 0]], np.float32), 4, protect=2, kernel=1)
    array([6, 2])
    >>> adakv_budgets(np.array([[5, 4, 3, 2], [1, 1, 1, 0]], np.float32), 4, protect=2, kernel=1, alpha=0.5)
    array([5, 3])
    """
    rule = rule_of_scores(selection, protect=protect, kernel=kernel, pooling=pooling, edge=edge, sinks=sinks)
    require_weights(rule.value_weight, weights)
    average = at_least("budget", budget, rule.always_kept)
    share = real("alpha", alpha)
    if not 0 <= share <= 1:
        raise ValueError(f"alpha = {share:g}: must be between 0 and 1")
    shape = tuple(np.shape(scores)) if not hasattr(scores, "shape") else tuple(scores.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"scores: has shape {shape}, must be (kv_heads, n - protect) with one or more of each")
    heads, scored = shape
    free = average - rule.always_kept
    if free >= scored - rule.sinks:
        return np.full(heads, scored + rule.protected, np.int64)
    # Pooled scores of the positions behind the sinks, each head's sure ones raised above all others.
    weighted = scores
    if weights is not None:
        weigh = _torch_path.weighted_scores if on_other_device("scores", scores) else weighted_scores
        weighted = weigh(scores, weights, scored + rule.protected)
    pooled: Any = pool_scores(weighted, rule.kernel, str(rule.pooling), edge=rule.edge)  # type: ignore[arg-type, unused-ignore]
    pooled = pooled[:, rule.sinks :]
    sure = int(share * free)
    if sure:
        best = select_top(pooled, sure)
        top = float(np.finfo(np.float32).max)
        if isinstance(pooled, np.ndarray):
            np.put_along_axis(pooled, best.astype(np.int64), np.float32(top), axis=1)
        else:
            pooled.scatter_(1, best, top)
    together = select_top(pooled.reshape(1, -1), free * heads)
    behind = scored - rule.sinks
    owners = np.asarray(together if isinstance(together, np.ndarray) else together.cpu().numpy()).ravel() // behind
    return np.bincount(owners.astype(np.int64), minlength=heads).astype(np.int64) + rule.always_kept
