"""Attention traces to replay policies on: a registry's single-layer trace, a synthetic funnel, and recorded models.

A :class:`Trace` gives one decode step at a time: for every layer the weights that the new token gave to the positions
before it. Nothing here holds a square matrix per layer; a packed trace keeps the lower triangle alone, in the
precision in which it was recorded.

Trace files
-----------
An ``.npz`` file (a zip archive of ``.npy`` members) with one member ``metadata`` and one member ``layer_000``,
``layer_001``, ... per layer. ``metadata`` is JSON in UTF-8, as bytes; ``num_layers`` and ``length`` in it give every
other member's shape. A layer is ``uint8`` of shape ``(2, length * (length - 1) // 2)``: the high bytes and then the
low bytes of the float16 weights, so that deflate finds the exponents side by side. The weights are ordered by position
and then by step (the attention that position 0 got at steps 1, 2, ..., then position 1 at steps 2, 3, ...), since one
position's weights resemble each other more than one step's do. 512 tokens of the shipped recording deflate to 89 % as
they are, to 81 % as planes, and to 80 % in this order. :func:`save` and :func:`load` write and read it.
"""

from __future__ import annotations

import heapq
import io
import json
import os
import secrets
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import integer, plain_array, real, uint32
from ._dtypes import DTYPE_BITS
from ._native import lib

__all__ = [
    "TOP",
    "PackedTrace",
    "Trace",
    "decode_4096",
    "funnel",
    "load",
    "named",
    "names",
    "pack",
    "recorded",
    "save",
]

#: How many of a step's largest weights recall counts.
TOP = 32

_FORMAT = "pb_kvcache trace"
_FORMAT_VERSION = 1
#: The most that deflate can shrink anything: 258 bytes in 2 bits. A member that claims more is a lie or a bomb.
_DEFLATE_LIMIT = 1032
_METADATA_LIMIT = 1 << 20
#: Head means are rounded to float16 weight by weight, so a row may sum to a little more than 1.
_SUM_LIMIT = 1.01


class Trace(ABC):
    """A model's attention over one sequence, step by step and layer by layer.

    Parameters
    ----------
    name
        What reports call it.
    num_layers
        Layers; greater than 0, at most 65536.
    length
        Positions in the sequence; greater than 1. Position 0 is there from the start: there are ``length - 1`` steps.
    metadata
        Where it comes from; JSON values. `num_kv_heads`, `head_dim` and `kv_dtype`, where given, tell
        :attr:`bytes_per_position`.
    """

    def __init__(self, name: str, num_layers: int, length: int, metadata: Mapping[str, Any] | None = None) -> None:
        self.name = str(name)
        self.num_layers = _num_layers(num_layers)
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

        Shape ``(num_layers, min(32, step))``. Worked out once a step and remembered: every policy is measured
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
        """Bytes of K and V that one layer of the model stores for one position; None where that is not known."""
        return _bytes_per_position(self.metadata)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.num_layers} layers, {self.length} positions>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_top": {}}  # cheaper to work out again than to send


def _num_layers(value: Any) -> int:
    number = uint32("num_layers", value)
    most: int = lib.PB_KVCACHE_STACK_MAX_LAYERS  # a stack could not follow more
    if not 0 < number <= most:
        raise ValueError(f"num_layers = {number}: must be greater than 0 and at most {most}")
    return number


def _bytes_per_position(metadata: Mapping[str, Any]) -> int | None:
    keys = ("num_kv_heads", "head_dim", "kv_dtype")
    if any(metadata.get(key) is None for key in keys):
        return None
    heads, dim, dtype = (metadata[key] for key in keys)
    for key, value in (("num_kv_heads", heads), ("head_dim", dim)):
        if not 0 < integer(key, value) <= 2**20:
            raise ValueError(f"{key} = {value}: must be between 1 and {2**20}")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"kv_dtype = {dtype!r}: must be one of {', '.join(DTYPE_BITS)}")
    return 2 * int(heads) * int(dim) * DTYPE_BITS[dtype] // 8


