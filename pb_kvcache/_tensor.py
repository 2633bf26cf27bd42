"""NumPy arrays and torch CPU tensors as the native kernels see them: an address, strides and a kind of element.

Every function that takes an array reads it through here: by its values, or not at all. A tensor's memory is not always
its values. It may be the negative of them, or lie elsewhere, or not exist.

torch is never imported here. A tensor can only be given where it has been imported already.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.ma import isMaskedArray  # np.ma would be imported at the first use, inside a call

from ._native import lib

#: The kinds of element that the kernels read, by the name that NumPy, ml_dtypes and torch share.
_CODES: dict[str, int] = {
    "float32": lib.PB_KVCACHE_FLOAT32,
    "float16": lib.PB_KVCACHE_FLOAT16,
    "bfloat16": lib.PB_KVCACHE_BFLOAT16,
}

_SIZES = {lib.PB_KVCACHE_FLOAT32: 4, lib.PB_KVCACHE_FLOAT16: 2, lib.PB_KVCACHE_BFLOAT16: 2}


#: The kinds of torch device whose memory the native kernels read.
NATIVE_DEVICES = frozenset({"cpu"})


def is_torch(value: Any) -> bool:
    """Tell whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def torch_module() -> Any:
    """Return torch, which has been imported by whoever made the tensor at hand.

    It is looked up and not imported: an import in a forked child can wait for a lock that the parent held.
    """
    return sys.modules["torch"]


def on_other_device(name: str, value: Any) -> bool:
    """Tell whether `value` is a torch tensor that is not in this computer's own memory.

    Raises
    ------
    TypeError
        For one that has no memory anywhere, as :func:`dense`.
    """
    if not is_torch(value) or value.device.type in NATIVE_DEVICES:
        return False
    dense(name, value)
    return True


def dense(name: str, value: Any) -> Any:
    """Return a tensor without its graph and its class, after a check that its memory, where it is, holds its values.

    A negative or conjugate bit is still set.

    Raises
    ------
    TypeError
        For a tensor that has no memory of its own. The message says what it is.
    """
    torch = torch_module()
    what = ""
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = f"a {type(value).__name__}, which computes its values"
    elif value.device.type == "meta":
        what = "a meta tensor"
    elif value.is_nested:
        what = "a nested tensor"
    elif value.layout is not torch.strided:
        what = f"a {str(value.layout).removeprefix('torch.')} tensor"
    elif value.is_quantized:
        what = f"a quantised tensor, {str(value.dtype).removeprefix('torch.')}"
    if what:
        raise TypeError(f"{name}: must be a torch tensor with memory of its own, not {what}")
    plain = torch.Tensor.detach(value)
    if type(plain) is not torch.Tensor:  # __torch_function__ could change what the methods below answer
        with torch._C.DisableTorchFunctionSubclass():
            plain = plain.as_subclass(torch.Tensor)
    if plain.device.type in NATIVE_DEVICES and plain.numel():
        try:
            address = plain.data_ptr()
        except RuntimeError:  # of torch.vmap and other transforms
            raise TypeError(
                f"{name}: must be a torch tensor with memory of its own, not one inside a transform such as torch.vmap"
            ) from None
        if address == 0:
            raise TypeError(f"{name}: must be a torch tensor with memory of its own, not a zero tensor without one")
    return plain


def resolved(name: str, value: Any) -> Any:
    """Return a checked tensor whose memory is its values: copied where a negative or conjugate bit is set."""
    return dense(name, value).resolve_conj().resolve_neg()


def plain_array(name: str, value: Any, what: str) -> npt.NDArray[Any]:
    """Return an array-like as a plain array. A subclass may have its own idea of its size or items.

    Raises
    ------
    TypeError
        For what cannot be read as an array.
    """
    if isMaskedArray(value):
        raise TypeError(f"{name}: must be an array of {what}, not a masked one; fill it first")
    if is_torch(value):
        value = resolved(name, value).cpu()
        if value.dtype == torch_module().bfloat16:  # which NumPy does not have
            value = value.float()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, UserWarning) as error:
        # RuntimeError: a list of tensors. UserWarning: ragged lists before NumPy 1.24, as an error.
        raise TypeError(f"{name}: must be an array of {what}: {error}") from None


def as_numpy(name: str, value: Any) -> Any:
    """Return a tensor's elements as a NumPy array, and anything else as it is."""
    return plain_array(name, value, "numbers") if is_torch(value) else value


class View:
    """A checked look at somebody's array: nothing is copied unless its layout cannot be read in place.

    Attributes
    ----------
    address
        Of the first element.
    shape, strides
        Strides in elements.
    code, size
        The kernels' number for the kind of element, and its bytes.
    torch
        Whether it came as a torch tensor.
    """

    __slots__ = ("address", "code", "owner", "shape", "size", "strides", "torch")

    def __init__(self, name: str, value: Any, kinds: tuple[str, ...] = tuple(_CODES), contiguous: bool = True) -> None:
        self.torch = is_torch(value)
        if self.torch:
            value = resolved(name, value)
        elif isinstance(value, np.ndarray):
            value = plain_array(name, value, "numbers")
        kind = self._kind(value)
        if kind not in kinds:
            what = kind if self.torch or isinstance(value, np.ndarray) else type(value).__name__
            listed = ", ".join(kinds[:-1]) + (" or " if len(kinds) > 1 else "") + kinds[-1]
            raise TypeError(f"{name}: must be a NumPy array or torch tensor of {listed}, not {what}")
        if contiguous and value.ndim and value.shape[-1] > 1 and self._last_stride(value) != 1:
            value = value.contiguous() if self.torch else np.ascontiguousarray(value)
        if not self.torch and not value.flags.aligned:
            value = value.copy()
        self.owner = value
        self.shape: tuple[int, ...] = tuple(value.shape)
        self.code = _CODES[kind]
        self.size = _SIZES[self.code]
        if self.torch:
            self.address: int = value.data_ptr()
            self.strides: tuple[int, ...] = tuple(value.stride())
        else:
            self.address = value.__array_interface__["data"][0]
            self.strides = tuple(stride // self.size for stride in value.strides)

    def _kind(self, value: Any) -> str:
        if self.torch:
            if value.device.type != "cpu":
                return f"a tensor on {value.device}"
            return str(value.dtype).removeprefix("torch.")
        if not isinstance(value, np.ndarray):
            return type(value).__name__
        if not value.dtype.isnative:
            return f"{value.dtype.name} in foreign byte order"
        if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
            return str(value.dtype)
        return str(value.dtype.name)

    def _last_stride(self, value: Any) -> int:
        return int(value.stride(-1)) if self.torch else int(value.strides[-1]) // int(value.itemsize)

    def floats(self) -> npt.NDArray[np.float32]:
        """Return the elements as float32: for messages, after a call was refused."""
        value = self.owner.float().numpy() if self.torch else self.owner
        return np.asarray(value, dtype=np.float32)


def give(array: npt.NDArray[Any], torch: bool) -> Any:
    """Return a result in the caller's kind: the array, or a tensor, whose positions are int64, as torch indexes."""
    if not torch:
        return array
    if array.dtype == np.uint32:
        array = array.astype(np.int64)
    return torch_module().from_numpy(array)
