"""``pb-kvcache vectors``: run the shared vectors with the installed module."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._text import one_line
from ..vectors import cases
from ._output import say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "vectors",
        help="run the shared vectors with the installed module",
        description="Run every vector file of a folder, or those installed with the package, and count the cases.",
        examples=("pb-kvcache vectors",),
    )
    parser.add_argument("dir", nargs="?", type=Path, metavar="DIR", help="folder of vector files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the vectors, and return 1 where a case fails."""
    passed = failed = 0
    for case in cases(args.dir):
        try:
            case.run()
            passed += 1
        except Exception as error:  # a case that breaks is a case that fails
            failed += 1
            say(f"{case.file}: {case.name}: {one_line(error)}")
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0
