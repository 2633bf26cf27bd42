"""The attention of one new token, worked out natively from queries and keys: a weight for each slot of each cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._errors import status_text
from ._native import ffi, lib
from ._options import REDUCE

#: Names of element types, of NumPy as of torch.
DTYPES = {
    "float32": lib.PB_KVCACHE_FLOAT32,
    "float16": lib.PB_KVCACHE_FLOAT16,
    "bfloat16": lib.PB_KVCACHE_BFLOAT16,
}
_OK: int = lib.PB_KVCACHE_OK
_FLOATS = ffi.typeof("float[]")
_UINT32S = ffi.typeof("uint32_t[]")
_UINT64S = ffi.typeof("uint64_t[]")


class DecodeWeights:
    """``pb_kvcache_decode_weights`` for the caches of one layer, with what every step needs made once.

    Parameters
    ----------
    offsets
        The row of each cache's slot 0 in the flat keys ``(rows, head_dim)``, shape ``(num_caches,)``.
    slots
        The most slots that a cache will have.
    group
        Query heads of a cache.
    head_dim
        Elements of a query and of a key.
    dtype
        A name of :data:`DTYPES`.
    scale, softcap
        What products are multiplied by, and what caps them. None: nothing.
    sinks
        One logit per query head of a sequence, which takes part in the softmax and has no slot. None: none.
    reduce
        How the query heads of a group become one weight: ``"mean"``, ``"max"`` or ``"sum"``.
    """

    __slots__ = ("_arrays", "_attention", "_cache", "_scratch", "_weights")

    def __init__(
        self,
        offsets: npt.NDArray[np.uint64],
        slots: int,
        *,
        group: int,
        head_dim: int,
        dtype: str,
        scale: float,
        softcap: float | None,
        sinks: npt.NDArray[np.float32] | None,
        reduce: str,
    ) -> None:
        count = len(offsets)
        attention = ffi.new("pb_kvcache_decode_attention *")
        attention.dtype, attention.reduce = DTYPES[dtype], REDUCE[reduce]
        attention.num_caches, attention.group, attention.head_dim = count, group, head_dim
        attention.key_stride = head_dim
        attention.scale, attention.softcap = scale, softcap or 0.0
        self._arrays = [ffi.from_buffer(_UINT64S, offsets)]  # what the struct points to lives as long as this
        attention.offsets = self._arrays[0]
        if sinks is not None:
            repeated = np.tile(np.ascontiguousarray(sinks, np.float32), count * group // len(sinks))
            self._arrays.append(ffi.from_buffer(_FLOATS, repeated))
            attention.sinks = self._arrays[1]
        most = np.full(count, slots, np.uint32)
        attention.counts = ffi.from_buffer(_UINT32S, most)
        size = ffi.new("size_t *")
        status = lib.pb_kvcache_decode_weights_workspace_size(attention, size)
        if status != _OK:
            raise ValueError(status_text(status))
        self._attention = attention
        self._scratch = ffi.new("unsigned char[]", size[0])
        self._weights = np.empty((count, slots), np.float32)
        self._cache = ffi.new("uint32_t *")

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch memory, of the weights, and of what the call reads besides queries and keys."""
        return len(self._scratch) + self._weights.nbytes + sum(int(ffi.sizeof(array)) for array in self._arrays)

    def __call__(
        self, queries: int, keys: int, key_elements: int, counts: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float32]:
        """Return the weights, ``(num_caches, slots)``: the first ``counts[c]`` of row ``c``. Overwritten next time.

        Parameters
        ----------
        queries, keys
            Where they lie in memory: ``(num_caches, group, head_dim)`` and the flat rows, both contiguous.
        key_elements
            Elements of the keys.
        counts
            Slots that each cache's queries see, at most `slots`.

        Raises
        ------
        ValueError
            A logit that is NaN or infinite. The message names the cache.
        """
        attention, weights = self._attention, self._weights
        attention.queries, attention.keys = ffi.cast("void *", queries), ffi.cast("void *", keys)
        attention.key_capacity = key_elements
        seen = ffi.from_buffer(_UINT32S, counts)
        attention.counts = seen
        status = lib.pb_kvcache_decode_weights(
            attention,
            self._scratch,
            len(self._scratch),
            ffi.from_buffer(_FLOATS, weights),
            weights.shape[1],
            weights.size,
            self._cache,
        )
        if status != _OK:
            where = f" (cache {self._cache[0]})" if status == lib.PB_KVCACHE_ERROR_LOGIT else ""
            raise ValueError(f"attention of a new token{where}: {status_text(status)}")
        return weights
