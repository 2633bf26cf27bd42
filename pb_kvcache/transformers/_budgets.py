"""What a cache was asked for, and the budget of every layer that follows from it for a prompt of some length."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .._amount import Amount, Curve, Kind, only_one
from .._checks import real
from .._curves import CurveSet
from .._head_plan import HeadPlan
from .._options import choice
from .._plan import LayerPlan, plan
from .._plan_file import load_plan
from .._selection import Selection
from ._merging import MERGES
from ._ranks import Ranks

if TYPE_CHECKING:
    from ._layer import BudgetedLayer

#: Positions per layer where the caller does not say how much.
_DEFAULT_BUDGET = 512
#: Whether a layer stays at its budget while tokens are generated.
_HOLDS = {"grow": False, "hold": True}
#: Whether the heads of a layer divide its positions by their scores.
_HEADS = {"adakv": True}
#: Whether the prompt itself says how a total is divided over the heads of all layers.
_ALLOCATE = {"prompt": True}
#: Positions beyond those that are always kept, which every head has where the prompt divides and rows are merged: fewer
#: make a merge under such a plan worse than none.
_MERGE_FLOOR = 16
#: Whether the prompt may come in several calls.
_CHUNKED = {"prompt": False, "decode": True}


class Budgets:
    """The parameters of a cache, checked, and the plan for each prompt length.

    Every layer keeps at least one position more than the selection always keeps. In a prompt shorter than a layer's
    share the layer keeps everything and the others take over what it leaves. With ``decode="hold"`` they do not,
    because the layer fills up to its share while tokens are generated.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        ranks: Ranks,
        budget: Any,
        default_ratio: float,
        ratio: Any,
        beta: Any,
        weights: Any,
        layer_plan: Any,
        curves: Any = None,
        memory: Any,
        fraction: Any,
        selection: Selection,
        decode: str,
        compress: str,
        heads: str | None = None,
        alpha: Any = 0.2,
        allocate: str | None = None,
        merge: str | None = None,
    ) -> None:
        # How positions are chosen.
        self.num_layers = num_layers
        self.selection = selection
        self.hold = choice("decode", decode, _HOLDS)
        self.chunked = choice("compress", compress, _CHUNKED)
        if selection.second_hop and self.chunked:
            raise ValueError(
                "second_hop: needs the queries of the whole prompt at once; use compress='prompt', or no second hop"
            )
        self.adakv = heads is not None and choice("heads", heads, _HEADS)
        self.by_prompt = allocate is not None and choice("allocate", allocate, _ALLOCATE)
        self.merge = None if merge is None else choice("merge", merge, MERGES)
        self.alpha = real("alpha", alpha)
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha = {self.alpha:g}: must be between 0 and 1")

        # How many, and how they are divided: a plan says both.
        amounts: dict[Kind, Any] = {"budget": budget, "memory": memory, "fraction": fraction}
        only_one({"plan": layer_plan, **amounts})
        only_one({"plan": layer_plan, "curves": curves})
        if self.by_prompt:
            others = {"plan": layer_plan, "curves": curves, "ratio": ratio, "beta": beta, "weights": weights}
            for name, value in {**others, "heads": heads}.items():
                if value is not None:
                    raise ValueError(f"allocate and {name}: the prompt already says how the total is divided")
        self.least = selection.always_kept + 1  # positions of every layer, or of every head
        self._least_is = f"window + 1 = {self.least}"
        if selection.always_kept != selection.window:
            self._least_is = f"{self.least}, one more than the selection always keeps"
        self.curves: CurveSet | None = None
        self.plan = None if layer_plan is None else self._check_plan(layer_plan)
        if self.plan is not None:
            for name, value in (("ratio", ratio), ("beta", beta), ("weights", weights)):
                if value is not None:
                    raise ValueError(f"plan and {name}: the plan already says what every layer keeps")
            self.amount = Amount.of("total", int(self.plan.sum()))
            self.curve = Curve("weights", weights=self.plan.ravel().astype(np.float64))
            if self.plan.ndim == 2 and self.adakv:
                raise ValueError("plan and heads: a HeadPlan already says what every KV head keeps")
        elif curves is not None:
            for name, value in (("ratio", ratio), ("beta", beta), ("weights", weights), ("heads", heads)):
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
        self.ranks = ranks  # that the heads of a layer are divided over
        self.waiting: dict[int, BudgetedLayer] = {}  # hold their prompts whole until the total is divided
        self._kv_heads = 0  # of a layer, of all ranks, where the prompt divides and was read
        self._by_prompt: list[npt.NDArray[np.int64]] = []  # for every sequence
        self.warned_of_gradients = False
        self.failed_layer: int | None = None  # whose attention has not come to its end
        self._decided: dict[int, npt.NDArray[np.int64]] = {}
        self._position_bytes = 0  # of one position in one layer, one sequence: keys, values, all heads and ranks
        if num_layers and not self.amount.needs_prompt:
            self.nominal()  # an impossible curve is refused now

    def _check_amount(self, amounts: dict[Kind, Any]) -> Amount:
        amount = Amount.one_of(amounts) or Amount.of("budget", _DEFAULT_BUDGET)
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

    def _check_plan(self, layer_plan: Any) -> npt.NDArray[np.int64]:
        if isinstance(layer_plan, (str, os.PathLike)):
            layer_plan = load_plan(layer_plan)
        if not isinstance(layer_plan, (LayerPlan, HeadPlan)):
            raise TypeError(
                "plan: must be a LayerPlan (pb_kvcache.plan makes one), a HeadPlan or the path of a plan file, not "
                f"{type(layer_plan).__name__}"
            )
        budgets = np.asarray(layer_plan.budgets, np.int64)
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
        kv_heads *= self.ranks.size
        if len(self._shape) == 2 and self._shape[1] != kv_heads:
            raise ValueError(
                f"{'plan' if self.curves is None else 'curves'}: has {self._shape[1]} KV heads a layer, and layer "
                f"{model_layer} of the model {kv_heads}"
            )

    def measure(self, model_layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take note of what a position costs in bytes. Only `memory` needs it."""
        size = keys.shape[1] * (keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size())
        size *= self.ranks.size
        if self._position_bytes not in (0, size) and self.amount.kind == "memory":
            raise ValueError(
                f"memory: layer {model_layer} has {size} bytes a position, an earlier one {self._position_bytes}; "
                "give a budget or a plan for a model whose layers differ"
            )
        self._position_bytes = size

    def end_prompts(self) -> None:
        """Divide the total by the prompts that all layers hold, one plan for each sequence, and let them choose."""
        layers = [self.waiting[index] for index in sorted(self.waiting)]
        heads = {layer.kv_heads for layer in layers}
        if len(heads) > 1:
            raise ValueError(f"allocate: layers have {sorted(heads)} KV heads, must all have the same number")
        self._kv_heads = heads.pop() * self.ranks.size
        for layer in layers:
            layer.measure()
        lengths = layers[0].prompt_lengths
        of_layers = [layer.prompt_losses() for layer in layers]
        plans = []
        for row, length in enumerate(lengths):
            total = self._total(length, len(lengths))
            grid = of_layers[0][row][0]
            if len(grid) < 2:  # too short to tell
                plans.append(self._divide(total, None if self.hold else length))
                continue
            losses = [self.ranks.gathered(one[row][1]).cpu().numpy().astype(np.float64) for one in of_layers]
            plans.append(self._divide_by(CurveSet([*grid[:-1], length], np.stack(losses)), total))
        self._by_prompt = [self.ranks.own(plan) for plan in plans]
        self.waiting = {}
        for layer in layers:
            layer.end_prompt()

    def decide(self, length: int, batch: int, row: int = 0) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a sequence of `length` tokens, the one at `row` in a batch of `batch`.

        Shape ``(num_layers,)``, with a head plan ``(num_layers, kv_heads)``, this rank's KV heads.
        """
        if self._by_prompt:
            return self._by_prompt[row]
        if length not in self._decided:
            decided = self._divide(self._total(length, batch), None if self.hold else length)
            self._decided[length] = decided if decided.ndim == 1 else self.ranks.own(decided)
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
        chosen = plan(
            self._shares,
            total=total,
            shape=curve.shape,
            ratio=curve.ratio,
            weights=curve.weights,
            minimum=least,
            maximum=maximum,
        )
        return np.asarray(chosen.budgets, np.int64).reshape(self._shape)

    def _divide_by(self, curves: CurveSet, total: int) -> npt.NDArray[np.int64]:
        """Return every head's budget by what a prompt says that they lose."""
        length = int(curves.grid[-1])
        if total >= length * self._shares:  # with decode="hold" there may be more than the prompt takes
            return np.full(self._shape, total // self._shares if self.hold else length, np.int64)
        least = self.least
        if self.merge is not None:
            least = min(total // self._shares, self.selection.always_kept + _MERGE_FLOOR)
        return curves.plan(total=total, minimum=least).budgets.astype(np.int64)

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the budgets: one a layer, or one a KV head, of all ranks."""
        if self._kv_heads:
            return self.num_layers, self._kv_heads
        if self.curves is not None:
            return self.curves.num_layers, self.curves.num_kv_heads
        return (self.num_layers,) if self.plan is None else self.plan.shape

    @property
    def _shares(self) -> int:
        """How many budgets there are."""
        return math.prod(self._shape)

    @property
    def first_hop(self) -> Selection:
        """The selection without its second hop."""
        return dataclasses.replace(self.selection, second_hop=0.0) if self.selection.second_hop else self.selection

    def forget(self) -> None:
        """Forget the prompt. The next one may have another batch size or another dtype."""
        self.failed_layer = None
        self._decided.clear()
        self._position_bytes = self._kv_heads = 0
        self._by_prompt = []
        self.waiting = {}

    def describe(self) -> str:
        """Return what was asked for, in words."""
        parts = [self._describe_amount(), self._describe_curve(), str(self.selection)]
        if self.adakv:
            parts.append(f"heads by AdaKV with alpha {self.alpha:g}")
        if self.merge is not None:
            parts.append(f"merging ({self.merge})")
        return ", ".join(parts)

    def _describe_amount(self) -> str:
        if self.plan is not None:
            return "a plan"
        if self.amount.kind == "fraction":
            return f"{self.amount.value:g} of the prompt"
        return f"{self.amount.value} bytes" if self.amount.kind == "memory" else f"budget {self.amount.value}"

    def _describe_curve(self) -> str:
        if self.by_prompt:
            return "heads by the prompt"
        if self.plan is not None:
            return f"{self.amount.value} positions"
        if self.curves is not None:
            return "heads by curves"
        if self.curve.weights is not None:
            return "own weights"
        return f"ratio {self.curve.ratio:g}" if self.curve.beta is None else f"beta {self.curve.beta:g}"

    def copy(self) -> Budgets:
        """Return an independent copy."""
        twin = object.__new__(Budgets)
        twin.__dict__.update(self.__dict__)
        twin._decided = dict(self._decided)
        twin.waiting = {}  # whoever copies a layer puts it in
        return twin
