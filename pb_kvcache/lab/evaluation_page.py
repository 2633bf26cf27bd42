"""The page that ``pb-kvcache evaluate --report`` writes: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _html, bench
from ._estimate import Estimate, change, milliseconds, or_dash, percent, relative, written
from ._evaluation_plots import colour, plots
from ._figures import Figures, Row
from ._html import escape
from .findings import size
from .verdict import Summary

__all__ = ["page", "require_matplotlib", "write"]

_HEAD = (
    ("KL", "to the full cache, nats a token, mean over prompts"),
    ("less uniform's", "paired by prompt, with the bootstrap's interval of 95 %. Negative is better"),
    ("change", "mean KL against uniform's, with its interval"),
    ("better", "prompts whose KL is lower than uniform's"),
    ("worse", "prompts whose KL is higher than uniform's"),
    ("N", "prompts"),
)
#: Of the tables over all prompts.
_COSTS = (
    ("worst prompt", "the prompt with the largest difference to uniform, and that difference"),
    ("nll", "of the true text, nats a token, and less uniform's"),
    ("same", "tokens whose likeliest one is the full cache's"),
    ("rows", "held for each layer and head"),
    ("bytes", "of K and V, and what merging adds"),
    ("ms", "a decoded token"),
)
#: Of the tables of one task or kind.
_SCORES = (
    ("budget", "as it was asked for"),
    ("score", "mean over prompts, with its interval"),
    ("score less uniform's", "paired by prompt, with its interval. Positive is better"),
)


def require_matplotlib() -> Any:
    """Import matplotlib, or say which extra it belongs to."""
    return _html.require_matplotlib("plot")


def write(
    rows: Iterable[Row],
    summary: Summary,
    directory: str | os.PathLike[str],
    command: str,
    header: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``index.html`` into a folder, and return its path. The folder is made where there is none.

    Parameters
    ----------
    rows, header
        What ``runs.jsonl`` holds: a row for each prompt, variant and budget, and its first line.
    summary
        Of the same rows.
    command
        Shown as what made the page.

    Raises
    ------
    ImportError
        matplotlib (extra ``plot``) is not there.
    OSError
        The folder or the file cannot be written.
    """
    return _html.write_page(page(rows, summary, command, header), directory)


def page(rows: Iterable[Row], summary: Summary, command: str, header: Mapping[str, Any] | None = None) -> str:
    """Return the whole page as HTML."""
    require_matplotlib()
    rows, header = list(rows), header or {}
    note = (
        f"Differences are paired by prompt, intervals are the bootstrap's over prompts: {summary.draws:,} draws, seed "
        f"{summary.seed}. Bold: the lowest KL at this budget. Bytes, rows and milliseconds are medians over prompts. "
        "Milliseconds are of this machine and this run."
    )
    help_ = _html.columns([*_HEAD, *_COSTS, *_SCORES])
    tables = [_everything(summary, budget) for budget in summary.budgets]
    tables += [_of_part(summary, part, name) for part, name in summary.parts() if part != "all"]
    name = header.get("model", {}).get("name")
    return _html.document(
        f"{name}: what compression costs in answers" if name else "What compression costs in answers",
        _facts(summary, header),
        [_html.section("Verdict", _html.points(summary.sentences() or ["There is nothing to compare yet."]))],
        plots(rows, summary),
        _html.section("All figures", "\n".join([f'<p class="note">{escape(note)}</p>', help_, *tables])),
        _html.made_by(command, header.get("machine") or bench.machine()),
    )


def _facts(summary: Summary, header: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was judged: the model, the settings, the prompts, and the full cache."""
    model, settings = header.get("model", {}), header.get("settings", {})
    facts = [("model", ", ".join(f"{key} {value}" for key, value in model.items()))] if model else []
    facts += [(str(key), _shown(value)) for key, value in settings.items()]
    for r in summary.references:
        score = "" if r.score is None else f", score {r.score.text()}, chance {written(r.chance)}"
        nll = "" if r.nll is None else f", nll {written(r.nll)}"
        facts.append(
            (
                f"full cache, {r.task}",
                f"N {r.count}{score}{nll}, {size(r.bytes)}, {milliseconds(r.decode_ms)} ms a token",
            )
        )
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(entry)}" for key, entry in value.items())
    return ", ".join(map(_shown, value)) if isinstance(value, (list, tuple)) else str(value)


def _everything(summary: Summary, budget: str) -> str:
    """Return one budget's table over all prompts."""
    head = (("variant", ""), *_HEAD, *_COSTS)
    figures = summary.at(budget)
    rows = []
    for f in figures:
        worst = "" if f.worst is None else f"{written(f.worst[1], signed=True)} <small>{escape(f.worst[0])}</small>"
        nll = f"{or_dash(f.nll)}{_small(f.nll_difference)}"
        cells = (
            *_divergence(f),
            worst,
            nll,
            percent(f.same),
            f"{f.rows:,.1f}",
            size(f.bytes),
            milliseconds(f.decode_ms),
        )
        rows.append(_html.table_row(f.variant, colour(f.variant, summary.variants), cells, _best(f, figures)))
    return _html.table(f"Budget {budget}, all prompts", head, rows)


def _of_part(summary: Summary, part: str, name: str) -> str:
    """Return the table of one task or kind, all budgets."""
    scored = any(f.score for f in summary.figures if (f.part, f.name) == (part, name))
    budget_head, *score_head = _SCORES
    head = [("variant", ""), *_HEAD, budget_head, *(score_head if scored else [])]
    rows = []
    for budget in summary.budgets:
        figures = summary.at(budget, part, name)
        for f in figures:
            cells = [*_divergence(f), escape(budget)]
            if scored:
                cells += ["-" if f.score is None else f.score.text(), _difference(f.score_difference)]
            rows.append(_html.table_row(f.variant, colour(f.variant, summary.variants), cells, _best(f, figures)))
    return _html.table(f"{'Kind' if part == 'kind' else 'Task'}: {name}", head, rows)


def _divergence(f: Figures) -> tuple[str, ...]:
    """Return the cells under `_HEAD`."""
    apart = f.relative
    part = "-"
    if apart is not None:
        part = f"{relative(apart.value)} <small>[{relative(apart.low)}, {relative(apart.high)}]</small>"
    return (or_dash(f.kl), _difference(f.difference), part, percent(f.better), percent(f.worse), str(f.count))


def _difference(difference: Estimate | None) -> str:
    return "-" if difference is None else change(difference)


def _small(difference: Estimate | None) -> str:
    return "" if difference is None else f" <small>{change(difference)}</small>"


def _best(f: Figures, figures: Sequence[Figures]) -> bool:
    return f.kl is not None and f.kl == min(other.kl for other in figures if other.kl is not None)
