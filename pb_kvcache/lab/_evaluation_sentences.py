"""What an evaluation's plots show, in sentences with their figures, for who does not see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ._estimate import Array, lowered, written
from ._figures import UNIFORM, Figures, Reference, Row


def saved(budgets: Iterable[str], figures: Sequence[Figures]) -> str:
    """Say at each budget which variant saves most against uniform budgets, and how many do so clearly."""
    said = []
    for budget in budgets:
        compared = [(f.variant, d) for f in figures if f.budget == budget and (d := f.difference)]
        if not compared:
            continue
        name, best = min(compared, key=lambda pair: pair[1].value)
        better, worse = (sum(d.sign == sign for _, d in compared) for sign in (-1, 1))
        said.append(
            f"at {budget} {name} saves most, {lowered(best)} nats; of {len(compared)} compared with uniform {better} "
            f"clearly better, {worse} clearly worse"
        )
    return _sentences(said)


def scored(budgets: Iterable[str], figures: Sequence[Figures], reference: Reference) -> str:
    """Say what the full cache scores, and at each budget uniform budgets and the best variant."""
    assert reference.score is not None
    said = [f"the full cache scores {reference.score.text()}, a guess {written(reference.chance)}"]
    for budget in budgets:
        scores = {f.variant: f.score for f in figures if f.budget == budget and f.score}
        if scores:
            best = max(scores, key=lambda name: scores[name].value)
            uniform = f", uniform {scores[UNIFORM].text()}" if UNIFORM in scores and best != UNIFORM else ""
            said.append(f"at {budget} {best} scores most, {scores[best].text()}{uniform}")
    return _sentences(said)


def along(means: Mapping[str, Array]) -> str:
    """Say of each variant what it diverges by at the first token and on average, and where most."""
    return _sentences(
        f"{name} diverges by {written(float(mean[0]))} nats at token 1, {written(float(mean.mean()))} on average, and "
        f"most at token {int(mean.argmax()) + 1}, by {written(float(mean.max()))}"
        for name, mean in means.items()
    )


def kept(row: Row) -> str:
    """Say how many positions a head keeps, by layer, and how many of them are of the prompt's last eighth."""
    counts = [float(np.mean([len(head) for head in heads])) for heads in row["kept"]]
    tail = row["tokens"] - row["tokens"] // 8
    late = [position >= tail for heads in row["kept"] for head in heads for position in head]
    part = f", {100 * float(np.mean(late)):.0f} % of them in the prompt's last eighth" if late else ""
    return (
        f"A head keeps {np.mean(counts):.0f} of {row['tokens']} positions on average{part}; "
        f"{counts[0]:.0f} in the first layer, {counts[-1]:.0f} in the last, {max(counts):.0f} at most."
    )


def _sentences(parts: Iterable[str]) -> str:
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)
