"""One line that makes a model ready for compressed caches, and one that undoes it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypeVar

from mlx import nn

from ._attention import NAME, redirect, restore
from ._probe import Facts, probe

_Model = TypeVar("_Model", bound=nn.Module)

#: Where a used model notes what the probe found out.
_FACTS = "_pb_kvcache_facts"


def use(model: _Model) -> _Model:
    """Redirect the attention of `model` so that the caches of :func:`make_prompt_cache` see its queries.

    The function is replaced in the modules that the model's classes come from. With other caches, and in other models
    of these modules, it computes what it did before. The model is tried once with four tokens: it tells which layers
    can be compressed, and a model that would compute something else is refused. :func:`unuse` undoes it.

    Parameters
    ----------
    model
        A model of mlx-lm, as ``mlx_lm.load`` returns it.

    Returns
    -------
    mlx.nn.Module
        The same object.

    Raises
    ------
    TypeError
        Not a model of mlx.
    ValueError
        A model that cannot be served. The message names the layer and the reason. Nothing was changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be an mlx.nn.Module, as mlx_lm.load returns it, not {type(model).__name__}")
    if facts_of(model) is not None:
        return model
    modules = _modules_of(model)
    if not modules:
        raise ValueError(
            f"model: {type(model).__name__} cannot be compressed: none of its modules calls mlx-lm's {NAME}, so "
            "that its queries cannot be seen"
        )
    for module in modules:
        redirect(module)
    try:
        facts = probe(model)
    except BaseException:
        for module in modules:
            restore(module)
        raise
    setattr(model, _FACTS, facts)
    return model


def unuse(model: _Model) -> _Model:
    """Undo :func:`use`. A compressed cache that the model meets afterwards raises an error at its second step.

    Nothing happens to a model that was not used.

    Returns
    -------
    mlx.nn.Module
        The same object.
    """
    if facts_of(model) is not None:
        delattr(model, _FACTS)
        for module in _modules_of(model):
            restore(module)
    return model


def facts_of(model: nn.Module) -> Facts | None:
    """Return what the probe found out about a model. None for one that is not used."""
    facts = model.__dict__.get(_FACTS)
    return facts if isinstance(facts, Facts) else None


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes that hold mlx-lm's attention function."""
    classes = {one for module in model.modules() for one in type(module).__mro__}
    names = sorted({one.__module__ for one in classes if not one.__module__.startswith("mlx.")})
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), NAME)]
