"""Budgets fitted to a model's attention, and judged where they were not fitted: what ``pb-kvcache fit`` does.

Layers do not see each other's caches, so a trace replayed at a few equal budgets gives every layer's own curve of
retained mass against budget. Dividing a total where the curves rise most is then exact arithmetic, and no assumption
about pyramids is left. What is left is that a plan fitted to some steps flatters itself on them: :func:`judge` counts
other steps, or another trace, and :func:`run` does both beside uniform budgets and pyramids.

>>> from pb_kvcache import fit, workloads
>>> trace = workloads.funnel()
>>> fitted = fit.fit(trace, 205, steps=range(1, 512))
>>> print(fitted.plan.budgets[0] > 205 > fitted.plan.budgets[-1], fitted.plan.total == 205 * 16)
True True
>>> rest = range(512, trace.length)
>>> uniform, better = (fit.judge(trace, p, steps=rest).retained_mass for p in ([205] * 16, fitted.plan))
>>> uniform < better
True
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import LayerPlan, PyramidStack, bench, plan, workloads
from ._checks import integer, plain_array, real, uint32, uint32_array
from .harness import LayerPolicy, Report, StackPolicy, counted_steps, replay
from .report import points
from .workloads import Trace

__all__ = ["OBJECTIVES", "Fit", "Result", "divide", "fit", "judge", "run"]

#: What a fit can be best at: the mean over layers, or the layer that retains least.
OBJECTIVES = ("mean", "worst")

#: A function from a budget to a new policy of one layer that keeps so many positions.
MakePolicy = Callable[[int], LayerPolicy]


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """Budgets fitted to some steps of a trace, and the curves that they follow from."""

    trace: str
    #: Positions per layer on average.
    budget: int
    #: The steps that the fit saw.
    steps: range
    objective: str
    #: The fitted budgets, which add up to ``budget * num_layers``.
    plan: LayerPlan
    #: Budgets at which every layer was replayed, ascending, shape ``(n,)``.
    grid: npt.NDArray[np.uint32]
    #: Each layer's retained mass at each of them, mean over the steps, shape ``(num_layers, n)``.
    curves: npt.NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "trace": self.trace,
            "budget": self.budget,
            "steps": [self.steps.start, self.steps.stop - 1],
            "objective": self.objective,
            "plan": self.plan.to_dict(),
            "grid": self.grid.tolist(),
            "curves": self.curves.tolist(),
        }


def fit(
    trace: Trace,
    budget: int,
    make_policy: MakePolicy | None = None,
    *,
    steps: range | None = None,
    grid: Sequence[int] | None = None,
    recent_window: int | None = None,
    obs_window: int = 16,
    pool_kernel: int = 7,
    minimum: int | None = None,
    multiple_of: int = 1,
    objective: Literal["mean", "worst"] = "mean",
) -> Fit:
    """Fit every layer's budget to a trace, at a total of ``budget * num_layers`` positions.

    Every layer is replayed alone at a grid of budgets; :func:`divide` does the rest.

    Parameters
    ----------
    trace
        The model's attention.
    budget
        Positions per layer on average, at most the trace's length.
    make_policy
        A function from a budget to a new policy that keeps so many positions (its `effective_budget`, where it has
        one). None: :class:`pb_kvcache.SnapKV`, all layers in one :class:`pb_kvcache.PyramidStack`.
    steps
        The steps that the fit may see, as for :func:`pb_kvcache.harness.replay`; None: all. Steps after them are never
        asked of the trace.
    grid
        Budgets at which to replay, between the minimum and the trace's length; both ends are added. None: from the
        minimum in steps of a third to where nothing is evicted any more.
    recent_window
        The newest positions, safe in every layer. None: as in the benchmark, ``min(32, budget // 4)``.
    obs_window, pool_kernel
        As for :class:`pb_kvcache.SnapKV`; not used with `make_policy`.
    minimum
        The fewest positions of a layer. None: ``recent_window + 1``.
    multiple_of
        The block size: every budget is a multiple of it, and so must the total be.
    objective
        ``"mean"``: the most retained mass, mean over layers. ``"worst"``: the most in the layer that retains least, and
        what that leaves as for ``"mean"``.

    Raises
    ------
    TypeError, ValueError
        For an argument that breaks a rule above, or a policy that has another budget than it was made for.
    """
    counted = counted_steps(trace, steps)
    number = uint32("budget", budget)
    recent = bench.recent_window(number) if recent_window is None else uint32("recent_window", recent_window)
    least = recent + 1 if minimum is None else uint32("minimum", minimum)
    if least <= recent:
        raise ValueError(f"minimum = {least}: must be greater than recent_window = {recent}")
    if not 1 <= number <= trace.length:
        raise ValueError(f"budget = {number}: must be between 1 and the trace's {trace.length} positions")
    # Refuses a total or bounds that cannot be, before the work.
    bounds: dict[str, Any] = {"minimum": least, "maximum": trace.length, "multiple_of": multiple_of}
    plan(trace.num_layers, number, shape="uniform", **bounds)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective = {objective!r}: must be one of {', '.join(OBJECTIVES)}")
    b = integer("multiple_of", multiple_of)
    first, last = -(-least // b) * b, trace.length // b * b
    if grid is None:
        points = _geometric(first, min(-(-counted.stop // b) * b, last), b)
    else:
        points = [integer(f"grid[{i}]", point) for i, point in enumerate(grid)]
        for i, point in enumerate(points):
            if point % b or not first <= point <= last:
                raise ValueError(f"grid[{i}] = {point}: must be between {first} and {last}, and a multiple of {b}")
    points = sorted({first, *points, last})
    caches = _caches(make_policy, recent, obs_window, pool_kernel)
    columns: list[npt.NDArray[np.float64]] = []
    all_kept = False
    for point in points:
        if not all_kept:  # else a larger budget retains the same
            layers = _replay(trace, [point] * trace.num_layers, caches, counted, None).per_layer
            columns.append(np.array([layer.retained_mass for layer in layers]))
            all_kept = point >= counted.stop or all(layer.retained_mass == layer.available_mass for layer in layers)
        else:
            columns.append(columns[-1])
    curves = np.stack(columns, axis=1)
    divided = divide(points, curves, number * trace.num_layers, multiple_of=b, objective=objective)
    return Fit(trace.name, number, counted, objective, divided, np.array(points, np.uint32), curves)


def _geometric(first: int, last: int, b: int) -> list[int]:
    """Return multiples of `b` from `first` to `last`, each about a third above the one before."""
    points = [first]
    while points[-1] < last:
        points.append(min(max(points[-1] + b, -(-points[-1] * 4 // (3 * b)) * b), last))
    return points


#: From the layers' budgets to what a replay drives.
_Caches = Callable[[list[int]], "Callable[[int], LayerPolicy] | StackPolicy"]


def _caches(make_policy: MakePolicy | None, recent: int, obs_window: int, pool_kernel: int) -> _Caches:
    if make_policy is not None:
        return lambda budgets: lambda layer: make_policy(budgets[layer])
    # Its layers are SnapKVs bit for bit, in half the time.
    return lambda budgets: PyramidStack(
        len(budgets), recent_window=recent, obs_window=obs_window, pool_kernel=pool_kernel, plan=budgets
    )


def _replay(trace: Trace, budgets: list[int], caches: _Caches, steps: range, name: str | None) -> Report:
    """Replay a trace through one cache a layer, each of its own budget."""
    mean = -(-sum(budgets) // len(budgets))
    report = replay(trace, caches(budgets), mean, name=name, steps=steps)
    for layer, wanted in zip(report.per_layer, budgets, strict=True):
        if layer.budget != min(wanted, trace.length):
            raise ValueError(f"make_policy({wanted}): made a policy whose effective budget is {layer.budget}")
    return report


def divide(
    grid: npt.ArrayLike,
    curves: npt.ArrayLike,
    total: int,
    *,
    multiple_of: int = 1,
    objective: Literal["mean", "worst"] = "mean",
) -> LayerPlan:
    """Divide a total over layers, each with a measured curve of what a budget is worth to it.

    Each curve is made concave (its upper hull: what lies below a line between two of its points is worth no stop), and
    the total goes where one more position gains most. On concave curves that is the best division there is. Of layers
    that would gain the same, the one that holds fewest gets the position, and of those the lower layer.

    Parameters
    ----------
    grid
        Budgets, ascending, each greater than 0 and a multiple of `multiple_of`, shape ``(n,)``. The first is every
        layer's minimum, the last every layer's maximum.
    curves
        What each layer is worth at each of them, higher is better, finite, shape ``(num_layers, n)``. Retained mass
        from :func:`fit`, or a measurement of your own.
    total
        Positions in all, a multiple of `multiple_of`; at least ``num_layers * grid[0]``.
    multiple_of
        The block size.
    objective
        As for :func:`fit`.

    Returns
    -------
    LayerPlan
        Of shape ``"weights"``, its weights being the budgets: they add up to `total` exactly, or hold the last grid
        point in every layer where `total` is more than that.

    Raises
    ------
    TypeError, ValueError
        For an argument that breaks a rule above.

    Examples
    --------
    >>> divide([10, 20, 40], [[0.5, 0.9, 1.0], [0.2, 0.3, 0.9]], 60).budgets
    array([20, 40], dtype=uint32)
    """
    b = uint32("multiple_of", multiple_of)
    points = [int(point) for point in uint32_array("grid", grid, 1)]
    if not points:
        raise ValueError("grid: must have one budget or more")
    for i, point in enumerate(points):
        if point <= (points[i - 1] if i else 0) or b == 0 or point % b:
            raise ValueError(f"grid[{i}] = {point}: must be above the one before it, and a multiple of {b} above 0")
    values = plain_array("curves", curves, "real numbers")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"curves: must be an array of real numbers, not of dtype {values.dtype}")
    if values.ndim != 2 or values.shape[0] == 0 or values.shape[1] != len(points):
        raise ValueError(f"curves: has shape {values.shape}, must be (num_layers, {len(points)})")
    if not np.isfinite(values).all():
        layer, i = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(f"curves[{layer}, {i}] = {values[layer, i]}: must be finite")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective = {objective!r}: must be one of {', '.join(OBJECTIVES)}")
    layers = len(values)
    bounds: dict[str, Any] = {"minimum": points[0], "maximum": points[-1], "multiple_of": b}
    plan(layers, total=total, shape="uniform", **bounds)  # refuses a total that cannot be
    # Fractions of the given doubles: slopes compare exactly, so the budgets are the same on every machine.
    hulls = [_hull(list(zip(points, map(Fraction, row.tolist()), strict=True))) for row in values]
    low = _raise_the_worst(hulls, total, b) if objective == "worst" else [points[0]] * layers
    segments = [
        (-(end[1] - start[1]) / (end[0] - start[0]), layer, end[0])
        for layer, hull in enumerate(hulls)
        for start, end in itertools.pairwise(hull)
        if end[0] > low[layer]
    ]
    high = list(low)
    for _, group in itertools.groupby(sorted(segments), key=lambda segment: segment[0]):
        if sum(high) >= total:
            break
        low = list(high)
        for _, layer, stop in group:
            high[layer] = stop
    # The last group of equal gains is levelled: that is uniform water-filling between the two.
    level = plan(layers, total=total, shape="uniform", minimum=low, maximum=high, multiple_of=b)
    # The budgets as their own weights are their own targets, so this plan has them unchanged.
    return plan(layers, total=total, weights=level.budgets, **bounds)


_Point = tuple[int, Fraction]


def _hull(points: list[_Point]) -> list[_Point]:
    """Return the corners of the least concave curve that is nowhere below these points, of ascending budget."""
    hull: list[_Point] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _raise_the_worst(hulls: list[list[_Point]], total: int, b: int) -> list[int]:
    """Return the least budgets at which every layer reaches the highest level that the total allows."""

    def needed(level: Fraction) -> list[int]:
        return [_reach(hull, level, b) for hull in hulls]

    low = min(hull[0][1] for hull in hulls)
    high = min(max(y for _, y in hull) for hull in hulls)
    if sum(needed(high)) <= total:
        return needed(high)
    for _ in range(40):  # masses are at most 1: to 1e-12
        middle = (low + high) / 2
        low, high = (middle, high) if sum(needed(middle)) <= total else (low, middle)
    return needed(low)


def _reach(hull: list[_Point], level: Fraction, b: int) -> int:
    """Return the least multiple of `b` at which a curve reaches a level that it does reach."""
    if level <= hull[0][1]:
        return hull[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        if level <= y1:
            x = x0 + (level - y0) * (x1 - x0) / (y1 - y0)
            return -(-x.numerator // (x.denominator * b)) * b
    raise AssertionError("unreachable: the level is at most every curve's highest point")


def judge(
    trace: Trace,
    budgets: LayerPlan | Sequence[int],
    make_policy: MakePolicy | None = None,
    *,
    steps: range | None = None,
    recent_window: int | None = None,
    obs_window: int = 16,
    pool_kernel: int = 7,
    name: str | None = None,
) -> Report:
    """Replay a trace at given budgets, and count the steps that are to judge them.

    Parameters
    ----------
    trace
        The attention to judge on: the fit's own or, better, another text's.
    budgets
        A plan, or one budget for each layer.
    make_policy, recent_window, obs_window, pool_kernel
        As for :func:`fit`, where the budget is the mean of the budgets.
    steps
        The steps that count; those before are replayed all the same. None: all.
    name
        What the report calls it.

    Raises
    ------
    TypeError, ValueError
        For budgets that are not one for each layer, or that the policy refuses.
    """
    counted = counted_steps(trace, steps)
    numbers = [int(budget) for budget in uint32_array("budgets", getattr(budgets, "budgets", budgets), 1)]
    if len(numbers) != trace.num_layers:
        raise ValueError(
            f"budgets: has {len(numbers)}, must have one for each of the {trace.num_layers} layers of {trace.name}"
        )
    mean = -(-sum(numbers) // len(numbers))
    recent = bench.recent_window(mean) if recent_window is None else uint32("recent_window", recent_window)
    return _replay(trace, numbers, _caches(make_policy, recent, obs_window, pool_kernel), counted, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A fit, and how it does beside uniform budgets and pyramids at the same total."""

    fit: Fit
    num_layers: int
    recent_window: int
    obs_window: int
    pool_kernel: int
    #: By name: ``fitted``, ``uniform``, and ``pyramid:2`` and such.
    plans: dict[str, LayerPlan]
    #: Where judged (``in sample``, ``held out``, or another trace's name) -> name of the plan -> report.
    judged: dict[str, dict[str, Report]]

    def findings(self) -> list[str]:
        """Return what the numbers say, a sentence for each place of judgement, whichever plan wins."""
        sentences = []
        for place, reports in self.judged.items():
            mass = {name: report.retained_mass for name, report in reports.items()}
            best = max(mass, key=lambda name: mass[name])
            others = [f"{points(mass['fitted'] - mass[name])} on {name}" for name in mass if name != "fitted"]
            winner = (
                f"{best} retains most" if max(mass.values()) - min(mass.values()) >= 5e-5 else "all retain the same"
            )
            sentences.append(f"{place}: {winner}; fitted, in points of mass: {', '.join(others)}")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "fit": self.fit.to_dict(),
            "recent_window": self.recent_window,
            "obs_window": self.obs_window,
            "pool_kernel": self.pool_kernel,
            "plans": {name: made.to_dict() for name, made in self.plans.items()},
            "judged": {
                place: {name: report.to_dict() for name, report in reports.items()}
                for place, reports in self.judged.items()
            },
        }

    def file(self) -> dict[str, Any]:
        """Return what ``pb-kvcache fit -o`` writes: the plan's members, and how it was fitted."""
        how = self.fit.to_dict() | {
            "recent_window": self.recent_window,
            "obs_window": self.obs_window,
            "pool_kernel": self.pool_kernel,
        }
        del how["plan"], how["curves"], how["grid"]
        return self.fit.plan.to_dict() | {"fit": how}


