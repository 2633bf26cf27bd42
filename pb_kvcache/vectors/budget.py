"""Kind ``pyramid_budget``: one layer's share."""

from __future__ import annotations

from typing import Any

from .. import _budget
from .._native import lib
from ._expect import answers, equal

#: What C answers where there is no share.
_IN_C = {"saturates": 2**32 - 1, "invalid": 0}


def run(case: dict[str, Any]) -> None:
    """Run one case."""
    arguments = [case[name] for name in ("budget", "layer", "num_layers", "pyramid_ratio")]
    expect = case["expect"]
    equal("share in C", lib.pb_kvcache_pyramid_budget(*arguments), case.get("share", _IN_C.get(expect)))
    share = answers(expect, lambda: _budget.pyramid_budget(*arguments))
    if expect == "ok":
        equal("share", share, case["share"])
