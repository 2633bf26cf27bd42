"""What a cache was asked for, and the budget of every layer that follows from it for a prompt of some length."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._checks import integer
from .._plan import LayerPlan, plan

_POOLINGS = ("max", "avg")
_REDUCTIONS = ("mean", "max", "sum")
_DECODES = ("grow", "hold")
_COMPRESS = ("prompt", "decode")


class Budgets:
    """The parameters of a cache, checked, and the plan for each prompt length.

    Every layer keeps at least the window and one position more. In a prompt shorter than a layer's share the layer
    keeps everything and the others take over what it leaves; with ``decode="hold"`` they do not, as the layer fills up
    to its share while tokens are generated.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        budget: Any,
        ratio: Any,
        beta: Any,
        weights: Any,
        layer_plan: Any,
        memory: Any,
        fraction: Any,
        window: Any,
        kernel: Any,
        pooling: str,
        reduce: str,
        decode: str,
        compress: str,
    ) -> None:
        self.num_layers = num_layers
        self.window = integer("window", window)
        if self.window < 1:
            raise ValueError(f"window = {self.window}: must be 1 or more")
        self.kernel = integer("kernel", kernel)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel = {self.kernel}: must be odd")
        self.pooling = _choice("pooling", pooling, _POOLINGS)
        self.reduce = _choice("reduce", reduce, _REDUCTIONS)
        self.hold = _choice("decode", decode, _DECODES) == "hold"
        self.chunked = _choice("compress", compress, _COMPRESS) == "decode"

        sources = {"budget": budget, "plan": layer_plan, "memory": memory, "fraction": fraction}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them, they all say how much is kept")
        curves = [name for name, value in (("ratio", ratio), ("beta", beta), ("weights", weights)) if value is not None]
        if layer_plan is not None and curves:
            raise ValueError(f"plan and {curves[0]}: the plan already says what every layer keeps")
        if len(curves) > 1:
            raise ValueError(f"{' and '.join(curves)}: give one of them, they all shape the pyramid")
        self.source = given[0] if given else "budget"

        self._curve: dict[str, Any] = {"shape": "pyramid", "ratio": 4}
        if ratio is not None:
            self._curve = {"shape": "pyramid", "ratio": ratio}
        elif beta is not None:
            self._curve = {"shape": "pyramid", "beta": beta}
        elif weights is not None:
            self._curve = {"shape": "weights", "weights": _weights(weights, num_layers)}
        self.budget = self._check_budget(budget)
        self.memory = _positive("memory", memory)
        self.fraction = _fraction(fraction)
        self.plan = self._check_plan(layer_plan)
        if self.plan is not None:
            self._curve = {"shape": "weights", "weights": self.plan.astype(float)}
        self.failed_layer: int | None = None  # whose attention has not come to its end
        self._decided: dict[int, npt.NDArray[np.int64]] = {}
        self._position_bytes = 0  # of one position in one layer, one sequence: keys and values of all heads
        if num_layers and self.source in ("budget", "plan"):
            self.nominal()  # an impossible curve is refused now

    def _check_budget(self, budget: Any) -> int:
        number = 512 if budget is None else integer("budget", budget)
        if self.source == "budget" and number <= self.window:
            raise ValueError(
                f"budget = {number}: must be at least window + 1 = {self.window + 1}; raise the budget or lower the "
                "window"
            )
        return number

    def _check_plan(self, layer_plan: Any) -> npt.NDArray[np.int64] | None:
        if layer_plan is None:
            return None
        if not isinstance(layer_plan, LayerPlan):
            raise TypeError(f"plan: must be a LayerPlan (pb_kvcache.plan makes one), not {type(layer_plan).__name__}")
        budgets = np.asarray(layer_plan.budgets, np.int64)
        if len(budgets) != self.num_layers:
            raise ValueError(
                f"plan: has {len(budgets)} layers, the model has {self.num_layers} with full attention, which are the "
                "ones that are compressed"
            )
        if len(budgets) and budgets.min() <= self.window:
            layer = int(budgets.argmin())
            raise ValueError(
                f"plan: gives layer {layer} a budget of {budgets[layer]}, every layer needs at least window + 1 = "
                f"{self.window + 1}; make the plan with minimum={self.window + 1}, or lower the window"
            )
        return budgets

    def _total(self, length: int, batch: int) -> int:
        """Return the positions that all layers together may keep of a sequence of `length` tokens."""
        least = (self.window + 1) * self.num_layers
        if self.plan is not None:
            return int(self.plan.sum())
        if self.source == "fraction":
            return max(round(Fraction(self.fraction) * length * self.num_layers), least)
        if self.source == "memory":
            total = self.memory // (batch * self._position_bytes)
            if total < least and total < length * self.num_layers:
                raise ValueError(
                    f"memory = {self.memory}: every layer needs at least window + 1 = {self.window + 1} positions, "
                    f"which is {least * batch * self._position_bytes} bytes for a batch of {batch}"
                )
            return total
        return self.budget * self.num_layers

    def measure(self, model_layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take note of what a position costs in bytes; only `memory` needs it."""
        size = keys.shape[1] * (keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size())
        if self._position_bytes not in (0, size) and self.source == "memory":
            raise ValueError(
                f"memory: layer {model_layer} has {size} bytes a position, an earlier one {self._position_bytes}; "
                "give a budget or a plan for a model whose layers differ"
            )
        self._position_bytes = size

    def decide(self, length: int, batch: int) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a sequence of `length` tokens, in a batch of `batch`."""
        if length not in self._decided:
            self._decided[length] = self._plan(length, self._total(length, batch), None if self.hold else length)
        return self._decided[length]

    def nominal(self) -> npt.NDArray[np.int64]:
        """Return every layer's budget for a prompt that is long enough.

        Raises
        ------
        RuntimeError
            With `memory` or `fraction`: no prompt has been seen.
        """
        if self.source in ("memory", "fraction"):
            raise RuntimeError(f"budgets: with {self.source}= they follow from the prompt; ask after it")
        return self._plan(0, self._total(0, 1), None)

    def _plan(self, length: int, total: int, maximum: int | None) -> npt.NDArray[np.int64]:
        least = self.window + 1
        if maximum is not None and (maximum <= least or total >= maximum * self.num_layers):
            return np.full(self.num_layers, maximum, np.int64)
        chosen = plan(self.num_layers, total=total, minimum=least, maximum=maximum, **self._curve)
        return np.asarray(chosen.budgets, np.int64)

    def forget(self) -> None:
        """Forget the prompt; the next one may have another batch size or another dtype."""
        self.failed_layer = None
        self._decided.clear()
        self._position_bytes = 0

    def describe(self) -> str:
        """Return what was asked for, in words."""
        amount = {
            "budget": f"budget {self.budget}",
            "plan": "a plan",
            "memory": f"{self.memory} bytes",
            "fraction": f"{self.fraction:g} of the prompt",
        }[self.source]
        curve = self._curve
        if self.plan is not None:
            shape = f"{int(self.plan.sum())} positions"
        elif curve["shape"] == "weights":
            shape = "own weights"
        elif "beta" in curve:
            shape = f"beta {curve['beta']:g}"
        else:
            shape = f"ratio {curve['ratio']:g}"
        return (
            f"{amount}, {shape}, window {self.window}, kernel {self.kernel}, {self.pooling} pooling, "
            f"{self.reduce} over a group"
        )

    def copy(self) -> Budgets:
        """Return an independent copy."""
        twin = object.__new__(Budgets)
        twin.__dict__.update(self.__dict__)
        twin._decided = dict(self._decided)
        return twin


def _choice(name: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(choices)}")
    return str(value)


def _positive(name: str, value: Any) -> int:
    if value is None:
        return 0
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} = {number}: must be greater than 0")
    return number


def _fraction(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"fraction = {value!r}: must be a number")
    if not 0 < value <= 1:
        raise ValueError(f"fraction = {value}: must be greater than 0 and at most 1")
    return float(value)


def _weights(value: Any, num_layers: int) -> npt.NDArray[np.float64]:
    weights = np.asarray(value, float)
    if weights.shape != (num_layers,):
        raise ValueError(
            f"weights: have shape {weights.shape}, must be one for each of the {num_layers} full-attention layers"
        )
    return weights
