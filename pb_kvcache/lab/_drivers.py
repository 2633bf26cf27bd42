"""What a replay drives: a policy for each layer, or a stack for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class LayerPolicy(Protocol):
    """What a layer's policy must have. Every policy of this package has it.

    `effective_budget`, where a policy has it, is its layer's own budget. `memory_bytes` and `kept` are read where they
    are there.
    """

    def on_decode_step(self, pos: int, attn: npt.NDArray[np.float32]) -> None:
        """Take in the weights that the kept positions got from the token at `pos`. Then `pos` joins them."""

    def evict(self, budget: int) -> npt.ArrayLike:
        """Drop positions until no more than `budget` are kept, and return them."""


class StackPolicy(Protocol):
    """All layers' caches in one object, such as :class:`pb_kvcache.PyramidStack`."""

    @property
    def budgets(self) -> Any:
        """Every layer's own budget: a sequence or array of integers."""

    def on_decode_step(self, pos: int, attn: Sequence[npt.NDArray[np.float32]]) -> None:
        """Take in one vector a layer."""

    def evict(self) -> Sequence[npt.ArrayLike]:
        """Let every layer that is over its budget evict, and return one array of dropped positions a layer."""


def drive(
    make_policy: Callable[[int], LayerPolicy] | StackPolicy, budget: int | None, num_layers: int, length: int
) -> Layers | Stack:
    """Make what a replay of so many layers and positions drives."""
    if callable(make_policy):
        policies = [make_policy(layer) for layer in range(num_layers)]
        for layer, policy in enumerate(policies):
            _require(f"make_policy({layer})", policy, "a policy", "on_decode_step", "evict")
        return Layers(policies, budget, length)
    rule = "a function from a layer to its policy, or a stack"
    _require("make_policy", make_policy, rule, "on_decode_step", "evict", "budgets")
    return Stack(make_policy, budget, length)


def _require(what: str, given: object, rule: str, *names: str) -> None:
    for name in names:
        if not hasattr(given, name):
            raise TypeError(f"{what} = {given!r}: has no {name}; must be {rule}")


class Layers:
    """One policy object per layer."""

    def __init__(self, policies: list[LayerPolicy], budget: int | None, length: int) -> None:
        self._policies = policies
        self._steps = [policy.on_decode_step for policy in policies]
        # A budget of the whole length is never exceeded, so a larger one means the same.
        self.budgets = np.array(
            [
                length if budget is None else min(int(getattr(policy, "effective_budget", budget)), length)
                for policy in policies
            ],
            np.int64,
        )
        self.name = type(policies[0]).__name__

    @property
    def memory(self) -> list[int]:
        return [int(getattr(policy, "memory_bytes", 0)) for policy in self._policies]

    def feed(self, pos: int, attn: list[npt.NDArray[np.float32]]) -> None:
        for layer, (step, weights) in enumerate(zip(self._steps, attn, strict=True)):
            try:
                step(pos, weights)
            except Exception as error:
                raise Refused(layer, error) from error

    def evict(self, over: npt.NDArray[np.intp]) -> list[tuple[int, npt.ArrayLike]]:
        victims = []
        for layer in over.tolist():
            try:
                victims.append((layer, self._policies[layer].evict(int(self.budgets[layer]))))
            except Exception as error:
                raise Refused(layer, error) from error
        return victims

    def kept(self, layer: int) -> npt.NDArray[Any] | None:
        return _kept(self._policies[layer])


class Stack:
    """One object for all layers."""

    def __init__(self, stack: StackPolicy, budget: int | None, length: int) -> None:
        self._stack = stack
        own = [min(int(b), length) for b in stack.budgets]
        self.budgets = np.array([length] * len(own) if budget is None else own, np.int64)
        self.name = type(stack).__name__

    @property
    def memory(self) -> list[int]:
        # One allocation serves all layers. A layer's part is its share of the positions.
        total = int(getattr(self._stack, "memory_bytes", 0))
        ends = [total * int(end) // int(self.budgets.sum()) for end in np.cumsum(self.budgets)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def feed(self, pos: int, attn: list[npt.NDArray[np.float32]]) -> None:
        try:
            self._stack.on_decode_step(pos, attn)
        except Exception as error:
            raise Refused(None, error) from error

    def evict(self, over: npt.NDArray[np.intp]) -> list[tuple[int, npt.ArrayLike]]:
        try:
            victims = self._stack.evict()
        except Exception as error:
            raise Refused(None, error) from error
        if len(victims) != len(self.budgets):
            raise Refused(None, ValueError(f"evict() returned {len(victims)} arrays for {len(self.budgets)} layers"))
        dropped = {layer for layer, positions in enumerate(victims) if np.size(positions)}
        return [(layer, victims[layer]) for layer in sorted(dropped | set(over.tolist()))]

    def kept(self, layer: int) -> npt.NDArray[Any] | None:
        layers = getattr(self._stack, "layers", None)
        return None if layers is None else _kept(layers[layer])


class Refused(Exception):  # noqa: N818 - never leaves this module
    """What a policy raised, and in which layer where that is known."""

    def __init__(self, layer: int | None, error: Exception) -> None:
        super().__init__(layer, error)
        self.layer = layer
        self.error = error


def _kept(policy: object) -> npt.NDArray[Any] | None:
    kept = getattr(policy, "kept", None)
    return None if kept is None else np.asarray(kept)
