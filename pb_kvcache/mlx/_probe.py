"""What a model does with its caches, found out with four tokens: whether its layers can be compressed.

Class names and configurations do not tell it. The model runs once with its own caches and once with caches that watch.
In the second run the layers hold every row once, twice or three times when the last two tokens come. Attention over
repeated rows is the same, so a model that computes anything else takes the number of rows for something that it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as own_caches

from ._attention import AttendingCache, Attention

#: Caches that stay as they are: they are short already.
_LEFT_ALONE = (RotatingKVCache, ArraysCache)

#: Differences of logits that are rounding, as a part of the largest logit.
_ROUNDING = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}


@dataclass(frozen=True)
class LayerFacts:
    """What one compressible layer is like."""

    layer: int  # the place in the model's list of caches
    q_heads: int
    kv_heads: int
    value_dim: int


@dataclass(frozen=True)
class Facts:
    """What the probe found out about a model."""

    layers: tuple[LayerFacts, ...]


class _Watching(AttendingCache):
    """A cache that holds rows several times, and notes what its layer does."""

    def __init__(self, layer: int, masks: list[mx.array]) -> None:
        self.layer = layer
        self.offset = 0
        self._masks = masks  # that the caches of this run have made
        self.facts: LayerFacts | None = None
        self._rows: tuple[mx.array, mx.array] | None = None
        self._given: tuple[mx.array, mx.array] | None = None
        self._attended = True
        self._repeats = 1 + layer % 3

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self._attended:
            raise _Unsuitable(self.layer, _NOT_REACHED)
        if self._rows is not None:
            keys, values = (
                mx.concatenate([held, new], axis=2) for held, new in zip(self._rows, (keys, values), strict=True)
            )
        self._rows = keys, values
        if self.offset:
            keys, values = (mx.concatenate([rows] * self._repeats, axis=2) for rows in (keys, values))
        self.offset = self._rows[0].shape[2]
        self._given = keys, values
        self._attended = False
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        raise _Unsuitable(self.layer, "another layer reads its keys and values")

    @property
    def state(self) -> Any:
        return self.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        if window_size is not None:
            raise _Unsuitable(self.layer, f"it asks for a local window of {window_size} on a cache of all positions")
        if N == 1:
            return None
        if not return_array:
            return "causal"
        self._masks.append(mx.tri(N, dtype=mx.bool_))
        return self._masks[-1]

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self._rows is None

    def attend(
        self,
        attention: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        if self._attended or self._given is None:
            raise _Unsuitable(self.layer, "its attention runs more often than its cache is written")
        if keys is not self._given[0] or values is not self._given[1]:
            raise _Unsuitable(self.layer, "it changes keys or values between its cache and its attention")
        new, q_heads, kv_heads = queries.shape[2], queries.shape[1], keys.shape[1]
        causal = mask is None if new == 1 else isinstance(mask, str) and mask == "causal"
        if not causal and not any(mask is own for own in self._masks):
            raise _Unsuitable(self.layer, "its attention has a mask of its own, and needs more than causality")
        if q_heads % kv_heads or queries.shape[-1] != keys.shape[-1]:
            raise _Unsuitable(self.layer, f"queries {queries.shape} do not group over keys {keys.shape}")
        if sinks is not None:
            self._repeats = 1  # a sink weighs less against repeated rows
        self._attended = True
        self.facts = LayerFacts(self.layer, q_heads, kv_heads, values.shape[-1])
        return attention(queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks)


_NOT_REACHED = (
    "its attention does not go through mlx-lm's scaled_dot_product_attention with its cache, so that its queries "
    "cannot be seen"
)


class _Unsuitable(Exception):  # noqa: N818
    """A layer that cannot be compressed, and why."""

    def __init__(self, layer: int, reason: str) -> None:
        super().__init__(f"layer {layer}: {reason}")


def probe(model: nn.Module) -> Facts:
    """Run a model, whose attention was redirected, with four tokens.

    Raises
    ------
    ValueError
        It cannot be served. The message names the layer and the reason.
    """
    name = type(model).__module__.rpartition(".")[2] + "." + type(model).__name__
    try:
        reference = _logits(model, own_caches(model))
        caches = watched(own_caches(model))
        watching = [cache for cache in caches if isinstance(cache, _Watching)]
        found = _logits(model, caches)
        for cache in watching:
            if cache.facts is None or not cache._attended:
                raise _Unsuitable(cache.layer, _NOT_REACHED)
        _check_equal(reference, found, watching[0].layer)
    except Exception as error:
        raise ValueError(f"model: {name} cannot be compressed: {error}") from error
    return Facts(tuple(cache.facts for cache in watching if cache.facts is not None))


def watched(caches: list[Any]) -> list[Any]:
    """Return a model's own caches with those of all positions replaced by watching ones.

    Raises
    ------
    _Unsuitable
        A cache of another kind, or none that holds all positions.
    """
    masks: list[mx.array] = []
    mixed = [_Watching(layer, masks) if type(cache) is KVCache else cache for layer, cache in enumerate(caches)]
    for layer, cache in enumerate(mixed):
        if not isinstance(cache, (_Watching, *_LEFT_ALONE)):
            raise _Unsuitable(layer, f"its cache is a {type(cache).__name__}, whose rows are not one a position")
    if not any(isinstance(cache, _Watching) for cache in mixed):
        raise _Unsuitable(0, "no layer has a cache of all positions (KVCache), so that there is nothing to compress")
    return mixed


def _logits(model: nn.Module, caches: list[Any]) -> mx.array:
    """Return the logits of two tokens at once and of two one by one, ``(4, vocabulary)``."""
    parts = [model(mx.array([tokens]), cache=caches)[0] for tokens in ([0, 1], [1], [0])]
    logits = mx.concatenate(parts, axis=0)
    mx.eval(logits)
    return logits


def _check_equal(reference: mx.array, found: mx.array, layer: int) -> None:
    rounding = _ROUNDING.get(reference.dtype, 1e-1)
    reference, found = reference.astype(mx.float32), found.astype(mx.float32)
    largest = float(mx.abs(reference).max())
    difference = float(mx.abs(reference - found).max())
    if not difference <= rounding * max(largest, 1e-6):
        raise _Unsuitable(
            layer,
            f"from here on it computes something else when a layer holds more rows than others (logits differ by "
            f"{difference:.3g} of {largest:.3g}): the number of rows is taken for a position",
        )
