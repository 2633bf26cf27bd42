"""What both reports have: at most four lines at first, colours for both modes, plots told in sentences."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from pb_kvcache import _policies
from pb_kvcache.lab import _colours, bench, evaluation_page, page, traces
from pb_kvcache.lab._evaluation_plots import plots as evaluation_plots
from pb_kvcache.lab._panels import MOST, Line, Lines
from pb_kvcache.lab._plots import plots as bench_plots
from pb_kvcache.lab.verdict import summarise

from .evaluation_rows import run
from .html_page import Page

pytest.importorskip("matplotlib", reason="needs the plot extra")

POLICIES = ["full", "sliding_window", "h2o", "tova", "snapkv", "pyramidkv:1", "pyramidkv:4", "pyramidkv:1/4"]
ROWS = run({f"v{n}": 1 + n / 20 for n in range(10)}, ("16", "50%"), prompts=8, kinds=["prose"])


@pytest.fixture(scope="module")
def results() -> bench.Results:
    return bench.run(traces.funnel(3, 60), [12, 20], POLICIES)


@pytest.fixture(scope="module")
def texts(results: bench.Results) -> list[str]:
    return [page.page(results, "x"), evaluation_page.page(ROWS, summarise(ROWS), "x")]


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_black_on_white_has_the_known_contrast() -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_and_words_stand_out_from_the_page(dark: bool) -> None:
    def shown(colour: str) -> str:
        return _colours.DARK[colour] if dark else colour

    ground = shown(_colours.PAPER)
    for colour in (_colours.INK, _colours.QUIET):
        assert _contrast(shown(colour), ground) >= 4.5
    lines = {colour for row in _policies.ROWS.values() for colour in row.colours} | {*_colours.LINES}
    for colour in lines | {*_policies._INVERTED, _colours.UNIFORM}:
        assert _contrast(shown(colour), ground) >= 3, colour
    assert _contrast(_colours.IMAGE, ground) >= 3


def test_a_colour_without_a_dark_one_is_refused() -> None:
    with pytest.raises(ValueError, match="colour = '#123456': has no dark one"):
        _colours.variable("#123456")


def test_the_first_four_are_the_most_telling_that_there_are() -> None:
    lines = Lines([Line(name, "#000000") for name in "abcdef"], ["z", "f", "a", "f", "b", "c", "d"])
    assert lines.first == ["f", "a", "b", "c"]


def test_four_lines_are_shown_and_all_can_be_chosen(results: bench.Results, texts: list[str]) -> None:
    made = [*bench_plots(results), *evaluation_plots(ROWS, summarise(ROWS))]
    boxes = [box for text in texts for box in Page(text).all("input")]
    assert len(boxes) == sum(len(plot.lines.all) for plot in made)
    assert [sum("checked" in box for box in Page(text).all("input")) for text in texts] == [
        sum(len(plot.lines.first) for plot in made[:5]),
        sum(len(plot.lines.first) for plot in made[5:]),
    ]
    for plot in made:
        assert len(plot.lines.first) == min(MOST, len(plot.lines.all))
    assert {line.name for line in made[0].lines.all} == {_policies.label(policy) for policy in POLICIES}
    for text in texts:
        for number in {box["class"].removeprefix("pick-") for box in Page(text).all("input")}:
            assert f".pick-{number}:checked" in text


def test_every_plot_is_told_with_its_figures(results: bench.Results, texts: list[str]) -> None:
    best = max(results.at(12), key=lambda r: r.retained_mass if r.budget else 0)
    told = Page(texts[0]).pictures()
    assert f"At 12 positions a layer {_policies.label(best.policy)} has the most, {best.retained_mass:.3f}" in told[0]
    pyramid = next(r for r in results.at(20) if r.policy == "pyramidkv:4")
    first, last = (pyramid.per_layer[layer].budget for layer in (0, -1))
    assert any(f"PyramidKV 4 keeps {first} positions in layer 0 and {last} in the last" in words for words in told)
    summary = summarise(ROWS)
    told += Page(texts[1]).pictures()
    assert len(told) > 15
    assert all(re.search(r"\d", words.partition(". ")[2]) for words in told)
    assert any(f"full cache scores {summary.reference('retrieval').score.text()}" in words for words in told)  # type: ignore[union-attr]


def test_a_page_allows_its_own_script_and_nothing_else() -> None:
    text = evaluation_page.page([], summarise([]), "x")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(meta["content"] for meta in Page(text).all("meta") if "http-equiv" in meta)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; img-src data:"
