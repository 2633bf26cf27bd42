"""Checks of arguments that every wrapper shares: a clear error that names the argument, the value and the rule."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

UINT32_MAX = 2**32 - 1

_F32 = np.dtype(np.float32)


def integer(name: str, value: Any) -> int:
    """Return `value` as an int.

    Raises
    ------
    TypeError
        For anything that is not an integer: floats, strings and bools are refused.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} = {value!r}: must be an integer, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} = {value!r}: must be an integer, not {type(value).__name__}") from None


def uint32(name: str, value: Any) -> int:
    """Return `value` as an int that fits 32 unsigned bits.

    Raises
    ------
    TypeError
        For anything that is not an integer.
    ValueError
        Below 0 or above 2**32 - 1.
    """
    number = integer(name, value)
    if not 0 <= number <= UINT32_MAX:
        raise ValueError(f"{name} = {number}: must be between 0 and {UINT32_MAX}")
    return number


def float32_array(name: str, value: Any, ndim: int) -> npt.NDArray[np.float32]:
    """Return `value` as a C-contiguous, aligned array of native float32 with `ndim` dimensions.

    An array that is one already is returned as it is, without a copy; any other real numeric dtype, byte order,
    layout or array-like is converted once.

    Raises
    ------
    TypeError
        Where the elements are not real numbers.
    ValueError
        For another number of dimensions, or a finite value too large for float32.
    """
    if np.ma.isMaskedArray(value):
        raise TypeError(f"{name}: must be an array of real numbers, not a masked one; fill it first")
    if not (isinstance(value, np.ndarray) and value.dtype == _F32):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that requires a gradient
            raise TypeError(f"{name}: must be an array of real numbers: {error}") from None
        if value.dtype.kind not in "fiu":
            raise TypeError(f"{name}: must be an array of real numbers, not of dtype {value.dtype}")
        with np.errstate(over="ignore"):
            converted = value.astype(np.float32)
        overflown = np.isinf(converted) & np.isfinite(value)
        if overflown.any():
            raise ValueError(f"{name}: {value[overflown][0]} is too large for float32")
        value = converted
    if value.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimension{'s' if ndim != 1 else ''}, not shape {value.shape}")
    if not (value.flags.c_contiguous and value.flags.aligned and value.dtype.isnative):
        value = np.require(value, _F32, ["C", "A"])
    return value  # type: ignore[no-any-return]
