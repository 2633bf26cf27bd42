"""Kind ``divide``: every unit's budget."""

from __future__ import annotations

from typing import Any

from .. import _divide
from ._expect import answers, equal


def run(case: dict[str, Any]) -> None:
    """Run one case."""
    arguments = {key: value for key, value in case.items() if key not in ("name", "budgets", "status")}
    made = answers(case.get("status"), lambda: _divide.divide(**arguments))
    if "budgets" in case:
        equal("budgets", made.budgets.tolist(), case["budgets"])
        # The same units as the heads of a layer.
        heads = {**arguments, "losses": [arguments["losses"]]}
        for bound in ("minimum", "maximum"):
            if isinstance(arguments.get(bound), list):
                heads[bound] = [arguments[bound]]
        equal("heads", _divide.divide(**heads).budgets.tolist(), [case["budgets"]])
