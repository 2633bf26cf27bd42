"""What the documents show runs, and prints what they say.

Of README.md and docs/*.md: ``python`` blocks run in order in one namespace per document; ``c`` blocks are compiled and
run; in ``console`` blocks every ``$ pb-kvcache`` line is run. A ``text`` block after a program, and what follows a
command, is what it prints. Words after the language name modules that the block needs (``python torch transformers``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pb_kvcache import cli

from .conftest import ROOT, Run

GENERATE = ROOT / "examples" / "generate.py"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    needs: list[str]
    text: str
    prints: str | None  # of the text block right after it


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = list(re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    listed = []
    for block, following in itertools.zip_longest(found, found[1:]):
        between = text[block.end() : following.start()].strip() if following is not None else None
        prints = following[3] if following is not None and following[1] == "text" and not between else None
        line = text.count("\n", 0, block.start()) + 1
        listed.append(Block(document, line, block[1], block[2].split(), block[3], prints))
    return listed


ALL = [block for document in DOCUMENTS for block in blocks(document)]


def identify(block: Block | Path) -> str:
    return block.name if isinstance(block, Path) else f"{block.document.name}:{block.line}"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if any(b.language == "python" for b in blocks(d))], ids=identify
)
def test_python_runs_and_prints_what_is_shown(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.language != "python":
            continue
        if not all(importlib.util.find_spec(module) for module in block.needs):
            continue  # the other blocks stand without it
        printed = io.StringIO()
        code = compile("\n" * block.line + block.text, str(block.document), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.prints is not None:
            assert lines(printed.getvalue()) == lines(block.prints), identify(block)


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "c"], ids=identify)
def test_c_compiles_runs_and_prints_what_is_shown(block: Block, tmp_path: Path, c_build: Path, run: Run) -> None:
    (tmp_path / "main.c").write_text(block.text)
    run(
        *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc' / 'include'}", tmp_path / "main.c"),
        *(c_build / "libpb_kvcache.a", "-o", tmp_path / "main"),
    )
    assert block.prints is not None, "say what it prints, in a text block after it"
    assert lines(run(tmp_path / "main").stdout) == lines(block.prints)


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "console"], ids=identify)
def test_commands_print_what_is_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for module in block.needs:
        pytest.importorskip(module)
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(command)
        assert words[0] == "pb-kvcache", f"{identify(block)}: only pb-kvcache is run here"
        assert cli.main(words[1:]) == 0
        assert lines(capsys.readouterr().out) == lines(shown), command


# The example of a real model is run in test_transformers_model.py, where that model is loaded.
@pytest.mark.parametrize("example", sorted({*(ROOT / "examples").glob("*.py")} - {GENERATE}), ids=identify)
def test_examples_run(example: Path, run: Run, tmp_path: Path) -> None:
    assert run(sys.executable, example, cwd=tmp_path).stdout
