"""Arithmetic that one code does on NumPy arrays and torch tensors, where no native kernel does it.

Arrays and tensors are read and checked here. What is computed from them is float32, or float64 where it says so,
whatever their own kind is. NumPy's or torch's own matrix multiplication works on the device where the tensors are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._qk import _kind, as_float32
from ._tensor import View, is_torch, on_other_device, resolved, torch_module

_KINDS = ("float32", "float16", "bfloat16")


def read(name: str, value: Any, dims: str, *, like: tuple[str, Any] | None = None, empty: bool = False) -> Any:
    """Return an array or tensor of float32, float16 or bfloat16, without its graph.

    Parameters
    ----------
    name, value
        The argument.
    dims
        The names of its axes, such as ``"kv_heads, n, head_dim"``.
    like
        The name and value of another argument that was read: both are arrays, or tensors on one device.
    empty
        Whether the axis before the last may have no elements.

    Raises
    ------
    TypeError
        For another kind of value.
    ValueError
        For another number of axes, or for none of something.
    """
    if on_other_device(name, value):
        array = resolved(name, value)
        if str(array.dtype).removeprefix("torch.") not in _KINDS:
            raise TypeError(f"{name}: must be a torch tensor of {', '.join(_KINDS)}, not {array.dtype}")
    else:
        array = View(name, value, contiguous=False).owner
    if like is not None:
        same_place(name, array, *like)
    shape = tuple(array.shape)
    needed = shape[:-2] + shape[-1:] if empty else shape
    if len(shape) != dims.count(",") + 1 or 0 in needed:
        raise ValueError(f"{name}: has shape {shape}, must be ({dims}) with one or more of each")
    return array


def same_place(name: str, array: Any, other_name: str, other: Any) -> None:
    """Refuse an array beside a tensor, and tensors on two devices."""
    if is_torch(array) != is_torch(other) or (is_torch(array) and array.device != other.device):
        raise TypeError(
            f"{name}: must be an array where {other_name} is one, or a tensor on its device; "
            f"they are {_kind(array)} and {_kind(other)}"
        )


def query_group(q_heads: int, kv_heads: int, name: str) -> int:
    """Return how many query heads share a KV head.

    Raises
    ------
    ValueError
        Where the KV heads do not divide the `q_heads` of the argument `name`.
    """
    if q_heads % kv_heads:
        raise ValueError(f"keys: has {kv_heads} heads, must divide the {q_heads} of {name}")
    return q_heads // kv_heads


def same_shape(name: str, array: Any, shape: tuple[int, ...], what: str) -> None:
    """Refuse an array of another shape than `what` asks for."""
    if tuple(array.shape) != shape:
        raise ValueError(f"{name}: has shape {tuple(array.shape)}, must be {shape} to agree with {what}")


def refuse_not_finite(name: str, array: Any) -> None:
    """Refuse NaN and infinities, with the first of them."""
    parts = enumerate(array) if len(array.shape) > 2 else [(None, array)]  # no more than one head's in float32
    for head, rows in parts:
        rows = float32(rows)
        with in_float32(array):
            total = float(rows.sum())
        if math.isfinite(total):  # 0.2 ms where torch's isfinite takes 7, at 9 x 4096 x 64 on one thread
            continue
        finite = library(array).isfinite(rows)
        if not bool(finite.all()):
            where = tuple(int(index) for index in np.argwhere(~np.asarray(finite.tolist()))[0])
            place = ", ".join(map(str, where if head is None else (head, *where)))
            raise ValueError(f"{name}[{place}] = {float(rows[where])}: every value must be finite")


def library(array: Any) -> Any:
    """Return the module whose functions take the array: torch or NumPy.

    Both know ``axis`` and ``keepdims``.
    """
    return torch_module() if is_torch(array) else np


def float32(array: Any) -> Any:
    """Return an array or tensor in float32, itself where it is."""
    return as_float32(array)


def float64(array: Any) -> Any:
    """Return an array or tensor in float64."""
    return library(array).asarray(float32(array), dtype=library(array).float64)


def zeros(shape: tuple[int, ...], like: Any) -> Any:
    """Return float32 zeros where `like` is."""
    if is_torch(like):
        return torch_module().zeros(shape, dtype=torch_module().float32, device=like.device)
    return np.zeros(shape, np.float32)


@contextlib.contextmanager
def in_float32(array: Any) -> Iterator[None]:
    """Leave precision to this package: torch's autocast is off, and NumPy does not warn of what is checked later."""
    if is_torch(array):
        torch = torch_module()
        with torch.no_grad(), torch.autocast(array.device.type, enabled=False):
            yield
    else:
        with np.errstate(all="ignore"):
            yield
