"""Dividing independent native calls, which release the GIL, among a few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: How often an interrupted caller looks whether its helpers have ended their calls, in seconds.
_POLL = 0.001


def in_threads(calls: Sequence[Callable[[], _T]], threads: int, *, whole: bool = False) -> list[_T]:
    """Make the calls on up to `threads` threads, the caller's among them, and return what they return, in order.

    Each thread takes the next call that nobody has taken, so that a thread that starts late or shares its core costs
    little: of two threads the second often starts half a millisecond later, when a small call is already done.

    Parameters
    ----------
    calls, threads
        The calls, and how many threads.
    whole
        Whether an interrupt (Ctrl-C) waits for all calls. Python delivers it to the main thread, between any two of
        its operations. So that it cannot fall into a call, the main thread makes none of several, and helpers do.

    Raises
    ------
    BaseException
        What the first of the calls that raise, in their order, has raised. The calls after it may not have been made.
    KeyboardInterrupt
        After an interrupt. It takes precedence over what calls raise. When it is raised, no call is in progress and
        none will be made any more. With `whole` all have been made, or none.
    """
    results: list[_T | None] = [None] * len(calls)
    raised: dict[int, BaseException] = {}
    lock = threading.Lock()
    taken = 0
    running = 0  # calls of helpers in progress
    stopped = False

    def take() -> int | None:
        """Return the number of the next call. The caller holds the lock."""
        nonlocal taken
        if stopped or raised or taken == len(calls):
            return None
        taken += 1
        return taken - 1

    def work() -> None:
        while True:
            with lock:
                number = take()
            if number is None:
                return
            try:
                results[number] = calls[number]()
            except BaseException as error:
                raised[number] = error

    def help_out() -> None:
        nonlocal running
        while True:
            with lock:
                number = take()
                if number is None:
                    return
                running += 1
            try:
                results[number] = calls[number]()
            except BaseException as error:
                raised[number] = error
            finally:
                with lock:
                    running -= 1

    def ended() -> bool:
        """Stop what may be stopped, and tell whether no call is in progress and none will be."""
        nonlocal stopped
        with lock:
            if not whole or taken == 0:
                stopped = True
            return running == 0 and (stopped or bool(raised) or taken == len(calls))

    watches = whole and len(calls) > 1 and threading.current_thread() is threading.main_thread()
    helpers = [threading.Thread(target=help_out) for _ in range(min(threads, len(calls)) - (0 if watches else 1))]
    try:
        for helper in helpers:
            helper.start()
        if not watches:
            work()
        for helper in helpers:
            helper.join()
    except BaseException:  # an interrupt, or no further thread
        while True:
            try:
                while not ended():
                    time.sleep(_POLL)
                break
            except BaseException:  # another interrupt: the wait goes on
                continue
        raise
    for error in raised.values():
        if not isinstance(error, Exception):
            raise error
    if raised:
        raise raised[min(raised)]
    return results  # type: ignore[return-value]
