"""Both reports in a headless Chromium: at two widths and in both modes nothing is cut and nothing complains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pb_kvcache.lab import bench, evaluation_page, page, traces
from pb_kvcache.lab.verdict import summarise

from .browser import Browser, browser
from .evaluation_rows import HEADER, run

pytest.importorskip("matplotlib", reason="needs the plot extra")

LONG = "a/long/path/without-any-place-to-break-it/" + "x" * 90 + ".json"
SHOWN = """
return [...document.querySelectorAll('figure')].map(figure => {
  const of = new Set();
  for (const e of figure.querySelectorAll('[class*="line-"], .panel[class*="of-"]'))
    if (e.getClientRects().length) for (const name of e.classList) of.add(name.match(/-(\\d+)$/)?.[1]);
  of.delete(undefined);
  return [...of].map(Number).sort((a, b) => a - b);
});
"""
CHECKED = """
return [...document.querySelectorAll('figure')].map(figure =>
  [...figure.querySelectorAll('input')].flatMap((box, number) => box.checked ? [number] : []));
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    about = {"about": LONG, "model": {"source": LONG}}
    trace = traces.pack(LONG, np.full((3, 60, 60), 0.01), about | {"kv_heads": 3, "head_dim": 64, "kv_bytes": 2})
    rows = run({LONG: 0.5, "pyramid:4": 1.2, "a": 0.4, "b": 0.3, "c": 1.1}, kinds=["prose", "code", LONG])
    results = bench.run(trace, [9, 20, 30])
    return {
        "bench": page.write(results, folder / "bench", f"pb-kvcache bench --trace {LONG}"),
        "evaluate": evaluation_page.write(rows, summarise(rows), folder / "evaluate", LONG, HEADER),
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["bench", "evaluate"])
def test_nothing_is_cut_and_the_console_is_empty(
    window: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    window.open(pages[name], width, dark)
    assert window.run("return innerWidth") == width
    assert window.run("return matchMedia('(prefers-color-scheme: dark)').matches") == dark
    assert window.cut() == []
    assert window.console() == []
    ground, ink = window.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    assert (ground, ink) == (
        ("rgb(21, 23, 26)", "rgb(228, 230, 233)") if dark else ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    )


def test_what_is_cut_is_found(window: Browser, tmp_path: Path) -> None:
    path = tmp_path / "cut.html"
    words = "word" * 40
    path.write_text(f"<!doctype html><title>x</title><link rel=icon href='data:,'><p>{words}</p>", encoding="utf-8")
    window.open(path, 360, False)
    assert any(words[:40] in found for found in window.cut())
    path.write_text("<!doctype html><title>x</title><script>console.error('seen')</script>", encoding="utf-8")
    window.open(path, 360, False)
    assert any("seen" in message for message in window.console())


@pytest.mark.parametrize("name", ["bench", "evaluate"])
def test_boxes_choose_lines_and_a_fifth_replaces_the_first(window: Browser, pages: dict[str, Path], name: str) -> None:
    window.open(pages[name], 1280, False)
    before = window.run(CHECKED)
    assert all(len(chosen) <= 4 for chosen in before)
    assert window.run(SHOWN) == before
    first, more = before[0][0], 1 + max(before[0])
    if name == "bench":
        more = next(number for number in range(10) if number not in before[0])
    window.run(f"document.querySelectorAll('figure')[0].querySelectorAll('input')[{more}].click()")
    after = window.run(CHECKED)
    assert after[0] == sorted({*before[0], more} - {first})
    assert after[1:] == before[1:]
    assert window.run(SHOWN) == after
