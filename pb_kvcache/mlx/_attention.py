"""What stands in a model's module in place of mlx-lm's attention function: caches that want to see the queries do."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

#: The name under which the modules of mlx-lm's models hold the function.
NAME = "scaled_dot_product_attention"

#: Takes queries, keys, values, cache, scale, mask and more options by name, and returns the output.
Attention = Callable[..., mx.array]

#: How many used models have their attention in a module, by the module's name.
_users: dict[str, int] = {}


class AttendingCache(ABC):
    """A cache that does the attention of its own layer."""

    @abstractmethod
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
        """Return the output ``(batch, q_heads, new, value_dim)`` for queries ``(batch, q_heads, new, head_dim)``.

        `attention` is the function that the model would have called. `keys` and `values` are what ``update_and_fetch``
        returned.
        """


def redirect(module: ModuleType) -> None:
    """Put our function before the module's own, for one more model. With other caches it calls the module's own."""
    _users[module.__name__] = _users.get(module.__name__, 0) + 1
    if _users[module.__name__] > 1:
        return
    original: Attention = getattr(module, NAME)

    @functools.wraps(original)
    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, AttendingCache):
            return cache.attend(original, queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    setattr(module, NAME, attend)


def restore(module: ModuleType) -> None:
    """Undo one :func:`redirect`. The module has its own function again when the last model gives it back."""
    left = _users.get(module.__name__, 0) - 1
    if left > 0:
        _users[module.__name__] = left
        return
    _users.pop(module.__name__, None)
    setattr(module, NAME, getattr(getattr(module, NAME), "__wrapped__", getattr(module, NAME)))
