"""``divide``: no better division, the total kept exactly, and what is documented."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import HeadPlan, LayerPlan, divide

from . import reference_divide


@st.composite
def convex(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw convex curves over the budgets 1, 2, ..., n, and a total that can be divided."""
    n = draw(st.integers(1, 5))
    gains = st.lists(st.integers(-1, 6), min_size=n - 1, max_size=n - 1).map(lambda g: sorted(g, reverse=True))
    curves = draw(
        st.lists(
            st.builds(lambda a, g: list(itertools.accumulate([a, *(-x for x in g)])), st.integers(-3, 3), gains),
            min_size=1,
            max_size=4,
        )
    )
    return curves, draw(st.integers(len(curves), len(curves) * n))


@settings(max_examples=200)
@given(convex(), st.integers(1, 3))
def test_no_division_of_the_total_is_better(case: tuple[list[list[int]], int], block: int) -> None:
    curves, total = case
    n = len(curves[0])
    grid = [block * (i + 1) for i in range(n)]
    made = divide(grid, curves, block * total, multiple_of=block)

    def loss(budgets: tuple[int, ...]) -> int:
        return sum(curve[budget - 1] for curve, budget in zip(curves, budgets, strict=True))

    feasible = [b for b in itertools.product(range(1, n + 1), repeat=len(curves)) if sum(b) == total]
    found = tuple(int(budget) // block for budget in made.budgets)
    assert found in feasible
    assert loss(found) == min(map(loss, feasible))


@settings(max_examples=200)
@given(st.data())
def test_the_definition_in_fractions_gives_the_same(data: st.DataObject) -> None:
    """Steps of powers of two and small dyadic losses: every gain is exact as a double."""
    points = data.draw(st.integers(1, 5))
    grid = list(itertools.accumulate(2 ** data.draw(st.integers(0, 4)) for _ in range(points)))
    units = data.draw(st.integers(1, 5))
    losses = [[data.draw(st.integers(0, 16)) / 16 for _ in range(points)] for _ in range(units)]
    block = data.draw(st.sampled_from([1, 2, 4]))
    lows = [data.draw(st.integers(grid[0], grid[-1])) for _ in range(units)]
    highs = [low + block + data.draw(st.integers(0, 40)) for low in lows]
    low, high = (sum(-(-x // block) for x in lows), sum(x // block for x in highs))
    total = block * data.draw(st.integers(low, high + 1))
    options: dict[str, Any] = {"minimum": lows, "maximum": highs, "multiple_of": block}
    made = divide(grid, losses, total, **options)
    assert made.budgets.tolist() == reference_divide.divide(grid, losses, total, **options)


@pytest.mark.parametrize("seed", range(5))
def test_measured_curves_are_divided_as_well_as_can_be(seed: int) -> None:
    """Any doubles: the sum of the hulls' losses is the smallest, up to the rounding of the gains."""
    source = random.Random(seed)
    grid = list(itertools.accumulate(source.randint(1, 30) for _ in range(7)))
    losses = [[source.random() for _ in grid] for _ in range(6)]
    total = source.randint(6 * grid[0], 6 * grid[-1])
    curves = [[(x, Fraction(y)) for x, y in zip(grid, row, strict=True)] for row in losses]

    def loss(budgets: list[int]) -> Fraction:
        return sum((reference_divide.hull_at(curve, b) for curve, b in zip(curves, budgets, strict=True)), Fraction(0))

    made = divide(grid, losses, total).budgets.tolist()
    assert sum(made) == total
    assert abs(loss(made) - loss(reference_divide.divide(grid, losses, total))) < Fraction(1, 10**12)


def test_layers_make_a_layer_plan_and_heads_a_head_plan() -> None:
    losses = np.linspace(1, 0, 4)[None] * np.arange(1, 7)[:, None]
    layers = divide([8, 16, 32, 64], losses, 150)
    assert isinstance(layers, LayerPlan)
    assert layers.total == 150
    assert LayerPlan.from_dict(layers.to_dict()) == layers
    heads = divide([8, 16, 32, 64], losses.reshape(3, 2, 4), 150, maximum=np.full((3, 2), 40))
    assert isinstance(heads, HeadPlan)
    assert heads.budgets.shape == (3, 2)
    assert heads.total == 150
    assert heads.budgets.max() <= 40
    over = divide([8, 16], [[1.0, 0.0]] * 3, 99)
    assert (over.budgets == 16).all()
    assert over.requested == 99  # type: ignore[union-attr]


def test_a_curve_counts_as_its_hull() -> None:
    # 20 is worth nothing to layer 0; the line from 10 to 30 is steeper than what layer 1 has.
    assert divide([10, 20, 30], [[10, 10, 0], [8, 4, 0]], 40).budgets.tolist() == [30, 10]
    assert divide([10, 20, 30], [[6, 6, 0], [8, 4, 0]], 40).budgets.tolist() == [10, 30]


def test_equal_gains_are_levelled_and_the_lower_layer_gets_the_odd_one() -> None:
    same = [[0.6, 0.2, 0.1]] * 3
    assert divide([5, 15, 40], same, 41).budgets.tolist() == [14, 14, 13]
    assert divide([5, 15, 40], same, 100).budgets.tolist() == [34, 33, 33]
    # Nothing to gain anywhere: what is left goes to who has least.
    assert divide([4, 8, 40], [[1, 0, 0], [1, 1, 1], [1, 1, 1]], 36).budgets.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([], [[]], 3), {}, ValueError, "grid: must have one budget or more"),
        (([5, 5], [[0, 1]], 5), {}, ValueError, r"grid\[1\] = 5: must be above 0 and above the one before it"),
        (([0, 5], [[0, 1]], 5), {}, ValueError, r"grid\[0\] = 0"),
        (([1.5, 5], [[0, 1]], 5), {}, TypeError, "grid: must be integers"),
        (([1, 5], [0, 1], 5), {}, ValueError, r"losses: has shape \(2,\), must be \(layers, 2\) or"),
        (([1, 5], np.zeros((0, 2)), 5), {}, ValueError, r"losses: has shape \(0, 2\)"),
        (([1, 5], [["a", "b"]], 5), {}, TypeError, "losses: must be an array of real numbers"),
        (([1, 5], [[0, float("nan")]], 5), {}, ValueError, r"losses\[0, 1\] = nan: must be finite"),
        (([1, 5], [[[0, 1], [0, np.inf]]], 5), {}, ValueError, r"losses\[0, 1, 1\] = inf: must be finite"),
        (([3, 5], [[0, 1], [0, 1]], 5), {}, ValueError, "total = 5: must be at least 6"),
        (([3, 5], [[0, 1]], 3.0), {}, TypeError, "total = 3.0: must be an integer"),
        (([3, 5], [[0, 1]], -1), {}, ValueError, "total = -1"),
        (([4, 8], [[0, 1]], 5), {"multiple_of": 4}, ValueError, "total = 5: must be a multiple of multiple_of = 4"),
        (([4, 8], [[0, 1]], 4), {"multiple_of": 0}, ValueError, "multiple_of = 0"),
        (([4, 8], [[0, 1]], 4), {"minimum": 3}, ValueError, r"minimum = 3: must be at least grid\[0\] = 4"),
        (([4, 8], [[0, 1]], 4), {"minimum": 7, "maximum": 6}, ValueError, "minimum = 7: must not exceed maximum = 6"),
        (([4, 8], [[0, 1]], 4), {"minimum": [5, 5]}, ValueError, r"minimum: has shape \(2,\), must be \(1,\)"),
        (([4, 8], [[[0, 1]]], 4), {"minimum": [5]}, ValueError, r"minimum: has shape \(1,\), must be \(1, 1\)"),
        (([4, 9], [[0, 1]], 8), {"minimum": 5, "maximum": 7, "multiple_of": 8}, ValueError, "must lie between them"),
    ],
)
def test_divide_refuses(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        divide(*arguments, **options)
