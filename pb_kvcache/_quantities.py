"""Budgets, shares and ratios as people write them, read in one place for the command line and for names.

A budget is a number of positions, ``64``, or a share of a sequence, ``25%``. A ratio is a number or a fraction: ``4``,
``0.25``, ``1/4``. All are exact: what is read is an integer or a :class:`fractions.Fraction`.
"""

from __future__ import annotations

import re
from fractions import Fraction

#: What a budget must be, for errors.
BUDGET_RULE = "must be a whole number of positions of 1 or more, or a percentage above 0% and at most 100%"
#: What a share must be.
SHARE_RULE = "must be a percentage above 0% and at most 100%, such as 25%"
#: What a ratio must be.
RATIO_RULE = "must be a number or a fraction above 0, such as 4, 0.25 or 1/4"

#: Digits that are read at most. More are no quantity of this world, and take long.
_DIGITS = 40
_WHOLE = rf"\d{{1,{_DIGITS}}}"
_DECIMAL = rf"{_WHOLE}(?:\.\d{{0,{_DIGITS}}})?|\.\d{{1,{_DIGITS}}}"


def budget(text: str) -> int | Fraction | None:
    """Return a number of positions, or a share of a sequence as a fraction of 1. None: the text is neither."""
    if match := re.fullmatch(rf"\s*({_DECIMAL})\s*%\s*", text, re.ASCII):
        found = Fraction(match[1]) / 100
        return found if 0 < found <= 1 else None
    if re.fullmatch(rf"\s*{_WHOLE}\s*", text, re.ASCII):
        return int(text) or None
    return None


def share(text: str) -> Fraction | None:
    """Return a share of something: a percentage, or a number or fraction of at most 1. None: the text is no share."""
    found = budget(text)
    if isinstance(found, Fraction):
        return found
    number = ratio(text)
    return number if number is not None and number <= 1 else None


def ratio(text: str) -> Fraction | None:
    """Return a number or a fraction above 0. None: the text is neither."""
    match = re.fullmatch(rf"\s*(?:({_DECIMAL})|({_WHOLE})/({_WHOLE}))\s*", text, re.ASCII)
    if match is None or (match[3] is not None and not int(match[3])):
        return None
    found = Fraction(match[1]) if match[1] else Fraction(int(match[2]), int(match[3]))
    return found if found > 0 else None
