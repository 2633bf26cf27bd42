"""The rows that each layer keeps of a prompt of some length."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import integer
from .._head_plan import HeadPlan
from .._plan import LayerPlan, plan
from .._plan_file import load_plan
from .._selection import Selection

#: Positions per layer where the caller does not say how much, as in pb_kvcache.transformers.
_DEFAULT_BUDGET = 512


class Budgets:
    """What was asked for, checked, and the budgets that follow from it for each prompt length.

    Every layer keeps at least one position more than the selection always keeps. In a prompt shorter than a layer's
    share the layer keeps everything and the others take over what it leaves.
    """

    def __init__(self, num_layers: int, *, budget: Any, layer_plan: Any, selection: Any) -> None:
        self.num_layers = num_layers
        self.selection = _served(Selection.of(selection))
        self.least = self.selection.always_kept + 1
        if layer_plan is not None and budget is not None:
            raise ValueError("plan and budget: a plan already says how much is kept; give one of them")
        self._weights: npt.NDArray[np.int64] | None = None
        if layer_plan is None:
            number = _DEFAULT_BUDGET if budget is None else integer("budget", budget)
            if number < self.least:
                raise ValueError(
                    f"budget = {number}: must be at least {self.least}, one more than the selection always keeps"
                )
            self.total = number * num_layers
        else:
            self._weights = self._checked(layer_plan)
            self.total = int(self._weights.sum())

    def _checked(self, layer_plan: Any) -> npt.NDArray[np.int64]:
        if isinstance(layer_plan, (str, os.PathLike)):
            layer_plan = load_plan(layer_plan)
        if isinstance(layer_plan, HeadPlan):
            raise TypeError(
                "plan: is a HeadPlan, and OpenVINO's operation keeps the same positions for all KV heads of a layer; "
                "give its layer_plan()"
            )
        if not isinstance(layer_plan, LayerPlan):
            raise TypeError(
                "plan: must be a LayerPlan (pb_kvcache.plan makes one) or the path of a plan file, not "
                f"{type(layer_plan).__name__}"
            )
        budgets: npt.NDArray[np.int64] = layer_plan.budgets.astype(np.int64)
        if len(budgets) != self.num_layers:
            raise ValueError(f"plan: has {len(budgets)} layers, the model has {self.num_layers}")
        if budgets.min() < self.least:
            raise ValueError(
                f"plan: gives layer {int(budgets.argmin())} a budget of {budgets.min()}, every layer needs at least "
                f"{self.least}, one more than the selection always keeps; make the plan with minimum={self.least}"
            )
        return budgets

    def decide(self, length: int) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a prompt of `length` positions: ``(num_layers,)``, none above `length`."""
        if length <= self.least or self.total >= length * self.num_layers:
            return np.full(self.num_layers, length, np.int64)
        if self._weights is not None and length >= self._weights.max():
            return np.array(self._weights)
        made = plan(
            self.num_layers,
            total=self.total,
            shape="uniform" if self._weights is None else "weights",
            weights=self._weights,
            minimum=self.least,
            maximum=length,
        )
        return made.budgets.astype(np.int64)


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
