"""What a cache of a transformers model was asked for: budgets of layers, and how heads and prompts divide them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .._checks import real
from .._curves import CurveSet
from .._layer_budgets import LayerBudgets
from .._options import choice
from .._selection import Selection
from ._merging import MERGES
from ._ranks import Ranks

if TYPE_CHECKING:
    from ._layer import BudgetedLayer

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


class Budgets(LayerBudgets):
    """The parameters of a cache, checked, and the plan for each prompt length, over all ranks."""

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
        hold = choice("decode", decode, _HOLDS)
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
        if self.by_prompt:
            others = {"plan": layer_plan, "curves": curves, "ratio": ratio, "beta": beta, "weights": weights}
            for name, value in {**others, "heads": heads}.items():
                if value is not None:
                    raise ValueError(f"allocate and {name}: the prompt already says how the total is divided")
        if self.adakv and curves is not None:
            raise ValueError("curves and heads: the curves already say how the total is divided")

        # Of the prompt that is held.
        self.ranks = ranks  # that the heads of a layer are divided over
        self.waiting: dict[int, BudgetedLayer] = {}  # hold their prompts whole until the total is divided
        self._kv_heads = 0  # of a layer, of all ranks, where the prompt divides and was read
        self._by_prompt: list[npt.NDArray[np.int64]] = []  # for every sequence
        self.warned_of_gradients = False
        self.failed_layer: int | None = None  # whose attention has not come to its end

        # How many, and how they are divided.
        super().__init__(
            num_layers,
            selection=selection,
            budget=budget,
            memory=memory,
            fraction=fraction,
            plan=layer_plan,
            curves=curves,
            ratio=ratio,
            beta=beta,
            weights=weights,
            default_ratio=default_ratio,
            hold=hold,
        )
        if self.adakv and self.plan is not None and self.plan.ndim == 2:
            raise ValueError("plan and heads: a HeadPlan already says what every KV head keeps")

    def check_heads(self, model_layer: int, kv_heads: int) -> None:
        """Refuse a layer whose KV heads, of which this rank has `kv_heads`, are not those of a head plan or curves."""
        super().check_heads(model_layer, kv_heads * self.ranks.size)

    def measure(self, model_layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take note of what a position costs in bytes. Only `memory` needs it."""
        size = keys.shape[1] * (keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size())
        self.note_position_bytes(model_layer, size * self.ranks.size)

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

    def decide(self, length: int, batch: int = 1, row: int = 0) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a sequence of `length` tokens, the one at `row` in a batch of `batch`.

        Shape ``(num_layers,)``, with a head plan ``(num_layers, kv_heads)``, this rank's KV heads.
        """
        if self._by_prompt:
            return self._by_prompt[row]
        decided = super().decide(length, batch)
        return decided if decided.ndim == 1 else self.ranks.own(decided)

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
        return (self.num_layers, self._kv_heads) if self._kv_heads else super()._shape

    @property
    def first_hop(self) -> Selection:
        """The selection without its second hop."""
        return dataclasses.replace(self.selection, second_hop=0.0) if self.selection.second_hop else self.selection

    def forget(self) -> None:
        """Forget the prompt. The next one may have another batch size or another dtype."""
        super().forget()
        self.failed_layer = None
        self._kv_heads = 0
        self._by_prompt = []
        self.waiting = {}

    def describe(self) -> str:
        """Return what was asked for, in words."""
        parts = [super().describe()]
        if self.adakv:
            parts.append(f"heads by AdaKV with alpha {self.alpha:g}")
        if self.merge is not None:
            parts.append(f"merging ({self.merge})")
        return ", ".join(parts)

    def _describe_curve(self) -> str:
        return "heads by the prompt" if self.by_prompt else super()._describe_curve()

    def copy(self) -> Budgets:
        """Return an independent copy."""
        twin = super().copy()
        twin.waiting = {}  # whoever copies a layer puts it in
        return twin
