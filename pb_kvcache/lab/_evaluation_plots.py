"""The plots of an evaluation's page, as matplotlib figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._axes import new, panels
from ._estimate import LEAST, Array
from ._figures import FULL, UNIFORM, Figures, Reference, Row, asked
from .findings import size
from .verdict import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Variants whose kept positions are drawn, at most.
_STRIPS = 8
#: Columns of a strip: what a line of a page shows.
_COLUMNS = 300

_COLOURS = ("#e4572e", "#1b8a5a", "#15c0d8", "#c58b2a", "#7b6ba8", "#b0527a", "#f08a24", "#4f9be8", "#9aa5b1")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.5)))


def plots(rows: Sequence[Row], summary: Summary) -> Iterator[tuple[str, str, Figure]]:
    """Yield each plot's title, caption and figure. What the rows have nothing for has no plot."""
    if any(f.difference for f in summary.figures):
        yield (
            "Gain over uniform budgets",
            "KL to the full cache that a variant saves against uniform budgets, paired by prompt, in nats a token, by "
            "the bytes held (medians over prompts). Above the line: better. Bars are bootstrap intervals of 95 % over "
            "prompts: one that crosses the line is no clear difference. Points of a budget stand a little apart, so "
            "that bars do not hide each other. The first panel has all prompts, the others tasks and kinds of text.",
            _gains(summary),
        )
    if any(_scored(summary, reference) for reference in summary.references):
        yield (
            "Scores",
            "Mean score by task with bootstrap intervals of 95 %, against the bytes held. The dashed line is the full "
            "cache, the dotted one a blind guess. A task whose full cache is not clearly above a guess ranks nothing.",
            _scores(summary),
        )
    if any(row["kl"] for row in rows):
        yield (
            "Divergence along the answer",
            "KL to the full cache at each token of the answer, mean over the prompts whose answer has that token. "
            "Token 1 is the first that is read from the compressed cache.",
            _along(rows, summary),
        )
    if found := _kept(rows, summary):
        budget, strips = found
        left_out = len(summary.variants) - len(strips)
        yield (
            "What was kept of one prompt",
            f"Prompt {next(iter(strips.values()))['prompt']}, budget {budget}. A row for each layer and head, the "
            "first layer on top. From left to right: the prompt's positions, dark where they are kept."
            + (f" {left_out} variants are not shown." if left_out else ""),
            _strips(strips),
        )


def colour(variant: str, variants: Sequence[str]) -> str:
    """Return a variant's colour among those of a page."""
    if variant == UNIFORM:
        return "#1d3f91"
    return _COLOURS[_number(variant, variants) % len(_COLOURS)]


def _number(variant: str, variants: Sequence[str]) -> int:
    return [other for other in variants if other != UNIFORM].index(variant)


def _style(variant: str, variants: Sequence[str]) -> dict[str, Any]:
    number = 0 if variant == UNIFORM else _number(variant, variants) // len(_COLOURS)
    dashes = _DASHES[number % len(_DASHES)]
    return {"color": colour(variant, variants), "label": variant, "linewidth": 1.5, "linestyle": dashes}


def _title(part: str, name: str, count: int) -> str:
    few = ", too few for a verdict" if count < LEAST else ""
    return f"{name or 'all prompts'} ({'kind, ' if part == 'kind' else ''}N {count}{few})"


def _gains(summary: Summary) -> Figure:
    parts = summary.parts()
    of = [[f for f in summary.figures if (f.part, f.name) == part and f.difference] for part in parts]
    shown = [(part, figures) for part, figures in zip(parts, of, strict=True) if figures]

    def draw(axis: Axes, number: int) -> None:
        figures = shown[number][1]
        axis.axhline(0, color=colour(UNIFORM, summary.variants), linewidth=1.2, label=UNIFORM)
        for variant in summary.variants:
            at = [(f.bytes, f.difference) for f in figures if f.variant == variant and f.difference]
            gains = [(held, -d.value, -d.high, -d.low) for held, d in at]
            _bars(axis, gains, variant, summary.variants)
        _bytes_axis(axis, figures)

    titles = [_title(*part, max(f.difference.count for f in figures if f.difference)) for part, figures in shown]
    return panels(titles, draw, "K and V held", "KL saved, nats")


def _scores(summary: Summary) -> Figure:
    references = [reference for reference in summary.references if _scored(summary, reference)]

    def draw(axis: Axes, number: int) -> None:
        reference = references[number]
        assert reference.score is not None
        axis.axhline(reference.score.value, color="#444444", linewidth=1.2, linestyle=(0, (5, 3)), label=FULL)
        axis.axhline(reference.chance, color="#888888", linewidth=1.2, linestyle=(0, (1, 2)), label="chance")
        figures = _scored(summary, reference)
        for variant in summary.variants:
            at = [(f.bytes, f.score) for f in figures if f.variant == variant and f.score]
            _bars(axis, [(held, s.value, s.low, s.high) for held, s in at], variant, summary.variants)
        _bytes_axis(axis, figures)
        axis.set_ylim(-0.04, 1.04)

    titles = [
        _title("task", r.task, r.count) + ("" if r.ranked else ": not above chance, no ranking") for r in references
    ]
    return panels(titles, draw, "K and V held", "score")


