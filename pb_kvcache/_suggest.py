"""What somebody who misspelt a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that a word is closest to. None where none is close. Case does not count."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word[:100].lower(), by_lower, 1)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` to end an error with. Empty where no known name is close.

    >>> did_you_mean("snapvk", ["full", "tova", "snapkv"])
    '; did you mean snapkv?'
    """
    name = nearest(word, known)
    return "" if name is None else f"; did you mean {name}?"
