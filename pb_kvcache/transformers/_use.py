"""One line that makes a model ready for compressed caches, for good or for a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ._attention import NAMES, eager_function, implementation, register
from ._cache import BudgetedCache
from ._generation import METHODS, Generate, WarnOfPlainForwards
from ._probe import facts_of, remember, switch
from ._probe import probe as run_probe
from ._rotary import UNTURNED, noting_modules, stop_noting, watch

_Model = TypeVar("_Model")

_HOOK = "_pb_kvcache_hook"


def use(model: _Model, attention: str | None = None, *, probe: bool = True, **options: Any) -> _Model:
    """Redirect the attention of `model` so that a :class:`BudgetedCache` works in it.

    With options, every ``generate`` from then on has a fresh cache of these: in pipelines, chat loops and servers
    alike. Without them, only the caches that a call is given are compressed. With any other cache the model computes
    what it did before. ``model.set_attn_implementation("sdpa")`` undoes it, and :func:`compressed` does it for a block.

    Parameters
    ----------
    model
        A transformers model, also inside of a PEFT model or ``torch.compile``.
    attention
        ``"sdpa"`` or ``"eager"``: the arithmetic that attention is done with. None keeps the model's own.
    probe
        Whether to try the model with a forward of two tokens, once: it tells which layers can be compressed, and
        refuses a model that would compute something else. False trusts that.
    **options
        What a cache is made with: ``budget=512`` and whatever else :class:`BudgetedCache` takes.

    Returns
    -------
    transformers.PreTrainedModel
        The same object.

    Raises
    ------
    TypeError
        Not a transformers model, or an option that a cache does not have.
    ValueError
        A model that cannot be served, other arithmetic than the two, or a bad option. The message names the layer or
        the option, and the fix. The model is as it was before.
    """
    inner = unwrapped(model)
    name = type(inner).__name__
    current = implementation(inner.config)
    if attention is None:
        attention = next((plain for plain, own in NAMES.items() if own == current), current)
    if attention not in NAMES:
        raise ValueError(
            f"attention = {attention!r}: must be 'sdpa' or 'eager', which take a mask for each layer; "
            "use(model, attention='sdpa') switches the model over"
        )
    if attention == "sdpa" and not inner._supports_sdpa:
        raise ValueError(
            f"attention = 'sdpa': {name} does more in its attention than that can; use(model, attention='eager')"
        )
    if attention == "eager" and eager_function(type(inner)) is None:
        if not inner._supports_sdpa:
            raise ValueError(
                f"model: the attention of {name} cannot be redirected, because it does not go through transformers' "
                "attention interface; a newer transformers release may have moved it there"
            )
        raise ValueError(
            f"attention = 'eager': the module of {name} has no eager_attention_forward; use(model, attention='sdpa')"
        )
    register()
    try:
        _redirect(inner, attention)
        if probe and facts_of(inner.config) is None:
            declared = inner._supports_attention_backend and inner._can_set_attn_implementation()
            remember(inner.config, run_probe(inner, compare_with=None if declared else attention))
        facts = facts_of(inner.config)
        if facts is not None and any(layer.layout not in (None, UNTURNED) for layer in facts.layers.values()):
            watch(inner, facts.attention)
        if options:
            BudgetedCache(inner.config, **options)  # a bad option is refused now
    except BaseException:
        if current is not None:
            switch(inner, current)
        raise
    _put_before(inner, options or None)
    return model


@contextlib.contextmanager
def compressed(model: _Model, attention: str | None = None, *, probe: bool = True, **options: Any) -> Iterator[_Model]:
    """Compress every ``generate`` of a block, and leave the model as it was.

    Takes what :func:`use` takes, and gives the block the model. Where neither a budget nor another option is given,
    caches have the default budget.

    >>> with compressed(model, budget=512):                              # doctest: +SKIP
    ...     pipeline(prompts)
    """
    inner = unwrapped(model)
    current = implementation(inner.config)
    names = [method.name for method in (Generate, *METHODS)] + [_HOOK]
    before = {name: inner.__dict__[name] for name in names if name in inner.__dict__}
    noting = {id(module) for module in noting_modules(inner)}
    use(model, attention, probe=probe, **(options or {"budget": None}))
    try:
        yield model
    finally:
        if _HOOK in inner.__dict__ and _HOOK not in before:
            inner.__dict__[_HOOK].remove()
        for name in names:
            inner.__dict__.pop(name, None)
        inner.__dict__.update(before)
        stop_noting(module for module in noting_modules(inner) if id(module) not in noting)
        if current is not None:
            switch(inner, current)


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model within wrappers that compute the same: PEFT, torch.compile, DataParallel."""
    inner = model
    for _ in range(8):
        if isinstance(inner, PreTrainedModel):
            return inner
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), torch.nn.Module):
            inner = inner.module
        else:
            break
    raise TypeError(f"model: must be a transformers PreTrainedModel, not {type(model).__name__}")


def _redirect(model: PreTrainedModel, attention: str) -> None:
    switch(model, NAMES[attention])
    if implementation(model.config) != NAMES[attention]:
        raise ValueError(
            f"model: transformers did not switch the attention of {type(model).__name__}, which still is "
            f"{implementation(model.config)!r}; its attention cannot be redirected"
        )


def _put_before(model: PreTrainedModel, options: dict[str, Any] | None) -> None:
    """Put our methods before the model's own. Options that are not given stay as an earlier call set them."""
    if not hasattr(type(model), Generate.name):
        return
    for method in METHODS:
        if hasattr(type(model), method.name):
            model.__dict__[method.name] = method(model)
    earlier = model.__dict__.get(Generate.name)
    if options is None and isinstance(earlier, Generate):
        options = earlier.options
    model.__dict__[Generate.name] = Generate(model, options)
    if options is not None and _HOOK not in model.__dict__:
        model.__dict__[_HOOK] = model.register_forward_pre_hook(WarnOfPlainForwards(), with_kwargs=True)
