"""Pooling: each score becomes the maximum or the average of its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import _torch_path
from ._calls import OK, ScoreRows, floats, scratch, workspace_size
from ._native import lib
from ._options import NAN, POOLING, choice, kernel_size
from ._tensor import on_other_device

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Scores


@overload
def pool_scores(scores: Scores, kernel: int = 7, pooling: str = "max", *, nan: str = "raise") -> Scores: ...


@overload
def pool_scores(scores: Tensor, kernel: int = 7, pooling: str = "max", *, nan: str = "raise") -> Tensor: ...


def pool_scores(scores: Any, kernel: int = 7, pooling: str = "max", *, nan: str = "raise") -> Any:
    """Return each score pooled with its `kernel` neighbours, itself in the middle.

    Parameters
    ----------
    scores
        ``(..., n)`` float32.
    kernel
        Odd. Neighbours that do not exist, at both ends, are left out.
    pooling
        ``"max"`` or ``"avg"``. An average divides by the number of neighbours that there are.
    nan
        ``"raise"`` refuses a NaN or an infinity. ``"lowest"`` leaves it out of its neighbours' pools and returns -inf
        in its place.

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
        return _torch_path.pool_scores(scores, kernel, pooling, nan=nan)
    kernel = kernel_size(kernel)
    code = choice("pooling", pooling, POOLING)
    rule = choice("nan", nan, NAN)
    given = ScoreRows(scores)
    rows = given.rows
    pooled = np.empty_like(rows)
    count, n = rows.shape
    if rows.size:
        size = workspace_size(lib.pb_kvcache_pool_scores_workspace_size, n, code, kernel)
        status = lib.pb_kvcache_pool_scores(
            floats(rows), n, count, n, code, kernel, rule, scratch(size), size, floats(pooled), n, pooled.size
        )
        if status != OK:
            raise given.refusal(status)
    return given.give(pooled, *given.shape)
