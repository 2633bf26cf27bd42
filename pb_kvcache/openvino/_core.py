"""The one OpenVINO core that every model here is read and compiled with."""

from __future__ import annotations

import functools

import openvino as ov


@functools.lru_cache(maxsize=1)
def core() -> ov.Core:
    """Return the core. It lives until the process ends.

    A core's CPU plugin gives the thread that makes it a stack for signals, and frees that stack when the core goes, in
    whichever thread the last reference is dropped. The first thread then runs its next signal handler, that of a
    Ctrl-C, on memory that is gone, and the process ends by a segmentation fault (openvino 2026.4.1, Linux).
    """
    made = ov.Core()
    made.set_property({"ENABLE_MMAP": False})  # a model's folder may be a temporary one
    return made