def _scored(summary: Summary, reference: Reference) -> list[Figures]:
    """Return a task's figures that have a score, where the full cache has one, too."""
    figures = [f for f in summary.figures if (f.part, f.name) == ("task", reference.task) and f.score]
    return figures if reference.score else []


def _bars(
    axis: Axes, points: Sequence[tuple[float, float, float, float]], variant: str, variants: Sequence[str]
) -> None:
    """Draw one variant's figures over its bytes, with intervals."""
    if not points:
        return
    # A percent apart: on the logarithmic axis the same at every budget.
    apart = 1.01 ** (variants.index(variant) - (len(variants) - 1) / 2)
    held, values, low, high = np.array(sorted(points)).T
    lengths = np.abs(np.stack([values - low, high - values]))  # rounding may leave a mean just outside
    axis.errorbar(
        held * apart, values, yerr=lengths, marker="o", markersize=3.5, elinewidth=1, **_style(variant, variants)
    )


def _bytes_axis(axis: Axes, figures: Sequence[Figures]) -> None:
    """Mark the bytes of the budgets: uniform's, or those of the first variant there is."""
    marked = [f for f in figures if f.variant == UNIFORM] or [f for f in figures if f.variant == figures[0].variant]
    ticks = sorted({f.bytes for f in marked})
    if min(f.bytes for f in figures) > 0:  # a contestant may not tell its bytes
        axis.set_xscale("log")
    axis.set_xticks(ticks, [size(tick) for tick in ticks])
    axis.minorticks_off()


def _along(rows: Sequence[Row], summary: Summary) -> Figure:
    def draw(axis: Axes, number: int) -> None:
        budget = summary.budgets[number]
        for variant in summary.variants:
            kls = [row["kl"] for row in rows if row["variant"] == variant and row["kl"] and asked(row) == budget]
            if kls:
                mean = _mean_along(kls)
                axis.plot(np.arange(1, len(mean) + 1), mean, **_style(variant, summary.variants))
        axis.set_ylim(bottom=0)

    counts = {budget: max(f.count for f in summary.at(budget)) for budget in summary.budgets}
    titles = [f"budget {budget} (N {count})" for budget, count in counts.items()]
    return panels(titles, draw, "token of the answer", "KL, nats")


def _mean_along(kls: Sequence[Sequence[float]]) -> Array:
    """Return the mean at each token, over those that have one."""
    longest = max(map(len, kls))
    table = np.full((len(kls), longest), np.nan)
    for line, kl in zip(table, kls, strict=True):
        line[: len(kl)] = kl
    mean: Array = np.nanmean(table, axis=0)
    return mean


def _kept(rows: Sequence[Row], summary: Summary) -> tuple[str, dict[str, Row]] | None:
    """Return the budget in the middle of those with kept positions, and the first prompt's rows by variant."""
    having = [row for row in rows if row.get("kept")]
    budgets = [budget for budget in summary.budgets if any(asked(row) == budget for row in having)]
    if not budgets:
        return None
    budget = budgets[len(budgets) // 2]
    at = [row for row in having if asked(row) == budget and row["prompt"] == having[0]["prompt"]]
    by_variant = {row["variant"]: row for row in at}
    strips = {variant: by_variant[variant] for variant in summary.variants if variant in by_variant}
    return (budget, dict(list(strips.items())[:_STRIPS])) if strips else None


def _strips(strips: dict[str, Row]) -> Figure:
    heads = [head for layer in next(iter(strips.values()))["kept"] for head in layer]
    height = min(3.0, max(0.5, 0.02 * len(heads)))
    figure, axes = new(9.5, (height + 0.45) * len(strips) + 0.4, len(strips), 1)
    for axis, (variant, row) in zip(axes, strips.items(), strict=True):
        image, layers = _image(row)
        axis.imshow(
            image, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest",
            extent=(0, row["tokens"], len(image), 0),
        )  # fmt: skip
        axis.set_title(variant, fontsize=10, loc="left", parse_math=False)
        shown = range(0, len(layers), max(1, len(layers) // 4))
        axis.set_yticks([layers[layer] for layer in shown], [str(layer) for layer in shown])
        axis.set_ylabel("layer")
    axes[-1].set_xlabel("position")
    return figure


def _image(row: Row) -> tuple[Array, list[float]]:
    """Return the part of each stretch of the prompt that is kept, ``(layers x heads, columns)``, and layers' places."""
    edges = np.linspace(0, row["tokens"], min(_COLUMNS, row["tokens"]) + 1).round()
    lines: list[Array] = []
    middles: list[float] = []
    for heads in row["kept"]:
        middles.append(len(lines) + len(heads) / 2)
        lines += [np.histogram(head, edges)[0] / np.diff(edges) for head in heads]
    return np.array(lines), middles
