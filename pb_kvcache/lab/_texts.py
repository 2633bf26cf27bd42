"""Texts to record, by name: a file each, or several in one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from .._text import printable, read_json
from ._prompt_file import read_text

__all__ = ["file_names", "read_texts"]


def read_texts(paths: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Return the texts of files, by name.

    A file is a text, called by its name without suffix. A ``.jsonl`` file has a text a line: an object with ``text``,
    and maybe ``name``. Without a name the text is called by the file's and the line's number.

    Raises
    ------
    OSError
        A file cannot be read.
    ValueError
        It is empty or no text in UTF-8, a line of it is no such object, or two texts have one name.
    """
    texts: dict[str, str] = {}
    for path in map(Path, paths):
        found = _lines(path) if path.suffix == ".jsonl" else [(path.stem, read_text(path))]
        for name, text in found:
            if name in texts:
                raise ValueError(f"text = {printable(os.fspath(path))}: a second text is called {printable(name)}")
            texts[name] = text
    return texts


def _lines(path: Path) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"text = {printable(os.fspath(path))}: line {number}"
        try:
            value = read_json(line.encode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str) or not value["text"].strip():
            raise ValueError(f'{where}: must be a JSON object whose "text" is a text, and not empty')
        name = value.get("name", f"{path.stem}-{number}")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f'{where}: "name" = {name!r}: must be a text, and not empty')
        found.append((name, value["text"]))
    return found


def file_names(names: Iterable[str]) -> list[str]:
    """Return a trace file's name for each text: what may be in any file's name stays.

    Raises
    ------
    ValueError
        Two texts would have one file.
    """
    files: list[str] = []
    text_of: dict[str, str] = {}
    for name in names:
        file = (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "text") + ".npz"
        # Some systems do not tell capitals from small letters.
        if (other := text_of.setdefault(file.lower(), name)) is not name:
            raise ValueError(f"text: {printable(other)} and {printable(name)} would be one file, {file}")
        files.append(file)
    return files
