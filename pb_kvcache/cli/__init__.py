"""The command line ``pb-kvcache``: a subcommand per module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from .._text import one_line, printable
from . import bench, budget, calibrate, evaluate, plan, record, vectors
from ._output import complete, say

#: Modules with ``register(subparsers)``, which adds a subcommand and sets ``run``: a function from the parsed
#: arguments to an exit status. In the order of the help text.
_COMMANDS = (budget, bench, calibrate, evaluate, plan, record, vectors)


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0, or 2 for bad input, with one line on standard error.

    130 where the user interrupts it. Whoever stops reading the output has read enough: 0.
    """
    parser = _Parser(prog="pb-kvcache", description="Budget and evict a decoder's KV cache.")
    parser.add_argument("--version", action="version", version=f"pb-kvcache {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(subparsers)
    args = parser.parse_args(argv)
    try:
        with complete():
            status: int = args.run(args)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        message = one_line(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
            message = f"{error.filename}: {error.strerror}"  # without Python's [Errno 2]
        if sys.stderr is not None:  # print() would take standard output for it
            say(f"pb-kvcache: {message}", sys.stderr)
        return 2
    return status
