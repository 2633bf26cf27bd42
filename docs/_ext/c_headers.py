"""The Sphinx directive that shows the C page."""

from __future__ import annotations

from c_page import page
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import build


class CHeaders(SphinxDirective):
    """``.. c-headers::``: the rules of every call, then a section for each header."""

    def run(self) -> list[nodes.Node]:
        """Return the parsed page, and make it anew where a header changes."""
        for header in (build.ROOT / build.INCLUDE).rglob("*.h"):
            self.env.note_dependency(str(header))
        return self.parse_text_to_nodes("\n".join(page()), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("c-headers", CHeaders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
