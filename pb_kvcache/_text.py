"""Text from files, made fit to show and to send on."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any


def printable(text: object) -> str:
    r"""Return text as one line that a terminal shows and does not obey.

    What has no shape of its own is shown as Python would write it, ``\x1b``: escape sequences, line ends, marks that
    turn the direction of writing, lone surrogates. Spaces of all widths stay.

    >>> print(printable("\x1b[31mred\n"))
    \x1b[31mred\n
    """
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException) -> str:
    """Return what an error says in one printable line. Its kind where it says nothing."""
    return printable(" ".join(str(error).splitlines()) or type(error).__name__)


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, which holds finite numbers alone.

    Python's own reader takes ``NaN`` and ``Infinity``, which are no JSON, and reads ``1e400`` as infinity, which cannot
    be written again.

    Raises
    ------
    ValueError
        The text is not JSON, or a number is not finite as a double. The message names the member that holds it.
    """
    try:
        value = json.loads(text, parse_constant=_constant)
        _check_finite("", value)
    except _NotFiniteError as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, numbers of too many digits, too deep
        raise ValueError(f"not JSON: {error}") from None
    return value


class _NotFiniteError(Exception):
    """A number that is not finite, and where it is."""


def _constant(text: str) -> None:
    raise ValueError(f"{text} is none of its values")


def _check_finite(where: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _NotFiniteError(f"{where or 'the number'}: must be finite as a double")
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_finite(f"{where}.{key}" if where else key, entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_finite(f"{where}[{index}]", entry)


def write_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text in ASCII. ValueError: a number is not finite, for which JSON has no word."""
    return json.dumps(value, indent=indent, allow_nan=False)
