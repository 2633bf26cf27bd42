"""A total divided over units by measured curves: each next position goes where it lowers the sum of losses most."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._amount import TotalError
from ._bounds import Bounds
from ._checks import natural, shown, uint32_array
from ._errors import status_text
from ._head_plan import HeadPlan
from ._native import ffi, lib
from ._plan import LayerPlan, plan
from ._tensor import plain_array


def divide(
    grid: npt.ArrayLike,
    losses: npt.ArrayLike,
    total: int,
    *,
    minimum: Any = None,
    maximum: Any = None,
    multiple_of: int = 1,
) -> LayerPlan | HeadPlan:
    """Divide a total over units, each with a measured curve of what it loses at a budget.

    A unit is whatever has a budget of its own: a layer, or each KV head of each layer. Every curve is replaced by its
    lower convex hull, and each next multiple goes where it lowers the sum of losses most. On convex curves no division
    of the total is better. Of units that gain the same, the one that holds fewest gets the next, and of those the
    lower unit.

    Parameters
    ----------
    grid
        Budgets at which losses are known, ascending, each greater than 0, shape ``(points,)``.
    losses
        What each unit loses at each of these budgets, finite numbers: ``(layers, points)``, or
        ``(layers, heads, points)``. Measure them on what counts: an output error times what it costs in answers.
    total
        Positions in all units together, a multiple of `multiple_of`.
    minimum, maximum
        The fewest and the most positions of a unit: a number, or an array of one per unit, shaped as the losses
        without their last axis. None: the grid's first and last point. Below the first no loss is known, so that no
        minimum may be. Beyond the last a curve is flat.
    multiple_of
        The block size. Minimums are rounded up to a multiple, maximums down.

    Returns
    -------
    LayerPlan or HeadPlan
        Of layers, by weights that are the budgets, or of heads. The budgets add up to `total` exactly, or every unit
        has its maximum where that is less.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above. The message names it, the value and the rule.

    Examples
    --------
    >>> divide([10, 20, 40], [[0.5, 0.1, 0.0], [0.8, 0.7, 0.1]], 60).budgets
    array([20, 40], dtype=uint32)
    """
    points, values = checked_curves(grid, losses)
    shape = values.shape[:-1]
    units = int(np.prod(shape))
    positions = natural("total", total)
    bounds = Bounds.of(
        units,
        int(points[0]) if minimum is None else _flat("minimum", minimum, shape),
        int(points[-1]) if maximum is None else _flat("maximum", maximum, shape),
        multiple_of,
    )
    lows, _ = bounds.per_layer(units)
    if (lows < int(points[0])).any():
        raise ValueError(
            f"minimum = {int(lows.min())}: must be at least grid[0] = {points[0]}, below which no loss is known"
        )
    budgets = _native(points, values, positions, bounds, units)
    if len(shape) == 2:
        return HeadPlan(budgets.reshape(shape))
    # Budgets that are their own weights are their own targets, so this plan has them unchanged.
    return plan(
        units,
        total=positions,
        weights=budgets,
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        multiple_of=bounds.multiple_of,
    )


def checked_curves(
    grid: npt.ArrayLike, losses: npt.ArrayLike, *, heads: bool = False
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]:
    """Return a grid and its losses, checked as :func:`divide` says. With `heads`, of layers and heads alone."""
    points = uint32_array("grid", grid, 1)
    if len(points) == 0:
        raise ValueError("grid: must have one budget or more")
    for i, point in enumerate(points.tolist()):
        if point <= (int(points[i - 1]) if i else 0):
            raise ValueError(f"grid[{i}] = {point}: must be above 0 and above the one before it")
    values = plain_array("losses", losses, "real numbers")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"losses: must be an array of real numbers, not of dtype {values.dtype}")
    if values.ndim not in ((3,) if heads else (2, 3)) or values.shape[-1] != len(points) or values.size == 0:
        layers = "" if heads else f"(layers, {len(points)}) or "
        raise ValueError(f"losses: has shape {values.shape}, must be {layers}(layers, heads, {len(points)})")
    values = np.ascontiguousarray(values, np.float64)
    if not np.isfinite(values).all():
        where = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"losses[{', '.join(map(str, where))}] = {values[where]}: must be finite")
    return points, values


def _flat(name: str, bound: Any, shape: tuple[int, ...]) -> Any:
    """Return a bound of one per unit as one row."""
    if len(shape) < 2 or not np.ndim(bound):
        return bound
    if np.shape(bound) != shape:
        raise ValueError(f"{name}: has shape {np.shape(bound)}, must be {shape}: one for each unit")
    return plain_array(name, bound, "integers").reshape(-1)


def _native(
    points: npt.NDArray[np.uint32], losses: npt.NDArray[np.float64], total: int, bounds: Bounds, units: int
) -> npt.NDArray[np.uint32]:
    b = bounds.multiple_of
    most = (2**64 - 1) // b * b
    params = ffi.new("pb_kvcache_divide_params *")
    params.grid = keep_grid = ffi.from_buffer("uint32_t[]", points)
    params.num_points = len(points)
    params.losses = keep_losses = ffi.from_buffer("double[]", losses)
    params.total = min(total, most) if total % b == 0 else total % b  # more than the maximums hold, as well
    params.multiple_of = b
    # Arrays alone: a bound of 0 as a number stands for the grid's end.
    lows, highs = (np.ascontiguousarray(bound, np.uint32) for bound in bounds.per_layer(units))
    params.minimums = keep_lows = ffi.from_buffer("uint32_t[]", lows)
    params.maximums = keep_highs = ffi.from_buffer("uint32_t[]", highs)
    size = ffi.new("size_t *")
    status = lib.pb_kvcache_divide_workspace_size(units, len(points), size)
    if status != lib.PB_KVCACHE_OK:
        raise MemoryError(f"losses: {units} units: {status_text(status)}")
    workspace = np.empty(size[0], np.uint8)
    budgets = np.empty(units, np.uint32)
    status = lib.pb_kvcache_divide(
        params, ffi.from_buffer(workspace), workspace.nbytes, ffi.from_buffer("uint32_t[]", budgets), units
    )
    del keep_grid, keep_losses, keep_lows, keep_highs
    if status != lib.PB_KVCACHE_OK:
        raise _refusal(status, units, total, bounds)
    return budgets


def _refusal(status: int, units: int, total: int, bounds: Bounds) -> ValueError:
    """Return the error of a refused division, with the numbers and what would be feasible."""
    b = bounds.multiple_of
    if status == lib.PB_KVCACHE_ERROR_PLAN_TOTAL:
        below = total // b * b
        return ValueError(f"total = {shown(total)}: must be a multiple of multiple_of = {b}, such as {below}")
    if status == lib.PB_KVCACHE_ERROR_PLAN_BOUNDS:
        return ValueError(bounds.crossing(units))
    if status == lib.PB_KVCACHE_ERROR_PLAN_BLOCK:
        return ValueError(bounds.without_block(units))
    if status == lib.PB_KVCACHE_ERROR_PLAN_MINIMUM:
        least = int(bounds.in_blocks(units)[0].sum())
        return TotalError(total, f"must be at least {least}, the sum of the {units} minimums", least)
    return ValueError(status_text(status))
