"""The plots of an evaluation's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import _evaluation_sentences as sentences
from ._colours import IMAGE, INK, LINES, QUIET, SHADE
from ._colours import UNIFORM as UNIFORM_COLOUR
from ._estimate import LEAST, Array
from ._figures import FULL, UNIFORM, Figures, Reference, Row, asked
from ._panels import Line, Lines, Panel, Plot, new, plain
from .findings import size
from .verdict import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Variants whose kept positions are drawn, at most.
_STRIPS = 8
#: Columns of a strip: what a line of a page shows.
_COLUMNS = 300
#: Of lines whose colour was had before.
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.5))


def plots(rows: Sequence[Row], summary: Summary) -> Iterator[Plot]:
    """Yield each plot. What the rows have nothing for has no plot."""
    if any(f.difference for f in summary.figures):
        yield Plot(
            "Gain over uniform budgets",
            "KL to the full cache that a variant saves against uniform budgets, paired by prompt, in nats a token, by "
            "the bytes held (medians over prompts). Above the line: better. Bars are bootstrap intervals of 95 % over "
            "prompts: one that crosses the line is no clear difference. Points of a budget stand a little apart, so "
            "that bars do not hide each other. The first panel has all prompts, the others tasks and kinds of text.",
            _lines(summary),
            _gains(summary),
        )
    if any(_scored(summary, reference) for reference in summary.references):
        yield Plot(
            "Scores",
            "Mean score by task with bootstrap intervals of 95 %, against the bytes held. The dashed line is the full "
            "cache, the grey ground a blind guess. A task whose full cache is not clearly above a guess ranks nothing.",
            _lines(summary, full=True),
            _scores(summary),
        )
    if any(row["kl"] for row in rows):
        yield Plot(
            "Divergence along the answer",
            "KL to the full cache at each token of the answer, mean over the prompts whose answer has that token. "
            "Token 1 is the first that is read from the compressed cache.",
            _lines(summary),
            _along(rows, summary),
        )
    if found := _kept(rows, summary):
        budget, strips = found
        left_out = len(summary.variants) - len(strips)
        yield Plot(
            "What was kept of one prompt",
            f"Prompt {next(iter(strips.values()))['prompt']}, budget {budget}. A row for each layer and head, the "
            "first layer on top. From left to right: the prompt's positions, coloured where they are kept."
            + (f" {left_out} variants are not shown." if left_out else ""),
            _lines(summary, only=list(strips)),
            [_strip(variant, row) for variant, row in strips.items()],
        )


def colour(variant: str, variants: Sequence[str]) -> str:
    """Return a variant's colour among those of a page."""
    return UNIFORM_COLOUR if variant == UNIFORM else LINES[_number(variant, variants) % len(LINES)]


def _number(variant: str, variants: Sequence[str]) -> int:
    return [other for other in variants if other != UNIFORM].index(variant)


def _line(variant: str, variants: Sequence[str]) -> Line:
    number = 0 if variant == UNIFORM else _number(variant, variants) // len(LINES)
    return Line(variant, colour(variant, variants), dashes=_DASHES[number % len(_DASHES)])


def _lines(summary: Summary, full: bool = False, only: Sequence[str] | None = None) -> Lines:
    """Return the variants' lines. First come the full cache, where it has one, and uniform, then the lowest KL."""
    shown = [variant for variant in summary.variants if only is None or variant in only]
    lines = [Line(FULL, QUIET, 1.3, (5, 3))] if full else []
    lines += [_line(variant, summary.variants) for variant in shown]
    return Lines(lines, [FULL, UNIFORM, *sorted(shown, key=lambda variant: _mean_kl(summary, variant))])


def _mean_kl(summary: Summary, variant: str) -> float:
    """Return a variant's KL over all budgets, infinite where it has none."""
    found = [f.kl for f in summary.figures if (f.part, f.variant) == ("all", variant) and f.kl is not None]
    return float(np.mean(found)) if found else float("inf")


def _title(part: str, name: str, count: int) -> str:
    few = ", too few for a verdict" if count < LEAST else ""
    return f"{name or 'all prompts'} ({'kind, ' if part == 'kind' else ''}N {count}{few})"


def _gains(summary: Summary) -> list[Panel]:
    lines = _lines(summary)
    panels = []
    for part in summary.parts():
        figures = [f for f in summary.figures if (f.part, f.name) == part and f.difference]
        if not figures:
            continue
        figure, axis = new()
        zero = lines.style(UNIFORM) if UNIFORM in summary.variants else {"color": INK}
        axis.axhline(0, **zero | {"linewidth": 1.2})
        for variant in summary.variants:
            at = [(f.bytes, f.difference) for f in figures if f.variant == variant and f.difference]
            _bars(axis, [(held, -d.value, -d.high, -d.low) for held, d in at], variant, summary.variants, lines)
        plain(axis, "K and V held", "KL saved, nats")
        _bytes_axis(axis, figures)
        title = _title(*part, max(f.difference.count for f in figures if f.difference))
        panels.append(Panel(title, sentences.saved(summary.budgets, figures), figure))
    return panels


