"""What the selection's native calls share: pointers to arrays, scratch, rows of scores, and ranges of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._errors import status_text
from ._native import ffi, lib
from ._options import REDUCE, not_finite, pooling_options
from ._tensor import View, give

if TYPE_CHECKING:
    from ._selection import Selection

OK: int = lib.PB_KVCACHE_OK


def floats(array: npt.NDArray[np.float32]) -> Any:
    """Return a pointer to an array of float32."""
    return ffi.from_buffer("float[]", array)


def words(array: npt.NDArray[np.uint32]) -> Any:
    """Return a pointer to an array of uint32."""
    return ffi.from_buffer("uint32_t[]", array)


def scratch(size: int) -> Any:
    """Return a pointer to so many bytes, which live as long as the pointer."""
    return ffi.from_buffer(np.empty(size, np.uint8))


def workspace_size(function: Any, *arguments: Any) -> int:
    """Return the bytes that a native ``*_workspace_size`` function asks for.

    Raises
    ------
    MemoryError
        For more than a C size holds.
    """
    size = ffi.new("size_t *")
    status = function(*arguments, size)
    if status == lib.PB_KVCACHE_ERROR_TOO_LARGE:
        raise MemoryError(status_text(status))
    if status != OK:
        raise RuntimeError(status_text(status))
    return int(size[0])


def head_ranges(heads: int, sequences: int, threads: int) -> list[tuple[int, int]]:
    """Return ranges of heads for each of so many sequences: about four a thread, so that all threads end together."""
    wanted = 1 if threads == 1 else 4 * threads
    parts = min(heads, max(1, -(-wanted // max(1, sequences))))
    return [(heads * part // parts, heads * (part + 1) // parts) for part in range(parts)]


class ScoreRows:
    """Checked scores, ``(..., n)`` float32, as the kernels take them.

    Attributes
    ----------
    shape
        As given.
    rows
        ``(rows, n)``, contiguous, or ``(0, 0)`` where there is no score.

    Raises
    ------
    TypeError, ValueError
        For another kind of array, or one without a dimension.
    """

    __slots__ = ("_view", "rows", "shape")

    def __init__(self, scores: Any) -> None:
        self._view = View("scores", scores, ("float32",))
        self.shape = self._view.shape
        if not self.shape:
            raise ValueError("scores: must have at least 1 dimension, (..., n)")
        array = self._view.owner.numpy() if self._view.torch else self._view.owner
        self.rows: npt.NDArray[np.float32] = (
            np.ascontiguousarray(array).reshape(-1, self.shape[-1]) if array.size else np.empty((0, 0), np.float32)
        )

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The scores with their shape: for messages, after a call was refused."""
        return self._view.floats()

    def give(self, array: npt.NDArray[Any], *shape: int) -> Any:
        """Return a result with this shape in the caller's kind."""
        return give(array.reshape(shape), self._view.torch)

    def refusal(self, status: int, read: Any = True) -> Exception:
        """Return the error for a status. `read` broadcasts to the scores and says which of them were read."""
        if status != lib.PB_KVCACHE_ERROR_SCORE:
            return RuntimeError(status_text(status))
        values = self.values
        return not_finite(values, np.argwhere(~np.isfinite(values) & read)[0])


class SelectParams:
    """A rule as the kernels take it, for one set of heads.

    Attributes
    ----------
    struct
        The ``pb_kvcache_select_params``, which lives as long as this.
    """

    __slots__ = ("_weights", "struct")

    def __init__(self, rule: Selection, nan: int, weights: npt.NDArray[np.float32] | None) -> None:
        kernel, pooling, edge = pooling_options(rule.kernel, rule.pooling, rule.edge)
        self._weights = ffi.NULL if weights is None else floats(weights)
        self.struct = ffi.new(
            "pb_kvcache_select_params *",
            {
                "reduce": REDUCE[rule.reduce],
                "pooling": pooling,
                "kernel": kernel,
                "edge": edge,
                "nan": nan,
                "protect": rule.protected,
                "sinks": rule.sinks,
                "weights": self._weights,
                "weights_stride": 0 if weights is None else weights.shape[-1],
            },
        )
