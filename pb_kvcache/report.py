"""The page that ``pb-kvcache bench --report`` writes: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import bench
from ._policies import colour, find, inverted, label, ratio_of
from .bench import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["findings", "layers", "page", "points", "require_matplotlib", "size", "write"]

_MINUS = "\N{MINUS SIGN}"


def require_matplotlib() -> Any:
    """Import matplotlib, or say which extra it belongs to."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a report needs matplotlib: pip install 'pb-kvcache[bench]'") from error
    return matplotlib


def findings(results: Results) -> list[str]:
    """Return what the numbers say in a few sentences, whichever policy wins."""
    reports = {(r.policy, r.budget): r for r in results.reports if r.budget is not None}
    rated = [policy for policy in results.policies if (policy, results.budgets[0]) in reports]
    if not rated:
        return []
    best: dict[str, list[int]] = {}
    for budget in results.budgets:
        best.setdefault(max(rated, key=lambda p: reports[p, budget].retained_mass), []).append(budget)
    available = next(iter(reports.values())).available_mass
    sentences = [
        f"{label(policy)} retains most at {_and(map(str, budgets))} positions a layer: "
        f"{_and(f'{reports[policy, budget].retained_mass:.4f}' for budget in budgets)} of the attention, "
        f"where a full cache has {available:.4f}."
        for policy, budgets in best.items()
    ]
    uniform = uniform_of(results)
    for policy in _pyramids(results) if uniform and results.num_layers > 1 else []:
        assert uniform is not None
        pairs = [(reports[policy, budget], reports[uniform, budget]) for budget in results.budgets]
        gains = [points(r.retained_mass - u.retained_mass) for r, u in pairs]
        worst = [points(r.worst_layer.retained_mass - u.worst_layer.retained_mass) for r, u in pairs]
        sentences.append(
            f"{label(policy)} against uniform SnapKV, in points of retained mass at {_and(map(str, results.budgets))} "
            f"positions a layer: {_and(gains)} on average over layers, {_and(worst)} in the layer that retains least."
        )
    return sentences


def uniform_of(results: Results) -> str | None:
    """Return the policy that stands for uniform budgets, where one was run."""
    return next((policy for policy in ("snapkv", "pyramidkv:1") if policy in results.policies), None)


def _pyramids(results: Results) -> list[str]:
    """Return the pyramids that are not flat, and other plans."""
    return [p for p in results.policies if ratio_of(p) not in (None, 1) or p.startswith("plan:")]


def points(gain: float) -> str:
    """Return a difference of masses in percentage points, with its sign; a rounded 0 has none."""
    text = f"{abs(100 * gain):.2f}"
    return text if float(text) == 0 else f"{'+' if gain > 0 else _MINUS}{text}"


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def write(results: Results, folder: str | os.PathLike[str], command: str) -> Path:
    """Write ``index.html`` into a folder, which is made where it is not there, and return its path.

    Raises
    ------
    ImportError
        matplotlib (extra ``bench``) is not there.
    OSError
        The folder or the file cannot be written.
    """
    text = page(results, command)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    path = path / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def page(results: Results, command: str) -> str:
    """Return the whole page as HTML; `command` is what made it, for the reader."""
    require_matplotlib()
    several = results.num_layers > 1
    figures = [
        _figure(
            "Retained mass by budget",
            "Mean over layers and steps of the model's attention that went to positions still kept. All policies hold "
            "the same number of positions in all. The dashed line is a cache that keeps everything: what is missing to "
            "1 is what tokens gave to themselves.",
            _mass_by_budget(results),
        )
    ]
    if several:
        figures += [
            _figure(
                "Retained mass by layer",
                "Mean over steps. The dashed line is a cache that keeps everything.",
                _mass_by_layer(results),
            ),
        ]
        if uniform_of(results) and _pyramids(results):
            figures.append(
                _figure(
                    "What a pyramid gives and takes",
                    "Retained mass less that of uniform SnapKV, in percentage points, by layer. A pyramid gives to the "
                    "first layers what it takes from the last; it pays where the area above the line is larger.",
                    _gains(results),
                )
            )
        figures += [
            _figure(
                "Budgets by layer",
                "How the same total is divided. A policy that is not a pyramid keeps the same number in each layer.",
                _budgets(results),
            ),
        ]
    figures.append(
        _figure(
            "Positions held over time",
            "All layers together, after each step's append and after its eviction: a saw with teeth one position high "
            "in each full layer, so the peak is one step above the total. A layer with a small budget is full early; "
            "from there on it evicts. The right side shows the last steps.",
            _residency(results),
        )
    )
    points = "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in findings(results))
    tables = "\n".join(_table(results, budget) for budget in results.budgets) if results.budgets else ""
    return _PAGE.format(
        title=html.escape(f"{results.trace}: what eviction keeps"),
        facts=_facts(results),
        findings=points,
        figures="\n".join(figures),
        tables=tables,
        command=html.escape(command),
        machine=html.escape(", ".join(f"{key} {value}" for key, value in bench.machine().items())),
    )


