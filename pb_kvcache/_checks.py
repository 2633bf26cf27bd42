"""Checks of arguments that every wrapper shares. Their errors name the argument, the value and the rule."""

from __future__ import annotations

import decimal
import numbers
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ._tensor import plain_array

UINT32_MAX = 2**32 - 1

_F32 = np.dtype(np.float32)


def shown(value: Any) -> str:
    """Return a value for an error message: its ``repr``, or its type where it has more digits than Python prints."""
    try:
        return repr(value)
    except ValueError:  # above sys.get_int_max_str_digits()
        return f"<{type(value).__name__} of too many digits>"


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
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without memory
        raise TypeError(f"{name} = {shown(value)}: must be an integer, not {type(value).__name__}") from None


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
        raise ValueError(f"{name} = {shown(number)}: must be between 0 and {UINT32_MAX}")
    return number


def positive(name: str, value: Any) -> int:
    """Return `value` as an int above 0 that fits 32 unsigned bits.

    Raises
    ------
    TypeError
        For anything that is not an integer.
    ValueError
        Below 1 or above 2**32 - 1.
    """
    number = uint32(name, value)
    if number == 0:
        raise ValueError(f"{name} = {number}: must be greater than 0")
    return number


def natural(name: str, value: Any) -> int:
    """Return `value` as an int of 0 or more, of any size.

    Raises
    ------
    TypeError
        For anything that is not an integer.
    ValueError
        Below 0.
    """
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} = {shown(number)}: must be 0 or more")
    return number


def real(name: str, value: Any) -> float:
    """Return `value` as a double: a real number of any type, or an array or tensor of no dimensions that holds one.

    Raises
    ------
    TypeError
        For anything that is not a real number.
    ValueError
        For a number beyond the doubles.
    """
    number = value
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic):
        number = plain_array(name, value, "real numbers")[()]
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (numbers.Real, decimal.Decimal)):
        raise TypeError(f"{name} = {shown(value)}: must be a real number, not {type(value).__name__}")
    try:
        return float(number)
    except (OverflowError, TypeError, ValueError):  # ValueError: a signalling NaN of Decimal
        raise ValueError(f"{name} = {shown(value)}: must fit a double") from None


def float32_array(name: str, value: Any, ndim: int) -> npt.NDArray[np.float32]:
    """Return `value` as a C-contiguous, aligned array of native float32 with `ndim` dimensions.

    Such an array is returned as it is, without a copy. Any other real numeric dtype, byte order, layout or array-like
    is converted once.

    Raises
    ------
    TypeError
        Where the elements are not real numbers.
    ValueError
        For another number of dimensions, or a finite value too large for float32.
    """
    array = plain_array(name, value, "real numbers")
    if array.dtype != _F32:
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":  # ml_dtypes' is of no kind
            raise TypeError(f"{name}: must be an array of real numbers, not of dtype {array.dtype}")
        with np.errstate(all="ignore"):  # values are checked here and by the library, whatever the caller has set
            converted = array.astype(np.float32)
        overflown = np.isinf(converted) & np.isfinite(array)
        if overflown.any():
            raise ValueError(f"{name}: {array[overflown][0]} is too large for float32")
        array = converted
    if array.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimension{'s' if ndim != 1 else ''}, not shape {array.shape}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        array = np.require(array, _F32, ["C", "A"])
    return array


def uint32_array(name: str, value: Any, ndim: int) -> npt.NDArray[np.uint32]:
    """Return integers as a C-contiguous, aligned array of native uint32 with `ndim` dimensions, copied where need be.

    Raises
    ------
    TypeError
        Where the elements are not integers.
    ValueError
        For another number of dimensions, or an element below 0 or above 2**32 - 1.
    """
    array = plain_array(name, value, "integers")
    if array.dtype.kind not in "iu":
        # Integers that no NumPy type holds together become objects, or doubles.
        whole = np.array(value, dtype=object) if isinstance(value, (list, tuple)) else array
        if array.size and not (whole.dtype == object and all(type(element) is int for element in whole.flat)):
            raise TypeError(f"{name}: must be integers, not of dtype {array.dtype}")
        array = whole if array.size else np.empty(array.shape, np.uint32)
    if array.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimension{'s' if ndim != 1 else ''}, not shape {array.shape}")
    outside = np.argwhere((array < 0) | (array > UINT32_MAX))
    if len(outside):
        index = tuple(outside[0])
        where = ", ".join(str(i) for i in index)
        raise ValueError(f"{name}[{where}] = {shown(int(array[index]))}: must be between 0 and {UINT32_MAX}")
    return np.require(array, np.uint32, ["C", "A"])
