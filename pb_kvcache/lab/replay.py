"""Replay a trace through policies, and measure what they keep of the model's attention and what that costs.

The rules are those of the registry from which the `decode-4096` trace comes, for any number of layers. Every cache
starts with position 0. At step ``t`` = 1, 2, ... the following happens in each layer:

1. The model's attention over positions ``0 .. t-1`` is restricted to the kept ones and not renormalised. Its sum is the
   step's retained mass.
2. The policy sees the restricted attention, and position ``t`` joins.
3. If the layer now keeps more than its own budget, its policy is asked once to evict down to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import uint32
from ._drivers import LayerPolicy, Layers, Refused, Stack, StackPolicy, drive
from .traces import Trace

__all__ = ["LayerPolicy", "ReplayError", "ReplayLayerReport", "ReplayReport", "StackPolicy", "replay"]


class ReplayError(ValueError):
    """A policy broke the rules of the replay. The message names the step, the layer and the policy."""


@dataclasses.dataclass(frozen=True)
class ReplayLayerReport:
    """What one layer's cache kept. The fields are those of :class:`ReplayReport`, for this layer alone."""

    layer: int
    #: The budget that the layer was asked to keep. None: nothing was ever evicted.
    budget: int | None
    retained_mass: float
    available_mass: float
    recall: float
    evictions: int
    peak_resident: int
    mean_resident: float
    policy_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayReport:
    """What a policy kept of a trace's attention, over all layers, and what that took."""

    trace: str
    policy: str
    num_layers: int
    #: Steps replayed, from step 1 on. Evictions, residency, memory and times are theirs.
    steps: int
    #: Mass and recall count from this step on, to the last.
    first_counted: int
    #: Positions per layer on average. None: nothing was ever evicted.
    budget: int | None
    #: The share of the model's attention that went to kept positions, mean over counted steps and layers.
    retained_mass: float
    #: What a cache that keeps everything retains. The rest is what tokens gave to themselves.
    available_mass: float
    #: The part of each step's 32 largest weights that was kept.
    recall: float
    #: Positions dropped, over all layers.
    evictions: int
    #: The most positions held at once over all layers, counted after a step's append and before its eviction.
    peak_resident: int
    #: Positions held after a step, over all layers, mean over steps.
    mean_resident: float
    #: Memory of the policies themselves, over all layers.
    policy_bytes: int
    #: Seconds spent in the policies' calls, and in the whole replay.
    policy_seconds: float
    seconds: float
    per_layer: tuple[ReplayLayerReport, ...]
    #: Positions held over all layers at each step, after its append and after its eviction. Shape ``(steps,)``.
    resident_before: npt.NDArray[np.int64]
    resident_after: npt.NDArray[np.int64]

    @property
    def steps_per_second(self) -> float:
        """Decode steps replayed in a second, all layers together."""
        return self.steps / self.seconds if self.seconds > 0 else float("inf")

    @property
    def worst_layer(self) -> ReplayLayerReport:
        """The layer that retains least."""
        return min(self.per_layer, key=lambda layer: layer.retained_mass)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, without the residency of each step."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["resident_before"], fields["resident_after"]
        fields["per_layer"] = [dataclasses.asdict(layer) for layer in self.per_layer]
        fields["steps_per_second"] = self.steps_per_second if self.seconds > 0 else None  # JSON has no infinity
        return fields


