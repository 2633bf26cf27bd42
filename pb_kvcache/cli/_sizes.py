"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

#: Bytes of a unit, in lower case and without the B. Decimal, or binary with an i.
_UNITS = {"": 1} | {
    letter + suffix: base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1000), ("i", 1024))
}


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``2GiB``, ``1.5 GB`` or ``4096`` means, rounded down.

    Raises
    ------
    ValueError
        For anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.ASCII | re.IGNORECASE)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"--memory {text}: must be a number and a unit, such as 2GiB, 500MB or 4096")
    return int(Fraction(found[1]) * _UNITS[found[2].lower()])


def format_size(nbytes: int) -> str:
    """Return a size in a unit that a person reads: ``2.5 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
