"""What a trace is: a model's attention over one sequence, a decode step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._checks import integer, uint32
from ..._dtypes import DTYPE_BITS
from ..._native import lib
from ..._tensor import plain_array

#: How many of a step's largest weights recall counts.
TOP = 32
#: Head means are rounded to float16 weight by weight, so a row may sum to a little more than 1.
SUM_LIMIT = 1.01


class Trace(ABC):
    """A model's attention over one sequence, step by step and layer by layer.

    Parameters
    ----------
    name
        What reports call it.
    num_layers
        Greater than 0, at most 65536.
    length
        Positions in the sequence, greater than 1. Position 0 is there from the start, so there are ``length - 1``
        steps.
    metadata
        Where it comes from, as JSON values. :attr:`bytes_per_position` follows from `kv_dtype` and `kv_elements`, or
        from `kv_dtype`, `num_kv_heads` and `head_dim`, where they are given.
    """

    def __init__(self, name: str, num_layers: int, length: int, metadata: Mapping[str, Any] | None = None) -> None:
        self.name = str(name)
        self.num_layers = checked_layers(num_layers)
        self.length = uint32("length", length)
        if self.length < 2:
            raise ValueError(f"length = {length}: must be greater than 1, so that there is a step to replay")
        self.metadata: dict[str, Any] = dict(metadata or {})
        _bytes_per_position(self.metadata)  # refuse nonsense now, not at the end of a benchmark
        self._top: dict[int, npt.NDArray[np.intp]] = {}

    @abstractmethod
    def rows(self, step: int) -> npt.NDArray[np.float32]:
        """Return what the token at position `step` attended to: shape ``(num_layers, step)``, not to be written to.

        Entry ``[l, i]`` is the weight of position ``i`` in layer ``l``, averaged over heads. The weight that the token
        gave to itself is left out, so a row sums to at most 1.
        """

    def top(self, step: int) -> npt.NDArray[np.intp]:
        """Return each layer's ``min(32, step)`` positions of largest weight, the lower one on a tie, in no order.

        Shape ``(num_layers, min(32, step))``. Found once for each step and remembered, since every policy is measured
        against the same.
        """
        found = self._top.get(step)
        if found is None:
            found = self._top[step] = _largest(self.rows(step), TOP)
        return found

    def layer(self, layer: int) -> npt.NDArray[Any]:
        """Return one layer's packed lower triangle, step after step: shape ``(length * (length - 1) // 2,)``."""
        self._check_layer(layer)
        return np.concatenate([self.rows(step)[layer] for step in range(1, self.length)])

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer = {layer}: must be between 0 and {self.num_layers - 1}")

    @property
    def steps(self) -> int:
        """How many decode steps there are: ``length - 1``."""
        return self.length - 1

    @property
    def bytes_per_position(self) -> int | None:
        """Bytes of K and V that one layer of the model stores for one position. None: that is not known."""
        return _bytes_per_position(self.metadata)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.num_layers} layers, {self.length} positions>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_top": {}}  # cheaper to work out again than to send


def checked_layers(value: Any) -> int:
    number = uint32("num_layers", value)
    most: int = lib.PB_KVCACHE_STACK_MAX_LAYERS  # a stack could not follow more
    if not 0 < number <= most:
        raise ValueError(f"num_layers = {number}: must be greater than 0 and at most {most}")
    return number


def _bytes_per_position(metadata: Mapping[str, Any]) -> int | None:
    dtype = metadata.get("kv_dtype")
    stated = {
        key: metadata[key] for key in ("num_kv_heads", "head_dim", "kv_elements") if metadata.get(key) is not None
    }
    for key, value in stated.items():
        for number in value if key == "kv_elements" and isinstance(value, list) else [value]:
            if not 0 < integer(key, number) <= 2**20:
                raise ValueError(f"{key} = {number}: must be between 1 and {2**20}")
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"kv_dtype = {dtype!r}: must be one of {', '.join(DTYPE_BITS)}")
    elements = stated.get("kv_elements")
    if elements is None and "num_kv_heads" in stated and "head_dim" in stated:
        elements = 2 * int(stated["num_kv_heads"]) * int(stated["head_dim"])
    # A list has one entry a layer, and no one number for all of them.
    return None if elements is None or isinstance(elements, list) else int(elements) * DTYPE_BITS[dtype] // 8


