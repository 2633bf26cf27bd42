"""Replay a trace through policies, and measure what they keep of the model's attention and what that costs.

The rules are those of the registry from which the `decode-4096` trace comes, for any number of layers. Every cache
starts with position 0. At step ``t`` = 1, 2, ... the model's attention over positions ``0 .. t-1`` is restricted to the
kept ones, not renormalised; its sum is the step's retained mass; the policy sees it; position ``t`` joins; and if more
than the layer's own budget is kept, the policy is asked once to evict down to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ._checks import uint32
from .workloads import Trace

__all__ = ["LayerPolicy", "LayerReport", "ReplayError", "Report", "StackPolicy", "replay"]


class LayerPolicy(Protocol):
    """What a layer's policy has to offer; every policy of this package does.

    Where it also has `effective_budget`, that is its layer's own budget; `memory_bytes`, `kept` and ``len()`` are used
    where they are there.
    """

    def on_decode_step(self, pos: int, attn: npt.NDArray[np.float32]) -> None:
        """Take in the weights that the kept positions got from the token at `pos`, which then joins them."""

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


class ReplayError(ValueError):
    """A policy broke the rules of the replay: the message names the step, the layer and the policy."""


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What one layer's cache kept. Fields as in :class:`Report`, for this layer alone."""

    layer: int
    #: The budget that the layer was asked to keep; None: nothing was ever evicted.
    budget: int | None
    retained_mass: float
    available_mass: float
    recall: float
    evictions: int
    peak_resident: int
    mean_resident: float
    policy_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What a policy kept of a trace's attention, over all layers, and what that took."""

    trace: str
    policy: str
    num_layers: int
    #: Steps replayed, from step 1 on. Evictions, residency, memory and times are theirs.
    steps: int
    #: The first of the steps whose mass and recall count; the last is `steps`.
    first_counted: int
    #: Positions per layer on average; None: nothing was ever evicted.
    budget: int | None
    #: The share of the model's attention that went to kept positions, mean over counted steps and layers.
    retained_mass: float
    #: What a cache that keeps everything retains: all but what tokens gave to themselves.
    available_mass: float
    #: Of each step's 32 largest weights, the part that was kept.
    recall: float
    #: Positions dropped, over all layers.
    evictions: int
    #: Most positions held at once over all layers, counted after a step's append and before its eviction.
    peak_resident: int
    #: Positions held after a step, over all layers, mean over steps.
    mean_resident: float
    #: Memory of the policies themselves, over all layers.
    policy_bytes: int
    #: Seconds spent in the policies' calls, and in the whole replay.
    policy_seconds: float
    seconds: float
    per_layer: tuple[LayerReport, ...]
    #: Positions held over all layers, for each step: after its append, and after its eviction. Shape ``(steps,)``.
    resident_before: npt.NDArray[np.int64]
    resident_after: npt.NDArray[np.int64]

    @property
    def steps_per_second(self) -> float:
        """Decode steps, of all layers together, replayed in a second."""
        return self.steps / self.seconds if self.seconds > 0 else float("inf")

    @property
    def worst_layer(self) -> LayerReport:
        """The layer that retains least."""
        return min(self.per_layer, key=lambda layer: layer.retained_mass)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, without the residency of each step."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["resident_before"], fields["resident_after"]
        fields["per_layer"] = [dataclasses.asdict(layer) for layer in self.per_layer]
        fields["steps_per_second"] = self.steps_per_second
        return fields


