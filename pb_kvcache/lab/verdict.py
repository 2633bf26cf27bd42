"""What an evaluation says: means, paired differences to uniform budgets with intervals, and plain sentences.

Every figure is over prompts. A difference is taken prompt by prompt between a variant and uniform budgets at the same
budget, and its interval is the percentile bootstrap over prompts (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13): prompts are drawn again with replacement, both sides of a pair together.

>>> from pb_kvcache.lab import verdict
>>> full = {"task": "text", "kind": "prose", "tokens": 9, "nll": None, "score": None, "chance": 0.0, "same": 1.0}
>>> full |= {"bytes": 80, "rows": 8.0, "decode_ms": 1.0, "kl": None, "variant": "full", "budget": None}
>>> at = full | {"budget": 4, "bytes": 40, "rows": 4.0}
>>> summary = verdict.summarise(
...     [full | {"prompt": f"text-{n}"} for n in range(8)]
...     + [at | {"prompt": f"text-{n}", "variant": "uniform", "kl": [0.6, 0.4]} for n in range(8)]
...     + [at | {"prompt": f"text-{n}", "variant": "plan.json", "kl": [0.3, 0.2]} for n in range(8)]
... )
>>> print(summary.sentences()[0])
At 4: plan.json lowers KL by .25 [.25, .25], better on 100 % of 8 prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._estimate import DRAWS, LEAST, Estimate, estimate
from ._figures import FULL, UNIFORM, Figures, Reference, Row, asked, figures, reference_of
from ._sentences import sentences
from ._verdict_tables import table

__all__ = ["DRAWS", "FULL", "LEAST", "UNIFORM", "Estimate", "Figures", "Reference", "Summary", "summarise", "table"]


@dataclass(frozen=True)
class Summary:
    """What :func:`summarise` found."""

    #: Budgets as they were asked for, the smallest first.
    budgets: tuple[str, ...]
    #: Uniform first, where it was run.
    variants: tuple[str, ...]
    references: tuple[Reference, ...]
    figures: tuple[Figures, ...]
    draws: int
    seed: int

    def at(self, budget: str, part: str = "all", name: str = "") -> list[Figures]:
        """Return the variants' figures at one budget over one set of prompts."""
        return [f for f in self.figures if (f.budget, f.part, f.name) == (budget, part, name)]

    def parts(self) -> list[tuple[str, str]]:
        """Return the sets of prompts, each once: all, tasks where there are several, and kinds."""
        kinds = _unique(f.name for f in self.figures if f.part == "kind")
        found = [("all", "")] if self.figures else []
        if len(self.references) > 1:
            found += [("task", reference.task) for reference in self.references]
        return found + [("kind", kind) for kind in kinds]

    def reference(self, task: str) -> Reference:
        """Return what the full cache does in a task."""
        return next(reference for reference in self.references if reference.task == task)

    def sentences(self) -> list[str]:
        """Return the verdict: what each variant does against uniform budgets, whichever wins."""
        return sentences(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "budgets": list(self.budgets),
            "variants": list(self.variants),
            "draws": self.draws,
            "seed": self.seed,
            "full": [dataclasses.asdict(r) | {"ranked": r.ranked} for r in self.references],
            "figures": [dataclasses.asdict(f) | {"worst": _worst_dict(f.worst)} for f in self.figures],
            "sentences": self.sentences(),
        }


def summarise(rows: Iterable[Row], *, draws: int = DRAWS, seed: int = 0) -> Summary:
    """Return the figures of an evaluation's rows.

    Parameters
    ----------
    rows
        As ``pb-kvcache evaluate`` writes them, one for each prompt, variant and budget. Rows may be missing, as after
        an interruption: a difference takes the prompts that both sides have.
    draws, seed
        Of the bootstrap. Figures do not depend on the order of the rows, nor on which other variants were run.

    Raises
    ------
    ValueError
        Two rows of the same prompt, variant and budget, or a figure that is not finite. The message names it.
    """
    full: dict[str, Row] = {}
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        prompt, variant = row["prompt"], row["variant"]
        _check_finite(row)
        cell = full if variant == FULL else cells.setdefault((variant, asked(row)), {})
        if prompt in cell:
            raise ValueError(f"rows: {prompt!r} has two rows of {variant!r} at {row['budget']}")
        cell[prompt] = row
    every = {name: row for cell in (full, *cells.values()) for name, row in cell.items()}
    sets = _sets(every)
    variants = sorted(_unique(variant for variant, _ in cells), key=lambda variant: variant != UNIFORM)
    budgets = sorted({budget for _, budget in cells}, key=lambda budget: (_positions(cells, budget), budget))
    resample = functools.partial(estimate, draws=draws, seed=seed)
    found = []
    for (part, name), prompts in sets.items():
        single = len({every[prompt]["task"] for prompt in prompts}) == 1
        for budget in budgets:
            uniform = _of(cells.get((UNIFORM, budget), {}), prompts)
            for variant in variants:
                held = _of(cells.get((variant, budget), {}), prompts)
                if held:
                    key = (part, name, budget, variant)
                    found.append(figures(key, held, None if variant == UNIFORM else uniform, single, resample))
    held_whole = [(name, _of(full, prompts)) for (part, name), prompts in sets.items() if part == "task"]
    references = [reference_of(task, rows, resample) for task, rows in held_whole if rows]
    return Summary(tuple(budgets), tuple(variants), tuple(references), tuple(found), draws, seed)


def _sets(every: Mapping[str, Row]) -> dict[tuple[str, str], list[str]]:
    """Return the prompts of each part and name, in an order that does not depend on which worker finished first."""
    prompts = sorted(every)
    tasks = sorted({row["task"] for row in every.values()})
    sets = {("all", ""): prompts} if prompts else {}
    for task in tasks:
        sets["task", task] = [p for p in prompts if every[p]["task"] == task]
    for task in tasks:
        kinds = sorted({every[p]["kind"] for p in sets["task", task]})
        for kind in kinds if len(kinds) > 1 else []:  # a single one would be the task again
            name = kind if len(tasks) == 1 else f"{task} {kind}"
            sets["kind", name] = [p for p in sets["task", task] if every[p]["kind"] == kind]
    return sets


def _positions(cells: Mapping[tuple[str, str], dict[str, Row]], budget: str) -> float:
    return statistics.fmean(row["budget"] for (_, b), cell in cells.items() if b == budget for row in cell.values())


def _of(cell: Mapping[str, Row], prompts: Sequence[str]) -> dict[str, Row]:
    return {prompt: cell[prompt] for prompt in prompts if prompt in cell}


def _check_finite(row: Row) -> None:
    for name in ("kl", "same", "nll", "score", "bytes", "rows", "decode_ms"):
        value = row.get(name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not math.isfinite(number):
                raise ValueError(f"rows: {name} of {row['variant']!r} for {row['prompt']!r} is {number}, not finite")


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _worst_dict(worst: tuple[str, float] | None) -> dict[str, Any] | None:
    return None if worst is None else {"prompt": worst[0], "difference": worst[1]}
