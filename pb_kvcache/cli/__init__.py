"""The command line ``pb-kvcache``: a subcommand per module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import bench, budget, plan, record, vectors

#: Modules with ``register(subparsers)``, which adds a subcommand and sets ``run``: a function from the parsed
#: arguments to an exit status. In the order of the help text.
_COMMANDS = (budget, bench, plan, record, vectors)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0, or 2 for bad input, with one line on standard error."""
    parser = argparse.ArgumentParser(prog="pb-kvcache", description="Budget and evict a decoder's KV cache.")
    parser.add_argument("--version", action="version", version=f"pb-kvcache {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pb-kvcache: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return status
