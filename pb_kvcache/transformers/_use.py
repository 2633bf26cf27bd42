"""Redirect a model's attention so that a cache layer meets its queries, and let every layer make its own mask.

``Cache.update`` sees no queries, and an attention function sees no cache. So the layer marks the key tensor that its
``update`` returns, and the attention function registered here finds the layer by that mark. A model makes one causal
mask per forward, sized by one layer; layers of different length cannot share it. So the cache marks the offset that
it answers for its mask's size, and the mask function registered here then passes the 2-D padding mask through. With
any other cache, or none, both functions are the stock ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_Model = TypeVar("_Model")

#: Arithmetic to the name under which it is registered.
NAMES = {"sdpa": "pb_kvcache_sdpa", "eager": "pb_kvcache_eager"}

#: Attribute of a key tensor that carries its cache layer from ``update`` to the attention function.
LAYER_MARK = "_pb_kvcache_layer"


class OwnMask(int):
    """A mask offset from a layer that makes its own masks.

    An int, because transformers calculates with the offset, and nothing else of a layer reaches its mask function.
    """


def use(model: _Model, attention: str | None = None) -> _Model:
    """Redirect the attention of `model` so that a :class:`PyramidKVCache` works in it.

    With any other cache the model computes what it did before. ``model.set_attn_implementation("sdpa")`` undoes it.

    Parameters
    ----------
    model
        A transformers model whose attention goes through the attention interface.
    attention
        ``"sdpa"`` or ``"eager"``: the arithmetic that attention is done with. None keeps the model's own.

    Returns
    -------
    The model itself.

    Raises
    ------
    TypeError
        Not a transformers model.
    ValueError
        A model whose attention cannot be redirected, or other arithmetic than the two; the message names the fix.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: must be a transformers PreTrainedModel, not {type(model).__name__}")
    current = _implementation(model.config)
    if attention is None:
        attention = next((plain for plain, name in NAMES.items() if name == current), current)
    if attention not in NAMES:
        raise ValueError(
            f"attention = {attention!r}: must be 'sdpa' or 'eager', which take a mask for each layer; "
            "use(model, attention='sdpa') switches the model over"
        )
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        raise ValueError(
            f"model: the attention of {type(model).__name__} cannot be redirected, because it does not go through "
            "transformers' attention interface; a newer transformers release may have moved it there"
        )
    if attention == "sdpa" and not model._supports_sdpa:
        raise ValueError(
            f"attention = 'sdpa': {type(model).__name__} does more in its attention than that can; "
            "use(model, attention='eager')"
        )
    if attention == "eager" and _eager_function(type(model)) is None:
        raise ValueError(
            f"attention = 'eager': the module of {type(model).__name__} has no eager_attention_forward; "
            "use(model, attention='sdpa')"
        )
    _register()
    model.set_attn_implementation(NAMES[attention])
    if _implementation(model.config) != NAMES[attention]:
        raise ValueError(
            f"model: transformers did not switch the attention of {type(model).__name__}, which still is "
            f"{_implementation(model.config)!r}; its attention cannot be redirected"
        )
    return model  # type: ignore[no-any-return, unused-ignore]


def _implementation(config: Any) -> str | None:
    """Return the attention implementation of a model's decoder."""
    return config.get_text_config(decoder=True)._attn_implementation  # type: ignore[no-any-return]


def plain_implementation(config: Any) -> str | None:
    """Return the attention implementation that a config names, if it is one that `use` would have replaced."""
    name = _implementation(config)
    return None if name is None or name in NAMES.values() else name


def _register() -> None:
    """Put the functions into transformers' registries; once more changes nothing."""
    for plain, name in NAMES.items():
        ALL_ATTENTION_FUNCTIONS.register(name, _ATTENTION[plain])
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _MASKS[plain])


def _eager_function(owner: type) -> Callable[..., Any] | None:
    """Return the eager attention of the module that defines a class: models differ in it."""
    return getattr(sys.modules[owner.__module__], "eager_attention_forward", None)


def _stock_sdpa(module: torch.nn.Module) -> Callable[..., Any]:
    return ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-any-return]


def _stock_eager(module: torch.nn.Module) -> Callable[..., Any]:
    function = _eager_function(type(module))
    if function is None:
        raise ValueError(
            f"attention = 'eager': the module of {type(module).__name__} has no eager_attention_forward; "
            "use(model, attention='sdpa')"
        )
    return function


def _attention(find_stock: Callable[[torch.nn.Module], Callable[..., Any]], additive: bool) -> Callable[..., Any]:
    """Return the attention function for one arithmetic."""

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stock = find_stock(module)
        layer = getattr(key, LAYER_MARK, None)
        if layer is None:
            return stock(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        # Decided by the layer's own mask, not by the model's: GPT-2 passes it for the mask that it was given.
        kwargs.pop("is_causal", None)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if mask is not None and additive:
                mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), _lowest(query.dtype))
            return stock(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

        return layer.attend(attend, query, key, value, attention_mask, additive, kwargs)  # type: ignore[no-any-return]

    return forward


def _lowest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)


def _mask(plain: str) -> Callable[..., Any]:
    """Return the mask function for one arithmetic."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("kv_offset"), OwnMask):
            return ALL_MASK_ATTENTION_FUNCTIONS[plain](*args, **kwargs)
        if kwargs.get("local_size") is not None:
            raise ValueError(
                "this model asks for a local window on a layer that its config calls full attention; PyramidKVCache "
                "compresses that layer and cannot serve it"
            )
        if kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
            raise ValueError(
                "this input needs more than a causal mask (images, packed sequences or a bidirectional prefix); "
                "PyramidKVCache serves causal text alone"
            )
        padding = kwargs.get("attention_mask")
        if padding is None:
            return None
        seen = int(kwargs["kv_length"]) + int(kwargs["kv_offset"])
        if padding.shape[-1] < seen:
            raise ValueError(
                f"attention_mask: has {padding.shape[-1]} columns, must cover every token seen so far, {seen}"
            )
        padding = padding[:, :seen].bool()
        return None if bool(padding.all()) else padding

    return make


_ATTENTION = {"sdpa": _attention(_stock_sdpa, additive=False), "eager": _attention(_stock_eager, additive=True)}
_MASKS = {"sdpa": _mask("sdpa"), "eager": _mask("eager")}
