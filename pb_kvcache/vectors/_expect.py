"""What the runners share: expecting a value, or the error that a status is in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import CacheFullError

#: The exception that a status becomes. Every other status becomes ValueError.
_ERRORS: dict[str, type[Exception]] = {"full": CacheFullError, "not_kept": KeyError, "unsupported": TypeError}


def equal(what: str, got: Any, want: Any) -> None:
    """Raise AssertionError unless both are equal."""
    if got != want:
        raise AssertionError(f"{what}: {got}, expected {want}")


def answers(status: str | None, call: Callable[[], Any]) -> Any:
    """Return what `call` returns. Where `status` names an error, expect its exception and return None."""
    if status in (None, "ok"):
        return call()
    assert status is not None
    error = _ERRORS.get(status, ValueError)
    try:
        got = call()
    except error:
        return None
    raise AssertionError(f"returned {got!r}, expected {error.__name__} ({status})")
