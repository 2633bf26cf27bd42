"""What a model's layers may keep of a prompt, and the budget of every layer that follows from it.

Engines of all kinds ask here: the caches of transformers models, of mlx-lm and of others. Nothing in it knows tensors.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ._amount import Amount, Curve, Kind, only_one
from ._curves import CurveSet
from ._head_plan import HeadPlan
from ._plan import LayerPlan
from ._plan import plan as divide_layers
from ._plan_file import load_plan
from ._selection import Selection

#: Positions per layer where the caller does not say how much.
DEFAULT_BUDGET = 512

_Budgets = TypeVar("_Budgets", bound="LayerBudgets")


class LayerBudgets:
    """How much the layers of a model keep of a prompt, checked, and the division for each prompt length.

    Every layer keeps at least one position more than the selection always keeps. In a prompt shorter than a layer's
    share the layer keeps everything and the others take over what it leaves. With `hold` they do not, because the layer
    fills up to its share while tokens are generated.

    Parameters
    ----------
    num_layers
        Layers that are compressed.
    selection
        The rule that chooses. It says how many positions a layer needs at least.
    budget, memory, fraction
        How much: positions per layer on average (:data:`DEFAULT_BUDGET` where nothing is given), bytes for a whole
        batch, or a share of the prompt above 0 and at most 1. One of them, or a plan.
    plan
        A :class:`LayerPlan`, a :class:`HeadPlan` or the path of a plan file.
    curves
        A :class:`CurveSet` or its file, which divides what `budget`, `memory` or `fraction` allow.
    ratio, beta, weights
        How budgets fall from the first layer to the last, as for :func:`pb_kvcache.plan`. One of them.
    default_ratio
        The ratio where none of the three is given. 1 is uniform.
    hold
        Whether every layer stays at its budget while tokens are generated.

    Attributes
    ----------
    least
        Positions that every layer, or every head, keeps at least.
    plan
        The budgets of the plan, int64, shape ``(num_layers,)`` or ``(num_layers, kv_heads)``. None without one.
    curves
        The curves. None without them.
    amount, curve
        How much, and how it falls.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or two that contradict each other. The message names the fix.

    Examples
    --------
    >>> budgets = LayerBudgets(4, selection=Selection(window=8), budget=64, ratio=3)
    >>> budgets.nominal(), budgets.decide(70)
    (array([96, 75, 53, 32]), array([70, 70, 70, 46]))
    """

    def __init__(
        self,
        num_layers: int,
        *,
        selection: Selection,
        budget: Any = None,
        memory: Any = None,
        fraction: Any = None,
        plan: Any = None,
        curves: Any = None,
        ratio: Any = None,
        beta: Any = None,
        weights: Any = None,
        default_ratio: float = 1.0,
        hold: bool = False,
    ) -> None:
        self.num_layers = num_layers
        self.selection = selection
        self.hold = hold
        self.least = selection.always_kept + 1
        self._least_is = f"window + 1 = {self.least}"
        if selection.always_kept != selection.window:
            self._least_is = f"{self.least}, one more than the selection always keeps"

        # How many, and how they are divided: a plan says both.
        amounts: dict[Kind, Any] = {"budget": budget, "memory": memory, "fraction": fraction}
        only_one({"plan": plan, **amounts})
        only_one({"plan": plan, "curves": curves})
        falls = {"ratio": ratio, "beta": beta, "weights": weights}
        self.curves: CurveSet | None = None
        self.plan = None if plan is None else self._check_plan(plan)
        if self.plan is not None:
            for name, value in falls.items():
                if value is not None:
                    raise ValueError(f"plan and {name}: the plan already says what every layer keeps")
            self.amount = Amount.of("total", int(self.plan.sum()))
            self.curve = Curve("weights", weights=self.plan.ravel().astype(np.float64))
        elif curves is not None:
            for name, value in falls.items():
                if value is not None:
                    raise ValueError(f"curves and {name}: the curves already say how the total is divided")
            self.curves = self._check_curves(curves)
            self.least = max(self.least, int(self.curves.grid[0]))
            self.curve = Curve("weights", weights=np.ones(num_layers))
            self.amount = self._check_amount(amounts)
        else:
            if ratio is None and beta is None and weights is None:
                ratio = default_ratio
            self.curve = Curve.of(num_layers, None, ratio, beta, weights, layer="full-attention layer")
            self.amount = self._check_amount(amounts)
        self._decided: dict[int, npt.NDArray[np.int64]] = {}
        self._position_bytes = 0  # of one position in one layer, one sequence: keys, values, all heads
        if num_layers and not self.amount.needs_prompt:
            self.nominal()  # an impossible curve is refused now

    def _check_amount(self, amounts: dict[Kind, Any]) -> Amount:
        amount = Amount.one_of(amounts) or Amount.of("budget", DEFAULT_BUDGET)
        always = self.selection.always_kept
        if amount.kind == "budget" and amount.value <= always:
            lower = "window" if always == self.selection.window else "protected positions"
            raise ValueError(
                f"budget = {amount.value}: must be at least {self._least_is}; raise the budget or lower the {lower}"
            )
        if amount.kind == "budget" and amount.value < self.least:
            raise ValueError(f"budget = {amount.value}: below {self.least}, where the curves begin; raise the budget")
        if amount.kind == "memory" and amount.value == 0:
            raise ValueError("memory = 0: must be greater than 0")
        return amount

    def _check_plan(self, plan: Any) -> npt.NDArray[np.int64]:
        if isinstance(plan, (str, os.PathLike)):
            plan = load_plan(plan)
        if not isinstance(plan, (LayerPlan, HeadPlan)):
            raise TypeError(
                "plan: must be a LayerPlan (pb_kvcache.plan makes one), a HeadPlan or the path of a plan file, not "
                f"{type(plan).__name__}"
            )
        budgets = np.asarray(plan.budgets, np.int64)
        if len(budgets) != self.num_layers:
            raise ValueError(
                f"plan: has {len(budgets)} layers, the model has {self.num_layers} with full attention, which are the "
                "ones that are compressed"
            )
        if len(budgets) and budgets.min() < self.least:
            place = np.unravel_index(int(budgets.argmin()), budgets.shape)
            where = " head ".join(str(int(index)) for index in place)
            every = "layer" if budgets.ndim == 1 else "head"
            raise ValueError(
                f"plan: gives layer {where} a budget of {budgets[place]}, every {every} needs at least "
                f"{self._least_is}; make the plan with minimum={self.least}, or lower the window"
            )
        return budgets

    def _check_curves(self, given: Any) -> CurveSet:
        curves = CurveSet.of(given)
        if curves.num_layers != self.num_layers:
            raise ValueError(
                f"curves: has {curves.num_layers} layers, the model has {self.num_layers} with full attention, which "
                "are the ones that are compressed"
            )
        return curves

    def check_heads(self, model_layer: int, kv_heads: int) -> None:
        """Refuse a layer whose KV heads are not those of a head plan or of curves."""
        if len(self._shape) == 2 and self._shape[1] != kv_heads:
            raise ValueError(
                f"{'plan' if self.curves is None else 'curves'}: has {self._shape[1]} KV heads a layer, and layer "
                f"{model_layer} of the model {kv_heads}"
            )

    def note_position_bytes(self, model_layer: int, size: int) -> None:
        """Take note of what a position of one sequence costs in one layer, in bytes. Only `memory` needs it."""
        if self._position_bytes not in (0, size) and self.amount.kind == "memory":
            raise ValueError(
                f"memory: layer {model_layer} has {size} bytes a position, an earlier one {self._position_bytes}; "
                "give a budget or a plan for a model whose layers differ"
            )
        self._position_bytes = size

    def decide(self, length: int, batch: int = 1) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a sequence of `length` tokens, one of a `batch`.

        Shape ``(num_layers,)``, with a head plan or curves ``(num_layers, kv_heads)``.
        """
        if length not in self._decided:
            self._decided[length] = self._divide(self._total(length, batch), None if self.hold else length)
        return self._decided[length]

    def nominal(self) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a prompt that is long enough.

        Raises
        ------
        RuntimeError
            With `memory` or `fraction`: no prompt has been seen.
        """
        if self.amount.needs_prompt:
            raise RuntimeError(f"budgets: with {self.amount.name}= they follow from the prompt; ask after it")
        return self._divide(self.amount.total(self._shares), None)

    def _total(self, length: int, batch: int) -> int:
        """Return the positions that all layers together may keep of a sequence of `length` tokens."""
        shares_of_a_layer = self._shares // max(self.num_layers, 1)
        position_bytes = batch * self._position_bytes // shares_of_a_layer
        total = self.amount.total(self._shares, position_bits=8 * position_bytes, length=length)
        least = self.least * self._shares
        if self.amount.kind == "fraction":
            return max(total, least)
        if self.amount.kind == "memory" and total < least and total < length * self._shares:
            every = f"every layer needs at least {self._least_is}"
            if self.curves is not None:
                every = f"every head needs at least {self.least}"
            raise ValueError(
                f"memory = {self.amount.value}: {every} positions, which is {least * position_bytes} bytes for a batch "
                f"of {batch}"
            )
        return total

    def _divide(self, total: int, maximum: int | None) -> npt.NDArray[np.int64]:
        """Return every layer's budget, or every head's, each at least `least` and at most `maximum`."""
        least = self.least
        if maximum is not None and (maximum <= least or total >= maximum * self._shares):
            return np.full(self._shape, maximum, np.int64)
        if self.plan is not None and (maximum is None or maximum >= self.plan.max()):
            return self.plan
        if self.curves is not None:
            made = self.curves.plan(total=total, minimum=least, maximum=maximum)
            return made.budgets.astype(np.int64)
        curve = self.curve
        chosen = divide_layers(
            self._shares,
            total=total,
            shape=curve.shape,
            ratio=curve.ratio,
            weights=curve.weights,
            minimum=least,
            maximum=maximum,
        )
        return np.asarray(chosen.budgets, np.int64).reshape(self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the budgets: one a layer, or one a KV head."""
        if self.curves is not None:
            return self.curves.num_layers, self.curves.num_kv_heads
        return (self.num_layers,) if self.plan is None else self.plan.shape

    @property
    def _shares(self) -> int:
        """How many budgets there are."""
        return math.prod(self._shape)

    def forget(self) -> None:
        """Forget the prompt. The next one may have another batch size or another dtype."""
        self._decided.clear()
        self._position_bytes = 0

    def describe(self) -> str:
        """Return what was asked for, in words."""
        return ", ".join([self._describe_amount(), self._describe_curve(), str(self.selection)])

    def _describe_amount(self) -> str:
        if self.plan is not None:
            return "a plan"
        if self.amount.kind == "fraction":
            return f"{self.amount.value:g} of the prompt"
        return f"{self.amount.value} bytes" if self.amount.kind == "memory" else f"budget {self.amount.value}"

    def _describe_curve(self) -> str:
        if self.plan is not None:
            return f"{self.amount.value} positions"
        if self.curves is not None:
            return "heads by curves"
        if self.curve.weights is not None:
            return "own weights"
        return f"ratio {self.curve.ratio:g}" if self.curve.beta is None else f"beta {self.curve.beta:g}"

    def copy(self: _Budgets) -> _Budgets:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._decided = dict(self._decided)
        return twin