def _largest(rows: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of each row's `count` largest entries, the lower index on a tie."""
    length = rows.shape[1]
    # Weights are >= 0, so their bits have the order of their values. The low half of a key is the index, counted down:
    # every key is distinct, and the tie rule holds whatever the partition does. Adding 0 turns -0.0 into 0.0.
    keys = (np.asarray(rows, np.float32) + np.float32(0)).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(0xFFFFFFFF, 0xFFFFFFFF - length, -1, dtype=np.uint64)
    if length > count:
        keys = np.partition(keys, length - count, axis=1)[:, length - count :]
    positions: npt.NDArray[np.intp] = (np.uint64(0xFFFFFFFF) - (keys & np.uint64(0xFFFFFFFF))).astype(np.intp)
    return positions


class PackedTrace(Trace):
    """A trace held as packed lower triangles, step after step: ``num_layers * length * (length - 1) / 2`` weights.

    Parameters
    ----------
    name, num_layers, length, metadata
        As for :class:`Trace`.
    weights
        float16 or float32, one-dimensional: for each step the weights of layer 0, layer 1, ... over the positions
        before it. Kept without a copy.

    Raises
    ------
    TypeError, ValueError
        Another dtype or size. A weight that is negative, infinite or NaN, or a row that sums to more than 1. The
        message names step, layer and position.
    """

    def __init__(
        self,
        name: str,
        num_layers: int,
        length: int,
        weights: npt.NDArray[Any],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, num_layers, length, metadata)
        if not isinstance(weights, np.ndarray) or weights.dtype not in (np.float16, np.float32):
            raise TypeError("weights: must be a NumPy array of float16 or float32")
        weights = plain_array("weights", weights, "float16 or float32")
        size = self.num_layers * triangle_size(self.length)
        if weights.shape != (size,):
            raise ValueError(
                f"weights: has shape {weights.shape}, must be ({size},) for {num_layers} layers and {length} positions"
            )
        self.weights: npt.NDArray[Any] = weights.view()
        self.weights.flags.writeable = False  # rows() hands out parts of it
        for step in range(1, self.length):
            rows = self.rows(step)
            with np.errstate(invalid="ignore"):  # infinities of both signs
                sums = rows.sum(axis=1, dtype=np.float64)
            # The sum is NaN or infinite as soon as one weight is. min() finds the negative ones.
            if not (rows.min() >= 0 and sums.max() <= SUM_LIMIT):
                raise ValueError(f"{self.name}: {_bad_rows(rows, sums, step)}")

    def rows(self, step: int) -> npt.NDArray[np.float32]:
        """Return what the token at position `step` attended to: shape ``(num_layers, step)``."""
        if not 1 <= step < self.length:
            raise IndexError(f"step = {step}: must be between 1 and {self.length - 1}")
        start = self.num_layers * triangle_size(step)
        block = self.weights[start : start + self.num_layers * step].reshape(self.num_layers, step)
        rows: npt.NDArray[np.float32] = block.astype(np.float32, copy=False)
        return rows

    def layer(self, layer: int) -> npt.NDArray[Any]:
        """Return one layer's packed lower triangle, in the precision in which it is held."""
        self._check_layer(layer)
        starts = (self.num_layers * triangle_size(step) + layer * step for step in range(1, self.length))
        return np.concatenate([self.weights[start : start + step] for step, start in enumerate(starts, start=1)])


def _bad_rows(rows: npt.NDArray[np.float32], sums: npt.NDArray[np.float64], step: int) -> str:
    bad = np.argwhere(~(np.isfinite(rows) & (rows >= 0)))
    if len(bad):
        layer, pos = bad[0]
        return f"step {step}, layer {layer}, position {pos}: weight {rows[layer, pos]} must be finite and >= 0"
    layer = int(np.argmax(sums))
    return f"step {step}, layer {layer}: weights that sum to {sums[layer]:.6g}, must sum to at most 1, not be logits"


def triangle_size(length: int) -> int:
    """Return how many weights one layer's steps before position `length` have: 1 + 2 + ... + (length - 1)."""
    return length * (length - 1) // 2


def pack(name: str, attention: npt.ArrayLike, metadata: Mapping[str, Any] | None = None) -> PackedTrace:
    """Make a trace of full attention matrices.

    Parameters
    ----------
    name
        What reports call it.
    attention
        Shape ``(num_layers, length, length)`` or ``(num_layers, heads, length, length)``, real numbers: row ``t`` is
        what the token at position ``t`` attended to. Heads are averaged in float32. The diagonal and what lies above it
        are not used. Stored as float32, or as float16 where float16 was given and no heads were averaged.
    metadata
        As for :class:`Trace`.

    Raises
    ------
    TypeError, ValueError
        Another shape or dtype, or weights that :class:`PackedTrace` refuses.
    """
    array = plain_array("attention", attention, "real numbers")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"attention: must be real numbers, not of dtype {array.dtype}")
    if array.ndim not in (3, 4) or array.shape[-1] != array.shape[-2] or array.shape[1] == 0:
        raise ValueError(f"attention: has shape {array.shape}, must be (num_layers[, heads], length, length)")
    if array.ndim == 4:
        with np.errstate(all="ignore"):  # what is not finite is refused below, where it is used
            array = array.mean(axis=1, dtype=np.float32)
    dtype = np.float16 if array.dtype == np.float16 else np.float32
    num_layers, length = array.shape[:2]
    weights = np.empty(num_layers * triangle_size(length), dtype)
    for step in range(1, length):
        start = num_layers * triangle_size(step)
        with np.errstate(all="ignore"):
            weights[start : start + num_layers * step] = array[:, step, :step].ravel()
    return PackedTrace(name, num_layers, length, weights, metadata)
