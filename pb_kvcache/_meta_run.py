"""What a model of some configuration caches, found by running two tokens through it on torch's meta device.

The meta device holds shapes and no numbers, so a model of any size is made and run in a second and in no memory. No
weights are needed, and nothing is downloaded. No code but that of the installed transformers is run.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._filled_cache import NO_CACHE, LayerCache, cache_argument, filled_layers
from ._native import lib
from ._text import one_line

#: Tokens of the run. Few, so that the shortest window holds them.
_TOKENS = 2
#: What a file may hold that would load code or packages, and changes no shape.
_LEFT_OUT = ("auto_map", "quantization_config", "compression_config")


def cached_layers(content: dict[str, Any]) -> tuple[str, tuple[LayerCache, ...]]:
    """Return the family of a configuration's language model, and what every layer of it caches.

    Parameters
    ----------
    content
        A ``config.json``. What it leaves out has the default of its transformers class, at every depth.

    Raises
    ------
    ImportError
        Torch or transformers is not installed.
    ValueError
        Transformers has no class for it, refuses a member, or cannot run the model.
    """
    name = content.get("model_type")
    torch, transformers = _extra("torch", name), _extra("transformers", name)
    classes = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    here = f"transformers {transformers.__version__}"
    if name not in classes:
        raise ValueError(f"model_type = {name!r}: {here} has no such family")
    with _quiet(torch, transformers):
        try:
            config = classes[name].from_dict({key: value for key, value in content.items() if key not in _LEFT_OUT})
            text = config.get_text_config(decoder=True)
        except Exception as error:  # classes raise of many kinds where a member has the wrong type
            raise ValueError(f"{here} refuses it: {type(error).__name__}: {one_line(error)}") from None
        stated = getattr(text, "num_hidden_layers", None)
        most: int = lib.PB_KVCACHE_STACK_MAX_LAYERS
        if isinstance(stated, int) and not 0 < stated <= most:
            raise ValueError(f"num_hidden_layers = {stated}: must be greater than 0 and at most {most}")
        try:
            layers = filled_layers(_run(torch, transformers, config, text))
        except Exception as error:
            raise ValueError(
                f"model_type = {name!r}: {here} cannot run it without its weights: {type(error).__name__}: "
                f"{one_line(error)}; give --layers, --kv-heads and --head-dim instead"
            ) from None
    # A cache ends with the last layer that has keys of its own.
    layers += [NO_CACHE] * ((stated if isinstance(stated, int) else 0) - len(layers))
    return str(text.model_type), tuple(layers)


def _run(torch: Any, transformers: Any, config: Any, text: Any) -> Any:
    """Return the cache that the model fills."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    # The language model alone where it is a model by itself, without the towers for images and sound.
    candidates = (
        (text, auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (text, auto.MODEL_MAPPING, transformers.AutoModel),
        (config, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
    )
    found = [(part, maker) for part, mapping, maker in candidates if type(part) in mapping]
    part, maker = found[0] if found else (config, transformers.AutoModel)
    with torch.device("meta"), torch.inference_mode():
        # bfloat16, because the mixtures of experts have no other kernel there. It changes no shape.
        options = {"attn_implementation": "eager", "dtype": torch.bfloat16, "trust_remote_code": False}
        decoder = maker.from_config(part, **options).eval().base_model
        cache = transformers.DynamicCache(config=decoder.config)
        ids = torch.zeros((1, _TOKENS), dtype=torch.long)
        decoder(input_ids=ids, use_cache=True, **{cache_argument(decoder): cache})
    return cache


@contextmanager
def _quiet(torch: Any, transformers: Any) -> Iterator[None]:
    """Keep transformers from warning of a model that nobody will use, and torch from looking at its numbers."""
    distribution = torch.distributions.Distribution
    verbosity, validates = transformers.logging.get_verbosity(), distribution._validate_args
    # Many releases switch autocast off for their rotary angles, by the device's name, and it knows no meta device.
    asked = {name: getattr(torch, name) for name in ("autocast", "is_autocast_enabled")}
    transformers.logging.set_verbosity_error()
    for name, function in asked.items():
        setattr(torch, name, _without_meta(function))
    distribution.set_default_validate_args(False)  # a mean and a deviation of no number cannot be compared with 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, function in asked.items():
            setattr(torch, name, function)
        distribution.set_default_validate_args(validates)
        transformers.logging.set_verbosity(verbosity)


def _without_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a device's type that takes the meta device for the CPU."""

    def asked_of_cpu(*arguments: Any, **options: Any) -> Any:
        known = ["cpu" if value == "meta" else value for value in arguments]
        return function(*known, **{name: "cpu" if value == "meta" else value for name, value in options.items()})

    return asked_of_cpu


def _extra(module: str, name: object) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"model_type = {name!r}: is read with {module}, which is not installed: "
            "pip install 'pb-kvcache[transformers]' (or give --layers, --kv-heads and --head-dim)"
        ) from error
