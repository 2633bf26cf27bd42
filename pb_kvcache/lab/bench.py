"""Replay one trace through many policies at equal total memory: what ``pb-kvcache bench`` does.

>>> from pb_kvcache.lab import bench
>>> results = bench.run("funnel", budgets=["20%"], policies=["snapkv", "pyramidkv:4"])
>>> uniform, pyramid = results.reports
>>> uniform.retained_mass < pyramid.retained_mass  # the funnel is made so that a pyramid fits it
True

Runs are independent of each other. All but the times they measure is the same, whatever runs beside them. With ``jobs``
they go through joblib, to the backend that the caller has set up for it, such as Dask or Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import LayerPlan, Policy, PyramidStack, SnapKV, __version__, _quantities
from .._checks import integer, uint32
from .._plan_file import read_plans
from .._policies import Setting, find, policy_names, ratio_of, recent_window
from . import traces
from ._jobs import in_order
from .replay import ReplayReport, replay
from .traces import Trace

__all__ = ["BUDGETS", "POLICIES", "Results", "policy_names", "recent_window", "run"]

#: Budgets per layer on average, as parts of the trace's length.
BUDGETS = ("5%", "10%", "20%", "40%")

#: What is compared unless the caller says otherwise.
POLICIES = (
    "full",
    "sliding_window",
    "streaming_llm",
    "h2o",
    "tova",
    "snapkv",
    "pyramidkv:1",
    "pyramidkv:2",
    "pyramidkv:4",
    "pyramidkv:1/4",
)


def _mean(layers: LayerPlan) -> int:
    """Return a plan's positions per layer on average, rounded up."""
    return -(-layers.total // layers.num_layers)


#: One run: the policy, what it is made for, and the plan where the policy is one.
_Task = tuple[str, Setting, "LayerPlan | None"]


#: What a run measured: of an object for each layer, and of a stack where there is one.
_Run = tuple[ReplayReport, "ReplayReport | None"]


def _make(task: _Task) -> tuple[Callable[[int], Policy], PyramidStack | None]:
    """Return what makes each layer's object, and a new stack that keeps the same where a stack can."""
    policy, setting, layers = task
    row, _ = find(policy)
    scoring = (setting.recent_window, setting.obs_window, setting.pool_kernel)
    made = row.make(setting, ratio_of(policy) if layers is None else layers)
    if isinstance(made, PyramidStack):
        budgets = made.budgets.tolist()
        return lambda layer: SnapKV(budgets[layer], *scoring), made
    if row.kind is SnapKV:
        return made, PyramidStack(setting.num_layers, setting.budget, 1, *scoring)
    return made, None


def _replay(source: Trace | str, checksum: int, task: _Task) -> _Run:
    """Do one run. At the top level, so that other processes find it."""
    policy, setting, _ = task
    try:
        if isinstance(source, Trace):
            trace = source
        else:
            trace, found = _named(source, _stamp(source))
            if found != checksum:
                raise ValueError(f"{source}: is not the file any more that it was when the benchmark began")
        budget = setting.budget if find(policy)[0].bounded else None
        layers, stack = _make(task)
        apart = replay(trace, layers, budget, name=policy)
        return apart, None if stack is None else replay(trace, stack, budget, name=policy)
    except MemoryError as error:
        raise MemoryError(f"{_called(task)}: not enough memory. Fewer jobs take less. {error}".rstrip()) from error


def _called(task: _Task) -> str:
    """Return a run's name for messages."""
    policy, setting, _ = task
    return f"the run of {policy}" + (f" at {setting.budget} positions a layer" if find(policy)[0].bounded else "")


def _stamp(source: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(source)  # noqa: PTH116 - a name that is no path is fine here
        return status.st_mtime_ns, status.st_size
    return None


@functools.lru_cache(maxsize=1)
def _named(source: str, stamp: tuple[int, int] | None) -> tuple[Trace, int]:
    """Return a trace and its file's checksum, kept for the next run of this process: reading takes as long as two runs.

    The checksum is 0 where there is no file. The stamp tells a file from an earlier one of its name.
    """
    return traces.named(source), 0 if source in traces.names() else zlib.crc32(Path(source).read_bytes())


@dataclasses.dataclass(frozen=True)
class Results:
    """What :func:`run` measured."""

    trace: str
    num_layers: int
    length: int
    #: Bytes of K and V that one layer stores for a position. None: the trace does not say.
    bytes_per_position: int | None
    metadata: dict[str, Any]
    budgets: tuple[int, ...]
    policies: tuple[str, ...]
    #: Of SnapKV and the pyramids.
    obs_window: int
    pool_kernel: int
    #: The full cache's, then each budget's, the policies of each in the order given. An object for each layer, so that
    #: the policies' times and memory are of the same kind.
    reports: tuple[ReplayReport, ...]
    #: In the same order, the same run through a :class:`pb_kvcache.PyramidStack`, or None where a policy has no stack.
    #: It keeps the same positions. Its times and memory are its own.
    stacks: tuple[ReplayReport | None, ...]

    def at(self, budget: int) -> list[ReplayReport]:
        """Return the reports at one budget, and the full cache's."""
        return [report for report in self.reports if report.budget in (None, budget)]

    def stack_of(self, report: ReplayReport) -> ReplayReport | None:
        """Return the same run through a stack. None: the policy has no stack."""
        return next(stack for one, stack in zip(self.reports, self.stacks, strict=True) if one is report)

    def saved(self, report: ReplayReport) -> int | None:
        """Return how many bytes of K and V the model does not have to hold at its peak, against keeping everything."""
        if self.bytes_per_position is None:
            return None
        return (self.num_layers * self.length - report.peak_resident) * self.bytes_per_position

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "trace": self.trace,
            "num_layers": self.num_layers,
            "length": self.length,
            "bytes_per_position": self.bytes_per_position,
            "metadata": {key: value for key, value in self.metadata.items() if key != "token_ids"},
            "budgets": [{"budget": budget, "recent_window": recent_window(budget)} for budget in self.budgets],
            "obs_window": self.obs_window,
            "pool_kernel": self.pool_kernel,
            "machine": machine(),
            "runs": [
                report.to_dict() | {"kv_bytes_saved": self.saved(report), "stack": _times(stack)}
                for report, stack in zip(self.reports, self.stacks, strict=True)
            ],
        }


def _times(stack: ReplayReport | None) -> dict[str, float] | None:
    """Return what a stack's run has of its own."""
    if stack is None:
        return None
    return {name: getattr(stack, name) for name in ("policy_bytes", "policy_seconds", "seconds")}


def machine() -> dict[str, str | int | None]:
    """Return where and with what this runs."""
    return {
        "pb_kvcache": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def positions(budget: int | str, length: int) -> int:
    """Return a budget in positions, given as a number of them or as a part of the length such as ``"20%"``.

    A part is rounded to the nearest position.

    Raises
    ------
    TypeError, ValueError
        Another form, or a result outside 1 .. length.
    """
    if isinstance(budget, str):
        amount = _quantities.budget(budget)
        if amount is None:
            raise ValueError(f"budget = {budget!r}: {_quantities.BUDGET_RULE}, such as 128 or 20%")
        number = amount if isinstance(amount, int) else round(amount * length)
    else:
        number = integer("budget", budget)
    if not 1 <= number <= length:
        raise ValueError(f"budget = {budget}: is {number} positions, must be between 1 and the trace's {length}")
    return number


def run(
    trace: Trace | str | os.PathLike[str] = "smollm2-135m",
    budgets: Sequence[int | str] | None = None,
    policies: Sequence[str] = POLICIES,
    *,
    obs_window: int = 16,
    pool_kernel: int = 7,
    jobs: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> Results:
    """Replay a trace through every policy at every budget.

    Parameters
    ----------
    trace
        A trace, the name of one (:func:`pb_kvcache.lab.traces.names`), or the path of a recording.
    budgets
        Positions per layer on average: numbers, or parts of the trace's length such as ``"20%"``. None: what the plans
        among the policies have, or `BUDGETS` where there are no plans.
    policies
        Names, as :func:`policy_names` lists them. ``full`` keeps everything. ``pyramidkv:RATIO`` is SnapKV on a
        :func:`pb_kvcache.plan` of that ratio, so that its total is the same to the position. ``plan:FILE`` is SnapKV on
        a plan from a file (:func:`pb_kvcache.save_plan`), at the plan's own budget. Every policy that has a recent
        window gets :func:`recent_window` of the budget. Every policy is an object for each layer. SnapKV and the
        pyramids run a second time in a :class:`pb_kvcache.PyramidStack`, for its time and memory.
    obs_window, pool_kernel
        Of SnapKV and the pyramids, as in :class:`pb_kvcache.SnapKV`.
    jobs
        How many runs at a time. 1 needs nothing else. Any other number needs joblib (extra ``bench``) and is its
        `n_jobs`: -1 for all cores. Within a ``joblib.parallel_config`` that names a backend, that backend does the
        runs.
    progress
        Called before the first run, and after each, with the number of runs done and of all runs.

    Raises
    ------
    ImportError
        `jobs` is not 1, and joblib is not there. The message names the extra.
    ChildProcessError
        A worker process ended before its run was done.
    MemoryError
        A run had not enough. The message names it.
    TypeError, ValueError, OSError
        An unknown trace or policy (the message lists the known ones), or a budget that a policy cannot have.
    """
    for name, listed in (("budgets", budgets), ("policies", policies)):
        if isinstance(listed, str):  # a sequence, too, of its characters
            raise TypeError(f"{name} = {listed!r}: must be a list of them, not one string")
    source: Trace | str = trace if isinstance(trace, Trace) else os.fspath(trace)
    if isinstance(source, str) and source not in traces.names() and os.path.exists(source):  # noqa: PTH110
        source = os.path.abspath(source)  # noqa: PTH100 - another process may have another working directory
    loaded, checksum = (source, 0) if isinstance(source, Trace) else _named(source, _stamp(source))
    plans = _plans(policies)
    if budgets is None:
        budgets = sorted(set().union(*plans.values())) or BUDGETS
    if not budgets:
        raise ValueError("budgets: none given")
    numbers = tuple(dict.fromkeys(positions(budget, loaded.length) for budget in budgets))
    names = tuple(dict.fromkeys(policies))
    scoring = (uint32("obs_window", obs_window), uint32("pool_kernel", pool_kernel))
    everything = Setting(loaded.num_layers, loaded.length, loaded.length, *scoring)
    tasks = _tasks(names, numbers, plans, everything)
    runs = []
    if progress is not None:
        progress(0, len(tasks))
    # In this process the trace is read once: what becomes of its file later does not matter.
    for done in _runs(loaded if jobs == 1 else source, checksum, tasks, integer("jobs", jobs)):
        runs.append(done)
        if progress is not None:
            progress(len(runs), len(tasks))
    return Results(
        trace=loaded.name,
        num_layers=loaded.num_layers,
        length=loaded.length,
        bytes_per_position=loaded.bytes_per_position,
        metadata=loaded.metadata,
        budgets=numbers,
        policies=names,
        obs_window=obs_window,
        pool_kernel=pool_kernel,
        reports=tuple(apart for apart, _ in runs),
        stacks=tuple(stack for _, stack in runs),
    )


def _plans(policies: Sequence[str]) -> dict[str, dict[int, LayerPlan]]:
    """Check the policies' names, and return the plans among them by name and budget."""
    plans = {}
    for policy in policies:
        if not isinstance(policy, str):
            raise TypeError(f"policies: {policy!r} is not a name")
        row, argument = find(policy)
        if row.argument == "FILE":
            read = read_plans(argument)
            layered = [entry for entry in read if isinstance(entry, LayerPlan)]
            if len(layered) < len(read):
                raise ValueError(
                    f"{argument}: has a plan of heads, but a trace has one row of attention a layer; "
                    "HeadPlan.layer_plan() makes a plan of layers"
                )
            plans[policy] = {_mean(layers): layers for layers in layered}
    if not policies:
        raise ValueError(f"policies: none given; known: {', '.join(policy_names())}")
    return plans


def _tasks(
    policies: Sequence[str], budgets: Sequence[int], plans: dict[str, dict[int, LayerPlan]], everything: Setting
) -> list[_Task]:
    """Return the runs. Each policy has been made once, so what it refuses is refused before the first run."""
    bounded = [policy for policy in policies if find(policy)[0].bounded]
    tasks: list[_Task] = [(policy, everything, None) for policy in policies if policy not in bounded]
    for budget, policy in itertools.product(budgets, bounded):
        layers = plans[policy].get(budget) if policy in plans else None
        if policy in plans and layers is None:
            has = ", ".join(map(str, plans[policy]))
            raise ValueError(f"policy = {policy!r}: has no plan of {budget} positions a layer, only of {has}")
        task = (policy, dataclasses.replace(everything, budget=budget), layers)
        _make(task)[0](0)
        tasks.append(task)
    return tasks


def _runs(source: Trace | str, checksum: int, tasks: list[_Task], jobs: int) -> Iterator[_Run]:
    """Yield what the runs measured, in the order of the tasks."""
    return in_order(_replay, (source, checksum), tasks, jobs, _called)
