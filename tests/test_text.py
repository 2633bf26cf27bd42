"""Text from files and arguments: shown and never obeyed, and JSON that every reader takes."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import cli, plan
from pb_kvcache._text import one_line, printable, read_json, write_json
from pb_kvcache.lab import bench, page, traces

#: Escape sequences, line ends, a mark that turns the direction, a lone surrogate, markup, an emoji code, math, HTML.
EVIL = "\x1b[31mred\x07\r\n\u2028\x9b2J\u202e \ud800 [bold red]x[/] :smile: $x^2$ <b>&amp;"
SHOWN = r"\x1b[31mred\x07\r\n\u2028\x9b2J\u202e \ud800 [bold red]x[/] :smile: $x^2$ <b>&amp;"
#: What no file system's name may hold is left out.
NAME = EVIL.replace("/", "")
NAMED = SHOWN.replace("/", "")


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.npz"
    about = {"about": EVIL, "model": {"source": EVIL, "licence": EVIL}, EVIL: EVIL}
    traces.save(path, traces.pack(EVIL, np.full((2, 20, 20), 1 / 20), about))
    return str(path)


def test_what_has_no_shape_is_shown_as_an_escape_and_all_else_as_it_is() -> None:
    assert printable(EVIL) == SHOWN
    for text in ("", "Zürich 東京\u3000\xa0→ µs", "\\x1b", "👍"):
        assert printable(text) == text
    assert printable("".join(map(chr, [0, 8, 9, 10, 13, 27, 127, 155]))).isprintable()


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("two\nlines \x1b[2J")) == r"two lines \x1b[2J"
    assert one_line(MemoryError()) == "MemoryError"


def test_a_trace_with_any_name_is_saved_and_loaded_as_it_was(trace: str) -> None:
    loaded = traces.load(trace)
    assert loaded.name == EVIL
    assert loaded.metadata["about"] == loaded.metadata[EVIL] == EVIL


BENCH = ("--budgets", "8", "--policies", "tova,snapkv")


def test_a_traces_name_does_nothing_to_the_terminal(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("COLUMNS", "300")
        assert cli.main(["bench", "--trace", trace, *BENCH]) == 0
    out = capsys.readouterr().out
    assert f"{SHOWN}: 2 layers" in out
    assert set(re.findall(r"\x1b[^m]*m", out)) <= {"\x1b[1m", "\x1b[0m", "\x1b[1;3m", "\x1b[3m"}
    assert "\x9b" not in out


def test_a_traces_name_reaches_json_whole(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--trace", trace, *BENCH, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    document = strict(out)
    assert document["trace"] == document["metadata"]["about"] == document["runs"][0]["trace"] == EVIL


def test_a_traces_name_and_metadata_are_plain_text_on_the_page(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    assert cli.main(["bench", "--trace", trace, *BENCH, "--report", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r" / "index.html").read_text(encoding="utf-8")
    assert text.count(SHOWN.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")) >= 6
    assert "<b>" not in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\x1b" not in capsys.readouterr().out


def test_a_plans_name_is_plain_text_in_tables_plots_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    # A surrogate of this kind is what Python makes of a name that is not UTF-8.
    name = NAME.replace("\ud800", "\udcff").replace(":", "").replace(",", "") + "東.json"
    shown = NAMED.replace(r"\ud800", r"\udcff").replace(":", "").replace(",", "") + "東.json"
    try:
        (tmp_path / name).write_text(json.dumps(plan(4, 12, ratio=3, minimum=10).to_dict()))
    except OSError:
        pytest.skip("no such names on this file system")
    policy = f"plan:{tmp_path / name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        assert cli.main(["bench", "--trace", "funnel-flat", "--policies", "snapkv", "--budgets", "12"]) == 0
        capsys.readouterr()
        results = bench.run(traces.funnel(4, 100), policies=["full", "snapkv", policy])
        cli.bench.show(results)
    assert f"SnapKV, {shown}" in capsys.readouterr().out
    text = page.page(results, "x")
    assert "SnapKV, " + shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    trees = [ET.fromstring(picture.replace("xlink:", "")) for picture in pictures]
    told = [tree.get("aria-label") or "" for tree in trees]
    assert sum(f"SnapKV, {shown}" in one for one in told) >= 5  # a plot each, at least


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--trace", NAME),
        ("bench", "--trace", f"{NAME}.npz"),
        ("bench", "--policies", f"plan:{NAME}"),
        ("bench", "--policies", NAME),
        ("bench", "--budgets", NAME),
        ("plan", "--layers", "2", "--budget", "9", "--weights", NAME),
        ("plan", "--layers", "2", "--memory", NAME),
        ("plan", "--model", NAME, "--budget", "9"),
        ("record", "--model", NAME, "--text", NAME, "-o", "x"),
        ("record", "--model", NAME, "--text", NAME, "-o", f"{NAME}.npz"),
        ("vectors", NAME),
    ],
)
def test_a_refusal_shows_what_it_refuses(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err[:-1].isprintable()


@pytest.mark.parametrize("arguments", [(EVIL,), ("budget", "--layers", "4", EVIL), ("vectors", "a", EVIL)])
def test_a_command_line_that_is_wrong_is_shown(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err[:-1].isprintable()


def test_a_vectors_name_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "v.json").write_text(json.dumps({"kind": "pyramid_budget", "cases": [{"name": EVIL}]}))
    assert cli.main(["vectors", str(tmp_path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"v.json: {SHOWN}: ")
    assert last == "0 passed, 1 failed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e400", "the number: must be finite as a double"),
        ('{"a": {"b": [1, -1e999]}}', r"a\.b\[1\]: must be finite as a double"),
        ("[NaN]", "not JSON: NaN is none of its values"),
        ("-Infinity", "not JSON: -Infinity is none of its values"),
        ("", "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON: Exceeds the limit"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_where_it_is_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_json(text)


def test_what_is_written_is_strict() -> None:
    assert strict(write_json({"a": [1.5, None, "\ud800"]})) == {"a": [1.5, None, "\ud800"]}
    with pytest.raises(ValueError, match="JSON"):
        write_json([float("inf")])


def test_a_plan_and_weights_with_infinities_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    path.write_text("[1, 1e400]")
    for arguments, said in (
        (["plan", "--layers", "2", "--budget", "9", "--weights", str(path)], f"--weights {path}: [1]: must be finite"),
        (["bench", "--policies", f"plan:{path}"], f"{path}: not a plan: [1]: must be finite as a double"),
    ):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err


def test_a_replay_that_took_no_time_has_no_rate() -> None:
    (report,) = bench.run(traces.funnel(1, 20), [10], ["tova"]).reports
    assert dataclasses.replace(report, seconds=0.0).to_dict()["steps_per_second"] is None
