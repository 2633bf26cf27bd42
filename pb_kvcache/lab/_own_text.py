"""Whether prompts that judge a plan have text in common with the prompts that it was measured on.

A plan that is judged on its own text, or on a part of it such as its beginning, looks better than it is. So what
measures a plan leaves marks of its prompts, and what judges compares them. A mark is a hash of a run of `RUN` tokens,
the smallest among `WINDOW` neighbouring runs (winnowing: Schleimer, Wilkerson and Aiken, SIGMOD 2003). Two texts with
``RUN + WINDOW - 1`` successive tokens in common share a mark, wherever in their prompts these tokens stand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .._text import printable
from ._measured import measured_of

if TYPE_CHECKING:
    from .tasks import Item

__all__ = ["FIELD", "RUN", "WINDOW", "common_part", "marks", "measured_marks", "refuse"]

#: The name of the marks among what curves and plans say of how they were measured.
FIELD = "prompt_marks"
RUN = 32
WINDOW = 32
#: Marks that are kept, the smallest ones: 16 KiB as text.
_MOST = 2048
_DIGITS = 8
#: The part of a prompt's marks from which on it counts as known. Licences and headers are in many files.
_KNOWN = 0.1


def marks(prompts: Iterable[Sequence[int]]) -> str:
    """Return the marks of prompts, given as token ids: hexadecimal numbers of 8 digits, ascending, in one word."""
    found = sorted(set().union(*(_winnowed(prompt) for prompt in prompts)))
    return "".join(f"{mark:0{_DIGITS}x}" for mark in found[:_MOST])


def _winnowed(prompt: Sequence[int]) -> set[int]:
    """Return the marks of one prompt. A prompt of fewer than `RUN` tokens has none."""
    tokens = [int(token).to_bytes(4, "little") for token in prompt]
    runs = [
        int.from_bytes(hashlib.blake2b(b"".join(tokens[start : start + RUN]), digest_size=_DIGITS // 2).digest(), "big")
        for start in range(len(tokens) - RUN + 1)
    ]
    return {min(runs[start : start + WINDOW]) for start in range(max(1, len(runs) - WINDOW + 1)) if runs}


def common_part(known: str, prompt: Sequence[int]) -> float:
    """Return which part of a prompt's marks is among those of others, as :func:`marks` writes them."""
    numbers = {int(known[at : at + _DIGITS], 16) for at in range(0, len(known), _DIGITS)}
    mine = _winnowed(prompt)
    if len(numbers) == _MOST:  # larger ones were left out
        mine = {mark for mark in mine if mark <= max(numbers)}
    return len(mine & numbers) / len(mine) if mine else 0.0


def measured_marks(path: str) -> str:
    """Return the marks in a plan file or a curve file. Empty where it has none: nothing is known of its text."""
    text = measured_of(path).get(FIELD)
    return text if isinstance(text, str) and re.fullmatch(f"([0-9a-f]{{{_DIGITS}}})*", text) else ""


def refuse(name: str, known: str, items: Iterable[Item]) -> None:
    """Refuse prompts whose text was measured.

    Parameters
    ----------
    name
        The argument that the error names, with its value.
    known
        Marks of what was measured.
    items
        The prompts that would judge.

    Raises
    ------
    ValueError
        A tenth or more of a prompt was measured.
    """
    for item in items if known else ():
        if (part := common_part(known, item.context)) >= _KNOWN:
            raise ValueError(
                f"{printable(name)}: was measured on {100 * part:.0f} % of the text of {printable(item.name)} "
                f"({printable(item.kind)}), on which it would be judged; judge on text that was not measured"
            )
