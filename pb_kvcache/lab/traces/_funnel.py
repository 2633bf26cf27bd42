"""A synthetic trace whose layers are concentrated to a known degree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..._checks import real, uint32
from ._trace import Trace, checked_layers
from ._xoshiro import Xoshiro128

#: Attention goes to phrases: positions that matter stand side by side, as the policies' pooling supposes.
_PHRASE = 16


class _Funnel(Trace):
    """The rows of :func:`funnel`, made as they are asked for."""

    def __init__(self, num_layers: int, length: int, widths: Sequence[int], local: float, seed: int) -> None:
        metadata = {"about": "synthetic", "widths": list(widths), "local_mass": local, "seed": seed}
        super().__init__("funnel", num_layers, length, metadata)
        rng = Xoshiro128(seed)
        # The first step at which a position is no longer among its layer's heavy ones. 0: it never is one.
        self._until = np.zeros((num_layers, length), np.uint32)
        for until, width in zip(self._until, widths, strict=True):
            heavy: list[tuple[int, int]] = []
            for start in range(0, length, _PHRASE):
                until[start : start + _PHRASE] = length
                heapq.heappush(heavy, (rng.next(), start))
                if len(heavy) > width:
                    _, lowest = heapq.heappop(heavy)
                    until[lowest : lowest + _PHRASE] = 0 if lowest == start else start + 1
        self._local = local

    def rows(self, step: int) -> npt.NDArray[np.float32]:
        if not 1 <= step < self.length:
            raise IndexError(f"step = {step}: must be between 1 and {self.length - 1}")
        heavy = self._until[:, :step] > step
        rows = heavy * ((1 - self._local) / np.maximum(heavy.sum(axis=1, keepdims=True), 1))
        near = np.arange(8, 0, -1, dtype=np.float64)[:step]
        with np.errstate(under="ignore"):
            rows[:, step - len(near) :] += (near * (self._local / near.sum()))[::-1]
            result: npt.NDArray[np.float32] = rows.astype(np.float32)
        return result


def funnel(
    num_layers: int = 16,
    length: int = 1024,
    *,
    widths: Sequence[int] = (12, 3),
    local_mass: float = 0.2,
    seed: int = 1,
) -> Trace:
    """Return a synthetic trace whose layers are concentrated to a known degree: a pyramid's effect has a known sign.

    Positions come in phrases of 16, and every phrase of every layer draws a priority. A step spreads ``1 - local_mass``
    of a layer's attention evenly over its `width` phrases of highest priority so far, and ``local_mass`` over the last
    8 positions in proportion 8, 7, ..., 1.

    A layer needs a budget of its phrases, their neighbours in a pool, and a recent window. A larger budget is wasted on
    it, and a smaller one costs it more the sharper it is. So where the mean budget is about what the layers need on
    average, a pyramid of the widths' ratio fits and uniform budgets do not. Far below that no layer has what it needs,
    a position is worth most where the layer is sharp, and the pyramid loses.

    Parameters
    ----------
    num_layers, length
        Layers, greater than 0, and positions, greater than 1.
    widths
        Phrases that matter, integers > 0: one for each layer, or two for the first and the last, between which the
        others are interpolated linearly. Falling widths are the funnel, broad at layer 0 and sharp at the last. Equal
        widths are flat, rising ones inverted.
    local_mass
        Between 0 and 1.
    seed
        32 bits, for the generator of :func:`decode_4096`. The same arguments give the same bits everywhere.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above.
    """
    num_layers, length, seed = checked_layers(num_layers), uint32("length", length), uint32("seed", seed)
    try:
        given = [uint32(f"widths[{i}]", value) for i, value in enumerate(widths)]
    except TypeError as error:
        raise TypeError(f"widths: must be a sequence of integers: {error}") from None
    for i, width in enumerate(given):
        if width == 0:
            raise ValueError(f"widths[{i}] = 0: must be greater than 0")
    if len(given) == 2:
        first, last = given
        span = max(num_layers - 1, 1)
        # Rounded to the nearest, in integers.
        given = [(2 * (first * (span - layer) + last * layer) + span) // (2 * span) for layer in range(num_layers)]
    if len(given) != num_layers:
        raise ValueError(f"widths: has {len(given)} values, must have 2, or one for each of the {num_layers} layers")
    local = real("local_mass", local_mass)
    if not 0 <= local <= 1:
        raise ValueError(f"local_mass = {local_mass}: must be between 0 and 1")
    return _Funnel(num_layers, length, given, local, seed)
