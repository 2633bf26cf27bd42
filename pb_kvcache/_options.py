"""The options of evictions and of the prefill selection, by name, and the checks that its functions share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np

from ._checks import UINT32_MAX, integer, real, shown
from ._native import lib

_T = TypeVar("_T")

#: Reaches every neighbour of 2^32 - 1 positions.
_LARGEST_KERNEL = 2 * UINT32_MAX + 1

#: How the query heads of a group become one score.
REDUCE: dict[str, int] = {
    "mean": lib.PB_KVCACHE_REDUCE_MEAN,
    "max": lib.PB_KVCACHE_REDUCE_MAX,
    "sum": lib.PB_KVCACHE_REDUCE_SUM,
}

#: How the scores of neighbours become one.
POOLING: dict[str, int] = {"max": lib.PB_KVCACHE_POOL_MAX, "avg": lib.PB_KVCACHE_POOL_AVERAGE}

#: What an average divides by at the ends: the neighbours that there are, or the kernel.
EDGE: dict[str, int] = {"count": lib.PB_KVCACHE_EDGE_COUNT, "kernel": lib.PB_KVCACHE_EDGE_KERNEL}

#: Which rows an eviction tells: those that stay, or those that leave.
ROW_SETS: dict[str, int] = {"kept": lib.PB_KVCACHE_ROWS_KEPT, "victims": lib.PB_KVCACHE_ROWS_VICTIMS}
RowSet = Literal["kept", "victims"]

#: What is done about NaN and infinities.
NAN: dict[str, int] = {"raise": lib.PB_KVCACHE_NAN_REFUSE, "lowest": lib.PB_KVCACHE_NAN_LOWEST}


def choice(name: str, value: Any, choices: Mapping[str, _T]) -> _T:
    """Return what `choices` holds for the string `value`.

    Raises
    ------
    ValueError
        For anything else. The message lists the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(choices)}")
    return choices[value]


def at_least(name: str, value: Any, least: int) -> int:
    """Return an integer that is `least` or more.

    Raises
    ------
    TypeError, ValueError
        For anything that is not an integer, or is smaller.
    """
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} = {shown(number)}: must be at least {least}")
    return number


def pooling_options(kernel: Any, pooling: Any, edge: Any) -> tuple[int, int, int]:
    """Return how scores are pooled: how many neighbours, and the values of `pooling` and `edge` in C.

    A kernel beyond every neighbour is lowered, so that it fits a C size, where nothing is divided by it.

    Raises
    ------
    TypeError, ValueError
        For a `kernel` that is no integer, is even or below 1, or is too large to be divided by, or for another name.
    """
    number = integer("kernel", kernel)
    if number < 1 or number % 2 == 0:
        raise ValueError(f"kernel = {shown(number)}: must be odd")
    code, divided_by = choice("pooling", pooling, POOLING), choice("edge", edge, EDGE)
    if number > _LARGEST_KERNEL and (code, divided_by) == (POOLING["avg"], EDGE["kernel"]):
        raise ValueError(f'kernel = {shown(number)}: must be at most {_LARGEST_KERNEL} with edge="kernel"')
    return min(number, _LARGEST_KERNEL), code, divided_by


def logit_scale(value: Any) -> float:
    """Return what logits are multiplied by, rounded to float32.

    Raises
    ------
    TypeError, ValueError
        For anything that is not a number, or is not finite and greater than 0 in float32.
    """
    number = real("scale", value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    if not 0.0 < rounded < math.inf:
        raise ValueError(f"scale = {shown(value)}: must be finite and greater than 0 in float32")
    return rounded


def head_budgets(
    budget: Any, kv_heads: int, protect: int, sinks: int, window_in_budget: bool
) -> tuple[list[int], bool]:
    """Return one budget per KV head, what is always kept included, and whether the caller gave one per head.

    Raises
    ------
    TypeError, ValueError
        For a budget that is not an integer or is below its minimum, or for another number of budgets than of heads.
    """
    always = protect + sinks
    extra = 0 if window_in_budget else always
    kept = f"{always}: protect {protect} and sinks {sinks}" if sinks else f"{always}"
    rule = f"must be at least what is always kept, {kept}" if window_in_budget else "must be 0 or more"

    def check(name: str, value: Any) -> int:
        number = integer(name, value)
        if number + extra < always:
            raise ValueError(f"{name} = {shown(number)}: {rule}")
        return number + extra

    if isinstance(budget, (list, tuple)) or getattr(budget, "ndim", 0) == 1:
        if len(budget) != kv_heads:
            raise ValueError(f"budget: has {len(budget)} numbers, must have one per KV head, {kv_heads}")
        return [check(f"budget[{head}]", value) for head, value in enumerate(budget)], True
    return [check("budget", budget)] * kv_heads, False


def not_finite(values: Any, index: Any) -> ValueError:
    """Return the error for the score at this index, of an array or a tensor."""
    first = tuple(int(i) for i in index)
    return ValueError(
        f"scores[{', '.join(map(str, first))}] = {float(values[first])}: every score must be finite; "
        'nan="lowest" ranks others below everything'
    )
