"""A plan as an inference engine's own configuration: what vLLM and TensorRT-LLM call the layers' attention windows.

Neither engine selects positions. A layer of a window holds its newest positions, whatever they are worth. What leaves
the package here are the lengths alone.
"""

from __future__ import annotations

import os
from typing import Any

from ._files import replacing
from ._groups import LayerGroup, LayerGroups, runs_of
from ._head_plan import HeadPlan
from ._plan import LayerPlan
from ._plan_file import load_plan
from ._text import write_json

#: What vLLM calls the attention of layer ``{}`` in models built like Llama.
LAYER_NAME = "model.layers.{}.self_attn.attn"


def _vllm(groups: LayerGroups, rounding: int, block: int, layer_name: str) -> dict[str, Any]:
    """Return the KV cache groups in the words of vLLM's ``KVCacheGroupSpec`` and ``SlidingWindowSpec``."""
    return {
        "engine": "vllm",
        "num_layers": groups[-1].stop,
        "total": groups.total,
        "rounding": rounding,
        "kv_cache_groups": [
            {
                "layer_names": [layer_name.replace("{}", str(layer)) for layer in range(group.start, group.stop)],
                "kv_cache_spec": {
                    "type": "SlidingWindowSpec",
                    "block_size": block,
                    "sliding_window": group.budget,
                },
            }
            for group in groups
        ],
    }


def _tensorrt_llm(groups: LayerGroups, rounding: int, block: int, layer_name: str) -> dict[str, Any]:
    """Return the members of TensorRT-LLM's ``KvCacheConfig``, and no others: it refuses what it does not know."""
    del rounding, layer_name
    return {"kv_cache_config": {"max_attention_window": groups.budgets.tolist(), "tokens_per_block": block}}


#: How each engine's export is written.
_WRITERS = {"vllm": _vllm, "tensorrt-llm": _tensorrt_llm}
#: The engines that a plan can be exported to.
ENGINES = tuple(_WRITERS)


def engine_export(
    plan: LayerPlan | str | os.PathLike[str],
    engine: str,
    *,
    groups: int | None = None,
    layer_name: str = LAYER_NAME,
) -> dict[str, Any]:
    """Return a plan as an engine's configuration: a window for each layer, in whole blocks.

    The engine keeps the newest positions of a layer, as many as its window, and selects none. What a plan promises
    under a selection does not hold there.

    Parameters
    ----------
    plan
        The layers' budgets, or a file of them. Its ``multiple_of`` is the engine's block size.
    engine
        ``"vllm"``: the layers' KV cache groups, each with its names, block size and sliding window. vLLM has no option
        that takes them. A model class of your own gives each ``Attention`` its window. ``"tensorrt-llm"``: a
        configuration file for ``--config``, with one ``max_attention_window`` a layer.
    groups
        Join the layers in at most so many groups of consecutive ones, as :meth:`LayerPlan.groups` does. None: every
        layer has its own budget, and runs of equal budgets are the groups.
    layer_name
        vLLM's name of a layer's attention, with ``{}`` for the layer's number.

    Returns
    -------
    dict
        Plain numbers, strings and lists, ready for JSON.

    Raises
    ------
    TypeError
        Not a plan of layers. In these engines all heads of a layer hold the same positions.
    ValueError
        Another engine, a block size that it does not take, a layer without positions, a layer name without ``{}``, or
        as :meth:`LayerPlan.groups`.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> engine_export(plan(3, 64, ratio=3, multiple_of=16), "tensorrt-llm")
    {'kv_cache_config': {'max_attention_window': [96, 64, 32], 'tokens_per_block': 16}}
    """
    loaded = load_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
    if isinstance(loaded, HeadPlan):
        raise TypeError(
            "plan: a plan of heads, but all heads of a layer hold the same in this engine; give plan.layer_plan(), or "
            "CurveSet.layer_plan with multiple_of"
        )
    if not isinstance(loaded, LayerPlan):
        raise TypeError(f"plan: must be a LayerPlan or the path of one, not {type(loaded).__name__}")
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r}: must be one of {', '.join(ENGINES)}")
    if not isinstance(layer_name, str) or "{}" not in layer_name:
        raise ValueError(f"layer_name = {layer_name!r}: must be text with {{}} where the layer's number is")
    _check_block(engine, loaded.multiple_of)
    joined = _runs(loaded) if groups is None else loaded.groups(groups)
    for group in joined:
        if group.budget == 0:
            raise ValueError(f"plan: layer {group.start} holds 0 positions, a window must hold one or more")
    return _WRITERS[engine](joined, loaded.total - joined.total, loaded.multiple_of, layer_name)


def save_engine_export(
    path: str | os.PathLike[str],
    plan: LayerPlan | str | os.PathLike[str],
    engine: str,
    *,
    groups: int | None = None,
    layer_name: str = LAYER_NAME,
) -> None:
    """Write what :func:`engine_export` returns as JSON.

    What stood at `path` is there until all of the new file is. JSON is YAML, so that an engine that asks for YAML reads
    the file as it is.

    Raises
    ------
    TypeError, ValueError
        As :func:`engine_export`. Nothing is written.
    OSError
        A file cannot be read or written.
    """
    content = engine_export(plan, engine, groups=groups, layer_name=layer_name)
    with replacing(path) as file:
        file.write((write_json(content, indent=2) + "\n").encode())


def _check_block(engine: str, block: int) -> None:
    """Refuse a block size that the engine does not take."""
    if engine == "tensorrt-llm" and (block < 2 or block & (block - 1)):
        raise ValueError(f"multiple_of = {block}: must be a power of two above 1, as TensorRT-LLM's tokens_per_block")
    if engine == "vllm" and block % 16:
        raise ValueError(f"multiple_of = {block}: must be a multiple of 16, as the block size of vLLM's kernels")


def _runs(plan: LayerPlan) -> LayerGroups:
    """Return the runs of equal budgets as groups."""
    starts = runs_of(plan.budgets).tolist()
    stops = [*starts[1:], plan.num_layers]
    budgets = plan.budgets[starts].tolist()
    return LayerGroups(tuple(map(LayerGroup, starts, stops, budgets)), plan.total, 0)
