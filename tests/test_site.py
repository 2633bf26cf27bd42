"""The site of the documents: what it is made of is complete, and what it says of the C headers is what they say."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import pb_kvcache

from .conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*") if path.suffix in (".md", ".rst"))


@pytest.fixture(scope="module")
def c_page() -> Iterator[Any]:
    """Import the module that makes the C page as Sphinx does."""
    before = list(sys.path)
    sys.path[:0] = [str(DOCS / "_ext"), str(ROOT)]
    try:
        yield importlib.import_module("c_page")
    finally:
        sys.path[:] = before
        for name in ("c_page", "comment_text", "build"):
            sys.modules.pop(name, None)


def test_every_page_is_in_the_list_that_makes_the_contents() -> None:
    listed = re.findall(r"^- \[[^\]]*\]\(([\w/-]+\.(?:md|rst))\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    expected = {path.name for path in DOCS.glob("*.*") if path.suffix in (".md", ".rst")} - {"index.md"}
    assert sorted(listed) == sorted({*expected, "api/index.rst"})


def test_every_public_name_is_in_the_python_reference_once() -> None:
    shown = [
        name
        for page in ("plan", "select", "decode")
        for name in re.findall(
            r"^\.\. auto(?:class|function|exception):: (\w+)", (DOCS / f"api/{page}.rst").read_text(), re.M
        )
    ]
    assert sorted(shown) == sorted(set(pb_kvcache.__all__) - {"__version__"})


def test_every_public_module_has_its_page() -> None:
    shown = set(
        re.findall(r"automodule:: (pb_kvcache[\w.]*)", "".join(page.read_text() for page in (DOCS / "api").iterdir()))
    )
    public = {
        f"pb_kvcache.{'.'.join(path.relative_to(ROOT / 'pb_kvcache').with_suffix('').parts).removesuffix('.__init__')}"
        for folder in ("lab", "transformers", "lm_eval", "vectors", "openvino", "mlx")
        for path in (ROOT / "pb_kvcache").glob(f"{folder}/*.py")
        if folder == "lab" or path.name == "__init__.py"
    }
    public = {name for name in public if "._" not in name} | {"pb_kvcache.lab.traces"}
    assert public - shown == set(), "docs/api needs an automodule line for each"


def test_transformers_names_are_in_the_reference() -> None:
    pytest.importorskip("torch")
    module = importlib.import_module("pb_kvcache.transformers")
    text = (DOCS / "api" / "transformers.rst").read_text()
    assert sorted(re.findall(r"^\.\. auto(?:class|function):: (\w+)", text, re.M)) == sorted(module.__all__)


def test_every_exported_symbol_is_on_the_c_page(c_page: Any) -> None:
    known = c_page.names()
    symbols = (ROOT / "csrc" / "symbols.txt").read_text().split()
    assert set(symbols) - set(known) == set()
    page = "\n".join(c_page.page())
    for symbol in symbols:
        assert len(re.findall(rf"^\.\. c:(?:function|var):: .*\b{symbol}\b(?:\(|$)", page, re.M)) == 1, symbol


def test_a_comment_becomes_text_with_its_arguments_code_and_references(c_page: Any) -> None:
    region = """
/* Why `x`? See pb_two.
 *
 *   first, second  what is *read*
 *                  once
 *
 *     pb_one(1);    // a sample
 */
PB_KVCACHE_API int pb_one(int first,
                          int second);
typedef struct pb_two {
    int a; /* the first */
    /* before it */
    int (*b)(int c);
} pb_two;
"""
    (_, function, comments), (_, struct, _) = c_page.declared(region)
    assert " ".join(function["shown"].split()) == "int pb_one(int first, int second)"
    text = list(c_page.to_rst(comments[0], {"pb_two": "c:struct"}))
    assert text[0].replace("\\ ", "") == "Why ``x``? See :c:struct:`pb_two`."
    assert text[2:4] == ["``first``, ``second``", r"   what is \*read\* once"]
    assert text[-5:-1] == [".. code-block:: c", "   :force:", "", "   pb_one(1);    // a sample"]
    members = [(item.code, item.comments) for item in c_page.items(struct["body"])]
    assert members == [("int a", ["/* the first */"]), ("int (*b)(int c)", ["/* before it */"])]


def sections() -> list[tuple[str, dict[str, str]]]:
    """Return the measurements of the page of figures: their titles and what their lines say."""
    text = (DOCS / "figures.md").read_text(encoding="utf-8")
    found = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        body = body.partition("\n## ")[0]
        found.append((title, dict(re.findall(r"^- (\w+): (.*?)(?=\n- |\n*\Z)", body, re.MULTILINE | re.DOTALL))))
    return found


@pytest.mark.parametrize(("title", "lines"), sections(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_figure_stands_in_the_guide_that_it_is_linked_to(title: str, lines: dict[str, str]) -> None:
    assert list(lines) == ["Figures", "Command", "Machine", "Guide"]
    guide = re.search(r"\]\(([\w-]+\.md)#[\w-]+\)", lines["Guide"])
    assert guide
    number = re.compile(r"(?<![\w.])(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?(?![\w.]*\d)")
    there = set(number.findall((DOCS / guide[1]).read_text(encoding="utf-8")))
    names = re.sub(r"`[^`]*`|float32|bfloat16|KV", "", lines["Figures"])
    missing = [figure for figure in number.findall(names) if figure not in there]
    assert missing == [], f"docs/figures.md, {title}: not in docs/{guide[1]}"
