"""Errors of the package, and how a C status becomes one."""

from __future__ import annotations

from ._native import ffi, lib


class CacheFullError(RuntimeError):
    """A decode step came while the cache held as many positions as it can. Evict first."""


def status_text(status: int) -> str:
    """Return the library's own sentence for a status."""
    return str(ffi.string(lib.pb_kvcache_status_str(status)), "ascii")
