"""The policies by name, a row each: what the benchmark, its page, the vectors and the command line read.

A policy is named by its row (``tova``), or by its row and an argument (``pyramidkv:1/4``, ``plan:FILE``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from . import _quantities
from ._baselines import H2O, TOVA, FullCache, Scissorhands, SlidingWindow, StreamingLLM
from ._plan import LayerPlan, plan
from ._policy import Policy
from ._pyramidkv import PyramidKV
from ._snapkv import SnapKV
from ._stack import PyramidStack
from ._suggest import nearest
from ._text import printable


def recent_window(budget: int) -> int:
    """Return the newest positions that are never dropped on score, the same for every policy that has a window."""
    return min(32, budget // 4)


@dataclass(frozen=True)
class Setting:
    """What a policy is made for: a trace, and the memory and scoring that every policy gets alike."""

    num_layers: int
    #: Positions in the sequence.
    length: int
    #: Positions per layer on average.
    budget: int
    #: Of SnapKV and the pyramids.
    obs_window: int
    pool_kernel: int

    @property
    def recent_window(self) -> int:
        """The newest positions that are never dropped on score."""
        return recent_window(self.budget)


#: One layer's new cache for each layer, or all layers in a stack.
Made = Callable[[int], Policy] | PyramidStack


@dataclass(frozen=True)
class Row:
    """What is known of a policy beside its rule."""

    name: str
    #: As people write it, with ``{}`` for the argument.
    label: str
    #: For plots. ``lab/_colours.py`` has a dark one for each. Policies with the same colours take them one after the
    #: other.
    colours: tuple[str, ...]
    #: One layer's cache, by the name that it has in C. None: the row adds budgets to another's.
    kind: type[Policy] | None
    #: Makes it. The argument is a pyramid's ratio, or a plan.
    make: Callable[[Setting, Fraction | LayerPlan | None], Made]
    #: What the help calls the argument of the name: ``RATIO``, ``FILE``, or nothing.
    argument: str = ""
    #: False: it keeps everything, so it has no budget.
    bounded: bool = True


def _each(make: Callable[[Setting], Policy]) -> Callable[[Setting, object], Made]:
    """Return what makes the same cache for each layer."""
    return lambda setting, argument: lambda layer: make(setting)


def _stack(setting: Setting, argument: Fraction | LayerPlan | None) -> PyramidStack:
    """Return SnapKV in every layer, at the budgets of a plan or of a ratio."""
    recent = setting.recent_window
    if isinstance(argument, Fraction):
        # The planner, not PyramidKV's floored shares: those lose up to num_layers - 1 positions of the total, and a
        # ratio below 1 has none.
        longest = max(setting.length, setting.budget)
        argument = plan(setting.num_layers, setting.budget, ratio=float(argument), minimum=recent + 1, maximum=longest)
    scoring = (setting.obs_window, setting.pool_kernel)
    return PyramidStack(setting.num_layers, setting.budget, 1, recent, *scoring, plan=argument)


#: Upright pyramids and plans.
_BLUES = ("#3d8ada", "#2368b8", "#0f93a6", "#0a7480")
_INVERTED = ("#d9481f", "#c96a10")

#: All policies by name, in the order of the help.
ROWS = {
    row.name: row
    for row in (
        Row("full", "full cache", ("#444444",), FullCache, _each(lambda s: FullCache()), bounded=False),
        Row("sliding_window", "sliding window", ("#7d8894",), SlidingWindow, _each(lambda s: SlidingWindow(s.budget))),
        Row(
            "streaming_llm",
            "StreamingLLM",
            ("#a8721a",),
            StreamingLLM,
            _each(lambda s: StreamingLLM(s.budget, min(4, s.budget - 1))),
        ),
        Row("h2o", "H2O", ("#b0527a",), H2O, _each(lambda s: H2O(s.budget, s.recent_window))),
        Row("tova", "TOVA", ("#1b8a5a",), TOVA, _each(lambda s: TOVA(s.budget))),
        Row(
            "scissorhands",
            "Scissorhands",
            ("#7b6ba8",),
            Scissorhands,
            _each(lambda s: Scissorhands(s.budget, s.recent_window)),
        ),
        Row(
            "snapkv",
            "SnapKV, uniform",
            ("#1d3f91",),
            SnapKV,
            _each(lambda s: SnapKV(s.budget, s.recent_window, s.obs_window, s.pool_kernel)),
        ),
        Row("pyramidkv", "PyramidKV {}", _BLUES, PyramidKV, _stack, argument="RATIO"),
        Row("plan", "SnapKV, {}", _BLUES, None, _stack, argument="FILE"),
    )
}

#: The classes by the name that they have in C, which is the vectors' name for them, too.
CLASSES: dict[str, type[Policy]] = {row.kind._NAME: row.kind for row in ROWS.values() if row.kind and row.kind._NAME}


def policy_names() -> list[str]:
    """Return the policies' names. RATIO stands for a number or a fraction such as 1/4, FILE for a plan's path."""
    return [f"{row.name}:{row.argument}" if row.argument else row.name for row in ROWS.values()]


def find(policy: str) -> tuple[Row, str]:
    """Return a policy's row and its name's argument, which is empty where the row has none.

    Raises
    ------
    ValueError
        Another name. The message lists the known ones.
    """
    name, colon, argument = policy.partition(":")
    row = ROWS.get(name)
    if row is None or bool(colon) != bool(row.argument):
        raise ValueError(
            f"policy = {policy!r}: no such policy; known: {', '.join(policy_names())}{_meant(name, argument)}"
        )
    if row.argument == "RATIO" and _quantities.ratio(argument) is None:
        raise ValueError(f"policy = {policy!r}: the ratio {_quantities.RATIO_RULE}")
    return row, argument


def _meant(name: str, argument: str) -> str:
    """Return the end of an error about a name: what may have been meant, with the argument that it takes."""
    row = ROWS.get(nearest(name, ROWS) or "")
    if row is None:
        return ""
    return f"; did you mean {row.name}{f':{argument or row.argument}' if row.argument else ''}?"


def ratio_of(policy: str) -> Fraction | None:
    """Return the ratio of a pyramid's name, None for another policy's."""
    row, argument = find(policy)
    return _quantities.ratio(argument) if row.argument == "RATIO" else None


def inverted(policy: str) -> bool:
    """Return whether a policy is a pyramid that gives the last layers most."""
    ratio = ratio_of(policy)
    return ratio is not None and ratio < 1


def label(policy: str) -> str:
    """Return a policy's name as people write it, in one printable line: a plan's file may be called anything."""
    row, argument = find(policy)
    shown = Path(argument).name if row.argument == "FILE" else argument
    return row.label.format(printable(shown)) + (" (inverted)" if inverted(policy) else "")


def colour(policy: str, policies: Sequence[str]) -> str:
    """Return a policy's colour among the policies of one plot."""
    colours = _colours(policy)
    same = [other for other in policies if _colours(other) == colours]
    return colours[same.index(policy) % len(colours)]


def _colours(policy: str) -> tuple[str, ...]:
    return _INVERTED if inverted(policy) else find(policy)[0].colours
