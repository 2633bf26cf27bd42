"""The division of a budget over layers, as every engine asks for it."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import HeadPlan, Selection, _layer_budgets, plan, save_plan
from pb_kvcache._layer_budgets import LayerBudgets

RULE = Selection(window=8)


@pytest.mark.parametrize("length", [12, 40, 65, 130, 1000])
@pytest.mark.parametrize("how", [{}, {"ratio": 4}, {"beta": 3.0}, {"weights": [1, 5, 2, 9]}])
def test_no_position_is_lost_and_none_is_beyond_the_prompt(length: int, how: dict[str, Any]) -> None:
    decided = LayerBudgets(4, selection=RULE, budget=64, **how).decide(length)
    assert decided.sum() == min(4 * 64, 4 * length)
    assert decided.max() <= length
    assert decided.min() >= min(length, 9)


def test_a_layer_that_fills_up_later_keeps_its_share() -> None:
    held = LayerBudgets(4, selection=RULE, budget=64, ratio=4, hold=True)
    np.testing.assert_array_equal(held.decide(20), held.nominal())


def test_a_plan_a_file_and_its_heads(tmp_path: Path) -> None:
    for made in (plan(2, total=64, weights=[40, 24]), HeadPlan([[40, 30, 20], [10, 12, 14]])):
        save_plan(tmp_path / "plan.json", made)
        budgets = LayerBudgets(2, selection=RULE, plan=tmp_path / "plan.json")
        np.testing.assert_array_equal(budgets.decide(500), made.budgets)
        short = budgets.decide(25)
        assert short.max() <= 25
        assert short.sum() == min(made.total, 25 * made.budgets.size)
    with pytest.raises(ValueError, match="plan: has 3 KV heads a layer, and layer 7 of the model 2"):
        budgets.check_heads(7, 2)


def test_bytes_hold_the_whole_batch() -> None:
    budgets = LayerBudgets(4, selection=RULE, memory=64_000)
    budgets.note_position_bytes(0, 100)
    assert budgets.decide(1000, batch=4).sum() == 64_000 // 400
    budgets.forget()
    budgets.note_position_bytes(0, 50)  # another dtype
    assert budgets.decide(1000, batch=4).sum() == 64_000 // 200
    with pytest.raises(ValueError, match="memory: layer 3 has 51 bytes a position, an earlier one 50"):
        budgets.note_position_bytes(3, 51)


def test_a_copy_forgets_alone() -> None:
    budgets = LayerBudgets(2, selection=RULE, fraction=0.5)
    assert budgets.decide(100).tolist() == [50, 50]
    budgets.copy().forget()
    assert budgets.decide(100) is budgets.decide(100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 8}, "budget = 8: must be at least window"),
        ({"budget": 64, "fraction": 0.5}, "only one of them"),
        ({"plan": plan(3, 24)}, "plan: has 3 layers, the model has 2"),
        ({"plan": plan(2, total=48, weights=[5, 1])}, "plan: gives layer 1 a budget of 8"),
        ({"plan": plan(2, 32), "ratio": 2}, "plan and ratio"),
        ({"memory": 0}, "memory = 0"),
    ],
)
def test_what_contradicts_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerBudgets(2, selection=RULE, **given)


def test_the_example() -> None:
    failed, tried = doctest.testmod(_layer_budgets)
    assert tried
    assert not failed
