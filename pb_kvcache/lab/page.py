"""The page that ``pb-kvcache bench --report`` writes: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import base64
import html
import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import replacing
from .._policies import colour, label
from .._text import printable
from . import bench
from ._plots import plots
from .bench import Results
from .findings import TIMES, findings, layers, size, step_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["page", "require_matplotlib", "write"]


def require_matplotlib() -> Any:
    """Import matplotlib, or say which extra it belongs to."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a report needs matplotlib: pip install 'pb-kvcache[bench]'") from error
    return matplotlib


def write(results: Results, folder: str | os.PathLike[str], command: str) -> Path:
    """Write ``index.html`` into a folder, and return its path. The folder is made where there is none.

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
    with replacing(path) as file:
        file.write(text.encode("utf-8"))
    return path


def page(results: Results, command: str) -> str:
    """Return the whole page as HTML. It shows `command` as what made it."""
    require_matplotlib()
    points = "\n".join(f"<li>{_escape(sentence)}</li>" for sentence in findings(results))
    tables = "\n".join(_table(results, budget) for budget in results.budgets) if results.budgets else ""
    return _PAGE.format(
        title=_escape(f"{results.trace}: what eviction keeps"),
        facts=_facts(results),
        findings=points,
        figures="\n".join(_figure(*plot) for plot in plots(results)),
        tables=tables,
        times=_escape(TIMES),
        command=_escape(command),
        machine=_escape(", ".join(f"{key} {value}" for key, value in bench.machine().items())),
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
    return "\n".join(f"<dt>{_escape(key)}</dt><dd>{_escape(value)}</dd>" for key, value in facts)


def _escape(text: str) -> str:
    """Return text as HTML shows it."""
    return html.escape(printable(text))


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
        ("time a step", "on_decode_step and evict of all layers, an object for each layer"),
        ("in a stack", "the same choice through one PyramidStack, where one call serves all layers"),
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
            step_time(r),
            step_time(results.stack_of(r)),
        )
        name = f'<td><i style="background:{colour(r.policy, results.policies)}"></i>{_escape(label(r.policy))}</td>'
        rows.append(f"<tr{' class=best' if best else ''}>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    titles = "".join(f'<th title="{_escape(tip)}">{_escape(name)}</th>' for name, tip in head)
    part = f"{100 * budget / results.length:.0f} %"
    caption = f"{budget} positions a layer on average ({part}), {budget * results.num_layers:,} in all"
    return (
        f"<div class=wide><table><caption>{caption}, recent window {bench.recent_window(budget)}</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(title: str, caption: str, figure: Figure) -> str:
    """Return a plot as an image inside the page."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # Text as text: smaller, and sharp at every size. A fixed salt and no date: the same results, the same bytes.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "pb_kvcache", "font.family": "sans-serif"}
    with rc_context(options), warnings.catch_warnings():
        # A name in letters that matplotlib's fonts lack: the page's reader has fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f"<figure><h2>{_escape(title)}</h2><div class=wide>"
        f'<img alt="{_escape(title)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{_escape(caption)}</figcaption></figure>"
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
<p class="note">Bold: the most retained mass at this budget. {times} All other figures are the same at every run.</p>
{tables}
</section>
<p class="note">Made by <code>{command}</code> with {machine}.</p>
</body>
</html>
"""
