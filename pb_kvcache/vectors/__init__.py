"""Run the shared vectors with the installed module: the files that prove every port of the rules.

A file states its kind. The kind's runner takes one case and raises where the library answers something else. The
schema is in the README beside the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import blocks, budget, divide, hold, plan, policy, select, stack

#: By kind: what runs a case, and raises AssertionError where it fails.
RUNNERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "pyramid_budget": budget.run,
    "plan": plan.run,
    "divide": divide.run,
    "policy": policy.run,
    "refusal": policy.run_refusal,
    "select": select.run,
    "compact": select.run_compact,
    "blocks": blocks.run,
    "hold": hold.run,
    "decode_weights": hold.run_decode_weights,
    "stack": stack.run,
    "stack_refusal": stack.run_refusal,
}


@dataclass(frozen=True)
class Case:
    """One case of a vector file."""

    file: str
    kind: str
    name: str
    case: dict[str, Any]

    def run(self) -> None:
        """Run the case. AssertionError: it fails."""
        RUNNERS[self.kind](self.case)


def _installed() -> Path:
    """Return the folder of vector files that belongs to this package."""
    installed = Path(__file__).parents[1] / "vectors_data"
    if installed.is_dir():
        return installed
    return Path(__file__).parents[2] / "vectors"  # an editable installation reads the source tree


def cases(directory: Path | None = None) -> Iterator[Case]:
    """Yield every case of every ``*.json`` in a directory. None: of the files installed with the package.

    Raises
    ------
    ValueError
        A file is not a vector file, or of an unknown kind.
    """
    files = sorted((_installed() if directory is None else directory).glob("*.json"))
    if not files:
        raise ValueError(f"DIR = {directory}: has no .json file")
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            kind, listed = content["kind"], content["cases"]
            named = [(case["name"], case) for case in listed]
            known = kind in RUNNERS
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file}: is not a vector file: {error!r}") from None
        if not known:
            raise ValueError(f"{file}: unknown kind {kind!r}; known are {', '.join(sorted(RUNNERS))}")
        for name, case in named:
            yield Case(file.name, kind, name, case)
