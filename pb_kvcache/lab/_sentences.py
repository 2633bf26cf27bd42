"""The verdict in plain sentences, whichever variant wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._estimate import LEAST, change, distance, lowered, percent, written
from ._figures import UNIFORM, Figures, Reference
from .findings import listed

if TYPE_CHECKING:
    from .verdict import Summary

#: Rows above uniform's, as a part of them, from which budgets are not called equal. Rounding makes less.
_UNEQUAL = 0.01


def sentences(summary: Summary) -> list[str]:
    """Return what each variant does against uniform budgets."""
    said = [sentence for reference in summary.references if (sentence := _of_reference(reference))]
    for budget in summary.budgets:
        said += _of_divergence(budget, summary.at(budget))
        said += _of_kinds(summary, budget)
        for reference in summary.references:
            if reference.ranked and reference.score and reference.score.count >= LEAST:
                said += _of_scores(reference.task, budget, summary.at(budget, "task", reference.task))
    said += _of_rows(summary)
    figures = [f for budget in summary.budgets for f in summary.at(budget)]
    compared = sum(f.difference is not None and f.difference.count >= LEAST for f in figures)
    if compared >= 20:
        said.append(
            f"These are {compared} comparisons with intervals of 95 %: about {round(compared / 20)} would look clear "
            "where there is no difference."
        )
    return said


def _of_reference(reference: Reference) -> str:
    """Say what the full cache scores where there is a score."""
    score = reference.score
    if score is None:
        return ""
    said = (
        f"{reference.task}: the full cache scores {score.text()} on {score.count} prompts, chance is "
        f"{written(reference.chance)}"
    )
    if score.count < LEAST:
        return f"{said}. N is too small for a verdict on scores, which takes {LEAST} prompts or more."
    if not reference.ranked:
        return f"{said}. That is not clearly above chance, so the scores of {reference.task} rank nothing."
    return f"{said}."


def _of_divergence(budget: str, figures: Sequence[Figures]) -> list[str]:
    """Say which variants lower KL at a budget, which raise it, and which do neither clearly."""
    compared = [(f.variant, f, d) for f in figures if (d := f.difference) is not None]
    if not compared:
        return []
    if few := [d.count for _, _, d in compared if d.count < LEAST]:
        counts = str(few[0]) if len(set(few)) == 1 else f"{min(few)} to {max(few)}"
        small = f"N is {counts}, too small for a verdict, which takes {LEAST} prompts or more"
        if len(few) == len(compared):
            return [f"At {budget}: {small}."]
    enough = sorted((c for c in compared if c[2].count >= LEAST), key=lambda c: c[2].value)
    parts = [
        f"{name} lowers KL by {lowered(d)}, better on {percent(f.better)} of {d.count} prompts"
        for name, f, d in enough
        if d.sign < 0
    ]
    parts += [
        f"{name} is worse than uniform by {d.text()}, on {percent(f.worse)} of {d.count} prompts"
        for name, f, d in enough
        if d.sign > 0
    ]
    parts += [
        f"{name} shows no clear difference to uniform, {change(d)} on {d.count} prompts"
        for name, f, d in enough
        if d.sign == 0
    ]
    if few:
        parts.append(f"of {listed(name for name, _, d in compared if d.count < LEAST)} {small}")
    return [f"At {budget}: {'; '.join(parts)}."]


def _of_kinds(summary: Summary, budget: str) -> list[str]:
    """Say of the variants that are clearly better over all prompts where they are worse."""
    kinds = [name for part, name in summary.parts() if part == "kind"]
    winners = [f for f in summary.at(budget) if (d := f.difference) and d.sign < 0 and d.count >= LEAST]
    winners_of: dict[str, list[str]] = {}
    for winner in winners if kinds else []:
        of = {k: f.difference for k in kinds for f in summary.at(budget, "kind", k) if f.variant == winner.variant}
        judged = {kind: d for kind, d in of.items() if d is not None}
        enough = {kind: d for kind, d in judged.items() if d.count >= LEAST}
        worse = [f"{kind} by {d.text()} (N {d.count})" for kind, d in enough.items() if d.sign > 0]
        better = sum(d.sign < 0 for d in enough.values())
        parts = []
        if enough:
            parts.append(
                f"lower KL in {better} of {len(enough)}, clearly worse {f'in {listed(worse)}' if worse else 'in none'}"
            )
        if small := {kind: d for kind, d in judged.items() if d.count < LEAST}:
            above = sum(d.value > 0 for d in small.values())
            parts.append(
                f"{len(small)} with fewer than {LEAST} prompts, too few for a verdict, of which {above or 'none'} "
                f"{'have' if above > 1 else 'has'} a higher mean"
            )
        winners_of.setdefault("; ".join(parts), []).append(winner.variant)
    return [f"At {budget} by kind, {listed(names)}: {found}." for found, names in winners_of.items()]


def _of_scores(task: str, budget: str, figures: Sequence[Figures]) -> list[str]:
    """Say whose answers are better than uniform's."""
    uniform = next((f.score for f in figures if f.variant == UNIFORM), None)
    parts = []
    for f in figures:
        d = f.score_difference
        if d is None or f.score is None or uniform is None:
            continue
        score = f"{f.variant} scores {written(f.score.value)}"
        if d.count < LEAST:
            parts.append(f"{score}, N is {d.count}, too small for a verdict")
        elif d.sign == 0:
            parts.append(f"{score}, no clear difference, {change(d)}")
        else:
            parts.append(f"{score}, {'higher' if d.sign > 0 else 'lower'} by {distance(d)}")
    if not parts or uniform is None:
        return []
    return [f"{task} at {budget}: uniform scores {written(uniform.value)}; {'; '.join(parts)}. N is {uniform.count}."]


def _of_rows(summary: Summary) -> list[str]:
    """Say which variants hold more rows than uniform: their budget is not the same."""
    said = []
    for budget in summary.budgets:
        figures = {f.variant: f for f in summary.at(budget)}
        if (uniform := figures.get(UNIFORM)) is None:
            continue
        said += [
            f"At {budget}, {name} holds {f.rows:,.1f} rows a head where uniform holds {uniform.rows:,.1f}: budgets are "
            "not equal."
            for name, f in figures.items()
            if f.rows > uniform.rows * (1 + _UNEQUAL)
        ]
    return said
