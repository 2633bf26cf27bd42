"""What a model caches in every layer, from its ``config.json``.

The common families are known here and need no torch. The others are asked of the installed transformers
(:mod:`pb_kvcache._meta_run`), which answers the same for the common ones: a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._checks import integer, positive, uint32
from ._dtypes import dtype_bits
from ._filled_cache import LayerCache, common
from ._meta_run import cached_layers
from ._native import lib
from ._text import read_json


@dataclass(frozen=True)
class _Family:
    """The members of a family's file, and what one that is missing means: the defaults of its transformers class."""

    #: Layers, query heads and hidden size where the file does not say.
    num_layers: int
    num_heads: int
    hidden_size: int
    #: The names of these members.
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
    "gemma": _Family(28, 16, 3072, kv_heads=16, head_dim=256),
    "gemma2": _Family(26, 8, 2304, kv_heads=4, head_dim=256, sliding=2, window=4096),
    "gemma3_text": _Family(26, 8, 2304, kv_heads=4, head_dim=256, sliding=6, window=4096),
    "gpt2": _Family(12, 12, 768, layers="n_layer", heads="n_head", hidden="n_embd"),
    "llama": _Family(32, 32, 4096),
    "mistral": _Family(32, 32, 4096, kv_heads=8, sliding="all", window=4096),
    "mixtral": _Family(32, 32, 4096, kv_heads=8, sliding="all"),
    "phi": _Family(24, 32, 2048),
    "phi3": _Family(32, 32, 3072, sliding="all"),
    "qwen2": _Family(32, 32, 4096, kv_heads=32, sliding="deep", window=4096),
    "qwen3": _Family(32, 32, 4096, kv_heads=32, head_dim=128, sliding="deep", window=4096),
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
    dtype
        The element type that the file states, or None.
    layers
        What every layer holds.
    """

    family: str
    dtype: str | None
    layers: tuple[LayerCache, ...]

    @property
    def num_kv_heads(self) -> int | None:
        """Key-value heads of a layer. None: the layers differ."""
        found: int | None = common(self.layers, "num_kv_heads")
        return found

    @property
    def head_dim(self) -> int | None:
        """Elements of a head's key, and of its value. None: the layers differ, or keys and values do."""
        found: int | None = common(self.layers, "head_dim")
        return found


def read_config(path: str | Path) -> ModelConfig:
    """Read a model's ``config.json``, or the one in a checkpoint's folder.

    Raises
    ------
    OSError
        The file cannot be read.
    ImportError
        Its family is not one of :data:`FAMILIES`, and torch or transformers is not installed.
    ValueError
        The file is not a JSON object, its family is not known, or a member is missing or contradicts another.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    content = file.read_bytes()
    try:
        return _parse(read_json(content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None
    except ImportError as error:
        raise ImportError(f"{file}: {error}") from error


def _parse(content: Any) -> ModelConfig:
    if not isinstance(content, dict):
        raise ValueError(f"must be a JSON object, not a {type(content).__name__}")
    text = content.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ValueError("text_config: must be an object")
    text = content if text is None else text
    dtype = _dtype(text, content)
    name = text.get("model_type", _TEXT_OF.get(str(content.get("model_type"))))
    if isinstance(name, str) and name in FAMILIES:
        return ModelConfig(name, dtype, _layers(text, FAMILIES[name]))
    whole = content if "model_type" in content else text
    if not isinstance(whole.get("model_type"), str):
        raise ValueError(f"model_type = {whole.get('model_type')!r}: must be a string")
    family, layers = cached_layers(whole)
    if not any(layer.elements for layer in layers):
        rule = "no layer of it holds keys and values in a DynamicCache"
        raise ValueError(f"model_type = {family!r}: {rule}, so there is nothing to plan")
    return ModelConfig(family, dtype, layers)


def _dtype(*parts: dict[str, Any]) -> str | None:
    """Return the element type that the first of the parts states."""
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            dtype = part.get(key)
            if dtype is None:
                continue
            if not isinstance(dtype, str):
                raise ValueError(f"dtype = {dtype!r}: must be a string")
            dtype_bits(dtype)
            return dtype.removeprefix("torch.")
    return None


def _layers(text: dict[str, Any], family: _Family) -> tuple[LayerCache, ...]:
    """Return every layer of a family that is known here."""
    layers = _number(text, family.layers, family.num_layers)
    if layers > lib.PB_KVCACHE_STACK_MAX_LAYERS:
        raise ValueError(f"{family.layers} = {layers}: must be at most {lib.PB_KVCACHE_STACK_MAX_LAYERS}")
    kv_heads = _optional(text, "num_key_value_heads", family.kv_heads)
    if kv_heads is None:
        kv_heads = _number(text, family.heads, family.num_heads)
    head_dim = _optional(text, "head_dim", family.head_dim)
    if head_dim is None:
        hidden = _number(text, family.hidden, family.hidden_size)
        heads = _number(text, family.heads, family.num_heads)
        if hidden % heads:
            raise ValueError(f"{family.hidden} = {hidden}: must be a multiple of {family.heads} = {heads}")
        head_dim = hidden // heads
    return tuple(LayerCache.of_heads(kv_heads, head_dim, window) for window in _windows(text, family, layers))


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


def _number(text: dict[str, Any], key: str, default: int) -> int:
    """Return a member, or its default. Null is no number."""
    number = _optional(text, key, default)
    if number is None:
        raise ValueError(f"{key} = null: must be an integer")
    return number


def _optional(text: dict[str, Any], key: str, default: int | None) -> int | None:
    """Return a member. Its default where it is missing, None where it is null."""
    if key not in text:
        return default
    return None if text[key] is None else positive(key, text[key])
