"""Compaction: the kept rows of keys or values move to the front, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ._calls import OK, head_ranges, words
from ._errors import status_text
from ._native import ffi, lib
from ._options import at_least
from ._positions import ascending_rows
from ._tensor import NATIVE_DEVICES, dense, is_torch, on_other_device, plain_array, torch_module
from ._threads import in_threads

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Integers

_Element = TypeVar("_Element", bound=np.generic)


@overload
def compact(kv: npt.NDArray[_Element], indices: Integers, *, threads: int = 1) -> npt.NDArray[_Element]: ...


@overload
def compact(
    kv: npt.NDArray[_Element], indices: Sequence[Any], *, threads: int = 1
) -> npt.NDArray[_Element] | list[Any]: ...


@overload
def compact(kv: Tensor, indices: Tensor | Integers, *, threads: int = 1) -> Tensor: ...


@overload
def compact(kv: Tensor, indices: Sequence[Any], *, threads: int = 1) -> Tensor | list[Any]: ...


def compact(kv: Any, indices: Any, *, threads: int = 1) -> Any:
    """Move the kept rows of keys or values to the front, in place, and return that front.

    Equal to a gather, without memory for a second copy. Rows behind the front keep whatever the moves left there.

    Parameters
    ----------
    kv
        ``(kv_heads, n, head_dim)``, or a batch of them. A NumPy array or torch tensor of any numeric kind, whose last
        axis is contiguous. Other axes may have any strides: give a cache that holds positions outermost transposed. On
        another device torch gathers one head after the other.
    indices
        What :func:`select` returned: ``(kv_heads, kept)`` ascending positions, one vector per head, or a batch of
        either.
    threads
        Heads are divided among so many threads. An interrupt (Ctrl-C) is raised when all rows have moved, or before the
        first has: `kv` is never left half compacted. On another device it may be.

    Returns
    -------
    numpy.ndarray, torch.Tensor or list
        A view of the first ``kept`` rows, ``(kv_heads, kept, head_dim)``. Where heads keep different numbers, a list of
        views, one per head. For a batch the same with the batch in front, or a list.

    Raises
    ------
    TypeError, ValueError
        Positions out of range or not ascending, overlapping rows, a read-only array. Nothing has moved.
    """
    memory = _Memory(kv)
    kv, shape = memory.kv, memory.shape
    threads = at_least("threads", threads, 1)
    batched = len(shape) == 4
    if is_torch(indices):
        indices = plain_array("indices", indices, "integers")
    try:
        len(indices)
    except TypeError:
        raise TypeError(f"indices: must be rows of positions, not {type(indices).__name__}") from None
    if batched and len(indices) != shape[0]:
        raise ValueError(f"indices: has {len(indices)} sequences, must have one per sequence of kv, {shape[0]}")
    # The kernel refuses rows that overlap within its one sequence. Those of a batch, and torch's, are checked here.
    elsewhere = on_other_device("kv", kv)
    if (elsewhere or (batched and shape[0] > 1)) and not memory.disjoint():
        raise ValueError("kv: its rows overlap in memory")
    heads, n = shape[-3:-1]
    named = [(f"indices[{i}]", one) for i, one in enumerate(indices)] if batched else [("indices", indices)]
    kept = [ascending_rows(name, one, heads, n) for name, one in named]
    if 0 in shape:
        return _nothing(kv, indices)
    sequences = list(kv) if batched else [kv]
    if elsewhere:
        for one, (rows, counts) in zip(sequences, kept, strict=True):
            _gather_in_place(one, rows, counts)
    else:
        ranges = head_ranges(heads, len(sequences), threads)
        structs = [memory.struct(sequence) for sequence in range(len(sequences))]
        jobs = [
            _job(struct, first, end, rows, counts)
            for struct, (rows, counts) in zip(structs, kept, strict=True)
            for first, end in ranges
        ]
        in_threads(jobs, threads, whole=True)
    fronts = [_front(one, counts) for one, (_, counts) in zip(sequences, kept, strict=True)]
    if not batched:
        return fronts[0]
    numbers = {int(count) for _, counts in kept for count in counts}
    return kv[:, :, : numbers.pop()] if len(numbers) == 1 else fronts


def _nothing(kv: Any, indices: Any) -> Any:
    """Return the front of a `kv` without elements."""
    batched = len(kv.shape) == 4
    rows = [row for one in indices for row in one] if batched else list(indices)
    numbers = {len(row) for row in rows}
    if not rows:  # an array of no rows still says how long they are
        shape: tuple[int, ...] = getattr(indices, "shape", ())
        numbers = {shape[-1] if len(shape) == len(kv.shape) - 1 else 0}
    if len(numbers) == 1:
        return kv[..., : numbers.pop(), :]
    if not batched:
        return [kv[head, : len(row)] for head, row in enumerate(indices)]
    return [_nothing(one, rows) for one, rows in zip(kv, indices, strict=True)]


class _Memory:
    """The checked `kv` of a call, and where its rows are: strides in bytes."""

    __slots__ = ("address", "kv", "shape", "size", "strides")

    def __init__(self, kv: Any) -> None:
        if is_torch(kv):
            plain = dense("kv", kv)  # with a negative or conjugate bit, which moves leave as it is
            if kv.requires_grad:
                raise ValueError("kv: is part of a gradient and is not changed in place; give kv.detach()")
            self.size: int = plain.element_size()
            self.strides: list[int] = [stride * self.size for stride in plain.stride()]
            # On another device, whose tensors may have no address, torch moves the rows.
            self.address: int = plain.data_ptr() if plain.device.type in NATIVE_DEVICES else 0
        elif isinstance(kv, np.ndarray):
            kv = plain_array("kv", kv, "numbers")
            if kv.dtype.hasobject:
                raise TypeError(f"kv: must hold numbers, not {kv.dtype}")
            if not kv.flags.writeable:
                raise ValueError("kv: is read-only, must be writeable")
            self.size = kv.itemsize
            self.strides = list(kv.strides)
            self.address = kv.__array_interface__["data"][0]
        else:
            raise TypeError(f"kv: must be a NumPy array or torch tensor, not {type(kv).__name__}")
        self.kv = kv
        self.shape: tuple[int, ...] = tuple(kv.shape)
        if len(self.shape) not in (3, 4):
            raise ValueError(
                f"kv: must have shape (kv_heads, n, head_dim) or (batch, kv_heads, n, head_dim), not {self.shape}"
            )
        if 0 not in self.shape and self.shape[-1] > 1 and self.strides[-1] != self.size:
            raise ValueError("kv: its last axis must be contiguous")

    def disjoint(self) -> bool:
        """Tell whether no two rows share a byte. That holds for every transposed or sliced whole array."""
        if 0 in self.shape:
            return True
        extent = self.shape[-1] * self.size
        axes = zip(self.shape[:-1], map(abs, self.strides[:-1]), strict=True)
        for length, stride in sorted(axes, key=lambda axis: axis[1]):
            if length > 1:
                if stride < extent:
                    return False
                extent += (length - 1) * stride
        return True

    def struct(self, sequence: int) -> Any:
        """Return the ``pb_kvcache_rows`` of one sequence."""
        offset = sequence * self.strides[0] if len(self.shape) == 4 else 0
        return ffi.new(
            "pb_kvcache_rows *",
            {
                "data": ffi.cast("void *", self.address + offset),
                "num_heads": self.shape[-3],
                "n": self.shape[-2],
                "row_bytes": self.shape[-1] * self.size,
                "head_stride": self.strides[-3],
                "row_stride": self.strides[-2],
            },
        )


def _job(
    struct: Any, first: int, end: int, rows: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32]
) -> Callable[[], None]:
    """Return the call that compacts a range of heads of one sequence."""

    def run() -> None:
        status = lib.pb_kvcache_compact(struct, first, end, words(rows), rows.shape[1], words(counts))
        if status == lib.PB_KVCACHE_ERROR_STRIDE:
            raise ValueError("kv: its rows overlap in memory")
        if status == lib.PB_KVCACHE_ERROR_OVERLAP:
            raise ValueError("indices: must not lie within kv")
        if status != OK:
            raise RuntimeError(status_text(status))

    return run


def _gather_in_place(kv: Any, rows: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32]) -> None:
    """Move the kept rows of a tensor to the front, one head after the other, on its device."""
    torch = torch_module()
    for head, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        index = torch.from_numpy(row[:count].astype(np.int64)).to(kv.device)
        kv[head, :count] = kv[head].index_select(0, index)


def _front(kv: Any, counts: npt.NDArray[np.uint32]) -> Any:
    """Return the kept rows: one view, or one per head where heads keep different numbers."""
    numbers = counts.tolist()
    if len(set(numbers)) == 1:
        return kv[:, : numbers[0]]
    return [kv[head, :number] for head, number in enumerate(numbers)]
