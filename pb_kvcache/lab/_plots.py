"""The plots of a benchmark's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from .._policies import colour, find, inverted, label
from ._bench_sentences import by_layer, divided, extremes, gained, gains, held
from ._colours import QUIET
from ._panels import Line, Lines, Panel, Plot, new, plain
from .bench import Results
from .findings import layers, pyramids_of, uniform_of
from .replay import ReplayReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plots(results: Results) -> Iterator[Plot]:
    """Yield each plot. A trace of one layer has none by layer."""
    yield Plot(
        "Retained mass by budget",
        "Mean over layers and steps of the model's attention that went to positions still kept. All policies hold "
        "the same number of positions in all. The dashed line is a cache that keeps everything: what is missing to "
        "1 is what tokens gave to themselves.",
        _lines(results),
        [
            _by_budget(results, "retained_mass", "retained mass"),
            _by_budget(results, "recall", "recall of the top 32"),
        ],
    )
    if results.num_layers > 1:
        yield Plot(
            "Retained mass by layer",
            "Mean over steps. The dashed line is a cache that keeps everything.",
            _lines(results),
            _mass_by_layer(results),
        )
        if uniform_of(results) and pyramids_of(results):
            yield Plot(
                "What a pyramid gives and takes",
                "Retained mass less that of uniform SnapKV, in percentage points, by layer. A pyramid gives to the "
                "first layers what it takes from the last. It pays where the area above the line is larger.",
                _lines(results, [uniform_of(results), *pyramids_of(results)]),
                _gains(results),
            )
        yield Plot(
            "Budgets by layer",
            "How the same total is divided. A policy that is not a pyramid keeps the same number in each layer.",
            _lines(results, _dividing(results)),
            _budgets(results),
        )
    yield Plot(
        "Positions held over time",
        "All layers together, after each step's append and after its eviction: a saw with teeth one position high "
        "in each full layer, so the peak is one step above the total. A layer with a small budget is full early and "
        "evicts from there on. The second panel shows the last steps.",
        _lines(results, _over_time(results)),
        _residency(results),
    )


def _dividing(results: Results) -> list[str]:
    """Return uniform SnapKV, a flat pyramid, and what divides unequally."""
    shown = {"snapkv", "pyramidkv:1", *pyramids_of(results)}
    return [policy for policy in results.policies if policy in shown]


def _over_time(results: Results) -> list[str]:
    """Return what is drawn over time. The others evict as uniform SnapKV does, in every layer from the same step on."""
    shown = {uniform_of(results), *pyramids_of(results)}
    return [policy for policy in results.policies if policy in shown or not find(policy)[0].bounded]


def _lines(results: Results, policies: list[str | None] | list[str] | None = None) -> Lines:
    """Return policies' lines, by default all. First come the full cache and uniform budgets, then who retains most."""
    chosen = list(results.policies) if policies is None else [p for p in results.policies if p in policies]
    mass: dict[str, float] = {}
    for report in results.reports:
        mass[report.policy] = mass.get(report.policy, 0.0) + report.retained_mass
    full = [policy for policy in chosen if not find(policy)[0].bounded]
    uniform = uniform_of(results)
    ranked = sorted(chosen, key=lambda policy: (policy == "pyramidkv:1", -mass[policy]))  # that lies on uniform SnapKV
    first = [*full, *([uniform] if uniform else []), *ranked]
    return Lines([_line(policy, results) for policy in chosen], map(label, first))


def _line(policy: str, results: Results) -> Line:
    name, shade = label(policy), colour(policy, results.policies)
    if not find(policy)[0].bounded:
        return Line(name, shade, 1.3, (5, 3))
    if policy == "pyramidkv:1":
        return Line(name, shade, 2.6, (1, 1.5))  # lies on uniform SnapKV, and shows beside it
    return Line(name, shade, dashes=(4, 1.5) if inverted(policy) else ())