def _scores(summary: Summary) -> list[Panel]:
    lines = _lines(summary, full=True)
    panels = []
    for reference in summary.references:
        figures = _scored(summary, reference)
        if not figures:
            continue
        assert reference.score is not None
        figure, axis = new()
        axis.axhspan(-0.04, reference.chance, color=SHADE, linewidth=0)
        axis.axhline(reference.score.value, **lines.style(FULL))
        for variant in summary.variants:
            at = [(f.bytes, f.score) for f in figures if f.variant == variant and f.score]
            _bars(axis, [(held, s.value, s.low, s.high) for held, s in at], variant, summary.variants, lines)
        plain(axis, "K and V held", "score")
        _bytes_axis(axis, figures)
        axis.set_ylim(-0.04, 1.04)
        title = _title("task", reference.task, reference.count)
        title += "" if reference.ranked else ": not above chance, no ranking"
        panels.append(Panel(title, sentences.scored(summary.budgets, figures, reference), figure))
    return panels


def _scored(summary: Summary, reference: Reference) -> list[Figures]:
    """Return a task's figures that have a score, where the full cache has one, too."""
    figures = [f for f in summary.figures if (f.part, f.name) == ("task", reference.task) and f.score]
    return figures if reference.score else []


def _bars(
    axis: Axes, points: Sequence[tuple[float, float, float, float]], variant: str, variants: Sequence[str], lines: Lines
) -> None:
    """Draw one variant's figures over its bytes, with intervals."""
    if not points:
        return
    # A percent apart: on the logarithmic axis the same at every budget.
    apart = 1.01 ** (variants.index(variant) - (len(variants) - 1) / 2)
    held, values, low, high = np.array(sorted(points)).T
    lengths = np.abs(np.stack([values - low, high - values]))  # rounding may leave a mean just outside
    drawn = axis.errorbar(
        held * apart, values, yerr=lengths, marker="o", markersize=3.5, elinewidth=1, **lines.style(variant)
    )
    lines.mark(drawn.get_children(), variant)


def _bytes_axis(axis: Axes, figures: Sequence[Figures]) -> None:
    """Mark the bytes of the budgets: uniform's, or those of the first variant there is."""
    marked = [f for f in figures if f.variant == UNIFORM] or [f for f in figures if f.variant == figures[0].variant]
    ticks = sorted({f.bytes for f in marked})
    if min(f.bytes for f in figures) > 0:  # a contestant may not tell its bytes
        axis.set_xscale("log")
    axis.set_xticks(ticks, [size(tick) for tick in ticks])
    axis.minorticks_off()


def _along(rows: Sequence[Row], summary: Summary) -> list[Panel]:
    lines = _lines(summary)
    panels = []
    for budget in summary.budgets:
        figure, axis = new()
        means: dict[str, Array] = {}
        for variant in summary.variants:
            kls = [row["kl"] for row in rows if row["variant"] == variant and row["kl"] and asked(row) == budget]
            if kls:
                means[variant] = _mean_along(kls)
                axis.plot(np.arange(1, len(means[variant]) + 1), means[variant], **lines.style(variant))
        axis.set_ylim(bottom=0)
        plain(axis, "token of the answer", "KL, nats")
        count = max(f.count for f in summary.at(budget))
        says = sentences.along({name: means[name] for name in lines.first if name in means})
        panels.append(Panel(f"budget {budget} (N {count})", says, figure))
    return panels


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


def _strip(variant: str, row: Row) -> Panel:
    from matplotlib.colors import to_rgba

    image, layers = _image(row)
    figure, axis = new(height=min(3.0, max(0.5, 0.02 * len(image))) + 0.7)
    # The more of a stretch is kept, the less of the page shows through: so it is the same on white and on black.
    shades = np.empty((*image.shape, 4))
    shades[..., :3] = to_rgba(IMAGE)[:3]
    shades[..., 3] = image
    axis.imshow(shades, aspect="auto", interpolation="nearest", extent=(0, row["tokens"], len(image), 0))
    shown = range(0, len(layers), max(1, len(layers) // 4))
    axis.set_yticks([layers[layer] for layer in shown], [str(layer) for layer in shown])
    axis.set_ylabel("layer")
    axis.set_xlabel("position")
    return Panel(variant, sentences.kept(row), figure, line=variant)


def _image(row: Row) -> tuple[Array, list[float]]:
    """Return the part of each stretch of the prompt that is kept, ``(layers x heads, columns)``, and layers' places."""
    edges = np.linspace(0, row["tokens"], min(_COLUMNS, row["tokens"]) + 1).round()
    lines: list[Array] = []
    middles: list[float] = []
    for heads in row["kept"]:
        middles.append(len(lines) + len(heads) / 2)
        lines += [np.histogram(head, edges)[0] / np.diff(edges) for head in heads]
    return np.array(lines), middles
