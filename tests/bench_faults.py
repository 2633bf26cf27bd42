"""Runs of the benchmark that go wrong in a worker, which imports this module by its own name."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from pb_kvcache.lab import bench, traces

REPLAY = bench._replay


def killed(source: object, checksum: int, task: tuple[str, object, object]) -> Any:
    """Do a run, or end this process as the system does where memory is short."""
    if task[0] == "h2o":
        os.kill(os.getpid(), signal.SIGKILL)
    return REPLAY(source, checksum, task)


def starved(source: object, checksum: int, task: tuple[str, object, object]) -> Any:
    """Do a run whose policy finds no memory."""

    def fail(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 1 PiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_make", fail)
        return REPLAY(source, checksum, task)


class Unreadable(traces.Trace):
    """A trace that reaches no other process."""

    def rows(self, step: int) -> np.ndarray:
        return np.zeros((1, step), np.float32)

    def __setstate__(self, state: object) -> None:
        raise AttributeError("no such trace here")
