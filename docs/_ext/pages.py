"""What the site makes of the Markdown pages, which stay as a code host shows them.

The table of contents is the list in ``index.md``: each of its headings is a part, each link to a page an entry.
Links to the C headers lead to the C page, to CHANGELOG.md to its page. Links to other files of the tree become
downloads, which MyST does by itself. Links to folders and to Markdown that is no page of the site become text.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)\)")


def contents(index: str) -> str:
    """Return the tables of contents that the list in ``index.md`` says, in MyST's words."""
    tables = []
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^- \[[^\]]*\]\(([\w/-]+)\.(?:md|rst)\)", part, re.MULTILINE)
        tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {part.splitlines()[0]}", "", *pages, "```"]))
    return "\n\n".join(tables)


def _for_the_site(app: Sphinx, document: str, source: list[str]) -> None:
    def link(found: re.Match[str]) -> str:
        text, path = found.groups()
        if header := re.fullmatch(r"csrc/include/pb_kvcache/(\w+)\.h", path):
            return f"[{text}](#c-{header[1]}-h)"
        if path == "CHANGELOG.md":
            return f"[{text}](changelog.rst)"
        return text if path.endswith(".md") or (app.srcdir.parent / path).is_dir() else found[0]

    source[0] = _LINK.sub(link, source[0])
    if document == "index":
        source[0] += "\n\n" + contents(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of it."""
    app.connect("source-read", _for_the_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
