"""How a prediction is scored against the right answers of a task."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

__all__ = ["METRICS", "score"]

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u201c\u201d\u2026", " "))
_ARTICLES = ("a", "an", "the")


def score(metric: str, prediction: str, answers: Sequence[str]) -> float:
    """Return how right a prediction is, from 0 to 1.

    Predictions and answers are compared as words: case, punctuation, spaces and the articles a, an, the do not count.

    Parameters
    ----------
    metric
        ``"exact"``: the first sentence of the prediction's first line is one of the answers, and nothing else.
        ``"contains"``: one of the answers is in the prediction.
        ``"f1"``: harmonic mean of the shares of words that prediction and answer have in common, of the best answer, as
        SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250) defines it.
        ``"set"``: the share of the answers that are in the prediction, in any order.
    prediction
        What the model wrote.
    answers
        The right answers, at least one.

    Raises
    ------
    TypeError
        A prediction or an answer is not a string. ``answers`` is one string and no sequence of them.
    ValueError
        There is no such metric, or no answer. An answer has no word, so that nothing could be right.

    Examples
    --------
    >>> score("exact", " The walnut. And more.", ["walnut"])
    1.0
    >>> score("set", "plum, fig", ["fig", "pear"])
    0.5
    """
    if metric not in METRICS:
        raise ValueError(f"metric = {metric!r}: must be one of {', '.join(METRICS)}")
    if not isinstance(prediction, str):
        raise TypeError(f"prediction = {prediction!r}: must be a string, not {type(prediction).__name__}")
    if isinstance(answers, str):
        raise TypeError(f"answers = {answers!r}: must be a sequence of strings, not one string")
    right = []
    for index, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise TypeError(f"answers[{index}] = {answer!r}: must be a string, not {type(answer).__name__}")
        right.append(_words(answer))
        if not right[-1]:
            raise ValueError(f"answers[{index}] = {answer!r}: has no word to compare")
    if not right:
        raise ValueError(f"answers = {answers!r}: must have at least one")
    return METRICS[metric](prediction, right)


def _words(text: str) -> list[str]:
    words = text.lower().translate(_PUNCTUATION).split()
    return [word for word in words if word not in _ARTICLES] or words  # an answer may be the letter A


def _within(answer: list[str], words: list[str]) -> bool:
    """Return whether the words of an answer follow each other somewhere."""
    return any(words[i : i + len(answer)] == answer for i in range(len(words) - len(answer) + 1))


def _exact(prediction: str, answers: list[list[str]]) -> float:
    line = prediction.strip().partition("\n")[0]
    words = _words(re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0])
    return float(words in answers)


def _contains(prediction: str, answers: list[list[str]]) -> float:
    words = _words(prediction)
    return float(any(_within(answer, words) for answer in answers))


def _f1(prediction: str, answers: list[list[str]]) -> float:
    words = _words(prediction)

    def one(answer: list[str]) -> float:
        common = sum((Counter(words) & Counter(answer)).values())
        return 2 * common / (len(words) + len(answer))

    return max(map(one, answers))


def _set(prediction: str, answers: list[list[str]]) -> float:
    words = _words(prediction)
    return sum(_within(answer, words) for answer in answers) / len(answers)


#: Name of a metric -> score of a prediction, given the answers' words.
METRICS: dict[str, Callable[[str, list[list[str]]], float]] = {
    "exact": _exact,
    "contains": _contains,
    "f1": _f1,
    "set": _set,
}
