"""Pooling: each score becomes the maximum or the average of its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import _torch_path
from ._calls import OK, ScoreRows, floats, scratch, workspace_size
from ._native import lib
from ._options import NAN, choice, pooling_options
from ._tensor import on_other_device

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Scores


@overload
def pool_scores(
    scores: Scores, kernel: int = 7, pooling: str = "max", *, edge: str = "count", nan: str = "raise"
) -> Scores: ...


@overload
def pool_scores(
    scores: Tensor, kernel: int = 7, pooling: str = "max", *, edge: str = "count", nan: str = "raise"
) -> Tensor: ...


def pool_scores(scores: Any, kernel: int = 7, pooling: str = "max", *, edge: str = "count", nan: str = "raise") -> Any:
    """Return each score pooled with its `kernel` neighbours, itself in the middle.

    Parameters
    ----------
    scores
        ``(..., n)`` float32.
    kernel
        Odd. Neighbours pooled, the score itself included.
    pooling
        ``"max"`` or ``"avg"``.
    edge
        What an average divides by at both ends: ``"count"``, the neighbours that there are, or ``"kernel"``, as if
        zeros lay beyond the ends. A maximum is the same with both.
    nan
        ``"raise"`` refuses a NaN or an infinity. ``"lowest"`` leaves it out of its neighbours' pools (an average does
        not count it either) and returns -inf in its place.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., n)`` float32.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    if on_other_device("scores", scores):
        return _torch_path.pool_scores(scores, kernel, pooling, edge=edge, nan=nan)
    kernel, code, divided_by = pooling_options(kernel, pooling, edge)
    rule = choice("nan", nan, NAN)
    given = ScoreRows(scores)
    rows = given.rows
    pooled = np.empty_like(rows)
    count, n = rows.shape
    if rows.size:
        size = workspace_size(lib.pb_kvcache_pool_scores_workspace_size, n, code, kernel)
        status = lib.pb_kvcache_pool_scores(
            floats(rows),
            n,
            count,
            n,
            code,
            kernel,
            divided_by,
            rule,
            scratch(size),
            size,
            floats(pooled),
            n,
            pooled.size,
        )
        if status != OK:
            raise given.refusal(status)
    return given.give(pooled, *given.shape)
