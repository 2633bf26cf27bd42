"""Standard output and error as the program writes to them: closed, full, ASCII or ended by their reader.

All that is printed goes through :class:`Stream`. What the encoding does not have becomes the nearest ASCII: ``#`` for a
bar, ``us`` for a microsecond, an escape for all else. A failure to write is told from a failure to write some file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Literal

#: What the tables, bars and plans use beyond ASCII. One character for one, so that columns stay in line.
_ASCII = str.maketrans(
    {"█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": " ", "▎": " ", "▏": " "}
    | {"µ": "u", "\N{MINUS SIGN}": "-", "–": "-", "—": "-", "─": "-", "━": "-", "×": "x"}  # noqa: RUF001
    | {"\xa0": " ", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "~", "≤": "<", "≥": ">"}  # noqa: RUF001
)

_TITLES = {"stdout": "standard output", "stderr": "standard error"}


class OutputError(OSError):
    """Standard output cannot be written to. The message says why, without the system's number for it."""

    def __init__(self, title: str, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"cannot write to {title}: {reason[:1].lower()}{reason[1:]}")


class Stream:
    """A standard stream: the one that is there when something is written, since tests and callers replace it."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    @property
    def _file(self) -> IO[str] | None:
        file = getattr(sys, self._name)  # None where it was closed before the start
        found: IO[str] | None = getattr(file, "rich_proxied_file", file)  # not what Rich puts there beside a bar
        return found

    @property
    def encoding(self) -> str:
        """The encoding that its reader expects."""
        file = self._file
        own = file is getattr(sys, f"__{self._name}__")
        if own and _plain_locale():
            return "ascii"
        return getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write text, made fit for the encoding.

        Raises
        ------
        BrokenPipeError
            Whoever read it has gone.
        OutputError
            It cannot be written for another reason. Of standard error nothing is raised: there is nobody to tell.
        """
        with self._failures():
            if self._file is not None:
                self._file.write(fit(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered. Errors as for :meth:`write`."""
        with self._failures():
            if self._file is not None:
                self._file.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        with contextlib.suppress(ValueError):  # closed
            return self._file is not None and self._file.isatty()
        return False

    def fileno(self) -> int:
        """Return the descriptor. ValueError, OSError: there is none."""
        if self._file is None:
            raise ValueError(f"{_TITLES[self._name]} is closed")
        return self._file.fileno()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            if self._name == "stderr":
                return
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(_TITLES[self._name], error) from error

    def _drop(self) -> None:
        """Send what is still buffered nowhere: it would fail once more when the interpreter ends."""
        with contextlib.suppress(OSError, ValueError):  # no file at all, in a test
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)


def fit(text: str, encoding: str) -> str:
    """Return text that an encoding has: the text itself, or with the nearest ASCII for what is missing.

    >>> fit("█ 3 µs", "ascii")
    '# 3 us'
    """
    if _has(encoding, text):
        return text
    return "".join(c if _has(encoding, c) else _nearest(c) for c in text)


def _nearest(character: str) -> str:
    found = character.translate(_ASCII)
    return found if found.isascii() else character.encode("ascii", "backslashreplace").decode("ascii")


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.isascii()
    return True


def _plain_locale() -> bool:
    """Return whether the user's locale is C, which has ASCII alone. Python itself would write UTF-8 there."""
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8"):
        return False  # the user has said what the encoding is
    named = next((value for key in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(key))), "")
    return named in ("C", "POSIX")
