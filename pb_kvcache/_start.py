"""Ctrl-C while the program ``pb-kvcache`` is still importing: status 130, and no traceback.

The imports take some tenths of a second, before ``main`` can catch anything. They begin with this module, which changes
nothing in any other program. A handler that ends the process serves better than an exception, which some of the
imported modules would swallow or print.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys

_SCRIPTS = ("pb-kvcache", "pb-kvcache.exe", "pb-kvcache-script.py")
_MODULES = ("pb_kvcache", "pb_kvcache.cli")


def is_program() -> bool:
    """Return whether this process was started as the program: by its script, or by ``python -m``.

    By the words that the interpreter was started with. Worker processes are told another ``sys.argv``, but have their
    own of these.
    """
    words = sys.orig_argv
    if any(first == "-m" and second in _MODULES for first, second in itertools.pairwise(words)):
        return True
    script = getattr(sys, "argv", [""])[0]
    return os.path.basename(script) in _SCRIPTS and script in words  # noqa: PTH119 - pathlib takes its time


def _end(number: int, frame: object) -> None:
    os._exit(130)


def _begin() -> None:
    """End the process where it is interrupted from now on, if it is the program."""
    if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _end)


def ready() -> None:
    """Let an interrupt raise KeyboardInterrupt again: ``main`` is there to catch it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()
