"""Choice: the positions of the highest scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import _torch_path
from ._calls import OK, ScoreRows, floats, words
from ._native import lib
from ._options import NAN, at_least, choice
from ._tensor import on_other_device

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Positions, Scores


@overload
def select_top(scores: Scores, k: int, *, nan: str = "raise") -> Positions: ...


@overload
def select_top(scores: Tensor, k: int, *, nan: str = "raise") -> Tensor: ...


def select_top(scores: Any, k: int, *, nan: str = "raise") -> Any:
    """Return the positions of the `k` highest scores of each row, ascending. Ties go to the lower position.

    Parameters
    ----------
    scores
        ``(..., n)`` float32.
    k
        How many. ``n`` or more means all.
    nan
        ``"raise"`` refuses a NaN or an infinity. ``"lowest"`` ranks it below everything.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., min(k, n))``, uint32 or (torch) int64.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    if on_other_device("scores", scores):
        return _torch_path.select_top(scores, k, nan=nan)
    number = at_least("k", k, 0)
    rule = choice("nan", nan, NAN)
    given = ScoreRows(scores)
    rows = given.rows
    count = len(rows)
    n = given.shape[-1]
    number = min(number, n)
    indices = np.empty((count, number), np.uint32)
    if rows.size:
        status = lib.pb_kvcache_select_top(
            floats(rows),
            n,
            count,
            n,
            words(np.full(count, number, np.uint32)),
            rule,
            words(indices),
            number,
            indices.size,
        )
        if status != OK:
            raise given.refusal(status)
    return given.give(indices, *given.shape[:-1], number)
