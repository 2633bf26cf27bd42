"""The parts of a report: one HTML file, plots inside, nothing to fetch."""

from __future__ import annotations

import base64
import html
import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import replacing
from .._text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def document(title: str, facts: Iterable[tuple[str, str]], parts: Iterable[str], made: str) -> str:
    """Return a page: its title, facts by name, parts in HTML, and the note that says what made it (HTML, too)."""
    rows = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<dl>\n{rows}\n</dl>\n{body}\n<p class="note">{made}</p>\n</body>\n</html>\n'
    )


def made_by(command: str, machine: dict[str, Any]) -> str:
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


def table(caption: str, head: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    """Return a table: titles with what a pointer shows of them, and rows as :func:`table_row` makes them."""
    titles = "".join(f'<th title="{escape(tip)}">{escape(name)}</th>' for name, tip in head)
    return (
        f"<div class=wide><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def table_row(name: str, colour: str, cells: Iterable[str], best: bool) -> str:
    """Return a row: a name with its colour in the plots, and cells that are HTML."""
    first = f'<td><i style="background:{colour}"></i>{escape(name)}</td>'
    return f"<tr{' class=best' if best else ''}>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def picture(title: str, caption: str, figure: Figure) -> str:
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
        f"<figure><h2>{escape(title)}</h2><div class=wide>"
        f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


_STYLE = """:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .93rem; margin: 0; }
dt { color: #666; } dd { margin: 0; }
section, figure { margin: 2.2rem 0; padding: 0; }
img { width: 100%; min-width: 44rem; height: auto; }
figcaption, .note { color: #555; font-size: .9rem; max-width: 52rem; }
.wide { overflow-x: auto; }
table { margin: 1rem 0 1.8rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: right; padding: .28rem .55rem; border-bottom: 1px solid #e6e6e6; white-space: nowrap; }
th { font-weight: 600; color: #555; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td small { color: #777; }
td i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .5em; }
tr.best td:nth-child(2) { font-weight: 700; }
code { background: #f4f4f4; padding: .1rem .3rem; border-radius: 3px; overflow-wrap: anywhere; }
li { margin: .35rem 0; }
"""
