"""The command line ``pb-kvcache``: a subcommand per module of this package."""

from __future__ import annotations

from collections.abc import Sequence

from .. import __version__, _start
from .._text import one_line
from . import bench, budget, calibrate, completion, evaluate, plan, record, vectors
from ._output import complain, complete
from ._parser import Parser
from ._stream import OutputError

#: Modules with ``register(subparsers)``, which adds a subcommand and sets ``run``: a function from the parsed
#: arguments to an exit status. In the order of the help text.
_COMMANDS = (budget, bench, calibrate, evaluate, plan, record, vectors, completion)


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="pb-kvcache",
        description="Budget and evict a decoder's KV cache. 'pb-kvcache COMMAND --help' tells of one command.",
        examples=("pb-kvcache bench", "pb-kvcache plan --layers 32 --budget 512"),
    )
    parser.add_argument("--version", action="version", version=f"pb-kvcache {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(subparsers)
    parser.set_defaults(parser=parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0, or 2 for bad input, with one line on standard error.

    130 where the user interrupts it. Whoever stops reading the output has read enough: 0.
    """
    try:
        with complete():
            _start.ready()
            args = make_parser().parse_args(argv)
            status: int = args.run(args)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        complain(f"pb-kvcache: {_message(error)}")
        return 2
    return status


def _message(error: BaseException) -> str:
    """Return what is said of an error: without the system's number for it, such as [Errno 2]."""
    if isinstance(error, OSError) and not isinstance(error, OutputError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return one_line(error)
