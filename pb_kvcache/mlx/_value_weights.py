"""What a value can do to the output of its layer: ``||W_O V_i||``, from the layer's own output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

#: What the models of mlx-lm call the layer that turns the heads' outputs into the layer's.
NAMES = ("o_proj", "out_proj", "wo", "dense", "c_proj")


class Projection:
    """The output projection of one layer. It belongs to the model: a copy of a cache refers to the same one."""

    def __init__(self, module: Callable[[mx.array], mx.array], width: int) -> None:
        self._module = module
        self._width = width  # inputs: query heads times value_dim
        self._products: mx.array | None = None

    def weights(self, values: mx.array) -> mx.array:
        """Return the norm of each value behind the projection, the mean over the query heads of its KV head.

        `values` is ``(batch, kv_heads, n, value_dim)``, the answer ``(batch, kv_heads, n)`` float32.
        """
        batch, kv_heads, n, value_dim = values.shape
        products = self._of_heads(value_dim)
        group = products.shape[0] // kv_heads
        total = mx.zeros((batch, kv_heads, n))
        values = values.astype(mx.float32)
        for member in range(group):
            # v G v. Rounding may leave less than 0 where the norm is 0.
            squares = ((values @ products[member::group]) * values).sum(axis=-1)
            total = total + mx.sqrt(mx.maximum(squares, 0))
        return total / group

    def _of_heads(self, value_dim: int) -> mx.array:
        """Return ``W W^T`` of every query head's inputs, ``(q_heads, value_dim, value_dim)`` float32."""
        if self._products is None:
            # By what it makes of unit vectors: quantised weights and adapters are read like this, whatever they are.
            none = self._module(mx.zeros((1, self._width)))
            weight = (self._module(mx.eye(self._width)) - none).astype(mx.float32)
            heads = weight.reshape(-1, value_dim, weight.shape[-1])
            self._products = heads @ heads.swapaxes(-1, -2)
            mx.eval(self._products)
        return self._products

    def __deepcopy__(self, memo: dict[int, Any]) -> Projection:
        return self


def projection_of(layer: nn.Module, width: int) -> Projection | None:
    """Return the output projection in the attention of a model's layer, None where it has none by a known name."""
    modules = dict(layer.named_modules())
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        siblings = {other.rpartition(".")[2] for other in modules if other.rpartition(".")[0] == parent}
        # In the attention, not in the feed-forward part, whose names are the same in some models.
        in_attention = "attn" in parent or "attention" in parent or siblings & {"q_proj", "k_proj", "wqkv"}
        if name in NAMES and in_attention and _takes(module, width):
            return Projection(module, width)
    return None


def _takes(module: nn.Module, width: int) -> bool:
    """Return whether a module takes rows of so many numbers. Shapes are checked before anything is computed."""
    try:
        module(mx.zeros((1, width)))
    except ValueError:
        return False
    return True
