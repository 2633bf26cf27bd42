"""The tables that an evaluation prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .._text import printable
from ._estimate import change, milliseconds, or_dash, percent, relative, written
from ._figures import Figures, Reference
from .findings import size

if TYPE_CHECKING:
    from .verdict import Summary


def table(summary: Summary) -> list[Table]:
    """Return what to print: the full cache, KL and costs at each budget, scores of each task.

    Figures are not wrapped and names only between their words, so that 80 columns hold any table whose names' words
    have 30 letters or fewer.
    """
    tables = [_full_table(summary)] if summary.references else []
    for budget in summary.budgets:
        figures = summary.at(budget)
        tables += [_divergence_table(budget, figures), _cost_table(budget, figures)]
    for reference in summary.references:
        if reference.score is not None:
            tables += [_score_table(summary, reference, budget) for budget in summary.budgets]
    return tables


def _new_table(title: str, names: Sequence[str], columns: Sequence[str]) -> Table:
    """Return a table whose first columns are names, and the others figures."""
    made = Table(box=None, pad_edge=False, title=_name(title), title_justify="left")
    for name in names:
        made.add_column(name)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def _name(text: str) -> Text:
    """Return a name that any console shows as it is: names may hold markup and escape sequences."""
    return Text(printable(text))


def _full_table(summary: Summary) -> Table:
    made = _new_table("full cache", ["task"], ["N", "chance", "score [95 %]", "nll", "bytes", "ms"])
    for r in summary.references:
        score = ("-", "-") if r.score is None else (written(r.chance), r.score.text())
        made.add_row(_name(r.task), str(r.count), *score, or_dash(r.nll), size(r.bytes), milliseconds(r.decode_ms))
    return made


def _divergence_table(budget: str, figures: Sequence[Figures]) -> Table:
    title = f"budget {budget}: KL to the full cache, in nats"
    made = _new_table(title, ["variant"], ["KL", "difference [95 %]", "change", "better", "N"])
    best = min((f.kl for f in figures if f.kl is not None), default=None)
    for f in figures:
        made.add_row(
            _name(f.variant),
            or_dash(f.kl),
            "-" if f.difference is None else change(f.difference),
            "-" if f.relative is None else relative(f.relative.value),
            percent(f.better),
            str(f.count),
            style="bold" if f.kl is not None and f.kl == best else None,
        )
    return made


def _cost_table(budget: str, figures: Sequence[Figures]) -> Table:
    title = f"budget {budget}: tokens as the full cache's, and costs"
    made = _new_table(title, ["variant"], ["same", "nll", "rows a head", "bytes", "ms a token", "N"])
    for f in figures:
        cost = (f"{f.rows:,.1f}", size(f.bytes), milliseconds(f.decode_ms))
        made.add_row(_name(f.variant), percent(f.same), or_dash(f.nll), *cost, str(f.count))
    return made


def _score_table(summary: Summary, reference: Reference, budget: str) -> Table:
    ranked = "" if reference.ranked else " (not above chance: no ranking)"
    made = _new_table(
        f"{reference.task}, budget {budget}: scores{ranked}", ["variant"], ["score [95 %]", "difference [95 %]", "N"]
    )
    for f in summary.at(budget, "task", reference.task):
        if f.score is not None:
            apart = "-" if f.score_difference is None or not reference.ranked else change(f.score_difference)
            made.add_row(_name(f.variant), f.score.text(), apart, str(f.score.count))
    return made
