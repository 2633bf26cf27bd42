"""Calls divided among threads: what comes back, and which error."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pb_kvcache._threads import in_threads

from .conftest import Run


@pytest.mark.parametrize("threads", [1, 2, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_results_come_in_the_order_of_the_calls(threads: int, count: int) -> None:
    def call(number: int) -> int:
        time.sleep(0.001 * ((number * 5) % 7))
        return number

    assert in_threads([lambda n=n: call(n) for n in range(count)], threads) == list(range(count))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_first_error_in_order_is_raised_whichever_comes_first(threads: int) -> None:
    def call(number: int) -> int:
        time.sleep(0.01 if number == 2 else 0.0)
        if number >= 2:
            raise ValueError(f"call {number}")
        return number

    with pytest.raises(ValueError, match="call 2"):
        in_threads([lambda n=n: call(n) for n in range(9)], threads)


def test_as_many_threads_as_asked_for_work_and_all_have_ended() -> None:
    together = threading.Barrier(3, timeout=10)
    before = threading.active_count()
    assert sorted(in_threads([together.wait] * 3, 3)) == [0, 1, 2]
    assert threading.active_count() == before


def interrupted(call: Callable[[], object], after: float, times: int = 1) -> None:
    """Make a call, send the process Ctrl-C's signal so many times, and see KeyboardInterrupt come out of the call."""
    inside = True

    def handle(*_: object) -> None:
        if inside:
            raise KeyboardInterrupt

    def send() -> None:
        for _ in range(times):
            time.sleep(after)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        inside = False
        sender.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_after_an_interrupt_no_call_is_in_progress_or_made(threads: int, times: int) -> None:
    begun, done = [], []
    states = []

    def call(number: int) -> None:
        begun.append(number)
        for _ in range(10):
            time.sleep(0.02)
        done.append(number)

    def calls() -> None:
        try:
            in_threads([lambda n=n: call(n) for n in range(40)], threads)
        finally:
            states.append((len(begun), len(done)))

    interrupted(calls, 0.05, times)
    time.sleep(0.25)
    assert states == [(len(begun), len(done))]
    # The caller's own call was interrupted. The helpers' have ended.
    assert len(done) == len(begun) - 1 == threads - 1


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_interrupt_waits_for_all_calls_where_the_whole_is_wanted(threads: int, times: int) -> None:
    done: list[int] = []
    seen = []

    def call(number: int) -> None:
        time.sleep(0.02)
        done.append(number)

    def calls() -> None:
        try:
            in_threads([lambda n=n: call(n) for n in range(20)], threads, whole=True)
        finally:
            seen.append(sorted(done))

    interrupted(calls, 0.03, times)
    assert seen == [list(range(20))]


def test_an_interrupt_takes_precedence_over_errors() -> None:
    def fail() -> None:
        time.sleep(0.1)
        raise ValueError("a call's own")

    interrupted(lambda: in_threads([fail] * 4, 2), 0.03)


def test_without_a_further_thread_nothing_is_done_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    with pytest.raises(RuntimeError, match="can't start"):
        in_threads([lambda: done.append(1)] * 4, 2, whole=True)
    assert done == []


COMPACTION = """
import os, signal, sys, threading, time
import numpy as np
import pb_kvcache as pb

signal.signal(signal.SIGINT, signal.default_int_handler)  # a program started in the background ignores it

batch, heads, n, dim = 2, 8, 20000, 64
keep = np.arange(1, n, 2, dtype=np.uint32)
indices = np.broadcast_to(keep, (batch, heads, len(keep)))
wanted = np.arange(1, n, 2, dtype=np.float32)
interrupted = 0
for delay in np.linspace(0.0, 0.05, 12):
    kv = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None], (batch, heads, n, dim)).copy()
    sender = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        sender.start()
        pb.compact(kv, indices, threads=int(sys.argv[1]))
        sender.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted += 1
    now = kv.copy()
    time.sleep(0.02)
    assert (now == kv).all(), "rows move after the interrupt"
    moved = [bool((head[: len(keep), 0] == wanted).all()) for sequence in kv for head in sequence]
    assert all(moved) or not any(moved), moved
print(interrupted)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_compaction_has_moved_all_rows_or_none(threads: int, run: Run) -> None:
    assert int(run(sys.executable, "-c", COMPACTION, threads).stdout) == 12
