"""The list of caches that a prompt is read with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mlx import nn
from mlx_lm.models.cache import make_prompt_cache as own_caches

from .._checks import positive
from .._head_plan import HeadPlan
from .._plan import LayerPlan
from .._plan_file import load_plan
from .._selection import Selection
from ._cache import BudgetedKVCache
from ._probe import Facts
from ._selection import check_rule
from ._shared import Shared
from ._use import facts_of
from ._value_weights import NAMES, Projection, projection_of


def make_prompt_cache(
    model: nn.Module,
    budget: int | None = None,
    plan: LayerPlan | str | os.PathLike[str] | None = None,
    *,
    ratio: float | None = None,
    beta: float | None = None,
    weights: Any = None,
    memory: int | None = None,
    fraction: float | None = None,
    selection: Selection | str | None = None,
    prompt_length: int | None = None,
) -> list[Any]:
    """Return the caches of one prompt, or of one batch of prompts of equal length, for a model of mlx-lm.

    The list goes where that of ``mlx_lm.models.cache.make_prompt_cache`` goes: to ``model(tokens, cache=...)``, and as
    `prompt_cache` to ``mlx_lm.generate``, ``stream_generate`` and ``generate_step``. Layers with a sliding window and
    layers without keys keep the cache that the model gives them.

    Parameters
    ----------
    model
        A model that :func:`use` was called with.
    budget
        Positions kept per layer on average, those that are always kept included. 512 where neither `plan`, `memory` nor
        `fraction` is given.
    plan
        What every layer keeps, from :func:`pb_kvcache.plan`, or a file that :func:`pb_kvcache.save_plan` wrote.
    ratio, beta, weights
        How budgets fall from the first layer to the last, as for :func:`pb_kvcache.plan`. Uniform without them.
    memory
        Bytes that the kept keys and values of the whole batch may take after the prompt.
    fraction
        Share of the prompt that is kept, above 0 and at most 1.
    selection
        The rule that chooses: a :class:`pb_kvcache.Selection` or the name of one. ``"snapkv"`` where nothing is given.
    prompt_length
        Tokens of the prompt. It is over with the call that brings the last of them. None: with the first call that
        brings a single token, which is how mlx-lm feeds the last token of every prompt.

    Returns
    -------
    list
        One cache a layer, :class:`BudgetedKVCache` where it is compressed.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a model that was not used. The message names the fix.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be an mlx.nn.Module, as mlx_lm.load returns it, not {type(model).__name__}")
    facts = facts_of(model)
    if facts is None:
        raise ValueError("model: its attention is not redirected; call pb_kvcache.mlx.use(model) first")
    rule = Selection.of("snapkv" if selection is None else selection)
    check_rule(rule)
    shared = Shared(
        len(facts.layers),
        rule,
        _layer_plan(plan),
        {
            "budget": budget,
            "memory": memory,
            "fraction": fraction,
            "ratio": ratio,
            "beta": beta,
            "weights": weights,
        },
        None if prompt_length is None else positive("prompt_length", prompt_length),
        _projections(model, facts) if rule.value_weight else None,
    )
    caches: list[Any] = own_caches(model)
    for index, layer in enumerate(facts.layers):
        caches[layer.layer] = BudgetedKVCache(shared, index, layer.layer)
    return caches


def end_prompt(caches: Iterable[Any]) -> None:
    """Say that the prompt is over: the layers choose by the last queries that they have seen.

    For loops of one's own that bring a prompt in calls of several tokens. Nothing happens where it is over already.

    Raises
    ------
    ValueError
        Attention that is not finite.
    """
    for cache in caches:
        if isinstance(cache, BudgetedKVCache):
            cache.end_prompt()


def _layer_plan(plan: Any) -> LayerPlan | None:
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if isinstance(plan, HeadPlan):
        raise ValueError(
            "plan: is a HeadPlan, and the attention of mlx reads equal rows in all heads of a layer: give it "
            "plan.layer_plan(), which keeps the total"
        )
    return plan  # type: ignore[no-any-return]  # LayerBudgets refuses the rest


def _projections(model: nn.Module, facts: Facts) -> list[Projection]:
    layers = getattr(model, "layers", None)
    found = []
    for layer in facts.layers:
        width = layer.q_heads * layer.value_dim
        module = layers[layer.layer] if layers is not None and layer.layer < len(layers) else None
        projection = None if module is None else projection_of(module, width)
        if projection is None:
            raise ValueError(
                f"selection: has value_weight=True, and layer {layer.layer} of the model has no output projection by "
                f"the name of {', '.join(NAMES)}; use a selection without it"
            )
        found.append(projection)
    return found
