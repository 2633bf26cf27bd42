"""``pb-kvcache completion``: a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from ._output import print_text

SHELLS = ("bash", "zsh", "tcsh")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "completion",
        help="a script for the shell that completes commands and options",
        description="Print a script that completes commands, options and their values. Needs "
        "pip install 'pb-kvcache[completion]'.",
        examples=(
            "pb-kvcache completion bash > ~/.local/share/bash-completion/completions/pb-kvcache",
            "pb-kvcache completion zsh > ~/.zfunc/_pb-kvcache",
        ),
    )
    parser.add_argument("shell", choices=SHELLS, help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ImportError("completion needs shtab: pip install 'pb-kvcache[completion]'") from None
    for action in _options(args.parser):
        if action.type is Path or action.metavar in ("FILE", "DIR", "PATH"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    print_text(shtab.complete(args.parser, args.shell))
    return 0


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a parser and of its commands."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [option for command in action.choices.values() for option in _options(command)]
    return found