def replay(
    trace: Trace,
    make_policy: Callable[[int], LayerPolicy] | StackPolicy,
    budget: int | None,
    *,
    name: str | None = None,
    steps: range | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Replay a trace through one policy per layer, or through a stack, and report what was retained.

    Parameters
    ----------
    trace
        The model's attention.
    make_policy
        A function from a layer to that layer's new policy, or a new stack for all layers. A policy is asked to keep its
        own `effective_budget` (which tells a pyramid's layers apart) or, where it has none, `budget`; a stack its
        `budgets`.
    budget
        Positions per layer on average; greater than 0. The layers' own budgets must not sum to more than
        ``budget * num_layers``: policies are compared at equal total memory. None: nothing is ever evicted.
    name
        What the report calls the policy; by default its class.
    steps
        The steps whose retained mass and recall count, within ``range(1, trace.length)``; None counts all. Those before
        are replayed and not counted; those after are never asked of the trace.
    progress
        Called after every step with the step's number.

    Returns
    -------
    Report
        The measurements; all but the times are the same at every run.

    Raises
    ------
    ReplayError
        Budgets that sum to too much; a policy that names positions that are not kept, names one twice, stays over its
        budget, or raises: the message names the step, the layer and the policy. A trace whose rows have the wrong shape
        or are not finite and >= 0.
    TypeError, ValueError
        For a budget that is not a positive integer, or steps that the trace does not have.
    """
    counted = counted_steps(trace, steps)
    if budget is not None:
        budget = uint32("budget", budget)
        if budget == 0:
            raise ValueError("budget = 0: must be greater than 0")
    layers = trace.num_layers
    driver: _Layers | _Stack
    if callable(make_policy):
        policies = [make_policy(layer) for layer in range(layers)]
        for layer, policy in enumerate(policies):
            _require(f"make_policy({layer})", policy, "a policy", "on_decode_step", "evict")
        driver = _Layers(policies, budget, trace.length)
    else:
        rule = "a function from a layer to its policy, or a stack"
        _require("make_policy", make_policy, rule, "on_decode_step", "evict", "budgets")
        driver = _Stack(make_policy, budget, trace.length)
    label = name if name is not None else driver.name
    budgets = driver.budgets
    if len(budgets) != layers:
        raise ReplayError(f"{label}: has {len(budgets)} layers, must have the {layers} of the trace {trace.name}")
    if budget is not None and int(budgets.sum()) > budget * layers:
        raise ReplayError(
            f"{label}: the layers' budgets sum to {int(budgets.sum())}, must be at most budget * layers = "
            f"{budget} * {layers} = {budget * layers}, so that policies are compared at equal total memory"
        )
    state = _State(trace, label, driver, budgets, counted)
    started = time.perf_counter()
    for step in range(1, counted.stop):
        state.step(step)
        if progress is not None:
            progress(step)
    seconds = time.perf_counter() - started
    state.check_kept()
    if budget is not None and int(state.before.max()) > (budget + 1) * layers:
        raise ReplayError(  # the checks above rule this out; said once more because every comparison rests on it
            f"{label}: {int(state.before.max())} positions were resident, above (budget + 1) * layers = "
            f"{(budget + 1) * layers}"
        )
    return state.report(budget, seconds)


def _require(what: str, given: object, rule: str, *names: str) -> None:
    for name in names:
        if not hasattr(given, name):
            raise TypeError(f"{what} = {given!r}: has no {name}; must be {rule}")


def counted_steps(trace: Trace, steps: range | None) -> range:
    """Return the steps that count, checked: all of the trace's where None is given."""
    if steps is None:
        return range(1, trace.length)
    if not isinstance(steps, range):
        raise TypeError(f"steps = {steps!r}: must be a range, such as range(1, {trace.length})")
    if steps.step != 1 or not 1 <= steps.start < steps.stop <= trace.length:
        raise ValueError(
            f"steps = {steps!r}: must be a range of one or more steps in a row, within range(1, {trace.length})"
        )
    return steps


class _Layers:
    """One policy object per layer."""

    def __init__(self, policies: list[LayerPolicy], budget: int | None, length: int) -> None:
        self._policies = policies
        self._steps = [policy.on_decode_step for policy in policies]
        # A budget of the whole length is never exceeded. 2**32 - 1, say, means the same.
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
                raise _Refused(layer, error) from error

    def evict(self, over: npt.NDArray[np.intp]) -> list[tuple[int, npt.ArrayLike]]:
        victims = []
        for layer in over.tolist():
            try:
                victims.append((layer, self._policies[layer].evict(int(self.budgets[layer]))))
            except Exception as error:
                raise _Refused(layer, error) from error
        return victims

    def kept(self, layer: int) -> npt.NDArray[Any] | None:
        return _kept(self._policies[layer])


class _Stack:
    """One object for all layers."""

    def __init__(self, stack: StackPolicy, budget: int | None, length: int) -> None:
        self._stack = stack
        own = [min(int(b), length) for b in stack.budgets]
        self.budgets = np.array([length] * len(own) if budget is None else own, np.int64)
        self.name = type(stack).__name__

    @property
    def memory(self) -> list[int]:
        # One allocation serves all; a layer's part is its share of the positions.
        total = int(getattr(self._stack, "memory_bytes", 0))
        ends = [total * int(end) // int(self.budgets.sum()) for end in np.cumsum(self.budgets)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def feed(self, pos: int, attn: list[npt.NDArray[np.float32]]) -> None:
        try:
            self._stack.on_decode_step(pos, attn)
        except Exception as error:
            raise _Refused(None, error) from error

    def evict(self, over: npt.NDArray[np.intp]) -> list[tuple[int, npt.ArrayLike]]:
        try:
            victims = self._stack.evict()
        except Exception as error:
            raise _Refused(None, error) from error
        if len(victims) != len(self.budgets):
            raise _Refused(None, ValueError(f"evict() returned {len(victims)} arrays for {len(self.budgets)} layers"))
        dropped = {layer for layer, positions in enumerate(victims) if np.size(positions)}
        return [(layer, victims[layer]) for layer in sorted(dropped | set(over.tolist()))]

    def kept(self, layer: int) -> npt.NDArray[Any] | None:
        layers = getattr(self._stack, "layers", None)
        return None if layers is None else _kept(layers[layer])


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """What a policy raised, and in which layer where that is known."""

    def __init__(self, layer: int | None, error: Exception) -> None:
        super().__init__(layer, error)
        self.layer = layer
        self.error = error


def _kept(policy: object) -> npt.NDArray[Any] | None:
    kept = getattr(policy, "kept", None)
    return None if kept is None else np.asarray(kept)


class _State:
    """The harness's own record of every layer's kept set, and the running sums."""

    def __init__(
        self, trace: Trace, label: str, driver: _Layers | _Stack, budgets: npt.NDArray[np.int64], counted: range
    ) -> None:
        layers, length = trace.num_layers, counted.stop
        self.trace, self.label, self.driver, self.budgets, self.counted = trace, label, driver, budgets, counted
        self.mask = np.zeros((layers, length), np.bool_)
        self.mask[:, 0] = True
        self.counts = np.ones(layers, np.int64)
        self.column = np.arange(layers)[:, None]
        self.mass = np.zeros(layers)
        self.available = np.zeros(layers)
        self.hits = np.zeros(layers, np.int64)
        self.asked = 0
        self.evictions = np.zeros(layers, np.int64)
        self.peak = np.ones(layers, np.int64)
        self.held = np.zeros(layers, np.int64)
        self.before = np.empty(length - 1, np.int64)
        self.after = np.empty(length - 1, np.int64)
        self.policy_seconds = 0.0

    def step(self, step: int) -> None:
        rows = self.trace.rows(step)
        if rows.shape != (self.trace.num_layers, step):
            raise ReplayError(
                f"{self.trace.name}: step {step}: rows have shape {rows.shape}, must be {(self.trace.num_layers, step)}"
            )
        with np.errstate(invalid="ignore"):  # infinities of both signs
            sums = rows.sum(axis=1, dtype=np.float64)
        if not (rows.min() >= 0 and np.isfinite(sums).all()):
            layer, pos = np.argwhere(~(np.isfinite(rows) & (rows >= 0)))[0]
            raise ReplayError(
                f"{self.trace.name}: step {step}, layer {layer}, position {pos}: weight {rows[layer, pos]} must be "
                "finite and >= 0"
            )
        # All layers at once: the mask picks every layer's kept weights, ascending, one layer after the other.
        flat = rows[self.mask[:, :step]]
        ends = np.cumsum(self.counts)
        held = np.flatnonzero(self.counts)  # reduceat cannot sum nothing
        if step >= self.counted.start:
            self.available += sums
            self.mass[held] += np.add.reduceat(flat, (ends - self.counts)[held], dtype=np.float64)
            top = self.trace.top(step)
            self.hits += self.mask[self.column, top].sum(axis=1)
            self.asked += top.shape[1]
        bounds = [0, *ends.tolist()]
        attn = [flat[start:end] for start, end in itertools.pairwise(bounds)]

        victims: list[tuple[int, npt.ArrayLike]] = []
        started = time.perf_counter()
        try:
            self.driver.feed(step, attn)
            self.counts += 1
            over = np.flatnonzero(self.counts > self.budgets)
            if len(over):
                victims = self.driver.evict(over)
        except _Refused as refused:
            raise self._error(step, refused.layer, f"raised {refused.error!r}") from refused.error
        self.policy_seconds += time.perf_counter() - started

        self.mask[:, step] = True
        self.before[step - 1] = self.counts.sum()
        np.maximum(self.peak, self.counts, out=self.peak)
        for layer, positions in victims:
            self._drop(step, layer, positions)
        self.after[step - 1] = self.counts.sum()
        self.held += self.counts

    def _drop(self, step: int, layer: int, victims: npt.ArrayLike) -> None:
        positions = np.asarray(victims)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise self._error(step, layer, f"evict() returned {victims!r}, must be one-dimensional and hold integers")
        mask = self.mask[layer]
        dropped = positions.tolist()
        for i, pos in enumerate(dropped):
            if not (0 <= pos <= step and mask[pos]):
                again = " any more" if pos in dropped[:i] else ""
                raise self._error(step, layer, f"dropped position {pos}, which is not kept{again}")
            mask[pos] = False
        self.counts[layer] -= positions.size
        self.evictions[layer] += positions.size
        if self.counts[layer] > self.budgets[layer]:
            count, budget = self.counts[layer], self.budgets[layer]
            raise self._error(step, layer, f"keeps {count} positions after evict({budget}), must be at most that")

    def _error(self, step: int, layer: int | None, what: str) -> ReplayError:
        where = "" if layer is None else f", layer {layer}"
        return ReplayError(f"{self.trace.name}: step {step}{where}: {self.label} {what}")

    def check_kept(self) -> None:
        """At the end the policies' own idea of what they keep must be the harness's."""
        for layer in range(self.trace.num_layers):
            kept = self.driver.kept(layer)
            if kept is not None and not np.array_equal(kept, np.flatnonzero(self.mask[layer])):
                raise self._error(self.counted.stop - 1, layer, "keeps other positions than its evict() calls returned")

    def report(self, budget: int | None, seconds: float) -> Report:
        steps, counted = self.counted.stop - 1, len(self.counted)
        memory = self.driver.memory
        per_layer = tuple(
            LayerReport(
                layer=layer,
                budget=None if budget is None else int(self.budgets[layer]),
                retained_mass=float(self.mass[layer] / counted),
                available_mass=float(self.available[layer] / counted),
                recall=float(self.hits[layer] / self.asked),
                evictions=int(self.evictions[layer]),
                peak_resident=int(self.peak[layer]),
                mean_resident=float(self.held[layer] / steps),
                policy_bytes=memory[layer],
            )
            for layer in range(self.trace.num_layers)
        )
        return Report(
            trace=self.trace.name,
            policy=self.label,
            num_layers=self.trace.num_layers,
            steps=steps,
            first_counted=self.counted.start,
            budget=budget,
            retained_mass=float(self.mass.mean() / counted),
            available_mass=float(self.available.mean() / counted),
            recall=float(self.hits.sum() / (self.asked * self.trace.num_layers)),
            evictions=int(self.evictions.sum()),
            peak_resident=int(self.before.max()),
            mean_resident=float(self.after.mean()),
            policy_bytes=sum(memory),
            policy_seconds=self.policy_seconds,
            seconds=seconds,
            per_layer=per_layer,
            resident_before=self.before,
            resident_after=self.after,
        )
