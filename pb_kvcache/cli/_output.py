"""How the subcommands write: tables that no terminal cuts, and an output that may be closed, full or ASCII."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

#: A terminal that is narrower, or says so, gets lines of this width.
_NARROWEST = 80
#: Lines in a file or a pipe.
_PIPED = 120


class _Console(Console):
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
