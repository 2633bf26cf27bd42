"""What an evaluation compares: how a total is divided, which rule ranks positions, and whether rows are merged."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import CurveSet, _quantities
from .._curves import SHIPPED, curve_file, measured_rule
from .._plan_file import load_plan, read_plans
from .._selection import SCORES, Selection
from .._suggest import did_you_mean
from ._figures import UNIFORM
from ._kvpress import PREFIX, make_press
from ._measured import measured_of

#: Divisions of a total that need no file, and what begins those with a number.
PLANS = (UNIFORM, "pyramid:RATIO", "adakv", "prompt")
#: Ways to merge, and none.
MERGES = ("none", "nearest", "fitted", "macro")
#: Rules that have a name, and scores alone.
_RULE_NAMES = tuple(dict.fromkeys([*Selection.NAMES, *SCORES[1:]]))


def rule_named(name: str) -> Selection:
    """Return the rule of a name: one of :class:`pb_kvcache.Selection`, or a score alone.

    A score alone is not pooled and protects the last 8 positions. Expected attention weighs values.

    Raises
    ------
    ValueError
        For another name.
    """
    if name in Selection.NAMES:
        return Selection.named(name)
    if name not in _RULE_NAMES:
        raise ValueError(
            f"selection = {name!r}: must be one of {', '.join(_RULE_NAMES)}{did_you_mean(name, _RULE_NAMES)}"
        )
    return Selection(kernel=1, protect=8, score=name, value_weight=name == "expected")


@dataclass(frozen=True)
class Variant:
    """One way to compress a prompt.

    Attributes
    ----------
    plan
        ``"uniform"``, ``"pyramid:RATIO"``, ``"adakv"``, ``"prompt"``, the path of a plan file or curve file, the name
        of shipped curves, or a press of kvpress, ``"kvpress:SnapKVPress"``, which has neither selection nor merging.
    selection
        The name of a rule of :class:`pb_kvcache.Selection`, or a score alone, such as ``"keydiff"``.
    merge
        ``"none"``, ``"nearest"``, ``"fitted"`` or ``"macro"``.
    digest
        Of the file. Of a press, kvpress's version. Empty without one.
    """

    plan: str = UNIFORM
    selection: str = "snapkv"
    merge: str = "none"
    digest: str = ""

    @property
    def label(self) -> str:
        """What tables call it: the parts that are not the default ones."""
        parts = [Path(self.plan).name if self.is_file else self.plan]
        parts += [self.selection] if self.selection not in ("snapkv", "") else []
        parts += [self.merge] if self.merge not in ("none", "") else []
        return " ".join(parts)

    @property
    def is_file(self) -> bool:
        """Whether the plan is a file."""
        return bool(self.digest) and not self.is_press

    @property
    def is_press(self) -> bool:
        """Whether a press of kvpress compresses, in place of a plan with a selection."""
        return self.plan.startswith(PREFIX)

    @property
    def rule(self) -> Selection:
        """The rule."""
        return rule_named(self.selection)

    def options(self, budget: int) -> dict[str, Any]:
        """Return what a cache is made with at a budget, in positions a KV head on average."""
        options: dict[str, Any] = {"selection": self.rule}
        if self.merge != "none":
            options["merge"] = self.merge
        if self.is_file and curve_file(self.plan):
            return options | {"budget": budget, "curves": self.plan}
        if self.is_file:
            plans = read_plans(self.plan)
            return options | {"plan": plans[0] if len(plans) == 1 else load_plan(self.plan, budget)}
        options["budget"] = budget
        if self.plan.startswith("pyramid:"):
            options["ratio"] = _ratio(self.plan)
        if self.plan == "adakv":
            options["heads"] = "adakv"
        if self.plan == "prompt":
            options["allocate"] = "prompt"
        return options

    def check(self, budget: int | None) -> None:
        """Refuse a budget that a plan file does not have. None: one that depends on the prompt."""
        if not self.is_file or curve_file(self.plan):
            return
        plans = read_plans(self.plan)
        have = [plan.total / plan.budgets.size for plan in plans]
        if budget is None or budget not in have:
            asked = "a percentage" if budget is None else f"{budget}"
            raise ValueError(
                f"{self.plan}: has plans of {', '.join(f'{one:g}' for one in have)} positions on average, and the "
                f"budget is {asked}; a curve file has every budget"
            )


def make_variants(
    plans: Sequence[str] = (UNIFORM,), selections: Sequence[str] | None = None, merges: Sequence[str] = ("none",)
) -> list[Variant]:
    """Return every plan with every rule and every way to merge. Uniform budgets of the plain rule come first.

    Without `selections`, a file that says under which rule it was measured has that rule, and other plans SnapKV's.

    Raises
    ------
    OSError, ValueError
        A name that is not known, or a file that cannot be read or holds something else.
    """
    found = [Variant()]
    for plan in plans:
        digest = _digest(plan)
        rules = (_own_rule(plan, digest),) if selections is None else selections
        for selection, merge in itertools.product(rules, merges):
            rule_named(selection)
            if merge not in MERGES:
                raise ValueError(f"merge = {merge!r}: must be one of {', '.join(MERGES)}{did_you_mean(merge, MERGES)}")
            chosen = ("", "") if plan.startswith(PREFIX) else (selection, merge)
            found.append(Variant(plan, *chosen, digest))
    unique = list(dict.fromkeys(found))
    labels: dict[str, Variant] = {}
    for variant in unique:
        other = labels.setdefault(variant.label, variant)
        if other is not variant:
            raise ValueError(f"plan: {other.plan} and {variant.plan} are both called {variant.label!r}; rename one")
    return unique


def _own_rule(plan: str, digest: str) -> str:
    """Return the name of the rule that a plan's file was measured under. SnapKV's for another plan."""
    try:
        rule = measured_rule(measured_of(plan)) if digest and not plan.startswith(PREFIX) else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"plan = {plan!r}: the rule that it was measured under: {error}") from None
    if rule is None:
        return Variant.selection
    names = [name for name in _RULE_NAMES if rule_named(name) == rule]
    if not names:
        raise ValueError(
            f"plan = {plan!r}: was measured under {rule}, a rule without a name; say which one ranks positions: "
            f"selection, one of {', '.join(_RULE_NAMES)}"
        )
    return names[0]


def _digest(plan: str) -> str:
    """Return the digest of a plan's file. Empty for a plan without one."""
    if plan in PLANS or (plan.startswith("pyramid:") and _ratio(plan)):
        return ""
    if plan.startswith(PREFIX):
        make_press(plan)
        return "kvpress " + importlib.metadata.version("kvpress")
    path = curve_file(plan) or Path(plan)
    if not path.is_file():
        known = [*PLANS, *SHIPPED, PREFIX + "PRESS"]
        raise ValueError(f"plan = {plan!r}: is neither a file nor one of {', '.join(known)}{did_you_mean(plan, known)}")
    if curve_file(plan):
        CurveSet.load(plan)
    else:
        read_plans(plan)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ratio(plan: str) -> float:
    ratio = _quantities.ratio(plan.partition(":")[2])
    if ratio is None:
        raise ValueError(f"plan = {plan!r}: the ratio {_quantities.RATIO_RULE}")
    return float(ratio)
