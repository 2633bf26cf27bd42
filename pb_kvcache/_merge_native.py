"""``"nearest"`` merging by the C library: no matrix library, the same bits everywhere, one thread a head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._calls import OK, floats, scratch, words, workspace_size
from ._errors import status_text
from ._native import ffi, lib
from ._threads import in_threads

_Floats = npt.NDArray[np.float32]


def merge_nearest(
    keys: _Floats,
    values: _Floats,
    kept: Sequence[npt.NDArray[np.uint32]],
    queries: _Floats,
    protect: Sequence[int],
    scale: float,
    window: int,
    threads: int = 1,
) -> list[tuple[_Floats, _Floats, _Floats]]:
    """Return each head's merged keys, values and biases, as :func:`merge` does, from arrays that were checked.

    Parameters
    ----------
    keys, values
        ``(kv_heads, n, head_dim)``, rows of one stride, whose elements lie side by side.
    kept
        Ascending positions of each head.
    queries
        ``(kv_heads, N, head_dim)``, contiguous: runs of the last `window` positions' queries, one for each query head
        of a group. None sees what follows it.
    protect
        Last kept rows of each head that take nothing in.
    scale
        What products are multiplied by.
    window
        The length of a run. A divisor of ``N``, at most ``n``.
    threads
        How many heads at once, at most.

    Raises
    ------
    ValueError
        A number is not finite, or a product too large.
    """

    def one(head: int) -> tuple[_Floats, _Floats, _Floats]:
        count, head_dim = len(kept[head]), keys.shape[2]
        merged = [np.empty((count, head_dim), np.float32) for _ in range(2)]
        bias = np.empty(count, np.float32)
        struct = ffi.new(
            "pb_kvcache_merge *",
            {
                "keys": _address(keys[head]),
                "values": _address(values[head]),
                "row_stride": keys.strides[1] // keys.itemsize,
                "n": keys.shape[1],
                "head_dim": head_dim,
                "kept": words(kept[head]),
                "num_kept": count,
                "protect": protect[head],
                "queries": floats(queries[head]),
                "num_queries": queries.shape[1],
                "window": window,
                "scale": scale,
            },
        )
        size = workspace_size(lib.pb_kvcache_merge_workspace_size, struct)
        status = lib.pb_kvcache_merge_nearest(
            struct,
            scratch(size),
            size,
            floats(merged[0]),
            floats(merged[1]),
            head_dim,
            merged[0].size,
            floats(bias),
            count,
        )
        if status != OK:
            raise ValueError(f"keys, values or queries of KV head {head}: {status_text(status)}")
        return merged[0], merged[1], bias

    return in_threads([functools.partial(one, head) for head in range(len(keys))], threads)


def _address(array: _Floats) -> Any:
    """Return a pointer to an array's first element, whatever its strides."""
    return ffi.cast("float *", array.ctypes.data)
