"""Every vector file's name and text.

A module that generates vectors has ``FILES``: name to a function of no arguments that returns the file's content.
"""

from __future__ import annotations

import json
from typing import Any

from . import baselines, blocks, budget, divide, engines, hold, plan, policies, select, stack

MODULES = (baselines, blocks, budget, divide, engines, hold, plan, policies, select, stack)


def text(content: dict[str, Any]) -> str:
    """Return the file's text: a line per case, so that changes read well."""
    head = {key: value for key, value in content.items() if key != "cases"}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    cases = ",\n".join("  " + json.dumps(case, allow_nan=False) for case in content["cases"])
    return "{\n" + "\n".join(lines) + '\n"cases": [\n' + cases + "\n]\n}\n"


def files() -> dict[str, str]:
    """Return every file's name and text."""
    return {name: text(make()) for module in MODULES for name, make in module.FILES.items()}
