"""Rows of a long measurement in a file of JSON lines, each written as it is done, so that a second run continues.

The first line is a header that says what was measured, and each line after it is one row. A line is written by one call
to the system, so that several processes may append, and whoever is interrupted loses the row in hand alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._text import read_json, write_json


class ProgressFile:
    """A file of JSON lines that is continued.

    Attributes
    ----------
    path
        Where it is.
    header
        Its first line.
    rows
        The rows that it held when it was opened.
    """

    def __init__(self, path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.header = header
        self.rows = rows

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, Any], same: Sequence[str]) -> ProgressFile:
        """Open a file to continue it, or begin it with a header. Its folder is made where there is none.

        Parameters
        ----------
        path
            The file.
        header
            What a new file begins with.
        same
            The header's members that a file must have alike to be continued.

        Raises
        ------
        OSError
            The file or folder cannot be read or written.
        ValueError
            The file is something else, damaged before its last line, or of another header: the message says which
            member differs. The file is left as it is.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # what follows was torn off when a run was ended
        if not whole:
            begun = write_json(dict(header)).encode() + b"\n"
            if content and not begun.startswith(content):
                raise ValueError(f"{path}: is no {header['format']}; choose another folder")
            path.write_bytes(begun)
            return cls(path, dict(header), [])
        lines = whole.splitlines()
        first = _line(path, 1, lines[0])
        if first.get("format") != header["format"]:
            raise ValueError(f"{path}: is no {header['format']}; choose another folder")
        for name in same:
            if first.get(name) != header[name]:
                raise ValueError(
                    f"{path}: was made with another {_difference(name, first.get(name), header[name])}; choose another "
                    "folder, or remove that one"
                )
        rows = [_line(path, number, line) for number, line in enumerate(lines[1:], start=2)]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        return cls(path, first, rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row at the end of the file."""
        append(self.path, row)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row at the end of a file that there is.

    Raises
    ------
    OSError
        There is no such file, or it cannot be written.
    """
    line = write_json(dict(row)).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        if os.write(file, line) < len(line):
            raise OSError(f"{path}: the disk is full")
    finally:
        os.close(file)


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = read_json(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: line {number}: must be a JSON object")
    return value


def _difference(name: str, found: Any, wanted: Any) -> str:
    """Return which member of two values differs, and how, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**found, **wanted}:
            if found.get(key) != wanted.get(key):
                return _difference(f"{name}.{key}", found.get(key), wanted.get(key))
    return f"{name}: {found!r}, and now it is {wanted!r}"
