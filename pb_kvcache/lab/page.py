"""The page that ``pb-kvcache bench --report`` writes: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .._policies import colour, label
from . import _html, bench
from ._html import escape
from ._plots import plots
from .bench import Results
from .findings import TIMES, findings, layers, size, step_time

__all__ = ["page", "require_matplotlib", "write"]

_HEAD = (
    ("policy", ""),
    ("retained mass", "mean over layers and steps"),
    ("worst layer", "the layer that retains least"),
    ("recall", "of each step's 32 largest weights, the part kept"),
    ("peak", "positions held at most, all layers, after an append"),
    ("mean", "positions held after a step, all layers"),
    ("K and V saved", "bytes at the peak, against keeping everything"),
    ("evictions", "all layers"),
    ("policy memory", "bytes, all layers"),
    ("time a step", "on_decode_step and evict of all layers, an object for each layer"),
    ("in a stack", "the same choice through one PyramidStack, where one call serves all layers"),
)


def require_matplotlib() -> Any:
    """Import matplotlib, or say which extra it belongs to."""
    return _html.require_matplotlib("bench")


def write(results: Results, folder: str | os.PathLike[str], command: str) -> Path:
    """Write ``index.html`` into a folder, and return its path. The folder is made where there is none.

    Raises
    ------
    ImportError
        matplotlib (extra ``bench``) is not there.
    OSError
        The folder or the file cannot be written.
    """
    return _html.write_page(page(results, command), folder)


def page(results: Results, command: str) -> str:
    """Return the whole page as HTML. It shows `command` as what made it."""
    require_matplotlib()
    note = f"Bold: the most retained mass at this budget. {TIMES} All other figures are the same at every run."
    tables = "\n".join(_table(results, budget) for budget in results.budgets) if results.budgets else ""
    return _html.document(
        f"{results.trace}: what eviction keeps",
        _facts(results),
        [_html.section("Findings", _html.points(findings(results)))],
        plots(results),
        _html.section("All figures", f'<p class="note">{escape(note)}</p>\n{_html.columns(_HEAD)}\n{tables}'),
        _html.made_by(command, bench.machine()),
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    """Return where the trace comes from."""
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
    return facts


def _table(results: Results, budget: int) -> str:
    """Return one budget's table."""
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
            step_time(r),
            step_time(results.stack_of(r)),
        )
        rows.append(_html.table_row(label(r.policy), colour(r.policy, results.policies), cells, best))
    part = f"{100 * budget / results.length:.0f} %"
    caption = f"{budget} positions a layer on average ({part}), {budget * results.num_layers:,} in all"
    return _html.table(f"{caption}, recent window {bench.recent_window(budget)}", _HEAD, rows)
