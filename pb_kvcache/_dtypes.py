"""The element types of keys and values, and the bytes that positions take in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._checks import positive

#: Bits of one element, by name. ``float8`` is another name of ``float8_e4m3fn``.
DTYPE_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
}


def dtype_bits(dtype: Any, name: str = "dtype") -> int:
    """Return the bits of one element of a dtype.

    Parameters
    ----------
    dtype
        A name of :data:`DTYPE_BITS`, with or without ``torch.`` before it, a NumPy dtype or a torch one.
    name
        What the caller calls it, for the errors.

    Raises
    ------
    TypeError
        Not a dtype.
    ValueError
        A dtype that no cache has.
    """
    if isinstance(dtype, str):
        found = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        found = str(dtype)
    else:
        try:
            if dtype is None:  # NumPy takes None for float64
                raise TypeError
            found = np.dtype(dtype).name
        except TypeError:
            raise TypeError(f"{name} = {dtype!r}: must be a dtype or the name of one") from None
    found = found.removeprefix("torch.")
    if found not in DTYPE_BITS:
        raise ValueError(f"{name} = {found!r}: must be one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[found]


def position_bits(num_kv_heads: Any, head_dim: Any, dtype: Any) -> int:
    """Return the bits of one position's key and value in one layer."""
    return 2 * positive("num_kv_heads", num_kv_heads) * positive("head_dim", head_dim) * dtype_bits(dtype)


def cache_nbytes(positions: int, num_kv_heads: Any, head_dim: Any, dtype: Any) -> int:
    """Return the bytes of the keys and values of `positions` positions of one layer, rounded up to a whole byte."""
    return -(-positions * position_bits(num_kv_heads, head_dim, dtype) // 8)
