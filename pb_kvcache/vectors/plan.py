"""Kind ``plan``: every layer's budget."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _plan
from ._expect import answers, equal


def run(case: dict[str, Any]) -> None:
    """Run one case."""
    arguments = {key: value for key, value in case.items() if key not in ("name", "budgets", "status")}
    if isinstance(arguments.get("ratio"), str):
        arguments["ratio"] = float(arguments["ratio"])
    if "weights" in arguments:
        arguments["weights"] = np.array(arguments["weights"], dtype=object).astype(np.float64)
    plan = answers(case.get("status"), lambda: _plan.plan(**arguments))
    if "budgets" in case:
        equal("budgets", plan.budgets.tolist(), case["budgets"])
        equal("total", plan.total, sum(case["budgets"]))
