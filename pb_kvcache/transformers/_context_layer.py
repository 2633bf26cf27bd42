"""A layer's context that any number of forwards start from, and whose attention is watched."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ._attention import LAYER_MARK


class ContextLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """The keys and values of a context, ``(1, kv_heads, n, head_dim)``, that every forward finds as they were.

    The attention function of :func:`use` hands the queries to ``watch``, which those who derive from this have.
    """

    watches = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the context's rows and the new ones for every sequence of the batch, and keep the context's alone."""
        batch = key_states.shape[0]
        keys = torch.cat([self.keys.expand(batch, -1, -1, -1), key_states], dim=-2)
        setattr(keys, LAYER_MARK, self)
        return keys, torch.cat([self.values.expand(batch, -1, -1, -1), value_states], dim=-2)
