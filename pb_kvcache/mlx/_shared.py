"""What the caches of one prompt have in common: the division of its budget, and what the layers find wrong together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .._layer_budgets import LayerBudgets
from .._plan import LayerPlan
from .._selection import Selection
from ._value_weights import Projection

#: The layout of :meth:`Shared.to_json`. A state of another version is refused.
_VERSION = 1


class Shared:
    """The budgets that the layers of a list divide, and where their step began.

    Parameters
    ----------
    num_layers
        Layers under the budget.
    selection
        The rule that chooses.
    plan
        What every layer keeps. None where `asked` says how much and how it falls.
    asked
        Further arguments of :class:`LayerBudgets`.
    prompt_length
        Tokens after which the prompt is over. None: it is over with the first call that brings a single token.
    projections
        The layers' output projections, where the rule weighs values.
    """

    def __init__(
        self,
        num_layers: int,
        selection: Selection,
        plan: LayerPlan | None,
        asked: Mapping[str, Any],
        prompt_length: int | None,
        projections: list[Projection] | None = None,
    ) -> None:
        self.budgets = LayerBudgets(num_layers, selection=selection, plan=plan, **asked)
        self.prompt_length = prompt_length
        self.projections = projections
        self.mask: mx.array | None = None  # the last one that a layer made for its model
        self._plan = plan
        self._offset: int | None = None  # tokens that every layer had seen before the step at hand

    def begin_step(self, index: int, layer: int, offset: int) -> None:
        """Note that a layer takes in tokens. The first one says how many were seen before.

        Raises
        ------
        RuntimeError
            A layer has seen more or fewer: a step before this one came to no end.
        """
        if index == 0:
            self._offset = offset
        elif self._offset not in (None, offset):
            raise RuntimeError(
                f"layer {layer} has seen {offset} tokens and the first layer {self._offset}: a step before this one "
                "failed in between; begin again with make_prompt_cache"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` makes the same from, without the projections."""
        # What was checked, not what was given: numbers of NumPy are no JSON.
        amount, curve = self.budgets.amount, self.budgets.curve
        asked: dict[str, Any] = {}
        if self._plan is None:
            asked[amount.kind] = amount.value
            if curve.weights is not None:
                asked["weights"] = curve.weights.tolist()
            else:
                asked.update({"ratio": curve.ratio} if curve.beta is None else {"beta": curve.beta})
        return {
            "version": _VERSION,
            "num_layers": self.budgets.num_layers,
            "selection": self.budgets.selection.to_dict(),
            "plan": None if self._plan is None else self._plan.to_dict(),
            "asked": asked,
            "prompt_length": self.prompt_length,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Shared:
        """Return what :meth:`to_json` described.

        Raises
        ------
        ValueError
            Another version, or content that breaks a rule.
        """
        if content.get("version") != _VERSION:
            raise ValueError(f"state: has version {content.get('version')!r}, must be {_VERSION}")
        try:
            plan = content["plan"]
            return cls(
                content["num_layers"],
                Selection.from_dict(content["selection"]),
                None if plan is None else LayerPlan.from_dict(plan),
                content["asked"],
                content["prompt_length"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"state: is not one of a BudgetedKVCache ({error})") from None


def dumped(content: Mapping[str, Any]) -> str:
    """Return JSON of ASCII, as mlx-lm stores text by its character codes."""
    return json.dumps(content, ensure_ascii=True)
