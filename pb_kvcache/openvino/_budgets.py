"""The rows that each layer keeps of a prompt of some length, and the rules that OpenVINO's scores serve."""

from __future__ import annotations

import os
from typing import Any

from .._head_plan import HeadPlan
from .._layer_budgets import LayerBudgets
from .._plan_file import load_plan
from .._selection import Selection


class Budgets(LayerBudgets):
    """Budgets of layers whose KV heads all keep the same positions, chosen by attention summed over all of them."""

    def __init__(self, num_layers: int, *, budget: Any, plan: Any, selection: Any) -> None:
        if isinstance(plan, (str, os.PathLike)):
            plan = load_plan(plan)
        if isinstance(plan, HeadPlan):
            raise TypeError(
                "plan: is a HeadPlan, and OpenVINO's operation keeps the same positions for all KV heads of a layer; "
                "give its layer_plan()"
            )
        super().__init__(num_layers, selection=_served(Selection.of(selection)), budget=budget, plan=plan)


def _served(selection: Selection) -> Selection:
    """Refuse a rule that needs more than the operation's scores: attention summed over query heads and queries."""
    if selection.score != "window":
        raise ValueError(
            f"selection: has score = {selection.score!r}, must have 'window', which is what OpenVINO tells"
        )
    if selection.value_weight:
        raise ValueError("selection: has value_weight = True; OpenVINO does not tell the values' norms, use 'snapkv'")
    if selection.second_hop:
        raise ValueError(f"selection: has second_hop = {selection.second_hop:g}; OpenVINO does not tell the queries")
    if selection.reduce == "max":
        raise ValueError("selection: has reduce = 'max'; OpenVINO sums over query heads, use 'mean' or 'sum'")
    return selection
