"""Runs in other processes, through joblib and whatever backend the caller has set up for it, such as Dask or Ray."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, TypeVar

_Task = TypeVar("_Task")


def in_order(
    function: Callable[..., Any],
    given: tuple[Any, ...],
    tasks: Sequence[_Task],
    jobs: int,
    called: Callable[[_Task], str],
) -> Iterator[Any]:
    """Yield ``function(*given, task)`` of every task in their order, `jobs` of them at a time.

    `called` names a task for messages. With ``jobs = 1`` everything is done here, without joblib.

    Raises
    ------
    ImportError
        `jobs` is not 1, and joblib is not there. The message names the extra.
    ChildProcessError
        A worker process ended before its task was done.
    ValueError
        `jobs` is 0.
    """
    if jobs == 1:
        for task in tasks:
            yield function(*given, task)
        return
    if jobs == 0:
        raise ValueError("jobs = 0: must be 1 or more, or negative to count from the number of cores down")
    try:
        joblib = importlib.import_module("joblib")
    except ImportError as error:
        raise ImportError("jobs other than 1 need joblib: pip install 'pb-kvcache[bench]'") from error
    # joblib starts as many processes as it is told to, even where there is no work for them.
    parallel = joblib.Parallel(n_jobs=min(jobs, len(tasks)), return_as="generator")
    done = 0
    try:
        with _interrupts_ignored():
            runs = parallel(joblib.delayed(function)(*given, task) for task in tasks)
        for run in runs:
            yield run
            done += 1
    except _lost_workers() as error:
        if error.__cause__ is not None:  # a worker that lives, and could not read what it was sent
            raise
        raise ChildProcessError(
            f"jobs = {jobs}: a worker process was ended, perhaps for lack of memory, with {done} of {len(tasks)} runs "
            f"done and {called(tasks[done])} next. Fewer jobs take less memory, and jobs = 1 needs no workers"
        ) from error


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in this block, a fraction of a second, and in the processes that it starts while they live.

    A terminal sends Ctrl-C to the workers, too, and one that is still importing would answer with a traceback. This
    process ends them. A blocked signal would do, and would not be lost, but joblib unblocks it while it starts them.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _lost_workers() -> tuple[type[BaseException], ...]:
    """Return what joblib's backends raise where a worker is gone."""
    dask = getattr(sys.modules.get("distributed"), "KilledWorker", None)
    return (BrokenExecutor, *([dask] if dask else []))