def _facts(results: Results) -> str:
    """Return where the trace comes from, as rows of a definition list."""
    facts = [("trace", f"{results.trace}: {layers(results)}, {results.length} positions")]
    if results.bytes_per_position:
        whole = results.bytes_per_position * results.num_layers * results.length
        facts.append(
            (
                "K and V",
                f"{results.bytes_per_position} bytes a position and layer, {size(whole)} for the whole sequence",
            )
        )
    for part in ("model", "text"):
        fields = results.metadata.get(part)
        if isinstance(fields, dict):
            shown = [str(fields[key]) for key in ("source", "licence") if fields.get(key)]
            facts.append((part, "; ".join(shown) or str(fields.get("name", ""))))
    if isinstance(about := results.metadata.get("about"), str):
        facts.append(("about", about))
    windows = ", ".join(f"{bench.recent_window(budget)} at {budget}" for budget in results.budgets)
    facts.append(("recent window", f"{windows}; the same for every policy that has one"))
    facts.append(("SnapKV, pyramids", f"obs_window {results.obs_window}, pool_kernel {results.pool_kernel}"))
    return "\n".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts)


def layers(results: Results) -> str:
    """Return how many layers there are, in words."""
    return f"{results.num_layers} layer{'s' if results.num_layers != 1 else ''}"


