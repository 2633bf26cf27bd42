"""A matplotlib figure as a part of a page: in the page's colours, its lines in groups that a style sheet hides."""

from __future__ import annotations

import html
import io
import re
import warnings
from typing import TYPE_CHECKING, Any

from .._text import printable
from ._colours import variable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg(figure: Figure, says: str, salt: str) -> str:
    """Return a figure as an SVG element.

    Parameters
    ----------
    says
        What is read to who does not see it.
    salt
        Another one for every figure of a page, so that no two elements have the same id.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # Text as text: smaller, and sharp at every size. A fixed salt and no date: the same results, the same bytes.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}
    with rc_context(options), warnings.catch_warnings():
        # A name in letters that matplotlib's fonts lack: the page's reader has fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue().decode("utf-8")
    (box,) = re.findall(r'viewBox="([^"]*)"', text)
    inside = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    label = html.escape(printable(says))
    return f'<svg role="img" aria-label="{label}" viewBox="{box}">{_cleaned(inside)}</svg>'


def _cleaned(inside: str) -> str:
    """Return a drawing without what is of no use, or does harm, inside a page."""
    inside = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inside, flags=re.DOTALL)
    inside = re.sub(r"<style[^>]*>.*?</style>", "", inside, flags=re.DOTALL)  # it holds for the whole page
    inside = re.sub(r"(fill|stroke): (#[0-9a-f]{6})\b", lambda m: f"{m[1]}: {variable(m[2])}", inside)
    inside = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", inside)  # the page's fonts
    inside = re.sub(r'id="(line-\d+)"', r'class="\1"', inside)
    used = {*re.findall(r'href="#([^"]+)"', inside), *re.findall(r"url\(#([^)]+)\)", inside)}
    inside = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", inside)
    return re.sub(r"\s*\n\s*", "\n", inside)
