"""A page as tests read it."""

from __future__ import annotations

import html.parser
import itertools
from collections import Counter

_VOID = ("meta", "img", "link", "br", "input")


class Page(html.parser.HTMLParser):
    """What a page refers to and says, and whether its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        #: Every tag with its attributes.
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.references += [v or "" for name, v in attrs if name in ("src", "href", "srcset", "data", "xlink:href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """Return the attributes of all tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]

    def pictures(self) -> list[str]:
        """Return what is said of each plot to who does not see it."""
        return [svg["aria-label"] for svg in self.all("svg") if svg.get("role") == "img"]

    def check(self, figures: int) -> None:
        """Check that the page has so many plots, fetches nothing, and can be read by ear and by keyboard."""
        assert self.open == []
        assert len(self.all("figure")) == figures
        assert all(reference.startswith(("#", "data:image/png;base64,", "data:,")) for reference in self.references)
        ids = Counter(attributes["id"] for _, attributes in self.tags if "id" in attributes)
        assert set(ids.values()) <= {1}
        assert self.all("html") == [{"lang": "en"}]
        levels = [int(name[1]) for name, _ in self.tags if name in ("h1", "h2", "h3")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        assert {header.get("scope") for header in self.all("th")} <= {"col", "row"}
        assert all("title" not in attributes for _, attributes in self.tags)
        for box in (attributes for _, attributes in self.tags if attributes.get("class") == "wide"):
            assert (box["tabindex"], box["role"]) == ("0", "region")
            assert box["aria-label"]