def size(count: float) -> str:
    """Return a number of bytes as people read it, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def _table(results: Results, budget: int) -> str:
    """Return one budget's table."""
    head = (
        ("policy", ""),
        ("retained mass", "mean over layers and steps"),
        ("worst layer", "the layer that retains least"),
        ("recall", "of each step's 32 largest weights, the part kept"),
        ("peak", "positions held at most, all layers, after an append"),
        ("mean", "positions held after a step, all layers"),
        ("K and V saved", "bytes at the peak, against keeping everything"),
        ("evictions", "all layers"),
        ("policy memory", "bytes, all layers"),
        ("policy time", "a step, all layers"),
    )
    reports = results.at(budget)
    rated = [r.retained_mass for r in reports if r.budget is not None]
    rows = []
    for r in reports:
        saved, whole = results.saved(r), (results.bytes_per_position or 0) * results.num_layers * results.length
        best = r.budget is not None and r.retained_mass == max(rated)
        cells = (
            f"{r.retained_mass:.4f}",
            f"{r.worst_layer.retained_mass:.3f} <small>layer {r.worst_layer.layer}</small>",
            f"{r.recall:.4f}",
            f"{r.peak_resident:,}",
            f"{r.mean_resident:,.0f}",
            "" if saved is None else f"{size(saved)} <small>{100 * saved / whole:.0f} %</small>",
            f"{r.evictions:,}",
            size(r.policy_bytes),
            f"{1e6 * r.policy_seconds / r.steps:.0f} µs",
        )
        name = f'<td><i style="background:{colour(r.policy, results.policies)}"></i>{html.escape(label(r.policy))}</td>'
        rows.append(f"<tr{' class=best' if best else ''}>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    titles = "".join(f'<th title="{html.escape(tip)}">{html.escape(name)}</th>' for name, tip in head)
    part = f"{100 * budget / results.length:.0f} %"
    caption = f"{budget} positions a layer on average ({part}), {budget * results.num_layers:,} in all"
    return (
        f"<div class=wide><table><caption>{caption}, recent window {bench.recent_window(budget)}</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


# --- plots


def _style(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    style: dict[str, Any] = {"color": colour(policy, policies), "label": label(policy), "linewidth": 1.5}
    if not find(policy)[0].bounded:
        style |= {"linestyle": (0, (5, 3)), "linewidth": 1.2}
    elif policy == "pyramidkv:1":
        style |= {"linestyle": (0, (1, 1.5)), "linewidth": 2.6}  # lies on uniform SnapKV, and shows beside it
    elif inverted(policy):
        style |= {"linestyle": (0, (4, 1.5))}
    return style


def _new(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    # Figure itself, not pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    return figure, list(axes)


def _plain(axis: Axes, x: str, y: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)


def _mass_by_budget(results: Results) -> Figure:
    figure, (mass, recall) = _new(9.5, 4.4, 2)
    for axis, field, title in ((mass, "retained_mass", "retained mass"), (recall, "recall", "recall of the top 32")):
        for policy in results.policies:
            values = [(r.budget, getattr(r, field)) for r in results.reports if r.policy == policy]
            style = _style(policy, results.policies)
            if not find(policy)[0].bounded:
                axis.axhline(values[0][1], **style)
            else:
                x, y = zip(*values, strict=True)
                axis.plot(x, y, marker="o", markersize=3.5, **style)
        _plain(axis, "positions a layer, on average", title)
        axis.set_xscale("log")
        axis.set_xticks(results.budgets, [str(budget) for budget in results.budgets])
        axis.minorticks_off()
    _legend(figure, mass)
    return figure


def _panels(results: Results, draw: Callable[[Axes, int], None], y: str) -> Figure:
    """Return a figure with one panel a budget, at most two side by side."""
    from matplotlib.figure import Figure

    columns = min(2, len(results.budgets))
    rows = -(-len(results.budgets) // columns)
    figure = Figure(figsize=(9.5, 3.3 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for number, (axis, budget) in enumerate(zip(axes, results.budgets, strict=False)):
        draw(axis, budget)
        axis.set_title(f"{budget} positions a layer ({100 * budget / results.length:.0f} %)", fontsize=10, loc="left")
        _plain(axis, "layer" if number + columns >= len(results.budgets) else "", y if number % columns == 0 else "")
    for axis in axes[len(results.budgets) :]:
        axis.set_visible(False)
    _legend(figure, axes[0])
    return figure


def _mass_by_layer(results: Results) -> Figure:
    def draw(axis: Axes, budget: int) -> None:
        for report in results.at(budget):
            axis.plot([layer.retained_mass for layer in report.per_layer], **_style(report.policy, results.policies))
        axis.set_ylim(top=1.02)

    return _panels(results, draw, "retained mass")


def _gains(results: Results) -> Figure:
    uniform, pyramids = uniform_of(results), _pyramids(results)

    def draw(axis: Axes, budget: int) -> None:
        reports = {report.policy: report for report in results.at(budget)}
        assert uniform is not None
        base = np.array([layer.retained_mass for layer in reports[uniform].per_layer])
        for policy in pyramids:
            mass = np.array([layer.retained_mass for layer in reports[policy].per_layer])
            axis.plot(100 * (mass - base), **_style(policy, results.policies))
        axis.axhline(0, color=colour(uniform, results.policies), linewidth=1.2)

    return _panels(results, draw, "points against uniform")


def _budgets(results: Results) -> Figure:
    shown = {"snapkv", "pyramidkv:1", *_pyramids(results)}

    def draw(axis: Axes, budget: int) -> None:
        for report in results.at(budget):
            if report.policy in shown:
                values = [layer.budget or 0 for layer in report.per_layer]
                style = _style(report.policy, results.policies)
                axis.stairs(values, np.arange(len(values) + 1) - 0.5, baseline=None, **style)
        axis.set_ylim(bottom=0)

    return _panels(results, draw, "positions kept")


def _residency(results: Results) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, (whole, end) = _new(9.5, 4.4, 2, width_ratios=(2, 1))
    budget = results.budgets[len(results.budgets) // 2]
    steps = np.repeat(np.arange(1, results.length), 2)
    last = 2 * min(8, results.length - 1)
    uniform, pyramids = uniform_of(results), _pyramids(results)
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
    _plain(whole, "step", f"positions held, {layers(results)}, {budget} each on average")
    _plain(end, "step", "")
    end.set_title("the last steps", fontsize=10, loc="left")
    end.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, whole)
    return figure


def _figure(title: str, caption: str, figure: Figure) -> str:
    """Return a plot as an image inside the page."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # Text as text: smaller, and sharp at every size. A fixed salt and no date: the same results, the same bytes.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "pb_kvcache", "font.family": "sans-serif"}
    with rc_context(options):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f"<figure><h2>{html.escape(title)}</h2><div class=wide>"
        f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.7rem; margin: 0 0 1rem; }}
h2 {{ font-size: 1.15rem; margin: 0 0 .5rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .93rem; margin: 0; }}
dt {{ color: #666; }} dd {{ margin: 0; }}
section, figure {{ margin: 2.2rem 0; padding: 0; }}
img {{ width: 100%; min-width: 44rem; height: auto; }}
figcaption, .note {{ color: #555; font-size: .9rem; max-width: 52rem; }}
.wide {{ overflow-x: auto; }}
table {{ margin: 1rem 0 1.8rem; }}
table {{ border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; width: 100%; }}
caption {{ text-align: left; font-weight: 600; padding: .3rem 0; }}
th, td {{ text-align: right; padding: .28rem .55rem; border-bottom: 1px solid #e6e6e6; white-space: nowrap; }}
th {{ font-weight: 600; color: #555; white-space: normal; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
td small {{ color: #777; }}
td i {{ display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .5em; }}
tr.best td:nth-child(2) {{ font-weight: 700; }}
code {{ background: #f4f4f4; padding: .1rem .3rem; border-radius: 3px; overflow-wrap: anywhere; }}
li {{ margin: .35rem 0; }}
</style>
</head>
<body>
<h1>{title}</h1>
<dl>
{facts}
</dl>
<section>
<h2>Findings</h2>
<ul>
{findings}
</ul>
</section>
{figures}
<section>
<h2>All figures</h2>
<p class="note">Bold: the most retained mass at this budget. Times are of this machine and this run; all else is the
same at every run.</p>
{tables}
</section>
<p class="note">Made by <code>{command}</code> with {machine}.</p>
</body>
</html>
"""
