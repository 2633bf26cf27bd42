"""The bytes of a saved state, from the references' caches. ``pb_kvcache/state.h`` has the layout."""

from __future__ import annotations

import functools
import struct
from typing import Any

from .reference import SnapKV, float32

KINDS = {"sliding_window": 2, "streaming_llm": 2, "h2o": 3, "tova": 4, "scissorhands": 5}


def checksum(data: bytes) -> bytes:
    """FNV-1a over little-endian numbers of 4 bytes."""
    words = struct.unpack_from(f"<{len(data) // 4}I", data)
    value = functools.reduce(lambda h, word: (h ^ word) * 0x100000001B3 % 2**64, words, 0xCBF29CE484222325)
    return struct.pack("<Q", value)


def framed(body: bytes, caches: int = 1, kind: int = 1, peak: int = 0, version: int = 1) -> bytes:
    data = struct.pack("<8sIIQQII", b"pbkvstat", version, kind, 40 + len(body) + 8, peak, caches, 0) + body
    return data + checksum(data)


def of_cache(cache: Any) -> bytes:
    """One cache, without its frame."""
    if isinstance(cache, SnapKV):
        shape = [1, cache.effective, cache.capacity, cache.recent_window, 0, cache.obs_window, cache.pool_kernel]
        head = [*shape, cache.observed % cache.obs_window, len(cache.kept), 0]
        rows = [[float32(slot[pos]) for pos in cache.kept if pos in slot] for slot in cache.slots]
        words = head + cache.kept
        data = struct.pack(f"<{len(words)}I", *words) + struct.pack(f"<{len(rows)}I", *map(len, rows))
        return data + b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    shape = [KINDS[cache.policy], cache.effective, cache.capacity, cache.recent_window, cache.sinks, 0, 0]
    unobserved = [pos for pos in cache.kept if not cache.received[pos]] if cache.policy == "tova" else []
    words = [*shape, 0, len(cache.kept), len(unobserved), *cache.kept]
    scores = [] if KINDS[cache.policy] == 2 else [cache.score(pos) for pos in cache.kept]
    return struct.pack(f"<{len(words)}I", *words) + struct.pack(f"<{len(scores)}d", *scores)


def state(cache: Any) -> bytes:
    """Return a cache's saved state."""
    return framed(of_cache(cache))


def stack_state(stack: Any) -> bytes:
    """Return a stack's saved state."""
    return framed(b"".join(map(of_cache, stack.layers)), len(stack.layers), 2, stack.peak)
