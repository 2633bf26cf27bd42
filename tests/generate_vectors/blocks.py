"""Vectors of kind ``blocks``: positions as blocks, whole blocks kept, and holes closed after an eviction."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from .. import reference_blocks as reference
from .select import number


def to_blocks(name: str, positions: list[int], block_size: int, status: str | None = None) -> dict[str, Any]:
    given = {"name": name, "call": "to_blocks", "positions": positions, "block_size": block_size}
    if status:
        return {**given, "status": status}
    blocks, fill = reference.to_blocks(positions, block_size)
    return {**given, "blocks": blocks, "fill": fill}


def block_select(
    name: str, scores: Any, budget: int, block_size: int, window: int, status: str | None = None, **changes: str
) -> dict[str, Any]:
    options = {"reduce": "max", "nan": "raise", **changes}
    rows = [[float(np.float32(x)) for x in row] for row in scores]
    given = {
        "name": name,
        "call": "block_select",
        "scores": [[number(x) for x in row] for row in rows],
        "budget": budget,
        "block_size": block_size,
        "window": window,
        **options,
    }
    if status:
        return {**given, "status": status}
    return {**given, "blocks": reference.block_select(rows, budget, block_size, window, options["reduce"])}


def block_moves(
    name: str, rows: list[int], table: list[int], block_size: int, status: str | None = None
) -> dict[str, Any]:
    given = {"name": name, "call": "block_moves", "rows": rows, "table": table, "block_size": block_size}
    if status:
        return {**given, "status": status}
    order, moves, after, freed = reference.block_moves(rows, table, block_size)
    return {**given, "order": order, "moves": moves, "table_after": after, "freed": freed}


def by_hand() -> list[dict[str, Any]]:
    ramp = [[0.5, 0.25, 1.0, 0.0, 0.75, 0.75, 2.0, 0.0, 0.5]]
    top = float(np.finfo(np.float32).max)
    return [
        to_blocks("no positions", [], 4),
        to_blocks("the first and the last of a block", [0, 3, 4, 11], 4),
        to_blocks("blocks of one", [2, 5, 6], 1),
        to_blocks("one block of all positions", [0, 7, 4294967295], 4294967296 - 1),
        to_blocks("the last position", [4294967280, 4294967295], 16),
        to_blocks("positions that do not ascend", [1, 3, 3], 4, "position"),
        to_blocks("blocks of nothing", [1, 3], 0, "block_size"),
        block_select("the best block and the window's", ramp, 6, 2, 1),
        block_select("sums", ramp, 6, 2, 1, reduce="sum"),
        block_select("means rank as sums do", ramp, 6, 2, 1, reduce="mean"),
        block_select("a budget that is no multiple", ramp, 7, 2, 1),
        block_select("a budget of everything", ramp, 99, 2, 1),
        block_select("the window's blocks alone", ramp, 4, 2, 2),
        block_select("a block with one position of the window is the window's", ramp, 4, 4, 1),
        block_select("one block", ramp, 16, 16, 3),
        block_select("ties go to the lower block", [[0.0, 0.0, -0.0, 0.0, 0.0, 0.0]], 6, 2, 2),
        block_select(
            "a sum beyond float is the largest float", [[top, top, top, 0, top, top, 1, 1]], 6, 2, 2, reduce="sum"
        ),
        block_select(
            "a sum below float is above what is none",
            [[math.nan, 0, -top, -top, 0, 0]],
            4,
            2,
            2,
            reduce="sum",
            nan="lowest",
        ),
        block_select("a NaN, refused", [[1, math.nan, 2, 3]], 4, 2, 2, "score"),
        block_select("a NaN is no maximum", [[1, math.nan, 2, 3, 0, 0]], 4, 2, 2, nan="lowest"),
        block_select("a NaN makes a sum the lowest", [[9, math.nan, 2, 3, 0, 0]], 4, 2, 2, nan="lowest", reduce="sum"),
        block_select("blocks of NaN are kept last", [[math.nan] * 4 + [-5, -6]], 4, 2, 2, nan="lowest"),
        block_select("a budget below the window's blocks", ramp, 3, 2, 3, "budget_window"),
        block_select("no blocks of nothing", ramp, 8, 0, 1, "block_size"),
        block_moves("nothing left", [], [7, 3], 4),
        block_moves("nothing held", [], [], 4),
        block_moves("nothing evicted", [0, 1, 2, 3, 4, 5], [7, 3], 4),
        block_moves("a hole in the last block", [0, 1, 2, 3, 5], [7, 3], 4),
        block_moves("a hole in the first block takes the last row", [0, 2, 3, 4, 5], [7, 3], 4),
        block_moves("one row less, one block less", [0, 1, 3, 5], [7, 3], 4),
        block_moves("the fullest block stays", [0, 4, 5, 6], [7, 3], 4),
        block_moves("equally full: the one at the back is the last, and stays", [0, 1, 4, 5], [7, 3], 4),
        block_moves("the last block is one whose rows are at its front", [0, 2, 5, 7, 8, 9], [5, 9, 2], 4),
        block_moves("a less full block becomes the last", [0, 1, 2, 3, 6, 7, 8], [1, 0, 4], 4),
        block_moves("blocks that held nothing are free", [0, 1], [3, 8, 6], 2),
        block_moves("blocks of one row", [1, 3], [9, 8, 7, 6], 1),
        block_moves("one block of everything", [1, 5, 4294967294], [0], 4294967295),
        block_moves("a row beyond the table", [0, 8], [7, 3], 4, "index"),
        block_moves("rows without a block", [0], [], 4, "index"),
        block_moves("rows that do not ascend", [1, 0], [7, 3], 4, "index"),
        block_moves("a slot beyond 32 bits", [0], [1073741824], 4, "too_large"),
        block_moves("rows in blocks of nothing", [0], [7], 0, "block_size"),
    ]


def at_random() -> list[dict[str, Any]]:
    rng = random.Random(5)
    cases = []
    for index in range(24):
        size, blocks = rng.choice([1, 2, 3, 4, 8, 16]), rng.randint(1, 9)
        n = rng.randint((blocks - 1) * size + 1, blocks * size)
        rows = sorted(rng.sample(range(n), rng.randint(0, n)))
        cases.append(block_moves(f"moves at random {index}", rows, rng.sample(range(50), blocks), size))
        cases.append(to_blocks(f"blocks at random {index}", rows, size))
        window, scored = rng.randint(1, 20), rng.randint(1, 60)
        total, free = -(-(window + scored) // size), scored // size
        cases.append(
            block_select(
                f"selection at random {index}",
                [[rng.randint(-3, 9) / 8 for _ in range(scored)] for _ in range(rng.randint(1, 3))],
                rng.randint((total - free) * size, (total + 1) * size),
                size,
                window,
                reduce=rng.choice(["max", "mean", "sum"]),
            )
        )
    return cases


def blocks() -> dict[str, Any]:
    return {
        "kind": "blocks",
        "about": "Positions as blocks, whole blocks kept, and holes closed after an eviction.",
        "cases": by_hand() + at_random(),
    }


FILES = {"blocks.json": blocks}
