"""Kind ``blocks``: positions as blocks, whole blocks kept, and holes closed after an eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._blocks import block_moves, block_select, to_blocks
from ._expect import answers, equal


def _to_blocks(case: dict[str, Any]) -> dict[str, Any]:
    blocks, fill = to_blocks(case["positions"], case["block_size"])
    return {"blocks": blocks.tolist(), "fill": fill.tolist()}


def _block_select(case: dict[str, Any]) -> dict[str, Any]:
    scores = np.array(case["scores"], dtype=object).astype(np.float32)
    options = {name: case[name] for name in ("block_size", "window", "reduce", "nan")}
    return {"blocks": block_select(scores, case["budget"], **options).tolist()}


def _block_moves(case: dict[str, Any]) -> dict[str, Any]:
    done = block_moves(case["rows"], case["table"], case["block_size"])
    return {
        "order": done.order.tolist(),
        "moves": done.moves.tolist(),
        "table_after": done.table.tolist(),
        "freed": done.freed.tolist(),
    }


_CALLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "to_blocks": _to_blocks,
    "block_select": _block_select,
    "block_moves": _block_moves,
}


def run(case: dict[str, Any]) -> None:
    """Run one case."""
    got = answers(case.get("status"), lambda: _CALLS[case["call"]](case))
    if case.get("status") is None:
        for name, value in got.items():
            equal(name, value, case[name])
