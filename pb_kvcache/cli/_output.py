"""How the subcommands write: tables that no terminal cuts, and an output that may be closed, full or ASCII.

Names and messages come from files and arguments, which may hold anything. So this module alone prints, and it prints
text as :func:`pb_kvcache._text.printable` makes it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .._text import printable, write_json

#: A terminal that is narrower, or says so, gets lines of this width.
_NARROWEST = 80
#: Lines in a file or a pipe.
_PIPED = 120


class _Console(Console):
    """A console that takes all text as it is: no markup, no emoji codes, no control characters."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as Rich draws it, table cells and titles too."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        # Rich would end the program with status 1. Here, whoever stops reading has read enough.
        raise BrokenPipeError


def console() -> Console:
    """Return the console for standard output."""
    found = _Console()
    return _Console(width=max(found.width, _NARROWEST) if found.is_terminal else _PIPED)


def print_table(table: Table) -> None:
    """Print a table. Where the console is too narrow, its lines run over: a number that is cut is another number."""
    for column in table.columns:
        column.overflow = "fold"  # what a column has no room for goes to the next line
    target = console()
    least = target.measure(table, options=target.options.update(width=4096)).minimum
    (target if target.width >= least else _Console(width=least)).print(table)


def say(text: object, file: IO[str] | None = None) -> None:
    """Print one line, to standard output unless another file is given."""
    print(printable(text), file=file)


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON."""
    print(write_json(value, indent))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give the block a function of the steps that are done and of all, and show them on a terminal while it lasts.

    Nothing is drawn where standard error is no terminal.
    """
    errors = Console(file=sys.stderr)
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Flush standard output at the end of the block, so that a failure to write is raised there."""
    if hasattr(sys.stdout, "reconfigure"):  # None where standard output is closed
        sys.stdout.reconfigure(errors="replace")  # bars and micro signs are not worth an error
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # What is still buffered would fail once more when the interpreter ends.
        with contextlib.suppress(OSError, ValueError):  # no file at all, in a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
