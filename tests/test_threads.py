"""Calls divided among threads: what comes back, and which error."""

from __future__ import annotations

import threading
import time

import pytest

from pb_kvcache._threads import in_threads


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
