"""What measured curves say that a plan loses, so that plans of other shapes can be compared without a model."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from ._curves import CurveSet
from ._groups import LayerGroups
from ._head_plan import HeadPlan
from ._plan import LayerPlan


def predicted_loss(curves: CurveSet | str | os.PathLike[str], plan: HeadPlan | LayerPlan | LayerGroups) -> float:
    """Return the sum of all heads' losses at a plan's budgets.

    The curves count as :func:`divide` takes them: each is replaced by its lower convex hull, and is flat beyond its
    last point. So no plan of the same total and bounds has less than :meth:`CurveSet.plan` in single positions.

    Parameters
    ----------
    curves
        What every head loses, or a curve file.
    plan
        A plan of the same layers and heads. Plans and groups of layers give all heads of a layer the same.

    Raises
    ------
    TypeError
        Not curves, or not a plan.
    ValueError
        Another number of layers or heads, or a budget below the curves' first point, where no loss is known.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> curves = CurveSet([16, 64], [[[0.8, 0.2], [0.4, 0.1]]])
    >>> round(predicted_loss(curves, HeadPlan([[40, 64]])), 6)
    0.6
    """
    measured = CurveSet.of(curves)
    if not isinstance(plan, (HeadPlan, LayerPlan, LayerGroups)):
        raise TypeError(f"plan: must be a HeadPlan, a LayerPlan or groups of layers, not {type(plan).__name__}")
    shape = (measured.num_layers, measured.num_kv_heads)
    budgets = plan.budgets if isinstance(plan, HeadPlan) else np.repeat(plan.budgets[:, None], shape[1], axis=1)
    if budgets.shape != shape:
        raise ValueError(f"plan: is of {budgets.shape[0]} layers and {budgets.shape[1]} heads, must be {shape}")
    least = int(budgets.min())
    if least < int(measured.grid[0]):
        raise ValueError(f"plan: has a budget of {least}, must be at least {measured.grid[0]}, the curves' first point")
    points = measured.grid.astype(np.float64)
    total = 0.0
    for layer, head in np.ndindex(shape):
        corners = _hull(points, measured.losses[layer, head])
        total += float(np.interp(budgets[layer, head], points[corners], measured.losses[layer, head][corners]))
    return total


def _hull(points: npt.NDArray[np.float64], losses: npt.NDArray[np.float64]) -> list[int]:
    """Return the corners of the lower convex hull of a curve, the first and last point among them."""
    corners: list[int] = []
    for point in range(len(points)):
        while len(corners) > 1:
            first, second = corners[-2:]
            before = (losses[second] - losses[first]) * (points[point] - points[first])
            if before < (losses[point] - losses[first]) * (points[second] - points[first]):
                break
            corners.pop()
        corners.append(point)
    return corners
