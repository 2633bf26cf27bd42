"""What a plan file or a curve file says of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import CurveSet
from .._curves import curve_file
from .._text import read_json


def measured_of(path: str) -> Mapping[str, Any]:
    """Return what such a file says, or the shipped curves of a name. Empty where it says nothing."""
    if curve_file(path):
        return CurveSet.load(path).measured
    content = read_json(Path(path).read_bytes())
    plans = content if isinstance(content, list) else [content]
    found = [plan.get("measured") for plan in plans if isinstance(plan, Mapping)]
    # Plans of one file are of one measurement.
    return next((entry for entry in found if isinstance(entry, Mapping) and entry), {})
