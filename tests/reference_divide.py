"""``divide`` from its definition, in fractions: one multiple after the other, to whoever gains most by it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def hull_at(points: Sequence[tuple[int, Fraction]], x: int) -> Fraction:
    """Return the lower convex hull of points at a position between the first and the last: the lowest chord over it."""
    chords = [
        y0 if x0 == x1 else y0 + (y1 - y0) * Fraction(x - x0, x1 - x0)
        for x0, y0 in points
        for x1, y1 in points
        if x0 <= x <= x1 and (x0 < x1 or x0 == x)
    ]
    return min(chords)


def divide(
    grid: Sequence[int],
    losses: Sequence[Sequence[float]],
    total: int,
    *,
    minimum: int | Sequence[int] | None = None,
    maximum: int | Sequence[int] | None = None,
    multiple_of: int = 1,
) -> list[int]:
    """Return the budgets."""
    units = len(losses)
    lows = [grid[0] if minimum is None else minimum if isinstance(minimum, int) else minimum[u] for u in range(units)]
    highs = [grid[-1] if maximum is None else maximum if isinstance(maximum, int) else maximum[u] for u in range(units)]
    b = multiple_of
    held = [-(-low // b) * b for low in lows]
    most = [high // b * b for high in highs]
    curves = []
    for row, high in zip(losses, most, strict=True):
        points = [(x, Fraction(y)) for x, y in zip(grid, row, strict=True)]
        if high > grid[-1]:
            points.append((high, Fraction(row[-1])))
        curves.append(points)
    gains: dict[tuple[int, int], Fraction] = {}

    def gain(unit: int) -> Fraction:
        at = (unit, held[unit])
        if at not in gains:
            gains[at] = hull_at(curves[unit], held[unit]) - hull_at(curves[unit], held[unit] + b)
        return gains[at]

    while sum(held) < total:
        open_units = [unit for unit in range(units) if held[unit] < most[unit]]
        if not open_units:
            break
        chosen = max(open_units, key=lambda unit: (gain(unit), -held[unit], -unit))
        held[chosen] += b
    return held
