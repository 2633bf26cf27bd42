"""What Sphinx has to be told of this package's docstrings.

Names are defined in modules that begin with an underscore and documented where they are imported from. A docstring
refers to a method of its class by the name alone, inherited or not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util.inspect import stringify_signature


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Return a reference to a name that Sphinx did not find."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    known = env.domains.python_domain.objects
    found = [f"{owner}.{target}" for owner in _owners(node) if f"{owner}.{target}" in known]
    if target.startswith("pb_kvcache."):  # where it is defined, not where it is documented
        found += [name for name in known if name.rpartition(".")[2] == target.rpartition(".")[2]]
    if not found:
        return content if _in_signature(node) else None
    node["reftarget"] = found[0]
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], found[0], node, content
    )


def _in_signature(node: nodes.Node) -> bool:
    """Return whether a name is a type in a signature: one of others, or the package's name for a union of types."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, desc_signature):
            return True
    return False


def _owners(node: pending_xref) -> list[str]:
    """Return the documented names of the class that a reference stands in, and of those that it inherits from."""
    module, owner = node.get("py:module"), node.get("py:class")
    if not module or not owner:
        return []
    cls = getattr(importlib.import_module(module), owner.partition(".")[0], None)
    return [f"{module}.{base.__name__}" for base in inspect.getmro(cls)] if inspect.isclass(cls) else []


def _as_written(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Return a signature with its types as the source has them: npt.ArrayLike, not the union of twelve that it is."""
    if signature is None or not callable(obj):
        return None
    found = inspect.signature(obj)
    if what == "method" and next(iter(found.parameters), None) == "self":
        found = found.replace(parameters=list(found.parameters.values())[1:])
    if inspect.isclass(obj):
        found = found.replace(return_annotation=inspect.Signature.empty)
    shown, _, result = stringify_signature(found).partition(" -> ")
    return shown, result or None


#: What napoleon must not touch, by name. It reads "The kept positions: a copy" as a type and its description.
_untouched: dict[str, list[str]] = {}


def _before_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what in ("attribute", "data", "property"):
        _untouched[name] = list(lines)


def _after_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if name in _untouched:
        lines[:] = _untouched.pop(name)


def _stand_in_for_lm_eval() -> None:
    """Let pb_kvcache.lm_eval be imported without lm_eval. A mock would swallow the class that it decorates."""
    registry, model = ModuleType("lm_eval.api.registry"), ModuleType("lm_eval.models.huggingface")
    vars(registry)["register_model"] = lambda name: lambda cls: cls
    vars(model)["HFLM"] = type("HFLM", (), {"__module__": model.__name__})
    for module in (registry, model):
        sys.modules[module.__name__] = module
        for parent in ("lm_eval", module.__name__.rpartition(".")[0]):
            sys.modules.setdefault(parent, ModuleType(parent))


def _signature_for_mocks() -> None:
    """Let pb_kvcache.transformers ask a mock of transformers for the name under which generate() takes a cache."""
    cache = inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY)
    _MockObject.__signature__ = inspect.Signature([cache])


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of it."""
    if not importlib.util.find_spec("lm_eval"):
        _stand_in_for_lm_eval()
    if not importlib.util.find_spec("transformers"):
        _signature_for_mocks()
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-signature", _as_written)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
