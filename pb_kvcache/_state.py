"""States as bytes: what a cache or a stack holds and remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._errors import status_text
from ._native import ffi, lib

_OK: int = lib.PB_KVCACHE_OK


def saved(size: Callable[[Any], int], save: Callable[[Any, Any, int], int], native: Any) -> bytes:
    """Return the state of a native object that the caller has for itself."""
    count = size(native)
    data = bytearray(count)
    status = save(native, ffi.from_buffer(data), count)
    if status != _OK:
        raise RuntimeError(status_text(status))
    return bytes(data)


def checked_bytes(data: Any) -> Any:
    """Return a buffer that a native call can read: bytes-like, contiguous.

    Raises
    ------
    TypeError
        For anything else than a bytes-like object.
    """
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(f"data: must be bytes or a buffer of bytes, not {type(data).__name__}") from None
    return ffi.from_buffer(view if view.c_contiguous else view.tobytes())


def refusal(status: int, size: int, into: object) -> ValueError:
    """Return the error for bytes that were not loaded."""
    if status == lib.PB_KVCACHE_ERROR_MISMATCH:
        return ValueError(f"data: {size} bytes, saved from another policy or with other parameters than {into!r}")
    return ValueError(f"data: {size} bytes, {status_text(status)}")
