"""A C comment of the public headers as reStructuredText.

The headers keep to a few forms. Text at the margin is a paragraph. Indented lines are a list with ``-`` or ``1.``, rows
of names with what is said of each, or else code: samples and tables are shown as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BULLET = re.compile(r"(-|\d\.) +")
_ROW = re.compile(r"(?P<names>[\w.*]+(?:, [\w.*]+)*)(?:  +(?P<said>.*))?")


def to_rst(comment: str, known: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a comment in reStructuredText.

    Parameters
    ----------
    comment
        The comment with its marks.
    known
        The role that refers to a declared name, such as ``c:func``, or to a header: ``ref``.
    """
    first, *rest = comment.removeprefix("/*").removesuffix("*/").rstrip().splitlines()
    starred = all(line.lstrip().startswith("*") for line in rest)
    rest = [re.sub(r"^\s*\* ?", "", line) if starred else line.strip() for line in rest]
    yield from _blocks([first.strip(), *rest], known)


def _blocks(lines: list[str], known: dict[str, str]) -> Iterator[str]:
    for block in _split(lines):
        if block[0][:1] != " ":
            yield _inline(" ".join(block), known)
        else:
            yield from _indented(_dedent(block), _indent(block), known)
        yield ""


def _split(lines: list[str]) -> Iterator[list[str]]:
    """Yield runs of lines that are all at the margin, or all indented."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or (line[0] == " ") != (block[0][0] == " ")):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _indented(lines: list[str], indent: int, known: dict[str, str]) -> Iterator[str]:
    entries = list(_entries(lines))
    if all(_BULLET.match(entry[0]) for entry in entries):
        for entry in entries:
            mark = _BULLET.match(entry[0])
            assert mark
            first = entry[0][mark.end() :]
            body = list(_blocks([first, *_dedent(entry[1:])], known))
            yield from (f"{mark[1]} {body[0]}", *(" " * (len(mark[1]) + 1) + line for line in body[1:]))
        return
    rows = [_ROW.fullmatch(entry[0]) for entry in entries]
    if indent < 4 and all(row and not re.search(r"\S  +\S", row["said"] or "") for row in rows):
        for row, entry in zip(rows, entries, strict=True):
            assert row
            said = " ".join([row["said"] or "", *entry[1:]])
            yield from (
                ", ".join(_name(name, known) for name in row["names"].split(", ")),
                f"   {_inline(said, known)}",
            )
        return
    yield from (".. code-block:: c", "   :force:", "", *("   " + line for line in lines))


def _entries(lines: list[str]) -> Iterator[list[str]]:
    """Yield each line that begins at the margin with the deeper ones that follow it."""
    entry: list[str] = []
    for line in lines:
        if entry and line[0] != " ":
            yield entry
            entry = []
        entry.append(line)
    yield entry


def _name(name: str, known: dict[str, str]) -> str:
    return _inline(name, known) if name in known else f"``{name}``"


def _inline(text: str, known: dict[str, str]) -> str:
    """Return a text with declared names as references, code between backticks as such, and nothing else as markup."""
    parts = re.split(r"`([^`]*)`", " ".join(text.split()))
    return "".join(f"``{part}``" if number % 2 else _escaped(part, known) for number, part in enumerate(parts))


def _escaped(text: str, known: dict[str, str]) -> str:
    def word(found: re.Match[str]) -> str:
        role = known.get(found[0])
        if role is None:
            return re.sub(r"([\\*`|_<>])", r"\\\1", found[0])
        return f"\\ :{role}:`{found[0]}`\\ " if role != "ref" else f"\\ :ref:`c-{found[0].replace('.', '-')}`\\ "

    return re.sub(r"\w+\.h\b|\w+|\W+", word, text)


def _indent(lines: list[str]) -> int:
    return min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)


def _dedent(lines: list[str]) -> list[str]:
    common = _indent(lines)
    return [line[common:] for line in lines]
