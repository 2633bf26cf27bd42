"""Vectors of kind ``divide``: every unit's budget, or why there is no division.

Grids differ by powers of two and losses are multiples of 2^-10, so that the gains are exact as doubles and the
fractions of the reference order them in the same way.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from .. import reference_divide


def case(name: str, grid: list[int], losses: list[list[float]], total: int, **options: Any) -> dict[str, Any]:
    """Return a case whose budgets the reference works out."""
    budgets = reference_divide.divide(grid, losses, total, **options)
    return {"name": name, "grid": grid, "losses": losses, "total": total, **options, "budgets": budgets}


def by_hand(
    name: str, budgets: list[int], grid: list[int], losses: list[list[float]], total: int, **options: Any
) -> dict[str, Any]:
    """Return a case whose budgets were worked out by hand."""
    return {"name": name, "grid": grid, "losses": losses, "total": total, **options, "budgets": budgets}


def refused(
    name: str, status: str, grid: list[int], losses: list[list[float]], total: int, **options: Any
) -> dict[str, Any]:
    return {"name": name, "grid": grid, "losses": losses, "total": total, **options, "status": status}


def by_hand_cases() -> list[dict[str, Any]]:
    """Cases that a person can check."""
    two = [[4.0, 2.0, 0.0], [8.0, 6.0, 5.0]]
    dent = [[6.0, 6.0, 0.0], [6.0, 4.5, 3.0]]
    return [
        by_hand("one unit gets everything", [30], [8, 64], [[1.0, 0.0]], 30),
        by_hand("a single grid point", [8, 8], [8], [[1.0], [2.0]], 16),
        by_hand("who gains more goes first", [64, 32], [16, 32, 64], two, 96, maximum=64),
        by_hand("equal gains are levelled", [14, 14, 13], [5, 15, 40], [[0.5, 0.25, 0.25]] * 3, 41),
        by_hand("of equals the lower unit has the odd one", [11, 10], [8, 16], [[1.0, 0.0]] * 2, 21),
        by_hand("a curve counts as its hull", [30, 10], [10, 20, 30], dent, 40),
        by_hand("losses that rise come last", [8, 16], [8, 16], [[0.0, 1.0], [0.0, 0.5]], 24),
        by_hand("a total that has to rise", [16, 16], [8, 16], [[0.0, 1.0], [0.0, 0.5]], 32),
        by_hand("more than the maximums", [16, 16], [8, 16], [[1.0, 0.0]] * 2, 1000),
        by_hand("all at their minimum", [8, 8], [8, 16], [[1.0, 0.0]] * 2, 16),
        by_hand("beyond the grid a curve is flat", [20, 20], [8, 16], [[1.0, 0.0]] * 2, 40, maximum=64),
        by_hand("bounds of their own", [12, 20], [8, 32], [[8.0, 0.0], [1.0, 0.0]], 32, minimum=10, maximum=[12, 32]),
        by_hand("whole blocks", [32, 16], [16, 32, 64], [[4.0, 1.0, 0.0], [3.0, 2.0, 0.0]], 48, multiple_of=16),
        by_hand(
            "a block across a corner gains the mean",
            [16, 8],
            [8, 12, 16],
            [[8.0, 2.0, 2.0], [5.0, 3.0, 0.0]],
            24,
            multiple_of=8,
        ),
        by_hand("-0.0 is 0.0", [12, 12], [8, 16], [[0.0, -0.0], [-0.0, 0.0]], 24),
    ]


def refused_cases() -> list[dict[str, Any]]:
    curve = [[1.0, 0.0]]
    return [
        refused("no unit", "divide_units", [8, 16], [], 16),
        refused("a grid without points", "divide_grid", [], [[]], 16),
        refused("a grid point of 0", "divide_grid", [0, 16], curve, 16),
        refused("a grid that does not ascend", "divide_grid", [16, 16], curve, 16),
        refused("blocks of 0", "plan_multiple", [8, 16], curve, 16, multiple_of=0),
        refused("a total that is no multiple", "plan_total", [8, 16], curve, 15, multiple_of=4),
        refused("a minimum below the grid", "divide_below", [8, 16], curve, 16, minimum=7),
        refused("bounds that cross", "plan_bounds", [8, 16], curve, 16, minimum=12, maximum=10),
        refused("no block between the bounds", "plan_block", [8, 16], curve, 16, minimum=9, maximum=15, multiple_of=8),
        refused("less than the minimums", "plan_minimum", [8, 16], curve * 2, 15),
    ]


def random_cases(count: int) -> list[dict[str, Any]]:
    random_source = random.Random(11)
    cases = []
    for number in range(count):
        points = random_source.randint(1, 6)
        steps = [2 ** random_source.randint(0, 5) for _ in range(points)]
        grid = list(itertools.accumulate(steps))
        units = random_source.randint(1, 6)
        falling = random_source.random() < 0.5
        losses = []
        for _ in range(units):
            row = [random_source.randint(0, 64) / 64 for _ in range(points)]
            losses.append(sorted(row, reverse=True) if falling else row)
        options: dict[str, Any] = {}
        block = random_source.choice([1, 1, 1, 2, 8])
        if block > 1:
            options["multiple_of"] = block
        lows, highs = [grid[0]] * units, [grid[-1]] * units
        if random_source.random() < 0.4:
            lows = [random_source.randint(grid[0], grid[-1]) for _ in range(units)]
            options["minimum"] = lows
        if random_source.random() < 0.4:
            highs = [low + random_source.randint(0, 2 * grid[-1]) for low in lows]
            options["maximum"] = highs
        low_blocks = [-(-low // block) for low in lows]
        high_blocks = [high // block for high in highs]
        if any(low > high for low, high in zip(low_blocks, high_blocks, strict=True)):
            continue
        total = block * random_source.randint(sum(low_blocks), sum(high_blocks) + 2)
        cases.append(case(f"random {number}", grid, losses, total, **options))
    return cases


FILES = {
    "divide.json": lambda: {
        "kind": "divide",
        "about": "A total divided over units by measured curves.",
        "cases": by_hand_cases() + refused_cases() + random_cases(120),
    }
}