def _largest(rows: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Return each row's `count` largest entries' indices; the lower index on a tie."""
    length = rows.shape[1]
    # Weights are >= 0, so their bits order as they do. With the index, counted down, in the low half every key is
    # distinct, and the tie rule holds whatever the partition does. Adding 0 turns -0.0 into 0.0.
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
        For another dtype or size; for a weight that is negative, infinite or NaN, or a row that sums to more than 1,
        naming step, layer and position.
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
        size = self.num_layers * _pairs(self.length)
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
            # The sum is NaN or infinite as soon as one weight is; min() then names the negative ones.
            if not (rows.min() >= 0 and sums.max() <= _SUM_LIMIT):
                raise ValueError(f"{self.name}: {_bad_rows(rows, sums, step)}")

    def rows(self, step: int) -> npt.NDArray[np.float32]:
        """Return what the token at position `step` attended to: shape ``(num_layers, step)``."""
        if not 1 <= step < self.length:
            raise IndexError(f"step = {step}: must be between 1 and {self.length - 1}")
        start = self.num_layers * _pairs(step)
        block = self.weights[start : start + self.num_layers * step].reshape(self.num_layers, step)
        rows: npt.NDArray[np.float32] = block.astype(np.float32, copy=False)
        return rows

    def layer(self, layer: int) -> npt.NDArray[Any]:
        """Return one layer's packed lower triangle, in the precision in which it is held."""
        self._check_layer(layer)
        starts = (self.num_layers * _pairs(step) + layer * step for step in range(1, self.length))
        return np.concatenate([self.weights[start : start + step] for step, start in enumerate(starts, start=1)])


def _bad_rows(rows: npt.NDArray[np.float32], sums: npt.NDArray[np.float64], step: int) -> str:
    bad = np.argwhere(~(np.isfinite(rows) & (rows >= 0)))
    if len(bad):
        layer, pos = bad[0]
        return f"step {step}, layer {layer}, position {pos}: weight {rows[layer, pos]} must be finite and >= 0"
    layer = int(np.argmax(sums))
    return f"step {step}, layer {layer}: weights that sum to {sums[layer]:.6g}, must sum to at most 1, not be logits"


def _pairs(length: int) -> int:
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
        are not used. Stored as float16 where that is the dtype given, else as float32.
    metadata
        As for :class:`Trace`.

    Raises
    ------
    TypeError, ValueError
        For another shape or dtype, or weights that :class:`PackedTrace` refuses.
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
    weights = np.empty(num_layers * _pairs(length), dtype)
    for step in range(1, length):
        start = num_layers * _pairs(step)
        with np.errstate(all="ignore"):
            weights[start : start + num_layers * step] = array[:, step, :step].ravel()
    return PackedTrace(name, num_layers, length, weights, metadata)


class _Xoshiro128:
    """xoshiro128** filled by splitmix32: the generator of the `decode-4096` trace. Also this module's own."""

    def __init__(self, seed: int) -> None:
        self._state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B9) & 0xFFFFFFFF
            z = seed
            z = ((z ^ (z >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
            z = ((z ^ (z >> 15)) * 0x735A2D97) & 0xFFFFFFFF
            self._state.append(z ^ (z >> 15))

    def next(self) -> int:
        """Return 32 bits."""
        s = self._state
        x = (s[1] * 5) & 0xFFFFFFFF
        result = (((x << 7) | (x >> 25)) * 9) & 0xFFFFFFFF
        shifted = (s[1] << 9) & 0xFFFFFFFF
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = ((s[3] << 11) | (s[3] >> 21)) & 0xFFFFFFFF
        return result

    def below(self, bound: int) -> int:
        """Return an integer below `bound`, all equally likely: draws from the uneven first stretch are thrown away."""
        threshold = (2**32 - bound) % bound
        while True:
            value = self.next()
            if value >= threshold:
                return value % bound


def decode_4096() -> PackedTrace:
    """Return the registry's single-layer trace `decode-4096`, bit for bit: 4,096 positions, seed 7, 33 MB as float32.

    Attention sinks, a local window of 64, 32 heavy positions that are drawn anew at step 128 and at every multiple of
    512, and noise. One layer, so it cannot show what a pyramid is for.
    """
    length, sinks, window, heavies = 4096, 4, 64, 32
    rng = _Xoshiro128(7)
    sink = np.array([0.06, 0.045, 0.03, 0.015])
    near = np.arange(window, 0, -1, dtype=np.float64)  # offset 1 weighs 64, offset 64 weighs 1
    rank = np.arange(1, heavies + 1, dtype=np.float64)
    rank_sum = _in_order(1.0 / rank)
    heavy = np.empty(0, np.intp)
    weights = np.empty(_pairs(length), np.float32)
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
        weights[_pairs(step) : _pairs(step + 1)] = row
    return PackedTrace("decode-4096", 1, length, weights, {"about": "synthetic, one layer", "seed": 7})


def _in_order(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of `values` added from the first to the last; ``sum()`` would add them in pairs."""
    return float(np.cumsum(values)[-1])


def _heavy_positions(rng: _Xoshiro128, step: int, count: int) -> npt.NDArray[np.intp]:
    drawn: list[int] = []
    while len(drawn) < count:
        pos = 4 + rng.below(step - 68)
        if pos not in drawn:
            drawn.append(pos)
    return np.array(drawn, np.intp)


#: Attention goes to phrases: positions that matter stand side by side, as the policies' pooling supposes.
_PHRASE = 16


class _Funnel(Trace):
    """The rows of :func:`funnel`, made as they are asked for."""

    def __init__(self, num_layers: int, length: int, widths: Sequence[int], local: float, seed: int) -> None:
        metadata = {"about": "synthetic", "widths": list(widths), "local_mass": local, "seed": seed}
        super().__init__("funnel", num_layers, length, metadata)
        rng = _Xoshiro128(seed)
        # The first step at which a position is no longer among its layer's heavy ones; 0 where it never is.
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
    8 positions in proportion 8, 7, ..., 1. A layer is served in full by a budget of its phrases, their neighbours in a
    pool and a recent window; what it gets beyond is wasted, and what it lacks costs it more the sharper it is. So where
    the mean budget is about what the layers need on average, a pyramid of the widths' ratio fits and uniform budgets do
    not. Far below that no layer is served, a position is worth most where the layer is sharp, and the sign turns.

    Parameters
    ----------
    num_layers, length
        Layers, and positions; greater than 0 and 1.
    widths
        Phrases that matter: two integers > 0, for the first and the last layer, between which the others are
        interpolated linearly; or one for each layer. Falling is the funnel, broad at layer 0 and sharp at the last;
        equal is flat; rising is inverted.
    local_mass
        Between 0 and 1.
    seed
        32 bits, of the generator of :func:`decode_4096`. The same arguments give the same bits everywhere.

    Raises
    ------
    TypeError, ValueError
        For an argument that breaks a rule above.
    """
    num_layers, length, seed = _num_layers(num_layers), uint32("length", length), uint32("seed", seed)
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


#: Recordings that ship with the package: name -> file in ``pb_kvcache/data``.
_RECORDED = {"smollm2-135m": "smollm2-135m.npz"}


def recorded(name: str = "smollm2-135m") -> PackedTrace:
    """Return a recording that ships with the package: real attention of a real decoder.

    Parameters
    ----------
    name
        ``"smollm2-135m"``: SmolLM2-135M-Instruct, 30 layers, on the opening of the Jargon File. The ``metadata`` tell
        licences and sources.

    Raises
    ------
    ValueError
        For another name; the message lists the known ones.
    """
    if name not in _RECORDED:
        raise ValueError(f"name = {name!r}: no such recording; known: {', '.join(_RECORDED)}")
    return load(Path(__file__).parent / "data" / _RECORDED[name])


_NAMED: dict[str, Callable[[], Trace]] = {
    "smollm2-135m": recorded,
    "decode-4096": decode_4096,
    "funnel": funnel,
    "funnel-flat": lambda: funnel(widths=(7, 7)),
    "funnel-inverted": lambda: funnel(widths=(3, 12)),
}


def names() -> list[str]:
    """Return the names that :func:`named` knows."""
    return list(_NAMED)


def named(name: str | os.PathLike[str]) -> Trace:
    """Return a trace by its name (see :func:`names`), or from a file by its path, which ends in ``.npz``.

    Raises
    ------
    ValueError
        For an unknown name; the message lists the known ones.
    OSError, ValueError
        As :func:`load`.
    """
    text = os.fspath(name)
    if text in _NAMED:
        return _NAMED[text]()
    if text.endswith(".npz") or os.sep in text:
        return load(text)
    raise ValueError(f"trace = {text!r}: no such trace; known: {', '.join(_NAMED)}, or the path of a .npz recording")


def save(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace file: float16, with the trace's name and metadata inside. The same trace gives the same bytes.

    Weights that are not float16 yet are rounded. One layer at a time is held beside the trace itself.

    Raises
    ------
    OSError
        Where the file cannot be written.
    TypeError, ValueError
        For metadata that are not JSON (NaN and infinities are not), or more than 1 MiB of it; for weights that are not
        between 0 and 1.

    Notes
    -----
    A call that raises leaves what stood there before as it was.
    """
    metadata = {
        **trace.metadata,
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "name": trace.name,
        "num_layers": trace.num_layers,
        "length": trace.length,
    }
    text = json.dumps(metadata, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode("utf-8")
    if len(text) > _METADATA_LIMIT:
        raise ValueError(f"metadata: {len(text)} bytes of JSON, must be at most {_METADATA_LIMIT}")
    target = Path(path)
    # A name of its own, so that two that save at once do not write into each other's.
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        with zipfile.ZipFile(partial, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _write_member(archive, "metadata", np.frombuffer(text, np.uint8))
            for layer in range(trace.num_layers):
                weights = trace.layer(layer)
                if not (weights.min() >= 0 and weights.max() <= _SUM_LIMIT):  # a NaN makes both false
                    raise ValueError(f"{trace.name}: layer {layer} has weights that are not between 0 and 1")
                with np.errstate(under="ignore"):
                    weights = weights.astype(np.float16)
                bits = np.concatenate([weights[index] for index in _columns(trace.length)]).view(np.uint16)
                planes = np.stack([(bits >> 8).astype(np.uint8), (bits & 0xFF).astype(np.uint8)])
                _write_member(archive, _member(layer), planes)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _member(layer: int) -> str:
    return f"layer_{layer:03d}"


def _columns(length: int, num_layers: int = 1, layer: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield for each position where its weights of one layer, step after step, stand among packed triangles."""
    steps = np.arange(length, dtype=np.int64)
    starts = num_layers * (steps * (steps - 1) // 2) + layer * steps
    for pos in range(length - 1):
        yield starts[pos + 1 :] + pos


def _write_member(archive: zipfile.ZipFile, name: str, array: npt.NDArray[np.uint8]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    # A fixed date and system, so that the bytes depend on the trace alone.
    info = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3
    info.external_attr = 0o644 << 16
    archive.writestr(info, buffer.getvalue())


def load(path: str | os.PathLike[str]) -> PackedTrace:
    """Read a trace file: a user's own recording, or one that ships with the package.

    Sizes are checked against the file's before anything is allocated, no pickles are read, and every weight is checked.

    Raises
    ------
    OSError
        Where the file cannot be read.
    ValueError
        For a file that is not a trace, is damaged or cut short, lacks a layer, has one of another shape, or holds
        weights that are not probabilities. The message names the file and what is wrong with it.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive, path)
        except MemoryError:
            raise
        except _NotATraceError as error:
            raise ValueError(f"{path}: {error}") from None
        except Exception as error:
            # zipfile, its decompressors and NumPy's header reader raise nearly anything at bytes that are wrong; an
            # OSError is a seek to where no file can be, or what bz2 makes of damaged data.
            raise ValueError(f"{path}: not a trace file, or a damaged one: {error}") from None


class _NotATraceError(Exception):
    """What is wrong with a trace file."""


def _constant(text: str) -> None:
    raise ValueError(f"{text} is none of JSON's values")


def _read(archive: zipfile.ZipFile, path: Path) -> PackedTrace:
    raw = _read_member(archive, "metadata", None)
    try:
        metadata = json.loads(raw.tobytes(), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _NotATraceError(f"metadata is not JSON: {error}") from None
    if not isinstance(metadata, dict) or metadata.pop("format", None) != _FORMAT:
        raise _NotATraceError("not a pb_kvcache trace")
    version = metadata.pop("format_version", None)
    if version != _FORMAT_VERSION:
        raise _NotATraceError(f"format_version = {version!r}: this version reads {_FORMAT_VERSION}")
    name = metadata.pop("name", path.stem)
    try:
        num_layers = uint32("num_layers", metadata.pop("num_layers", None))
        length = uint32("length", metadata.pop("length", None))
    except (TypeError, ValueError) as error:
        raise _NotATraceError(str(error)) from None
    expected = {_member(layer) + ".npy" for layer in range(min(num_layers, len(archive.namelist()) + 1))}
    present = {entry for entry in archive.namelist() if entry != "metadata.npy"}
    if len(present) + 1 < len(archive.namelist()):
        raise _NotATraceError("holds a member twice")
    if num_layers == 0 or length < 2:
        raise _NotATraceError(f"{num_layers} layers and {length} positions: must be at least 1 and 2")
    if present != expected:
        missing, extra = sorted(expected - present), sorted(present - expected)
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} does not belong there"
        raise _NotATraceError(f"{num_layers} layers are announced, and {what}")
    pairs = _pairs(length)
    size = path.stat().st_size
    if 2 * pairs * num_layers > size * _DEFLATE_LIMIT:
        raise _NotATraceError(f"{num_layers} layers of {length} positions cannot come out of a file of {size} bytes")
    weights = np.empty(num_layers * pairs, np.float16)
    for layer in range(num_layers):
        planes = _read_member(archive, _member(layer), pairs)
        values = ((planes[0].astype(np.uint16) << 8) | planes[1]).view(np.float16)
        done = 0
        for index in _columns(length, num_layers, layer):
            weights[index] = values[done : done + len(index)]
            done += len(index)
    try:
        return PackedTrace(str(name), num_layers, length, weights, metadata)
    except (TypeError, ValueError) as error:
        raise _NotATraceError(str(error)) from None


def _read_member(archive: zipfile.ZipFile, name: str, pairs: int | None) -> npt.NDArray[np.uint8]:
    """Return one member, whose shape must be ``(2, pairs)``, or ``(n,)`` with a modest n where `pairs` is None."""
    try:
        info = archive.getinfo(name + ".npy")
    except KeyError:
        raise _NotATraceError(f"not a pb_kvcache trace: it has no member {name}.npy") from None
    with archive.open(info) as member:
        try:
            if np.lib.format.read_magic(member) != (1, 0):
                raise ValueError("not a version 1.0 array")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        except ValueError as error:
            raise _NotATraceError(f"{name}.npy: {error}") from None
        wanted = f"(2, {pairs})" if pairs is not None else f"(n,) with n up to {_METADATA_LIMIT}"
        fits = shape == (2, pairs) if pairs is not None else len(shape) == 1 and 0 <= shape[0] <= _METADATA_LIMIT
        if not fits or dtype != np.uint8 or fortran:
            raise _NotATraceError(f"{name}.npy: has shape {shape} and dtype {dtype}, must be {wanted} and uint8")
        count = int(np.prod(shape, dtype=np.int64))
        data = member.read(count + 1)
    if len(data) != count:
        raise _NotATraceError(f"{name}.npy: holds {len(data)} bytes or more, must be {count}")
    return np.frombuffer(data, np.uint8).reshape(shape)
