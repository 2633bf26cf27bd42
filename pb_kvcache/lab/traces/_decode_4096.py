"""The registry's single-layer trace `decode-4096`, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._trace import PackedTrace, triangle_size
from ._xoshiro import Xoshiro128


def decode_4096() -> PackedTrace:
    """Return the registry's single-layer trace `decode-4096`, bit for bit: 4,096 positions, seed 7, 33 MB as float32.

    It has attention sinks, a local window of 64, 32 heavy positions that are drawn anew at step 128 and at every
    multiple of 512, and noise. With one layer it cannot show what a pyramid is for.
    """
    length, sinks, window, heavies = 4096, 4, 64, 32
    rng = Xoshiro128(7)
    sink = np.array([0.06, 0.045, 0.03, 0.015])
    near = np.arange(window, 0, -1, dtype=np.float64)  # offset 1 weighs 64, offset 64 weighs 1
    rank = np.arange(1, heavies + 1, dtype=np.float64)
    rank_sum = _in_order(1.0 / rank)
    heavy = np.empty(0, np.intp)
    weights = np.empty(triangle_size(length), np.float32)
    for step in range(1, length):
        # Every line below adds to distinct positions, so the order of the additions to one position is the order of
        # these lines. The sums run from the first term to the last.
        row = np.zeros(step)
        first = sink[:sinks][:step]
        row[: len(first)] += first * 0.15 / _in_order(first)
        local = near[:step]
        row[step - len(local) :] += (local * (0.55 if step >= 128 else 0.55 + 0.25) / _in_order(local))[::-1]
        if step >= 128:
            if step == 128 or step % 512 == 0:
                heavy = _heavy_positions(rng, step, heavies)
            row[heavy] += (0.25 / rank) / rank_sum
        row += 0.05 / step
        row /= _in_order(row)
        weights[triangle_size(step) : triangle_size(step + 1)] = row
    return PackedTrace("decode-4096", 1, length, weights, {"about": "synthetic, one layer", "seed": 7})


def _in_order(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of `values` added from the first to the last. ``sum()`` would add them in pairs."""
    return float(np.cumsum(values)[-1])


def _heavy_positions(rng: Xoshiro128, step: int, count: int) -> npt.NDArray[np.intp]:
    drawn: list[int] = []
    while len(drawn) < count:
        pos = 4 + rng.below(step - 68)
        if pos not in drawn:
            drawn.append(pos)
    return np.array(drawn, np.intp)
