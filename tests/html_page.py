"""A page as tests read it."""

from __future__ import annotations

import base64
import html.parser
import xml.etree.ElementTree as ET


class Page(html.parser.HTMLParser):
    """What a page refers to, and whether its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def check_pictures(self, count: int) -> None:
        """Check that the page refers to so many pictures and nothing else, and that all is inside of them."""
        assert len(self.references) == count
        for reference in self.references:
            assert reference.startswith("data:image/svg+xml;base64,")
            picture = ET.fromstring(base64.b64decode(reference.partition(",")[2]))
            links = [value for part in picture.iter() for name, value in part.attrib.items() if name.endswith("href")]
            assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
