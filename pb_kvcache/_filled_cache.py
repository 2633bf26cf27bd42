"""What one position takes in every layer, read from a transformers cache that a model has filled.

A configuration says it in as many ways as there are families: Falcon's ``multi_query`` means one head whatever its
``num_kv_heads`` says, latent attention caches neither its heads nor its head size, and shared, recurrent and
cross-attention layers hold nothing of the prompt. The tensors in the cache say it in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a cache.

    Attributes
    ----------
    elements
        Elements of one position: keys and values of all heads, and what else grows with the positions. 0: the layer
        holds no positions of its own, because it is recurrent, shares another layer's, or attends to something else.
    num_kv_heads, head_dim
        Key-value heads, and elements of a head's key, which are those of its value. None where that does not give
        `elements`.
    window
        The positions that the layer attends to. None: all.
    """

    elements: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None

    @classmethod
    def of_heads(cls, num_kv_heads: int, head_dim: int, window: int | None = None) -> LayerCache:
        """Return the layer whose heads have keys and values of one size."""
        return cls(2 * num_kv_heads * head_dim, num_kv_heads, head_dim, window)


#: A layer that holds no positions of its own.
NO_CACHE = LayerCache(0)


def common(layers: Iterable[LayerCache], name: str) -> Any:
    """Return what all layers that hold positions have as their attribute `name`, None where they differ."""
    found = {getattr(layer, name) for layer in layers if layer.elements}
    return found.pop() if len(found) == 1 else None


def cache_argument(decoder: Any) -> str:
    """Return what a decoder's ``forward`` calls its cache: releases of transformers differ."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def filled_layers(cache: Any) -> list[LayerCache]:
    """Return every layer of a cache, in which the model has put one sequence of at least one token.

    Raises
    ------
    ValueError
        A layer's keys and values are not of shape ``(1, heads, positions, elements)``, or its class is one model's own:
        what that holds of a position is not known.
    """
    found = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or not keys.numel():
            found.append(NO_CACHE)
            continue
        name = type(layer).__name__
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != 1 or keys.shape[2] != values.shape[2]:
            shapes = f"keys {tuple(keys.shape)}, values {tuple(values.shape)}"
            raise ValueError(f"layer {index}: {name} holds {shapes}, must be (1, heads, positions, elements)")
        if type(layer).__module__ != "transformers.cache_utils":
            raise ValueError(f"layer {index}: {name} is this model's own, and not a row of keys and values a position")
        positions = keys.shape[2]
        heads, key, value = keys.shape[1], keys.shape[3], values.shape[3]
        elements = heads * key + values.shape[1] * value
        for tensor in _others(layer, keys, values):  # the keys of an index, one row a position
            if tensor.ndim == 3 and tensor.shape[:2] == (1, positions):
                elements += tensor.shape[2]
        plain = elements == 2 * heads * key
        window = getattr(layer, "sliding_window", None)
        found.append(LayerCache(elements, heads if plain else None, key if plain else None, window))
    return found


def _others(layer: Any, *known: Any) -> Iterator[Any]:
    """Yield the tensors of a layer that are not its keys and values, and not a recurrence's states."""
    for name, value in vars(layer).items():
        if hasattr(value, "shape") and "state" not in name and not any(value is tensor for tensor in known):
            yield value
