"""``divide``: no better division, the total kept exactly, and what is documented."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import LayerPlan, divide
from pb_kvcache._divide import OBJECTIVES


@st.composite
def concave(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw concave curves over the budgets 1, 2, ..., n, and a total that can be divided."""
    n = draw(st.integers(1, 5))
    gains = st.lists(st.integers(0, 6), min_size=n - 1, max_size=n - 1).map(lambda g: sorted(g, reverse=True))
    starts = st.integers(-3, 3)
    curves = draw(
        st.lists(st.builds(lambda a, g: list(itertools.accumulate([a, *g])), starts, gains), min_size=1, max_size=4)
    )
    return curves, draw(st.integers(len(curves), len(curves) * n + 2))


@settings(deadline=None, max_examples=150)
@given(concave(), st.integers(1, 3))
def test_no_division_of_the_total_is_better(case: tuple[list[list[int]], int], block: int) -> None:
    curves, total = case
    n = len(curves[0])
    feasible = [b for b in itertools.product(range(1, n + 1), repeat=len(curves)) if sum(b) == min(total, n * len(b))]

    def values(budgets: tuple[int, ...]) -> list[int]:
        return [curve[budget - 1] for curve, budget in zip(curves, budgets, strict=True)]

    grid = [block * (i + 1) for i in range(n)]
    for objective, goal in (
        ("mean", lambda b: (sum(values(b)),)),
        ("worst", lambda b: (min(values(b)),)),
    ):
        made = divide(grid, curves, block * total, multiple_of=block, objective=objective)  # type: ignore[arg-type]
        found = tuple(int(budget) // block for budget in made.budgets)
        assert made.total == block * min(total, n * len(curves))
        assert made.requested == block * total
        assert found in feasible
        assert goal(found) == max(map(goal, feasible))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(2, 6), st.randoms(use_true_random=False), st.sampled_from([1, 4]), st.data())
def test_any_curves_divide_exactly(layers: int, n: int, random: Any, block: int, data: st.DataObject) -> None:
    grid = list(itertools.accumulate(block * random.randint(1, 9) for _ in range(n)))
    curves = [[random.choice([0.0, 0.25, random.random()]) for _ in range(n)] for _ in range(layers)]
    total = block * data.draw(st.integers(layers * grid[0] // block, layers * grid[-1] // block))
    for objective in OBJECTIVES:
        made = divide(grid, curves, total, multiple_of=block, objective=objective)  # type: ignore[arg-type]
        budgets = made.budgets.astype(int)
        assert budgets.sum() == made.total == total
        assert budgets.min() >= grid[0]
        assert budgets.max() <= grid[-1]
        assert not (budgets % block).any()
        assert np.array_equal(made.weights, budgets)
        assert LayerPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_curve_counts_as_its_upper_hull() -> None:
    # Alone, 20 is worth nothing to layer 0; the line from 10 to 30 is steeper than what layer 1 has.
    assert divide([10, 20, 30], [[0, 0, 10], [0, 4, 8]], 40).budgets.tolist() == [30, 10]
    assert divide([10, 20, 30], [[0, 0, 6], [0, 4, 8]], 40).budgets.tolist() == [10, 30]


def test_equal_gains_are_levelled_and_the_lower_layer_gets_the_odd_one() -> None:
    same = [[0.1, 0.5, 0.6]] * 3
    assert divide([5, 15, 40], same, 41).budgets.tolist() == [14, 14, 13]
    assert divide([5, 15, 40], same, 100).budgets.tolist() == [34, 33, 33]
    # Nothing to gain anywhere: what is left goes to who has least.
    assert divide([4, 8, 40], [[0, 1, 1], [0, 0, 0], [0, 0, 0]], 36).budgets.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], [[]], 3), ValueError, "grid: must have one budget or more"),
        (([5, 5], [[0, 1]], 5), ValueError, r"grid\[1\] = 5: must be above the one before it"),
        (([0, 5], [[0, 1]], 5), ValueError, r"grid\[0\] = 0"),
        (([1.5, 5], [[0, 1]], 5), TypeError, "grid: must be integers"),
        (([1, 5], [0, 1], 5), ValueError, r"curves: has shape \(2,\), must be \(num_layers, 2\)"),
        (([1, 5], np.zeros((0, 2)), 5), ValueError, r"curves: has shape \(0, 2\)"),
        (([1, 5], [["a", "b"]], 5), TypeError, "curves: must be an array of real numbers"),
        (([1, 5], [[0, float("nan")]], 5), ValueError, r"curves\[0, 1\] = nan: must be finite"),
        (([3, 5], [[0, 1], [0, 1]], 5), ValueError, "total = 5: must be at least 6"),
        (([3, 5], [[0, 1]], 3.0), TypeError, "total = 3.0: must be an integer"),
        (([4, 8], [[0, 1]], 5, 4), ValueError, "total = 5: must be a multiple of multiple_of = 4"),
        (([3, 8], [[0, 1]], 4, 4), ValueError, r"grid\[0\] = 3: .* a multiple of 4"),
        (([3, 8], [[0, 1]], 4, 0), ValueError, "a multiple of 0"),
        (([3, 8], [[0, 1]], 4, 1, "best"), ValueError, "objective = 'best': must be one of mean, worst"),
    ],
)
def test_divide_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    grid, curves, total, block, objective = (*arguments, *(1, "mean")[len(arguments) - 3 :])
    with pytest.raises(error, match=message):
        divide(grid, curves, total, multiple_of=block, objective=objective)
