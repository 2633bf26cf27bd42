"""Groups of layers: what holds for every plan, the best split by trying all of them, and what is refused."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_kvcache import LayerGroup, plan

from . import reference_plan
from .test_plan import SOME, requests


@SOME
@given(requests(layers=st.integers(1, 16)), st.integers(1, 8))
def test_every_promise_of_groups_holds(request_: dict[str, Any], n: int) -> None:
    p = plan(**request_)
    block = p.multiple_of
    try:
        groups = p.groups(n)
    except ValueError:
        assert isinstance(request_.get("minimum"), list)  # only bounds that differ can forbid groups
        return
    assert 1 <= len(groups) <= n
    assert [group.start for group in groups] == [0, *(group.stop for group in groups)][:-1]
    assert groups[-1].stop == p.num_layers
    assert groups.total == sum((group.stop - group.start) * group.budget for group in groups)
    assert groups.total == int(groups.budgets.sum(dtype=np.uint64))
    assert groups.rounding == p.total - groups.total >= 0
    assert groups.rounding < block * p.num_layers
    low, high = reference_plan.bounds_of(request_.get("minimum", 1), request_.get("maximum"), p.num_layers, block)
    for group in groups:
        layers = slice(group.start, group.stop)
        mean = Fraction(int(p.budgets[layers].sum(dtype=np.uint64)), group.stop - group.start)
        assert group.budget % block == 0
        assert abs(group.budget - mean) < block
        assert max(low[layers]) <= group.budget <= min(high[layers])
    falling = p.budgets.tolist() == sorted(p.budgets.tolist(), reverse=True)
    if falling:
        assert groups.budgets.tolist() == sorted(groups.budgets.tolist(), reverse=True)


@SOME
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 4))
def test_the_split_is_the_best_there_is(budgets: list[int], n: int) -> None:
    layers = len(budgets)
    p = plan(layers, total=sum(budgets), weights=budgets, minimum=0)
    assert p.budgets.tolist() == budgets

    def cost(edges: tuple[int, ...]) -> Fraction:
        total = Fraction(0)
        for start, stop in itertools.pairwise((0, *edges, layers)):
            part = budgets[start:stop]
            total += sum((value - Fraction(sum(part), len(part))) ** 2 for value in part)
        return total

    best = min(cost(edges) for k in range(min(n, layers)) for edges in itertools.combinations(range(1, layers), k))
    groups = p.groups(n)
    assert cost(tuple(group.stop for group in groups)[:-1]) == best


def test_as_many_groups_as_layers_is_the_plan() -> None:
    p = plan(32, 512, multiple_of=16)
    groups = p.groups(100)
    assert groups.budgets.tolist() == p.budgets.tolist()
    assert groups.rounding == 0


def test_groups_are_a_sequence() -> None:
    groups = plan(4, 100, ratio=3).groups(2)
    assert isinstance(groups[0], LayerGroup)
    assert list(groups) == [*groups[:1], groups[-1]]
    assert LayerGroup(0, 2, groups[0].budget) in groups


def test_bounds_that_forbid_groups_are_named() -> None:
    p = plan(2, 100, minimum=[150, 1], maximum=[200, 60])
    with pytest.raises(ValueError, match="n = 1: the layers' own minimums and maximums allow no such groups"):
        p.groups(1)
    assert len(p.groups(2)) == 2


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_bad_numbers_of_groups_are_refused(n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="n = "):
        plan(4, 100).groups(n)


def test_as_many_groups_as_runs_are_the_runs() -> None:
    p = plan(4096, 10**6, ratio=50)
    for n in (4096, 10**30):
        assert [group.budget for group in p.groups(n)] == p.budgets.tolist()
        assert p.groups(n).rounding == 0


def test_groups_that_would_take_minutes_to_find_are_refused() -> None:
    with pytest.raises(ValueError, match="n = 2000: must be at most 64, or at least 4096, for 4096 runs"):
        plan(4096, 10**6, ratio=50).groups(2000)


def test_too_many_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4096 runs of equal budgets, not 5000"):
        plan(5000, 10000).groups(3)
