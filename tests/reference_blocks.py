"""Caches in blocks, in plain loops: slow, obvious, and independent of the package."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

LARGEST = Fraction(2**128 - 2**104)  # float32


def to_blocks(positions, block_size):
    """Return the blocks of positions and how many each holds."""
    blocks = sorted({p // block_size for p in positions})
    return blocks, [sum(p // block_size == block for p in positions) for block in blocks]


def block_select(scores, budget, block_size, window, reduce):
    """Return the blocks that each row of scores keeps.

    What is not finite makes a sum or mean the lowest. A sum stays within float32's range.
    """

    def fold(values):
        finite = [Fraction(x) for x in values if math.isfinite(x)]
        if not finite or (reduce != "max" and len(finite) < len(values)):
            return -math.inf
        folded = {"max": max(finite), "sum": sum(finite), "mean": sum(finite) / block_size}[reduce]
        return max(min(folded, LARGEST), -LARGEST)

    kept = []
    for row in scores:
        total = -(-(len(row) + window) // block_size)
        free = len(row) // block_size
        folded = [fold(row[block * block_size : (block + 1) * block_size]) for block in range(free)]
        ranked = sorted(range(free), key=lambda block, folded=folded: (-folded[block], block))
        best = min(budget // block_size, total) - (total - free)
        kept.append(sorted(ranked[:best]) + list(range(free, total)))
    return kept


def places(others, last, block_size, count):
    """Return every place, block and row in it, that is full where `others` are full and `last` holds the rest."""
    full = [(block, i) for block in others for i in range(block_size)]
    return full + [(last, i) for i in range(count - len(full))]


def fewest_moves(rows, num_blocks, block_size):
    """Return the fewest rows that must move, by trying every choice of blocks and of the last one."""
    held = {divmod(row, block_size) for row in rows}
    left = -(-len(rows) // block_size)
    return min(
        (
            len(rows) - len(held & set(places([b for b in blocks if b != last], last, block_size, len(rows))))
            for blocks in combinations(range(num_blocks), left)
            for last in blocks
        ),
        default=0,
    )


def block_moves(rows, table, block_size):
    """Return `order`, `moves`, the new table and the free blocks."""
    if not rows:
        return [], [], [], list(table)
    held = {divmod(row, block_size) for row in rows}
    fill = [sum(row // block_size == block for row in rows) for block in range(len(table))]
    left = -(-len(rows) // block_size)
    most, chosen = -1, None
    for last in range(len(table)):  # the last block of equals
        fullest = sorted((b for b in range(len(table)) if b != last), key=lambda b: (-fill[b], b))
        new = places(sorted(fullest[: left - 1]), last, block_size, len(rows))
        if len(held & set(new)) >= most:
            most, chosen = len(held & set(new)), new
    waiting = [row for row in rows if divmod(row, block_size) not in chosen]
    order, moves = [], []
    for block, i in chosen:
        if (block, i) in held:
            order.append(block * block_size + i)
        else:
            row = waiting.pop(0)
            order.append(row)
            moves.append([table[row // block_size] * block_size + row % block_size, table[block] * block_size + i])
    new_table = list(dict.fromkeys(block for block, _ in chosen))
    freed = [table[block] for block in range(len(table)) if block not in new_table]
    return order, moves, [table[block] for block in new_table], freed
