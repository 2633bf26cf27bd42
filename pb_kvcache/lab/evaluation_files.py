"""An evaluation as files: ``results.json``, and what kvpress's evaluation writes.

kvpress (https://github.com/NVIDIA/kvpress, ``evaluation/``) writes three files for each press and ratio:
``predictions.csv``, ``metrics.json`` with percentages by task, and ``config.yaml``. The files here have its columns and
keys, for all variants and budgets together: ``press_name`` and ``budget`` tell the rows apart.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._files import replacing
from .._text import write_json
from ._figures import FULL, Row, asked
from .verdict import Summary

__all__ = ["COLUMNS", "write"]

#: Of ``predictions.csv``. The first seven are kvpress's. ``compression_ratio`` is the part of the rows that is gone.
COLUMNS = (
    "task",
    "question",
    "answer_prefix",
    "answer",
    "max_new_tokens",
    "predicted_answer",
    "compression_ratio",
    "prompt",
    "press_name",
    "budget",
    "score",
)


def write(
    rows: Iterable[Row], header: Mapping[str, Any], summary: Summary, directory: str | os.PathLike[str]
) -> list[Path]:
    """Write the four files into a folder, and return their paths. The folder is made where there is none.

    Parameters
    ----------
    rows, header
        What ``runs.jsonl`` holds: a row for each prompt, variant and budget, and its first line.
    summary
        Of the same rows.

    Raises
    ------
    OSError, ValueError
        A file cannot be written, or a value is no JSON. A file that stood there is replaced as a whole or not at all.
    """
    rows = list(rows)
    texts = {
        "results.json": write_json(_results(header, summary), indent=1) + "\n",
        "predictions.csv": _predictions(rows),
        "metrics.json": write_json(_metrics(summary), indent=4) + "\n",
        "config.yaml": _yaml(_config(header, summary)),
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with replacing(folder / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    return [folder / name for name in texts]


def _results(header: Mapping[str, Any], summary: Summary) -> dict[str, Any]:
    about = {key: value for key, value in header.items() if key not in ("format", "version")}
    return {"format": "pb_kvcache evaluation results", "version": 1} | about | summary.to_dict()


def _predictions(rows: Sequence[Row]) -> str:
    """Return the answers as CSV, one line a prompt, variant and budget. Text prompts have none."""
    whole = {row["prompt"]: row["rows"] for row in rows if row["variant"] == FULL}
    text = io.StringIO(newline="")
    writer = csv.writer(text)  # lines end as RFC 4180 has them: with "\n" alone, a "\r" in a cell would not be quoted
    writer.writerow(COLUMNS)
    for row in rows:
        if row["prediction"] is not None:
            positions = whole.get(row["prompt"]) or row["tokens"]
            values = {
                "task": row["task"],
                "question": row.get("question", ""),
                "answer_prefix": "",
                "answer": json.dumps(list(row["answers"]), ensure_ascii=False),
                "max_new_tokens": row.get("max_new_tokens", ""),
                "predicted_answer": row["prediction"],
                "compression_ratio": round(1 - row["rows"] / positions, 4),
                "prompt": row["prompt"],
                "press_name": row["variant"],
                "budget": "" if row["budget"] is None else asked(row),
                "score": "" if row["score"] is None else row["score"],
            }
            writer.writerow([_cell(values[name]) for name in COLUMNS])
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell that a spreadsheet shows and does not run.

    A text that it would take for a formula gets an apostrophe in front. ``runs.jsonl`` has it without.
    """
    if not isinstance(value, str):
        return value
    value = value.replace("\0", r"\x00")  # which no reader of CSV takes
    number = re.fullmatch(r"[+-][\d.,]*", value)
    return "'" + value if value[:1] in tuple("=@\t\r+-") and value and not number else value


def _metrics(summary: Summary) -> dict[str, Any]:
    """Return each task's mean score in percent: of the full cache, and by variant and budget."""
    full = {r.task: {"score": _hundred(r.score.value), "prompts": r.count} for r in summary.references if r.score}
    metrics: dict[str, Any] = {FULL: full} if full else {}
    for f in summary.figures:
        if f.part == "task" and f.score is not None:
            at = metrics.setdefault(f.variant, {}).setdefault(f.budget, {})
            at[f.name] = {"score": _hundred(f.score.value), "prompts": f.score.count}
    return metrics


def _hundred(part: float) -> float:
    return round(100 * part, 2)


def _config(header: Mapping[str, Any], summary: Summary) -> dict[str, Any]:
    """Return what was run under kvpress's names, then all settings under the library's own."""
    model, settings = header.get("model", {}), header.get("settings", {})
    named = {
        "dataset": ", ".join(reference.task for reference in summary.references),
        "model": model.get("name"),
        "press_name": ", ".join(summary.variants),
        "compression_ratio": None,  # of each row, in predictions.csv
        "query_aware": settings.get("question", "seen") == "seen",
        "budgets": ", ".join(summary.budgets),
    }
    return named | {name: value for name, value in settings.items() if name not in named}


def _yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML: a line a key, scalars, and lists and mappings of them in brackets."""
    return "".join(f"{_key(name)}{_scalar(value)}\n" for name, value in values.items())


def _key(name: str, end: str = "\n") -> str:
    """Return a key and what stands before its value. One above 1,024 characters must say that it is one."""
    # Shorter words, yes, no, on, off and y among them, are no strings where nothing is around them.
    plain = re.fullmatch(r"[a-z][a-z_0-9]{3,}", name) and name not in ("true", "false", "null")
    key = name if plain else _quoted(name)
    return f"{key}: " if len(key) <= 1024 else f"? {key}{end}: "


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # YAML 1.1 takes a number with an exponent for one only if it has a point and a sign, 1.0e-05.
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, Mapping):
        return "{" + ", ".join(_key(str(key), " ") + _scalar(entry) for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """Return a text in double quotes, in ASCII."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if " " <= character <= "~":
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
