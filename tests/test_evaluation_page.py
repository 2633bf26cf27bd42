"""An evaluation's page: whole, harmless, with nothing to fetch, and N beside every figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache.lab import evaluation_page
from pb_kvcache.lab._estimate import change
from pb_kvcache.lab._evaluation_plots import _image, _mean_along, plots
from pb_kvcache.lab.verdict import summarise

from .evaluation_rows import HEADER, kl_rows, row, run
from .html_page import Page

pytest.importorskip("matplotlib", reason="needs the plot extra")


def page(rows: list[dict[str, Any]], header: dict[str, Any] | None = None) -> str:
    return evaluation_page.page(rows, summarise(rows), "pb-kvcache evaluate", header)


def test_the_page_stands_on_its_own(tmp_path: Path) -> None:
    rows = run({"plan.json output": 0.5, "pyramid:4": 1.2})
    summary = summarise(rows)
    path = evaluation_page.write(rows, summary, tmp_path / "new" / "folder", "pb-kvcache evaluate -o x", HEADER)
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]
    shown = Page(path.read_text(encoding="utf-8"))
    assert shown.open == []
    words = " ".join(shown.words)
    for sentence in summary.sentences():
        assert sentence in words
    for f in summary.figures:
        assert f.variant in words
        if f.difference is not None:
            assert change(f.difference) in words
    assert "pb-kvcache evaluate -o x" in words
    assert "tiny: what compression costs in answers" in words
    shown.check(figures=4)
    assert path.stat().st_size < 2_000_000


def test_the_same_rows_make_the_same_page() -> None:
    rows = run({"a": 0.5}, prompts=3)
    assert page(rows) == page(rows)


def test_every_panel_says_how_many_prompts_it_has() -> None:
    rows = run({"a": 0.5})
    titles = {plot.title: [panel.title for panel in plot.panels] for plot in plots(rows, summarise(rows))}
    assert titles["Gain over uniform budgets"] == [
        "all prompts (N 30)",
        "retrieval (N 10)",
        "text (N 20)",
        "text code (kind, N 10)",
        "text prose (kind, N 10)",
    ]
    assert titles["Scores"] == ["retrieval (N 10)"]
    assert titles["Divergence along the answer"] == ["budget 16 (N 30)", "budget 50% (N 30)"]
    assert titles["What was kept of one prompt"] == ["uniform", "a"]


def test_gains_are_drawn_upwards_with_their_intervals() -> None:
    rows = kl_rows([1.0, 2.0, 3.0], {"a": [0.5, 1.5, 2.0]})
    plot = next(plot for plot in plots(rows, summarise(rows)) if plot.title.startswith("Gain"))
    (panel,) = plot.panels
    (axis,) = panel.figure.axes
    difference = next(f.difference for f in summarise(rows).figures if f.variant == "a")
    assert difference is not None
    bar = axis.containers[0]
    assert bar.lines[0].get_ydata() == pytest.approx([2 / 3])
    (segment,) = bar.lines[2][0].get_segments()
    assert sorted(segment[:, 1]) == pytest.approx([-difference.high, -difference.low])
    assert "too few for a verdict" in panel.title


def test_the_mean_along_answers_of_several_lengths() -> None:
    assert _mean_along([[1.0, 2.0, 6.0], [3.0]]).tolist() == [2.0, 2.0, 6.0]


def test_a_strip_shows_where_positions_are_kept() -> None:
    image, middles = _image(row("p", tokens=4, kept=[[[0, 1], [3]], [[], [0, 1, 2, 3]]]))
    assert image.tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert middles == [1.0, 3.0]
    image, _ = _image(row("p", tokens=900, kept=[[[0, 1, 2, 3, 899]]]))
    assert image.shape == (1, 300)
    assert image[0, :2].tolist() == [1.0, pytest.approx(1 / 3)]
    assert image.sum() == pytest.approx(5 / 3)
    image, _ = _image(row("p", tokens=700, kept=[[list(range(700))]]))
    assert np.all(image == 1)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("text-0", "full", None)],
        [row("text-0")],
        [row("text-0", "a")],
        [row("text-0", kl=None), row("text-0", "a", kl=None)],
        [row("text-0", kl=[0.0]), row("text-0", "a", kl=[0.0])],
        [row("text-0", bytes=0), row("text-0", "a", bytes=0)],
        run({}, ("10%",), prompts=1),
        run({f"v{n}": 1 + n / 20 for n in range(30)}, ("4", "8", "16"), prompts=1, kinds=["a"]),
        [
            r
            for r in run({"a": 0.5})
            if r["variant"] == "uniform" or r["budget_asked" if r["budget"] else "task"] == "16"
        ],
    ],
    ids=["none", "full", "uniform", "other", "no KL", "no divergence", "no bytes", "single", "many", "torn"],
)
def test_every_run_makes_a_page(rows: list[dict[str, Any]]) -> None:
    assert Page(page(rows)).open == []


EVIL = "<script>alert(1)</script>&\x1b[31m$x$\u202e"


def test_words_of_files_and_models_do_not_become_markup() -> None:
    rows = run({EVIL: 0.5}, ("16",), prompts=8, kinds=[EVIL, "code"])
    for r in rows:
        r["prompt"] = EVIL + r["prompt"]
        if r["task"] == "retrieval":
            r["task"] = EVIL
    text = page(rows, {"model": {"name": EVIL}, "settings": {EVIL: [EVIL]}, "machine": {EVIL: EVIL}})
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert Page(text).open == []
    assert "".join(Page(text).words).count("<script>alert(1)</script>&") > 20


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pb-kvcache\[plot\]"):
        page([])
