"""The fewest and the most positions of each layer, and the blocks that budgets are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, positive, shown, uint32
from ._tensor import plain_array


@dataclass(frozen=True, eq=False)
class Bounds:
    """What every layer's budget keeps to.

    Attributes
    ----------
    minimum, maximum
        A number, a read-only array with one per layer, or None for no maximum.
    multiple_of
        The block size: every budget is a multiple of it.
    """

    minimum: int | npt.NDArray[np.uint32]
    maximum: int | npt.NDArray[np.uint32] | None
    multiple_of: int

    @classmethod
    def of(cls, num_layers: int, minimum: Any, maximum: Any, multiple_of: Any) -> Bounds:
        """Check the arguments of :func:`pb_kvcache.plan`. Whether the bounds cross is checked with the plan.

        Raises
        ------
        TypeError, ValueError
            A bound that is not an integer of 32 unsigned bits or one per layer. A block size of 0.
        """
        return cls(
            _bound("minimum", minimum, num_layers),
            None if maximum is None else _bound("maximum", maximum, num_layers),
            positive("multiple_of", multiple_of),
        )

    def per_layer(self, num_layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return every layer's minimum and maximum as given, each of shape ``(num_layers,)``."""
        high = UINT32_MAX if self.maximum is None else self.maximum
        return (
            np.broadcast_to(np.asarray(self.minimum, np.int64), (num_layers,)),
            np.broadcast_to(np.asarray(high, np.int64), (num_layers,)),
        )

    def in_blocks(self, num_layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the same with the minimum rounded up to a multiple, the maximum down."""
        low, high = self.per_layer(num_layers)
        b = self.multiple_of
        return -(-low // b) * b, high // b * b

    def crossing(self, num_layers: int) -> str:
        """Return what is wrong with the first layer whose minimum is above its maximum."""
        lows, highs = self.per_layer(num_layers)
        layer = int(np.flatnonzero(lows > highs)[0])
        low, high = self._named(layer)
        return f"{low} = {lows[layer]}: must not exceed {high} = {highs[layer]}"

    def without_block(self, num_layers: int) -> str:
        """Return what is wrong with the first layer that has no multiple between its bounds."""
        lows, highs = self.per_layer(num_layers)
        b = self.multiple_of
        layer = int(np.flatnonzero(-(-lows // b) > highs // b)[0])
        low, high = self._named(layer)
        below = int(highs[layer]) // b * b
        return (
            f"{low} = {lows[layer]}, {high} = {highs[layer]}: a multiple of multiple_of = {b} must lie between them; "
            f"the nearest are {below} and {below + b}"
        )

    def _named(self, layer: int) -> tuple[str, str]:
        """Return what a caller calls the bounds of a layer."""
        bounds = (("minimum", self.minimum), ("maximum", self.maximum))
        low, high = (f"{name}[{layer}]" if isinstance(bound, np.ndarray) else name for name, bound in bounds)
        return low, high


def _bound(name: str, value: Any, num_layers: int) -> int | npt.NDArray[np.uint32]:
    """Return a bound as an int, or as an array with one per layer."""
    if isinstance(value, str) or not (isinstance(value, Sequence) or (hasattr(value, "__array__") and np.ndim(value))):
        return uint32(name, value)
    array = plain_array(name, value, "integers")
    # Integers that do not fit 64 bits make an array of objects.
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "O" and all(type(element) is int for element in array.flat)
    )
    if array.shape != (num_layers,):
        raise ValueError(f"{name}: has shape {array.shape}, must be ({num_layers},): one for each layer")
    if not whole:
        raise TypeError(f"{name}: must be integers, not of dtype {array.dtype}")
    outside = (array < 0) | (array > UINT32_MAX)
    if outside.any():
        layer = int(np.flatnonzero(outside)[0])
        raise ValueError(f"{name}[{layer}] = {shown(int(array[layer]))}: must be between 0 and {UINT32_MAX}")
    bounds = array.astype(np.uint32, order="C")
    bounds.flags.writeable = False
    return bounds
