"""Links between the documents, and from them into the tree, lead somewhere. Nothing is fetched."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .conftest import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "vectors/README.md")),
    ROOT / "pb_kvcache" / "data" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def prose(document: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(document: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`(?!\])", "", prose(document))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Return the names by which a code host lets its headings be linked."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return {
        name if found[:at].count(name) == 0 else f"{name}-{found[:at].count(name)}" for at, name in enumerate(found)
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if "://" in link:
            parts = urlsplit(link)
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT), f"{link} leaves the tree"
        if anchor:
            assert anchor in anchors(target), link


def test_anchors_are_those_of_a_code_host(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `plan`, to *the* last_position\n```sh\n# no heading\n```\n## It's 2 x\n## It's 2 x\n")
    assert anchors(page) == {"a-plan-to-the-last_position", "its-2-x", "its-2-x-1"}
