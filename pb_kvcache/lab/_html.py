"""The parts of a report: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._files import replacing
from .._text import printable
from ._colours import variable
from ._panels import MOST, Line, Panel, Plot
from ._style import SCRIPT, style
from ._svg import svg


def require_matplotlib(extra: str) -> Any:
    """Import matplotlib, or say which extra it belongs to."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"a report needs matplotlib: pip install 'pb-kvcache[{extra}]'") from error
    return matplotlib


def write_page(text: str, folder: str | os.PathLike[str]) -> Path:
    """Write ``index.html`` into a folder, and return its path. The folder is made where there is none."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    path = path / "index.html"
    with replacing(path) as file:
        file.write(text.encode("utf-8"))
    return path


def escape(text: str) -> str:
    """Return text as HTML shows it."""
    return html.escape(printable(text))


def document(
    title: str, facts: Iterable[tuple[str, str]], parts: Iterable[str], plots: Iterable[Plot], last: str, made: str
) -> str:
    """Return a page.

    Parameters
    ----------
    title
        Its title.
    facts
        What it is about, by name.
    parts
        Sections in HTML, before the plots.
    plots
        In their order.
    last
        A section in HTML, after the plots.
    made
        What made it, in HTML.
    """
    drawn = list(plots)
    figures = [_figure(plot, number) for number, plot in enumerate(drawn)]
    body = "\n".join([*parts, *figures, last])
    lines = max((len(plot.lines.all) for plot in drawn), default=0)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_allowed()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style(lines)}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{_terms(facts)}\n{body}\n</main>\n<footer>{made}</footer>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _allowed() -> str:
    """Return what a page may do: run its own script, and fetch nothing."""
    own = base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; img-src data:"


def made_by(command: str, machine: Mapping[str, Any]) -> str:
    """Return what made a page, as HTML."""
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    return f"Made by <code>{escape(command)}</code> with {escape(words)}."


def section(title: str, content: str) -> str:
    """Return a section whose content is HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def points(sentences: Iterable[str]) -> str:
    """Return sentences as a list."""
    lines = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>\n{lines}\n</ul>"


def _terms(terms: Iterable[tuple[str, str]]) -> str:
    rows = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in terms)
    return f"<dl>\n{rows}\n</dl>"


def columns(head: Iterable[tuple[str, str]]) -> str:
    """Return what the columns of tables mean. A column without a meaning needs none."""
    terms = {name: meaning for name, meaning in head if meaning}
    return f"<details open>\n<summary>What the columns mean</summary>\n{_terms(terms.items())}\n</details>"


def table(caption: str, head: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    """Return a table in a box that scrolls: titles, whose meanings :func:`columns` lists, and :func:`table_row` s."""
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in head)
    # What scrolls has to take the keyboard's focus, and what takes it needs a name.
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><caption><span>{escape(caption)}</span></caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def table_row(name: str, colour: str, cells: Iterable[str], best: bool) -> str:
    """Return a row: a name with its colour in the plots, and cells that are HTML."""
    first = f'<th scope="row"><i style="background: {variable(colour)}"></i>{escape(name)}</th>'
    return f"<tr{' class=best' if best else ''}>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _figure(plot: Plot, number: int) -> str:
    """Return a plot with its legend, whose boxes show and hide lines."""
    names = [line.name for line in plot.lines.all]
    choices = "\n".join(
        f'<label><input type="checkbox" class="pick-{index}" autocomplete="off"'
        f"{' checked' if line.name in plot.lines.first else ''}>{_key(line)}{escape(line.name)}</label>"
        for index, line in enumerate(plot.lines.all)
    )
    panels = "\n".join(
        _panel(panel, f"pb_kvcache-{number}-{index}", names.index(panel.line) if panel.line else None)
        for index, panel in enumerate(plot.panels)
    )
    at_most = f"Shown: choose up to {MOST}" if len(names) > MOST else "Shown"
    return (
        f"<figure>\n<h2>{escape(plot.title)}</h2>\n<figcaption>{escape(plot.caption)}</figcaption>\n"
        f'<fieldset>\n<legend>{at_most}</legend>\n{choices}\n<div class="panels">\n{panels}\n</div>\n</fieldset>\n'
        "</figure>"
    )


def _key(line: Line) -> str:
    """Return a short stretch of a line, as a legend shows it."""
    dashes = " ".join(f"{2 * length:g}" for length in line.dashes)
    dashed = f"; stroke-dasharray: {dashes}" if dashes else ""
    look = f"stroke: {variable(line.colour)}; stroke-width: {1.5 * line.width:g}{dashed}"
    return f'<svg class="key" aria-hidden="true" viewBox="0 0 27 11"><path d="M0 6h27" style="{look}"/></svg>'


def _panel(panel: Panel, salt: str, line: int | None) -> str:
    drawing = svg(panel.figure, f"{panel.title}. {panel.says}" if panel.title else panel.says, salt)
    title = f"<h3>{escape(panel.title)}</h3>\n" if panel.title else ""
    of_line = "" if line is None else f" of-{line}"
    return f'<div class="panel{of_line}">\n{title}{drawing}\n</div>'
