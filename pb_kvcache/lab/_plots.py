"""The plots of a benchmark's page, as matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._policies import colour, find, inverted, label
from ._axes import legend, new, panels, plain
from .bench import Results
from .findings import layers, pyramids_of, uniform_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plots(results: Results) -> Iterator[tuple[str, str, Figure]]:
    """Yield each plot's title, caption and figure. A trace of one layer has none by layer."""
    yield (
        "Retained mass by budget",
        "Mean over layers and steps of the model's attention that went to positions still kept. All policies hold "
        "the same number of positions in all. The dashed line is a cache that keeps everything: what is missing to "
        "1 is what tokens gave to themselves.",
        _mass_by_budget(results),
    )
    if results.num_layers > 1:
        yield (
            "Retained mass by layer",
            "Mean over steps. The dashed line is a cache that keeps everything.",
            _mass_by_layer(results),
        )
        if uniform_of(results) and pyramids_of(results):
            yield (
                "What a pyramid gives and takes",
                "Retained mass less that of uniform SnapKV, in percentage points, by layer. A pyramid gives to the "
                "first layers what it takes from the last. It pays where the area above the line is larger.",
                _gains(results),
            )
        yield (
            "Budgets by layer",
            "How the same total is divided. A policy that is not a pyramid keeps the same number in each layer.",
            _budgets(results),
        )
    yield (
        "Positions held over time",
        "All layers together, after each step's append and after its eviction: a saw with teeth one position high "
        "in each full layer, so the peak is one step above the total. A layer with a small budget is full early and "
        "evicts from there on. The right side shows the last steps.",
        _residency(results),
    )


def _style(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    style: dict[str, Any] = {"color": colour(policy, policies), "label": label(policy), "linewidth": 1.5}
    if not find(policy)[0].bounded:
        style |= {"linestyle": (0, (5, 3)), "linewidth": 1.2}
    elif policy == "pyramidkv:1":
        style |= {"linestyle": (0, (1, 1.5)), "linewidth": 2.6}  # lies on uniform SnapKV, and shows beside it
    elif inverted(policy):
        style |= {"linestyle": (0, (4, 1.5))}
    return style


def _mass_by_budget(results: Results) -> Figure:
    figure, (mass, recall) = new(9.5, 4.4, 1, 2)
    for axis, field, title in ((mass, "retained_mass", "retained mass"), (recall, "recall", "recall of the top 32")):
        for policy in results.policies:
            values = [(r.budget, getattr(r, field)) for r in results.reports if r.policy == policy]
            style = _style(policy, results.policies)
            if not find(policy)[0].bounded:
                axis.axhline(values[0][1], **style)
            else:
                x, y = zip(*values, strict=True)
                axis.plot(x, y, marker="o", markersize=3.5, **style)
        plain(axis, "positions a layer, on average", title)
        axis.set_xscale("log")
        axis.set_xticks(results.budgets, [str(budget) for budget in results.budgets])
        axis.minorticks_off()
    legend(figure, mass)
    return figure


def _by_budget(results: Results, draw: Callable[[Axes, int], None], y: str) -> Figure:
    """Return a figure by layer with one panel a budget."""
    titles = [f"{budget} positions a layer ({100 * budget / results.length:.0f} %)" for budget in results.budgets]
    return panels(titles, lambda axis, number: draw(axis, results.budgets[number]), "layer", y)


def _mass_by_layer(results: Results) -> Figure:
    def draw(axis: Axes, budget: int) -> None:
        for report in results.at(budget):
            axis.plot([layer.retained_mass for layer in report.per_layer], **_style(report.policy, results.policies))
        axis.set_ylim(top=1.02)

    return _by_budget(results, draw, "retained mass")


def _gains(results: Results) -> Figure:
    uniform, pyramids = uniform_of(results), pyramids_of(results)

    def draw(axis: Axes, budget: int) -> None:
        reports = {report.policy: report for report in results.at(budget)}
        assert uniform is not None
        base = np.array([layer.retained_mass for layer in reports[uniform].per_layer])
        for policy in pyramids:
            mass = np.array([layer.retained_mass for layer in reports[policy].per_layer])
            axis.plot(100 * (mass - base), **_style(policy, results.policies))
        axis.axhline(0, color=colour(uniform, results.policies), linewidth=1.2)

    return _by_budget(results, draw, "points against uniform")


def _budgets(results: Results) -> Figure:
    shown = {"snapkv", "pyramidkv:1", *pyramids_of(results)}

    def draw(axis: Axes, budget: int) -> None:
        for report in results.at(budget):
            if report.policy in shown:
                values = [layer.budget or 0 for layer in report.per_layer]
                style = _style(report.policy, results.policies)
                axis.stairs(values, np.arange(len(values) + 1) - 0.5, baseline=None, **style)
        axis.set_ylim(bottom=0)

    return _by_budget(results, draw, "positions kept")


def _residency(results: Results) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, (whole, end) = new(9.5, 4.4, 1, 2, width_ratios=(2, 1))
    budget = results.budgets[len(results.budgets) // 2]
    steps = np.repeat(np.arange(1, results.length), 2)
    last = 2 * min(8, results.length - 1)
    uniform, pyramids = uniform_of(results), pyramids_of(results)
    for report in results.at(budget):
        saw = np.stack([report.resident_before, report.resident_after], axis=1).ravel()
        if report.budget is None:
            axes: tuple[Axes, ...] = (whole,)
        elif report.policy == uniform or report.policy in pyramids:
            axes = (whole, end)
        else:
            continue  # evicts as uniform SnapKV does, in every layer from the same step on
        for axis in axes:
            stretch = slice(-last if axis is end else 0, None)
            style = _style(report.policy, results.policies) | {"linewidth": 1.2}
            axis.plot(steps[stretch], saw[stretch], **style)
    total = budget * results.num_layers
    whole.set_ylim(0, 2 * total)
    end.axhline(total, color="#999999", linewidth=0.8)
    end.annotate("the total", (1, total), xycoords=("axes fraction", "data"), ha="right", va="top", color="#666666")
    end.set_ylim(total - 0.5 * results.num_layers, total + 1.5 * results.num_layers)
    plain(whole, "step", f"positions held, {layers(results)}, {budget} each on average")
    plain(end, "step", "")
    end.set_title("the last steps", fontsize=10, loc="left")
    end.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, whole)
    return figure
