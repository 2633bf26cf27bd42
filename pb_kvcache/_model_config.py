"""A model's layers, heads, head size, dtype and sliding windows, from its ``config.json``. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._checks import integer, positive, uint32
from ._dtypes import dtype_bits
from ._native import lib


@dataclass(frozen=True)
class _Family:
    """The members of a family's file, and what one that is missing means: the defaults of its transformers class."""

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    hidden: str = "hidden_size"
    #: Key-value heads where the file does not say. None: as many as query heads.
    kv_heads: int | None = None
    #: None: the hidden size divided by the query heads.
    head_dim: int | None = None
    #: Which layers attend to a sliding window. None: none. "all": all. "deep": those from the layer on that the file
    #: names. A number n: all but every n-th.
    sliding: str | int | None = None
    #: The window where the file does not say. None: no layer slides.
    window: int | None = None


FAMILIES: dict[str, _Family] = {
    "gemma": _Family(kv_heads=16, head_dim=256),
    "gemma2": _Family(kv_heads=4, head_dim=256, sliding=2, window=4096),
    "gemma3_text": _Family(kv_heads=4, head_dim=256, sliding=6, window=4096),
    "gpt2": _Family(layers="n_layer", heads="n_head", hidden="n_embd"),
    "llama": _Family(),
    "mistral": _Family(kv_heads=8, sliding="all", window=4096),
    "mixtral": _Family(kv_heads=8, sliding="all"),
    "phi": _Family(),
    "phi3": _Family(sliding="all"),
    "qwen2": _Family(kv_heads=32, sliding="deep", window=4096),
    "qwen3": _Family(kv_heads=32, head_dim=128, sliding="deep", window=4096),
}

#: Files of several parts whose language model lies in ``text_config`` and may not say what it is.
_TEXT_OF = {"gemma3": "gemma3_text"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder's cache.

    Attributes
    ----------
    family
        The ``model_type`` of its language model.
    num_layers, num_kv_heads, head_dim
        Layers, key-value heads of a layer, and elements of a head.
    dtype
        The element type that the file states, or None.
    windows
        Per layer, the positions that it attends to. None for a layer that attends to all.
    """

    family: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str | None
    windows: tuple[int | None, ...]


def read_config(path: str | Path) -> ModelConfig:
    """Read a model's ``config.json``, or the one in a checkpoint's folder.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is not a JSON object, its family is not known, or a member is missing or contradicts another.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, numbers of too many digits
        raise ValueError(f"{file}: is no JSON file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: is no model configuration: must be a JSON object, not a {type(content).__name__}")
    try:
        return _parse(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _parse(content: dict[str, Any]) -> ModelConfig:
    text = content.get("text_config")
    if text is None:
        text = content
    elif not isinstance(text, dict):
        raise ValueError("text_config: must be an object")
    name = text.get("model_type")
    if name is None:
        name = _TEXT_OF.get(str(content.get("model_type")))
    if not isinstance(name, str) or name not in FAMILIES:
        stated = text.get("model_type", content.get("model_type"))
        raise ValueError(f"model_type = {stated!r}: must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    layers = _positive(text, family.layers)
    if layers > lib.PB_KVCACHE_STACK_MAX_LAYERS:
        raise ValueError(f"{family.layers} = {layers}: must be at most {lib.PB_KVCACHE_STACK_MAX_LAYERS}")
    kv_heads = _optional(text, "num_key_value_heads", family.kv_heads)
    if kv_heads is None:
        kv_heads = _positive(text, family.heads)
    head_dim = _optional(text, "head_dim", family.head_dim)
    if head_dim is None:
        hidden, heads = _positive(text, family.hidden), _positive(text, family.heads)
        if hidden % heads:
            raise ValueError(f"{family.hidden} = {hidden}: must be a multiple of {family.heads} = {heads}")
        head_dim = hidden // heads
    dtype = None
    for part in (text, content):
        for key in ("dtype", "torch_dtype"):
            if dtype is None and part.get(key) is not None:
                dtype = part[key]
    if dtype is not None:
        if not isinstance(dtype, str):
            raise ValueError(f"dtype = {dtype!r}: must be a string")
        dtype = dtype.removeprefix("torch.")
        dtype_bits(dtype)
    return ModelConfig(name, layers, kv_heads, head_dim, dtype, _windows(text, family, layers))


def _windows(text: dict[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    window = _optional(text, "sliding_window", family.window)
    slides_at_all = text.get("use_sliding_window")
    if slides_at_all is not None and not isinstance(slides_at_all, bool):
        raise ValueError(f"use_sliding_window = {slides_at_all!r}: must be true or false")
    if family.sliding == "deep" and not slides_at_all:
        window = None
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"layer_types: must be a list of {layers} strings, one for each layer")
        for layer, kind in enumerate(kinds):
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layer_types[{layer}] = {kind!r}: must be full_attention or sliding_attention")
        slides = [kind == "sliding_attention" for kind in kinds]
        if any(slides) and window is None:
            raise ValueError("sliding_window: must be given where a layer is of sliding_attention")
    elif isinstance(family.sliding, int):
        pattern = integer("sliding_window_pattern", text.get("sliding_window_pattern", family.sliding))
        if pattern <= 0:
            raise ValueError(f"sliding_window_pattern = {pattern}: must be greater than 0")
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif family.sliding == "deep":
        first = uint32("max_window_layers", text.get("max_window_layers", 28))
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [family.sliding == "all"] * layers
    return tuple(window if slide else None for slide in slides)


def _positive(text: dict[str, Any], key: str) -> int:
    if text.get(key) is None:
        raise ValueError(f"{key}: must be given")
    return positive(key, text[key])


def _optional(text: dict[str, Any], key: str, default: int | None) -> int | None:
    """Return a member. Its default where it is missing, None where it is null."""
    if key not in text:
        return default
    return None if text[key] is None else _positive(text, key)
