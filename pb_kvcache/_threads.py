"""Dividing independent native calls, which release the GIL, among a few threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import TypeVar

_T = TypeVar("_T")


def in_threads(calls: Sequence[Callable[[], _T]], threads: int) -> list[_T]:
    """Make the calls on up to `threads` threads, the caller's among them, and return what they return, in order.

    Each thread takes the next call that nobody has taken, so that a thread that starts late or shares its core costs
    little: of two threads the second often starts half a millisecond later, when a small call is already done.

    Raises
    ------
    BaseException
        What the first of the calls that raise, in their order, has raised; the calls after it may not have been made.
    """
    results: list[_T | None] = [None] * len(calls)
    raised: dict[int, BaseException] = {}
    numbers = iter(range(len(calls)))
    lock = Lock()

    def work() -> None:
        while True:
            with lock:
                number = None if raised else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = calls[number]()
            except BaseException as error:
                raised[number] = error

    helpers = [Thread(target=work) for _ in range(min(threads, len(calls)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if raised:
        raise raised[min(raised)]
    return results  # type: ignore[return-value]
