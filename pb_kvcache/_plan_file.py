"""Plans in files: one, or a list of them for several budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._checks import positive
from ._files import replacing
from ._head_plan import HeadPlan
from ._plan import LayerPlan
from ._text import read_json, write_json


def read_plans(path: str | os.PathLike[str]) -> list[LayerPlan | HeadPlan]:
    """Read every plan of a file: one, as ``pb-kvcache plan --json`` writes, or a list of them.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file holds something else. The message names the file and what is wrong with it.
    """
    try:
        content = read_json(Path(path).read_bytes())
        plans = [_made(entry) for entry in (content if isinstance(content, list) else [content])]
        if not plans:
            raise ValueError("an empty list")
    except (ValueError, TypeError) as error:  # no JSON, no plan
        raise ValueError(f"{os.fspath(path)}: not a plan: {error}") from None
    return plans


def _made(entry: Any) -> LayerPlan | HeadPlan:
    if not isinstance(entry, Mapping) or "budgets" not in entry:
        raise ValueError("neither a layer plan nor a head plan: it has no budgets")
    # By the budgets: what "pb-kvcache plan --json" prints of a layer plan has num_kv_heads as well.
    budgets = entry["budgets"]
    heads = isinstance(budgets, list) and len(budgets) > 0 and isinstance(budgets[0], list)
    return HeadPlan.from_dict(entry) if heads else LayerPlan.from_dict(entry)


def _units(plan: LayerPlan | HeadPlan) -> int:
    """Return how many budgets a plan has."""
    return int(plan.budgets.size)


def load_plan(path: str | os.PathLike[str], budget: int | None = None) -> LayerPlan | HeadPlan:
    """Read a plan from a file.

    Parameters
    ----------
    path
        A file that :func:`save_plan` or ``pb-kvcache plan --json`` wrote.
    budget
        Which one of several plans: positions kept per layer and head on average. None where the file has one.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file holds no plan, none of this budget, or several and `budget` does not say which. The message names the
        file and the budgets that it has.

    Examples
    --------
    >>> load_plan("plan.json").total                                     # doctest: +SKIP
    16384
    """
    plans = read_plans(path)
    have = ", ".join(f"{plan.total / _units(plan):g}" for plan in plans)
    if budget is None:
        if len(plans) > 1:
            raise ValueError(f"{os.fspath(path)}: has plans for the budgets {have}; say which with budget=")
        return plans[0]
    wanted = positive("budget", budget)
    found = [plan for plan in plans if plan.total == wanted * _units(plan)]
    if len(found) != 1:
        raise ValueError(
            f"{os.fspath(path)}: has {'several' if found else 'no'} plans for budget = {wanted}, but for {have}"
        )
    return found[0]


def save_plan(path: str | os.PathLike[str], plan: LayerPlan | HeadPlan | Sequence[LayerPlan | HeadPlan]) -> None:
    """Write a plan, or a list of them for several budgets, as JSON that :func:`load_plan` reads.

    What stood at `path` is there until all of the new file is.

    Raises
    ------
    TypeError
        Not a plan, or not a list of them.
    ValueError
        An empty list.
    OSError
        The file cannot be written.
    """
    plans = [plan] if isinstance(plan, (LayerPlan, HeadPlan)) else list(plan) if isinstance(plan, Sequence) else None
    if plans is None or not all(isinstance(entry, (LayerPlan, HeadPlan)) for entry in plans):
        raise TypeError(f"plan: must be a LayerPlan, a HeadPlan or a list of them, not {type(plan).__name__}")
    if not plans:
        raise ValueError("plan = []: must have at least one plan")
    content = [entry.to_dict() for entry in plans]
    with replacing(path) as file:
        file.write(
            (write_json(content[0] if isinstance(plan, (LayerPlan, HeadPlan)) else content, indent=2) + "\n").encode()
        )