def replay(
    trace: Trace,
    make_policy: Callable[[int], LayerPolicy] | StackPolicy,
    budget: int | None,
    *,
    name: str | None = None,
    steps: range | None = None,
    progress: Callable[[int], object] | None = None,
) -> ReplayReport:
    """Replay a trace through one policy per layer, or through a stack, and report what was retained.

    Parameters
    ----------
    trace
        The model's attention.
    make_policy
        A function from a layer to that layer's new policy, or a new stack for all layers. A policy is asked to keep its
        own `effective_budget`, which tells a pyramid's layers apart, or `budget` where it has none. A stack is asked to
        keep its `budgets`.
    budget
        Positions per layer on average, greater than 0. The layers' own budgets must not sum to more than
        ``budget * num_layers``, so that policies are compared at equal total memory. None: nothing is ever evicted.
    name
        What the report calls the policy. None: its class.
    steps
        The steps whose retained mass and recall count, within ``range(1, trace.length)``. None counts all. Earlier
        steps are replayed and not counted. Later steps are never asked of the trace.
    progress
        Called after every step with the step's number.

    Returns
    -------
    ReplayReport
        The measurements. All but the times are the same at every run.

    Raises
    ------
    ReplayError
        The budgets sum to too much. A policy names a position that is not kept, names one twice, stays over its budget,
        or raises. A row of the trace has the wrong shape, or is not finite and >= 0.
    TypeError, ValueError
        A budget that is not a positive integer, or steps that the trace does not have.
    """
    counted = _counted_steps(trace, steps)
    if budget is not None:
        budget = uint32("budget", budget)
        if budget == 0:
            raise ValueError("budget = 0: must be greater than 0")
    layers = trace.num_layers
    driver = drive(make_policy, budget, layers, trace.length)
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
        raise ReplayError(  # the checks above rule this out, but every comparison rests on it
            f"{label}: {int(state.before.max())} positions were resident, above (budget + 1) * layers = "
            f"{(budget + 1) * layers}"
        )
    return state.report(budget, seconds)


def _counted_steps(trace: Trace, steps: range | None) -> range:
    """Return the steps that count, checked. None stands for all of the trace's."""
    if steps is None:
        return range(1, trace.length)
    if not isinstance(steps, range):
        raise TypeError(f"steps = {steps!r}: must be a range, such as range(1, {trace.length})")
    if steps.step != 1 or not 1 <= steps.start < steps.stop <= trace.length:
        raise ValueError(
            f"steps = {steps!r}: must be a range of one or more steps in a row, within range(1, {trace.length})"
        )
    return steps


class _State:
    """The replay's own record of every layer's kept set, and the running sums."""

    def __init__(
        self, trace: Trace, label: str, driver: Layers | Stack, budgets: npt.NDArray[np.int64], counted: range
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

    def _rows(self, step: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
        """Return a step's attention, checked, and its sum in each layer."""
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
        return rows, sums

    def step(self, step: int) -> None:
        """Let the token at a step attend, join, and push others out."""
        rows, sums = self._rows(step)

        # What the kept positions get. All layers at once: the mask picks every layer's kept weights, ascending, one
        # layer after the other.
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

        # The policies' part, which alone is timed.
        victims: list[tuple[int, npt.ArrayLike]] = []
        started = time.perf_counter()
        try:
            self.driver.feed(step, attn)
            self.counts += 1
            over = np.flatnonzero(self.counts > self.budgets)
            if len(over):
                victims = self.driver.evict(over)
        except Refused as refused:
            raise self._error(step, refused.layer, f"raised {refused.error!r}") from refused.error
        self.policy_seconds += time.perf_counter() - started

        # The replay's own record of what is kept now.
        self.mask[:, step] = True
        self.before[step - 1] = self.counts.sum()
        np.maximum(self.peak, self.counts, out=self.peak)
        for layer, positions in victims:
            self._drop(step, layer, positions)
        self.after[step - 1] = self.counts.sum()
        self.held += self.counts

    def _drop(self, step: int, layer: int, victims: npt.ArrayLike) -> None:
        """Record what a layer's policy says that it dropped, and check it."""
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
        """Raise ReplayError where a policy keeps other positions at the end than the replay has recorded."""
        for layer in range(self.trace.num_layers):
            kept = self.driver.kept(layer)
            if kept is not None and not np.array_equal(kept, np.flatnonzero(self.mask[layer])):
                raise self._error(self.counted.stop - 1, layer, "keeps other positions than its evict() calls returned")

    def report(self, budget: int | None, seconds: float) -> ReplayReport:
        """Return the running sums as means."""
        steps, counted = self.counted.stop - 1, len(self.counted)
        memory = self.driver.memory
        per_layer = tuple(
            ReplayLayerReport(
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
        return ReplayReport(
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