def _by_budget(results: Results, field: str, title: str) -> Panel:
    figure, axis = new()
    lines = _lines(results)
    for policy in results.policies:
        values = [(r.budget, getattr(r, field)) for r in results.reports if r.policy == policy]
        style = lines.style(label(policy))
        if not find(policy)[0].bounded:
            axis.axhline(values[0][1], **style)
        else:
            x, y = zip(*values, strict=True)
            axis.plot(x, y, marker="o", markersize=3.5, **style)
    plain(axis, "positions a layer, on average", title)
    axis.set_xscale("log")
    axis.set_xticks(results.budgets, [str(budget) for budget in results.budgets])
    axis.minorticks_off()
    return Panel(title, extremes(results, field), figure)


def _each_budget(
    results: Results,
    draw: Callable[[Axes, list[ReplayReport]], None],
    y: str,
    says: Callable[[list[ReplayReport]], str],
) -> list[Panel]:
    """Return a panel by layer for each budget. `draw` gets its axis and the reports at that budget."""
    from matplotlib.ticker import MaxNLocator

    panels = []
    for budget in results.budgets:
        figure, axis = new()
        draw(axis, results.at(budget))
        plain(axis, "layer", y)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        title = f"{budget} positions a layer ({100 * budget / results.length:.0f} %)"
        panels.append(Panel(title, says(results.at(budget)), figure))
    return panels


def _mass_by_layer(results: Results) -> list[Panel]:
    lines = _lines(results)

    def draw(axis: Axes, reports: list[ReplayReport]) -> None:
        for report in reports:
            axis.plot([layer.retained_mass for layer in report.per_layer], **lines.style(label(report.policy)))
        axis.set_ylim(top=1.02)

    return _each_budget(results, draw, "retained mass", lambda reports: by_layer(reports, lines.first))


def _gains(results: Results) -> list[Panel]:
    uniform, pyramids = uniform_of(results), pyramids_of(results)
    assert uniform is not None
    lines = _lines(results, [uniform, *pyramids])

    def draw(axis: Axes, reports: list[ReplayReport]) -> None:
        for name, gain in gains(reports, uniform, pyramids).items():
            axis.plot(100 * gain, **lines.style(name))
        axis.axhline(0, **lines.style(label(uniform)) | {"linewidth": 1.2})

    def says(reports: list[ReplayReport]) -> str:
        return gained(gains(reports, uniform, pyramids))

    return _each_budget(results, draw, "points against uniform", says)


def _budgets(results: Results) -> list[Panel]:
    shown = _dividing(results)
    lines = _lines(results, shown)

    def draw(axis: Axes, reports: list[ReplayReport]) -> None:
        for report in reports:
            if report.policy in shown:
                values = [layer.budget or 0 for layer in report.per_layer]
                axis.stairs(
                    values, np.arange(len(values) + 1) - 0.5, baseline=None, **lines.style(label(report.policy))
                )
        axis.set_ylim(bottom=0)

    return _each_budget(results, draw, "positions kept", lambda reports: divided(reports, shown))


def _residency(results: Results) -> list[Panel]:
    from matplotlib.ticker import MaxNLocator

    (figure, whole), (last_figure, end) = new(), new()
    budget = results.budgets[len(results.budgets) // 2]
    steps = np.repeat(np.arange(1, results.length), 2)
    last = 2 * min(8, results.length - 1)
    shown = _over_time(results)
    lines = _lines(results, shown)
    for report in results.at(budget):
        if report.policy not in shown:
            continue
        saw = np.stack([report.resident_before, report.resident_after], axis=1).ravel()
        for axis in (whole,) if report.budget is None else (whole, end):
            stretch = slice(-last if axis is end else 0, None)
            style = lines.style(label(report.policy)) | {"linewidth": 1.2}
            axis.plot(steps[stretch], saw[stretch], **style)
    total = budget * results.num_layers
    whole.set_ylim(0, 2 * total)
    end.axhline(total, color=QUIET, linewidth=0.8)
    end.annotate("the total", (1, total), xycoords=("axes fraction", "data"), ha="right", va="top", color=QUIET)
    end.set_ylim(total - 0.5 * results.num_layers, total + 1.5 * results.num_layers)
    plain(whole, "step", "positions held")
    plain(end, "step", "positions held")
    end.yaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{layers(results)}, {budget} positions each on average"
    says = held(results, budget, shown)
    return [Panel(title, says, figure), Panel("the last steps", says, last_figure)]
