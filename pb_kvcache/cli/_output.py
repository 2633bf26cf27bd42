"""How the subcommands write: tables that no terminal cuts, lines, JSON and progress.

Names and messages come from files and arguments, which may hold anything. So this module alone prints, and it prints
text as :func:`pb_kvcache._text.printable` makes it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from .._text import printable, write_json
from ._stream import Stream

#: Lines in a file or a pipe, and in a terminal that is narrower or says so.
_NARROWEST = 80

_OUT, _ERR = Stream("stdout"), Stream("stderr")


class _Console(Console):
    """A console that takes all text as it is: no markup, no emoji codes, no numbers in colour, no control characters.

    With NO_COLOR it writes no escape sequence of any kind.
    """

    def __init__(self, stream: Stream, width: int | None = None) -> None:
        super().__init__(
            file=cast(IO[str], stream),
            width=width,
            markup=False,
            emoji=False,
            highlight=False,
            color_system=None if plain() else "auto",
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as Rich draws it, table cells and titles too."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        # Rich would end the program with status 1. Here, whoever stops reading has read enough.
        raise BrokenPipeError


def plain() -> bool:
    """Return whether the user asked for output without escape sequences: NO_COLOR is set, and not empty."""
    return bool(os.environ.get("NO_COLOR"))


def console() -> Console:
    """Return the console for standard output."""
    found = _Console(_OUT)
    return _Console(_OUT, max(found.width, _NARROWEST) if found.is_terminal else _NARROWEST)


def print_table(table: Table) -> None:
    """Print a table. Where the console is too narrow, further columns follow below, beside the first one's names.

    Where the first and one more are too wide, their lines run over: a number that is cut is another number.
    """
    target = console()
    wide = target.options.update(width=4096)
    for column in table.columns:
        column.overflow = "fold"  # what a column has no room for goes to the next line
        if column.no_wrap:  # which Rich would cut
            column.min_width = max(target.measure(cell, options=wide).maximum for cell in _cells(column))
    for number, part in enumerate(_parts(table, target)):
        if number:
            target.print()
        least = _least(part, target)
        (target if target.width >= least else _Console(_OUT, least)).print(part)


def _cells(column: Column) -> list[RenderableType]:
    return [column.header, *column.cells]


def _least(table: Table, target: Console) -> int:
    """Return the width without which a table is cut."""
    return target.measure(table, options=target.options.update(width=4096)).minimum


def _parts(table: Table, target: Console) -> Iterator[Table]:
    """Yield tables with some of the columns each, as many as there is room for, each with the first one."""
    first, *rest = range(len(table.columns))
    if len(rest) < 2 or _least(_columns(table, [first, rest[0]]), target) > target.width:
        yield table
        return
    while rest:
        count = len(rest)
        while count > 1 and _least(_columns(table, [first, *rest[:count]]), target) > target.width:
            count -= 1
        yield _columns(table, [first, *rest[:count]])
        rest = rest[count:]
        table = copy.copy(table)
        table.title = None  # it stands above all of them


def _columns(table: Table, chosen: list[int]) -> Table:
    part = copy.copy(table)
    part.columns = [dataclasses.replace(table.columns[one], _index=index) for index, one in enumerate(chosen)]
    return part


def say(text: object, file: IO[str] | None = None) -> None:
    """Print one line, to standard output unless `file` is standard error."""
    _stream(file).write(printable(text) + "\n")


def complain(text: object) -> None:
    """Print one line to standard error: nowhere where that is closed, and not among the results."""
    _ERR.write(printable(text) + "\n")


def print_text(text: str, file: IO[str] | None = None) -> None:
    """Print a text of the program's own, whose line ends are to stay. To `file` as for :func:`say`."""
    _stream(file).write(text.rstrip("\n") + "\n")


def _stream(file: IO[str] | None) -> Stream:
    return _ERR if file is not None and file is sys.stderr else _OUT


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON."""
    _OUT.write(write_json(value, indent) + "\n")


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Give the block a function of the steps that are done and of all, and show them on a terminal while it lasts.

    Nothing is drawn before the number of all steps is known, from `total` or from the first call. Nothing is drawn
    where standard error is no terminal.
    """
    errors = _Console(_ERR)
    if not errors.is_terminal:
        yield lambda done, total: None
        return
    line = _Line(what) if plain() or errors.is_dumb_terminal else _Bar(what, errors)
    if total is not None:
        line.show(0, total)
    try:
        yield line.show
    finally:
        line.end()


class _Bar:
    """A bar that Rich draws."""

    def __init__(self, what: str, target: Console) -> None:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=target, transient=True)
        self._task = self._progress.add_task(what, total=None)

    def show(self, done: int, total: int) -> None:
        """Show how many of how many steps are done."""
        self._progress.update(self._task, completed=done, total=total)
        self._progress.start()

    def end(self) -> None:
        """Remove it."""
        self._progress.stop()


class _Line:
    """One line that is written over, without escape sequences."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = ""

    def show(self, done: int, total: int) -> None:
        """Show how many of how many steps are done."""
        text = f"{self._what} {done}/{total}"
        if text != self._shown:
            _ERR.write("\r" + text.ljust(len(self._shown)))
            _ERR.flush()
            self._shown = text

    def end(self) -> None:
        """Remove it."""
        if self._shown:
            _ERR.write("\r" + " " * len(self._shown) + "\r")
            _ERR.flush()


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Flush standard output at the end of the block, so that a failure to write is raised there.

    A block that ends the program, as a help text does, is no other. Where it raises something else, that is said.
    """
    try:
        yield
    except SystemExit:
        _OUT.flush()
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            _OUT.flush()
        raise
    _OUT.flush()
