"""Redirect a model's attention so that a cache layer meets its queries, and let every layer make its own mask.

``Cache.update`` sees no queries, and an attention function sees no cache. So the layer marks the key tensor that its
``update`` returns, and the attention function registered here finds the layer by that mark. A model makes one causal
mask per forward, sized by one layer. Layers of different length cannot share it. So the cache marks the offset that
it answers for its mask's size, and the mask function registered here then passes the 2-D padding mask through. With
any other cache, or none, both functions are the stock ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Arithmetic to the name under which it is registered.
NAMES = {"sdpa": "pb_kvcache_sdpa", "eager": "pb_kvcache_eager"}

#: Dimensions of the mask that stands for a local window, which no compressed layer can serve.
LOCAL_WINDOW_DIMS = 5

#: Attribute of a key tensor that carries its cache layer from ``update`` to the attention function.
LAYER_MARK = "_pb_kvcache_layer"


class OwnMask(int):
    """A mask offset from a layer that makes its own masks.

    An int, because transformers calculates with the offset, and nothing else of a layer reaches its mask function.
    """


def not_compiled(function: _Function) -> _Function:
    """Keep torch.compile out of a function of ours: it calls native code, and its work depends on what is held."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def implementation(config: Any) -> str | None:
    """Return the attention implementation of a model's decoder."""
    return config.get_text_config(decoder=True)._attn_implementation  # type: ignore[no-any-return]


def plain_implementation(config: Any) -> str | None:
    """Return the attention implementation that a config names, if it is one that `use` would have replaced."""
    name = implementation(config)
    return None if name is None or name in NAMES.values() else name


def register() -> None:
    """Put the functions into transformers' registries. Once more changes nothing."""
    for plain, name in NAMES.items():
        ALL_ATTENTION_FUNCTIONS.register(name, _ATTENTION[plain])
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _MASKS[plain])


def eager_function(owner: type) -> Callable[..., Any] | None:
    """Return the eager attention of the module that defines a class: models differ in it."""
    return getattr(sys.modules[owner.__module__], "eager_attention_forward", None)


def _stock_sdpa(module: torch.nn.Module) -> Callable[..., Any]:
    return ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-any-return]


def _stock_eager(module: torch.nn.Module) -> Callable[..., Any]:
    function = eager_function(type(module))
    if function is None:
        raise ValueError(
            f"attention = 'eager': the module of {type(module).__name__} has no eager_attention_forward; "
            "use(model, attention='sdpa')"
        )
    return function


def _attention(find_stock: Callable[[torch.nn.Module], Callable[..., Any]], additive: bool) -> Callable[..., Any]:
    """Return the attention function for one arithmetic."""

    @not_compiled
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if dropout is not None:  # models give it by name, kvpress's wrapper by its place
            kwargs["dropout"] = dropout
        stock = find_stock(module)
        layer = getattr(key, LAYER_MARK, None)
        if layer is None:
            return stock(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        if layer.watches:  # the probe: see _probe.py
            return layer.watch(module, stock, query, key, value, attention_mask, additive, kwargs)  # type: ignore[no-any-return]
        # Decided by the layer's own mask, not by the model's: GPT-2 passes it for the mask that it was given.
        kwargs.pop("is_causal", None)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if mask is not None and additive and mask.dtype == torch.bool:
                mask = as_added(mask, query.dtype)
            return stock(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

        return layer.attend(module, attend, query, key, value, attention_mask, additive, kwargs)  # type: ignore[no-any-return]

    return forward


def as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a boolean mask as what is added to logits."""
    lowest = float(torch.finfo(dtype).min)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), lowest)


def with_bias(mask: torch.Tensor | None, bias: torch.Tensor, group: int) -> torch.Tensor:
    """Return what is added to logits: the rows' biases where a query may see a row, and the lowest float elsewhere.

    `bias` is ``(batch, kv_heads, rows)`` float32, of heads with `group` query heads each, `mask` a boolean mask that
    broadcasts to ``(batch, q_heads, new, rows)``, None for all.
    """
    added = bias.repeat_interleave(group, dim=1)[:, :, None]
    return added if mask is None else torch.where(mask, added, float(torch.finfo(bias.dtype).min))


def _mask(plain: str) -> Callable[..., Any]:
    """Return the mask function for one arithmetic."""

    @not_compiled
    def make(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("kv_offset"), OwnMask):
            return ALL_MASK_ATTENTION_FUNCTIONS[plain](*args, **kwargs)
        if kwargs.get("local_size") is not None:
            # Some models make a mask of every kind at each forward, also of one that no layer reads.
            return torch.empty((0,) * LOCAL_WINDOW_DIMS)
        seen = int(kwargs["kv_length"]) + int(kwargs["kv_offset"])
        if kwargs.get("mask_function", causal_mask_function) is not causal_mask_function and not _is_causal(
            seen, args, kwargs
        ):
            raise ValueError(
                "this input needs more than a causal mask (images, packed sequences or a bidirectional prefix); "
                "a compressed cache serves causal text alone"
            )
        padding = kwargs.get("attention_mask")
        if padding is None:
            return None
        if padding.shape[-1] < seen:
            raise ValueError(
                f"attention_mask: has {padding.shape[-1]} columns, must cover every token seen so far, {seen}"
            )
        padding = padding[:, :seen].bool()
        return None if bool(padding.all()) else padding

    return make


def _is_causal(seen: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a model's own mask function says no more than causality for the new tokens of this input.

    Models with images give a mask function for every input, which for text alone is the causal one.
    """
    whole = {**kwargs, "kv_length": seen, "kv_offset": 0, "attention_mask": None, "allow_is_causal_skip": False}
    asked = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **whole)
    if asked is None:
        return True
    new = asked.shape[-2]
    causal = torch.ones(new, seen, dtype=torch.bool, device=asked.device).tril_(seen - new)
    return bool((asked == causal).all())


_ATTENTION = {"sdpa": _attention(_stock_sdpa, additive=False), "eager": _attention(_stock_eager, additive=True)}
_MASKS = {"sdpa": _mask("sdpa"), "eager": _mask("eager")}
