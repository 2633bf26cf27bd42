"""Reading texts and prompts from files that users bring."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._text import printable, read_json
from ._metrics import METRICS

__all__ = ["Prompt", "read_prompts", "read_text"]


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts."""

    line: int
    kind: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is empty, or no text in UTF-8.
    """
    content = Path(path).read_bytes()
    name = printable(os.fspath(path))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: byte {error.start} is not UTF-8 text; convert it, or give another file") from None
    if "\0" in text:
        raise ValueError(f"{name}: byte {content.index(0)} is 0, so the file is not text; give another one")
    if not text.strip():
        raise ValueError(f"{name}: is empty; give a file with text")
    return text.replace("\r\n", "\n")


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Return the prompts of a file with one JSON object a line.

    A line has one of three sets of fields. Further fields are ignored, but for ``metric``, a name of
    :data:`pb_kvcache.lab._metrics.METRICS`, and ``kind`` or LongBench's ``dataset``.

    - ``context``, ``question``, ``answers``: scored by ``contains``.
    - ``context``, ``input``, ``answers``, as LongBench's files have it: scored by ``f1``.
    - ``input``, ``outputs``, as RULER's files have it, maybe with ``answer_prefix``: scored by ``set``. The last line
      of the input is the question, what is before it the context.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is no text, or a line is no such object. The message names the file and the line.
    """
    prompts = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                prompts.append(_prompt(read_json(line), number, Path(path).stem))
            except ValueError as error:
                raise ValueError(f"{printable(os.fspath(path))}, line {number}: {error}") from None
    return prompts


def _prompt(value: Any, line: int, stem: str) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    if "outputs" in value and "input" in value:
        # What the model reads, then its beginning of the answer.
        context, end, last = _string(value, "input").rstrip("\n").rpartition("\n")
        prefix = _string(value, "answer_prefix", "")
        question = last + (" " if prefix and not prefix[0].isspace() else "") + prefix
        context, answers, metric = context + end, _answers(value, "outputs"), "set"
    else:
        names = [name for name in ("question", "input") if name in value]
        if "context" not in value or not names or "answers" not in value:
            raise ValueError(
                f"has the fields {', '.join(map(printable, value)) or 'none'}; must have context, question and "
                "answers, or LongBench's context, input and answers, or RULER's input and outputs"
            )
        context, asked = _string(value, "context"), _string(value, names[0])
        question = f"\n\nQuestion: {asked}\nAnswer:" if asked else "\n\nAnswer:"
        answers, metric = _answers(value, "answers"), "f1" if names[0] == "input" else "contains"
    if not context.strip():
        raise ValueError("the context is empty: there is nothing to compress")
    if not question.strip():
        raise ValueError("the question is empty")
    metric = _string(value, "metric", metric)
    if metric not in METRICS:
        raise ValueError(f"metric = {metric!r}: must be one of {', '.join(METRICS)}")
    kind = _string(value, "kind", _string(value, "dataset", stem))
    return Prompt(line, kind, context, question, answers, metric)


def _string(value: Mapping[str, Any], name: str, missing: str | None = None) -> str:
    found = value.get(name, missing)
    if not isinstance(found, str):
        raise ValueError(f"{name}: must be a string, not {type(found).__name__}")
    return found


def _answers(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = value[name]
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not found:
        raise ValueError(f"{name}: must be a list of at least one string")
    for index, answer in enumerate(found):
        if not isinstance(answer, str) or not any(map(str.isalnum, answer)):
            raise ValueError(f"{name}[{index}] = {answer!r}: must be a string with a word to compare")
    return tuple(found)