def run(
    trace: Trace | str | os.PathLike[str] = "smollm2-135m",
    budgets: Sequence[int | str] = ("10%",),
    *,
    holdout: float | None = None,
    judge_on: Trace | str | os.PathLike[str] | None = None,
    ratios: Sequence[float] = (2, 4),
    multiple_of: int = 1,
    objective: Literal["mean", "worst"] = "mean",
    recent_window: int | None = None,
    obs_window: int = 16,
    pool_kernel: int = 7,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[Result, ...]:
    """Fit SnapKV's budgets to the first part of a trace, and judge them on the rest, on another trace, or on both.

    Parameters
    ----------
    trace, budgets
        As for :func:`pb_kvcache.bench.run`.
    holdout
        The part of the steps that the fit does not see, at least 0 and below 1; the last ones. None: half of them,
        or none where `judge_on` is given.
    judge_on
        Another trace of the same model, all of which judges.
    ratios
        Of the pyramids to compare with.
    multiple_of, objective, recent_window
        As for :func:`fit`.
    obs_window, pool_kernel
        As for :class:`pb_kvcache.SnapKV`.
    progress
        Called with the number of budgets done and of all budgets.

    Raises
    ------
    TypeError, ValueError, OSError
        For an argument that breaks a rule above, or a trace that cannot be read.
    """
    for name, listed in (("budgets", budgets), ("ratios", ratios)):
        if isinstance(listed, str):  # a sequence, too, of its characters
            raise TypeError(f"{name} = {listed!r}: must be a list of them, not one string")
    loaded = trace if isinstance(trace, Trace) else workloads.named(trace)
    other = judge_on if judge_on is None or isinstance(judge_on, Trace) else workloads.named(judge_on)
    if other is not None and other.num_layers != loaded.num_layers:
        raise ValueError(
            f"judge_on: {other.name} has {other.num_layers} layers, must have the {loaded.num_layers} of {loaded.name}"
        )
    if holdout is None:
        holdout = 0.5 if other is None else 0.0
    holdout = real("holdout", holdout)
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout = {holdout}: must be at least 0 and below 1")
    seen = loaded.steps - int(Fraction(holdout) * loaded.steps)
    steps, rest = range(1, seen + 1), range(seen + 1, loaded.length)
    if not budgets:
        raise ValueError("budgets: none given")
    numbers = tuple(dict.fromkeys(bench.positions(budget, loaded.length) for budget in budgets))
    results: list[Result] = []
    for number in numbers:
        recent = bench.recent_window(number) if recent_window is None else uint32("recent_window", recent_window)
        scoring: dict[str, Any] = {"recent_window": recent, "obs_window": obs_window, "pool_kernel": pool_kernel}
        found = fit(loaded, number, steps=steps, multiple_of=multiple_of, objective=objective, **scoring)
        bounds: dict[str, Any] = {"minimum": recent + 1, "maximum": loaded.length, "multiple_of": multiple_of}
        plans = {"fitted": found.plan, "uniform": plan(loaded.num_layers, number, shape="uniform", **bounds)}
        for ratio in ratios if loaded.num_layers > 1 else ():
            plans[f"pyramid:{ratio:g}"] = plan(loaded.num_layers, number, ratio=ratio, **bounds)
        places: list[tuple[str, Trace, range | None]] = [("in sample", loaded, steps)]
        if rest:
            places.append(("held out", loaded, rest))
        if other is not None:
            places.append((f"on {other.name}", other, None))
        judged = {
            place: {name: judge(where, made, steps=which, name=name, **scoring) for name, made in plans.items()}
            for place, where, which in places
        }
        results.append(Result(found, loaded.num_layers, recent, obs_window, pool_kernel, plans, judged))
        if progress is not None:
            progress(len(results), len(numbers))
    return tuple(results)
