"""A total divided over layers by measured curves: each next position goes to the layer that gains most by it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ._checks import uint32, uint32_array
from ._plan import LayerPlan, plan
from ._tensor import plain_array

#: What a division makes largest: the mean over layers, or the layer that is worth least.
OBJECTIVES = ("mean", "worst")


def divide(
    grid: npt.ArrayLike,
    curves: npt.ArrayLike,
    total: int,
    *,
    multiple_of: int = 1,
    objective: Literal["mean", "worst"] = "mean",
) -> LayerPlan:
    """Divide a total over layers, each with a measured curve of what a budget is worth to it.

    Each curve is replaced by its upper hull, which is concave. Each next position then goes to the layer that gains
    most by it. On concave curves no division of the total is better. Of layers that gain the same, the one that holds
    fewest gets the position, and of those the lower layer.

    Parameters
    ----------
    grid
        Budgets, ascending, each greater than 0 and a multiple of `multiple_of`, shape ``(n,)``. The first is every
        layer's minimum, the last every layer's maximum.
    curves
        What each layer is worth at each of these budgets, shape ``(num_layers, n)``: finite numbers, higher is better.
        Measure them on what counts, such as the model's loss with that layer alone at that budget.
    total
        Positions in all, a multiple of `multiple_of` and at least ``num_layers * grid[0]``.
    multiple_of
        The block size.
    objective
        ``"mean"``: the largest mean over layers. ``"worst"``: the highest level that every layer can reach with the
        total, and what is left over as for ``"mean"``.

    Returns
    -------
    LayerPlan
        Of shape ``"weights"``. Its weights are the budgets. They add up to `total` exactly, unless `total` is more
        than the last grid point in every layer, which then is what each layer gets.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above.

    Examples
    --------
    >>> divide([10, 20, 40], [[0.5, 0.9, 1.0], [0.2, 0.3, 0.9]], 60).budgets
    array([20, 40], dtype=uint32)
    """
    b = uint32("multiple_of", multiple_of)
    points = [int(point) for point in uint32_array("grid", grid, 1)]
    if not points:
        raise ValueError("grid: must have one budget or more")
    for i, point in enumerate(points):
        if point <= (points[i - 1] if i else 0) or b == 0 or point % b:
            raise ValueError(f"grid[{i}] = {point}: must be above the one before it, and a multiple of {b} above 0")
    values = plain_array("curves", curves, "real numbers")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"curves: must be an array of real numbers, not of dtype {values.dtype}")
    if values.ndim != 2 or values.shape[0] == 0 or values.shape[1] != len(points):
        raise ValueError(f"curves: has shape {values.shape}, must be (num_layers, {len(points)})")
    if not np.isfinite(values).all():
        layer, i = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(f"curves[{layer}, {i}] = {values[layer, i]}: must be finite")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective = {objective!r}: must be one of {', '.join(OBJECTIVES)}")
    layers = len(values)
    bounds: dict[str, Any] = {"minimum": points[0], "maximum": points[-1], "multiple_of": b}
    plan(layers, total=total, shape="uniform", **bounds)  # refuses a total that cannot be
    # Fractions of the given doubles: slopes compare exactly, so the budgets are the same on every machine.
    hulls = [_hull(list(zip(points, map(Fraction, row.tolist()), strict=True))) for row in values]
    low = _raise_the_worst(hulls, total, b) if objective == "worst" else [points[0]] * layers
    # The hulls' segments, steepest first, are taken as long as the total lasts.
    segments = [
        (-(end[1] - start[1]) / (end[0] - start[0]), layer, end[0])
        for layer, hull in enumerate(hulls)
        for start, end in itertools.pairwise(hull)
        if end[0] > low[layer]
    ]
    high = list(low)
    for _, group in itertools.groupby(sorted(segments), key=lambda segment: segment[0]):
        if sum(high) >= total:
            break
        low = list(high)
        for _, layer, stop in group:
            high[layer] = stop
    # Layers of the last group gain the same, so they are levelled: uniform water-filling between the two bounds.
    level = plan(layers, total=total, shape="uniform", minimum=low, maximum=high, multiple_of=b)
    # Budgets that are their own weights are their own targets, so this plan has them unchanged.
    return plan(layers, total=total, weights=level.budgets, **bounds)


_Point = tuple[int, Fraction]


def _hull(points: list[_Point]) -> list[_Point]:
    """Return the corners of the least concave curve that is nowhere below these points, of ascending budget."""
    hull: list[_Point] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _raise_the_worst(hulls: list[list[_Point]], total: int, b: int) -> list[int]:
    """Return the least budgets at which every layer reaches the highest level that the total allows."""

    def needed(level: Fraction) -> list[int]:
        return [_reach(hull, level, b) for hull in hulls]

    low = min(hull[0][1] for hull in hulls)
    high = min(max(y for _, y in hull) for hull in hulls)
    if sum(needed(high)) <= total:
        return needed(high)
    for _ in range(40):  # 2**-40: to 1e-12 of the distance between the two
        middle = (low + high) / 2
        low, high = (middle, high) if sum(needed(middle)) <= total else (low, middle)
    return needed(low)


def _reach(hull: list[_Point], level: Fraction, b: int) -> int:
    """Return the least multiple of `b` at which a curve reaches a level that it does reach."""
    if level <= hull[0][1]:
        return hull[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        if level <= y1:
            x = x0 + (level - y0) * (x1 - x0) / (y1 - y0)
            return -(-x.numerator // (x.denominator * b)) * b
    raise AssertionError("unreachable: the level is at most every curve's highest point")
