"""What a model does with its cache, seen in one small forward: what can be compressed, and why the rest cannot.

A class says little about it. Some models go through the attention interface without saying so, some say so and call
attention twice for one update, and some have layers that text never reaches.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.pytorch_utils import Conv1D

from ._attention import LAYER_MARK, as_added
from ._ranks import Ranks
from ._rotary import LAYOUTS, UNTURNED, note, rotation_of, watch

#: Tokens of the probe: the fewest that causality shows in.
_TOKENS = 2
#: Equal hidden states that tell how a rotation pairs dimensions.
_EQUAL_TOKENS = 3
#: Names of the argument that takes a cache: of releases from 5.24 on, and before.
CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class LayerFacts:
    """What one attention layer keeps of a position."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    #: The name that the output projection has within the attention module. None: there is none that was seen.
    projection: str | None = None
    #: How its rotary embedding pairs dimensions: one of LAYOUTS. None: not known.
    layout: str | None = None


@dataclass(frozen=True)
class Facts:
    """What a model does with its cache."""

    #: Every layer that keeps keys and values of all tokens, and reads them once a forward: the ones to compress.
    layers: dict[int, LayerFacts]
    #: Ranks that the heads of a layer are divided over.
    ranks: Ranks = field(default_factory=Ranks)
    #: The classes of the attention modules of these layers.
    attention: tuple[type[torch.nn.Module], ...] = ()


@dataclass
class _Seen:
    """What one layer did in the probe."""

    layer: int
    updates: int = 0
    attentions: int = 0
    facts: LayerFacts | None = None
    fault: str = ""
    attention: type[torch.nn.Module] | None = None


class _EnoughError(Exception):
    """Every layer that follows is like one that was seen."""


class _WatchedLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """The stock layer, which notes what it meets.

    `kind` is what it has in common with the layers that are like it, None for a layer on its own. `others` are all
    watched layers of the forward: where each is like one that has been left behind, the forward ends.
    """

    watches = True

    def __init__(self, layer: int, kind: Any, others: dict[int, _WatchedLayer]) -> None:
        super().__init__()
        self.seen = _Seen(layer)
        self.kind = kind
        self._others = others
        self._hooks: list[Any] = []

    def _end_early(self) -> None:
        done = [other for other in self._others.values() if other.seen.updates and other is not self]
        kinds = {other.kind for other in done} - {None}
        if kinds and all(other.kind in kinds for other in self._others.values()):
            raise _EnoughError

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._end_early()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen.updates += 1
        self.seen.facts = LayerFacts(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, values.dtype)
        keys = keys.view(keys.shape)
        setattr(keys, LAYER_MARK, self)
        return keys, values

    def watch(
        self,
        module: torch.nn.Module,
        stock: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        additive: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do the attention as the model asks for it, and compare it with what a compressed cache would ask for."""
        self.seen.attentions += 1
        asked = stock(module, query, key, value, mask, **options)
        self.seen.attention = type(module)
        self._watch_projection(module, query.shape[1] * value.shape[-1])
        new = query.shape[-2]
        causal = torch.ones(new, new, dtype=torch.bool, device=query.device).tril_()[None, None]
        # A compressed cache passes no mask where sdpa knows of causality itself. With one it does not ask the module.
        ways: list[torch.Tensor | None] = [as_added(causal, query.dtype)] if additive else [causal, None]
        options = {name: option for name, option in options.items() if name != "is_causal"}
        if options.get("position_bias") is not None:
            self.seen.fault = "its attention adds a position bias, with which positions cannot be scored"
            return asked  # type: ignore[no-any-return]
        if not all(_close(asked[0], stock(module, query, key, value, way, **options)[0]) for way in ways):
            self.seen.fault = "its mask says more than causality (a position bias, a local window or a prefix)"
        return asked  # type: ignore[no-any-return]

    def _watch_projection(self, module: torch.nn.Module, width: int) -> None:
        """Note the first linear map within the attention module that all heads' outputs go through."""

        def called(name: str) -> Callable[..., None]:
            def hook(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
                if not self._hooks or not inputs or getattr(inputs[0], "shape", (0,))[-1] != width:
                    return
                self.leave()
                if self.seen.facts is not None:
                    self.seen.facts = replace(self.seen.facts, projection=name)

            return hook

        self.leave()
        for name, part in module.named_modules():
            if name and (hasattr(part, "in_features") or isinstance(part, Conv1D)):
                self._hooks.append(part.register_forward_pre_hook(called(name)))

    def leave(self) -> None:
        """Take the hooks away."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()


def _close(asked: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether two ways of the same arithmetic agree, up to the rounding of the dtype."""
    tolerance = 64 * torch.finfo(asked.dtype).eps
    scale = asked.abs().amax().clamp(min=torch.finfo(asked.dtype).tiny)
    return bool(((asked - own).abs() <= tolerance * scale).all())


def probe(model: PreTrainedModel, *, compare_with: str | None) -> Facts:
    """Run a few tokens through a model whose attention was redirected, and return what it does with its cache.

    Parameters
    ----------
    model
        The model. Its weights have to be where its forward finds them.
    compare_with
        The attention to run the same tokens with once more, which has to give the same hidden states. None where the
        model says itself that it goes through the attention interface.

    Raises
    ------
    ValueError
        The model cannot be served. The message names the layer and the reason.
    """
    name = type(model).__name__
    missing = next((key for key, value in model.named_parameters() if value.is_meta), None)
    if missing is not None and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            f"model: the weights of {name} are not loaded ({missing} is on the meta device), so that it cannot be "
            "tried; load them first, or use(model, probe=False)"
        )
    cache = DynamicCache(config=model.config)
    watched: dict[int, _WatchedLayer] = {}
    kinds = _kinds(model, len(cache.layers)) if compare_with is None else []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.is_sliding:
            continue
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"model: {name} cannot be served: layer {index}: its cache is a {type(layer).__name__}, which keeps "
                "more than the keys and values of full attention"
            )
        kind = kinds[index] if index < len(kinds) else None
        cache.layers[index] = watched[index] = _WatchedLayer(index, kind, watched)
    if not watched:
        return Facts({})
    try:
        with _quiet(model):
            try:
                answer = _forward(model, cache)
            except _EnoughError:
                answer = None
            _check(watched, len(cache.layers))
            if compare_with is not None and answer is not None:
                _compare(model, answer, compare_with)
    except _NotServedError as error:
        raise ValueError(f"model: {name} cannot be served: {error}") from None
    except Exception as error:
        raise ValueError(
            f"model: a forward of {_TOKENS} tokens through {name} failed, which use() tries a model with: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. use(model, probe=False) skips it"
        ) from error
    finally:
        for watched_layer in watched.values():
            watched_layer.leave()
    facts = {index: layer.seen.facts for index, layer in watched.items() if layer.seen.facts is not None}
    if answer is None:
        like = {layer.kind: layer.seen.facts for layer in watched.values() if layer.seen.facts is not None}
        facts = {index: like[layer.kind] for index, layer in watched.items()}
    classes = {layer.seen.attention: None for layer in watched.values() if layer.seen.attention is not None}
    layouts = _layouts(model, tuple(classes), {index: layer.kind for index, layer in watched.items()})
    facts = {index: replace(known, layout=layouts.get(index)) for index, known in facts.items()}
    return Facts(facts, Ranks.of(model), tuple(classes))


class _AlikeLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """The stock layer, whose attention module is given equal hidden states.

    The queries of all positions are then equal before their rotation. That tells how it pairs dimensions. `kind` and
    `others` are those of :class:`_WatchedLayer`.
    """

    watches = True

    def __init__(self, kind: Any, others: dict[int, _AlikeLayer]) -> None:
        super().__init__()
        self.kind = kind
        self.layout: str | None = None
        self.done = False
        self._others = others

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        keys = keys.view(keys.shape)
        setattr(keys, LAYER_MARK, self)
        return keys, values

    def watch(
        self,
        module: torch.nn.Module,
        stock: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        additive: bool,
        options: dict[str, Any],
    ) -> Any:
        """Compare the queries of the positions, as they are and before each rotation."""
        tolerance = 64 * torch.finfo(query.dtype).eps
        unlike: dict[str, float] = {}
        for layout in LAYOUTS:
            rotation = rotation_of(module, 0, layout, query.shape[2])
            if rotation is not None and rotation.dims <= query.shape[-1]:
                before = rotation.before(query[0])
                unlike[layout] = float((before - before[:, :1]).abs().max() / before.abs().max())
        self.layout = next((layout for layout in LAYOUTS if unlike.get(layout, 1.0) <= tolerance), None)
        self.done = True
        kinds = {other.kind for other in self._others.values() if other.done} - {None}
        if all(other.done or other.kind in kinds for other in self._others.values()):
            raise _EnoughError
        return stock(module, query, key, value, mask, **options)


def _first_repeated(
    _: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the hidden states of every position be the first one's: a forward pre-hook."""
    hidden = options.get("hidden_states", inputs[0] if inputs else None)
    if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
        hidden = hidden[:, :1].expand_as(hidden)
        if "hidden_states" in options:
            options = {**options, "hidden_states": hidden}
        else:
            inputs = (hidden, *inputs[1:])
    return inputs, options


def _layouts(
    model: PreTrainedModel, classes: tuple[type[torch.nn.Module], ...], kinds: dict[int, Any]
) -> dict[int, str | None]:
    """Return how the rotary embedding of each watched layer pairs dimensions, and let attention modules note it."""
    handles = watch(model, classes)
    of_kind = [module for module in model.modules() if type(module) in classes]
    alike_hooks = [module.register_forward_pre_hook(_first_repeated, with_kwargs=True) for module in of_kind]
    cache = DynamicCache(config=model.config)
    layers: dict[int, _AlikeLayer] = {}
    for index, kind in kinds.items():
        cache.layers[index] = layers[index] = _AlikeLayer(kind, layers)
    with _quiet(model), contextlib.suppress(Exception):  # what fails here has no rotation that is known
        _forward(model, cache, tokens=_EQUAL_TOKENS)
    for handle in alike_hooks:
        handle.remove()
    of_done = {layer.kind: layer.layout for layer in layers.values() if layer.done and layer.kind is not None}
    found = {index: layer.layout if layer.done else of_done.get(layer.kind) for index, layer in layers.items()}
    if not set(found.values()) - {None, UNTURNED}:
        for handle in handles:
            handle.remove()
    return found


def _kinds(model: PreTrainedModel, num_layers: int) -> list[Any]:
    """Return what each layer's block has in common with the blocks that are like it. Empty: they cannot be compared.

    Two blocks are alike where all their modules have the same names, classes, plain attributes and shapes, and nothing
    was put before any of them.
    """
    text = model.config.get_text_config(decoder=True)
    if any(getattr(text, f"output_{name}", False) for name in ("attentions", "hidden_states", "router_logits")):
        return []  # transformers 4 puts its own functions before modules for these, until the forward ends
    lists = [module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList)]
    stacks = [blocks for blocks in lists if len(blocks) == num_layers]
    if len(stacks) != 1:
        return []
    for index, block in enumerate(stacks[0]):
        if any(getattr(module, "layer_idx", index) != index for module in block.modules()):
            return []
    return [tuple(map(_kind, *zip(*block.named_modules(), strict=True))) for block in stacks[0]]


def _kind(name: str, module: torch.nn.Module) -> Any:
    plain = (bool, int, float, str, type(None))
    attributes = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
    shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
    before = [hook for hook in module._forward_pre_hooks.values() if hook is not note]
    own = "forward" in vars(module) or bool(module._forward_hooks) or bool(before)
    return (
        name,
        type(module),
        tuple(sorted((key, repr(value)) for key, value in attributes.items() if key not in ("layer_idx", "training"))),
        shapes,
        id(module) if own else None,  # like no other
    )


class _NotServedError(Exception):
    """The reason."""


def _check(watched: dict[int, _WatchedLayer], num_layers: int) -> None:
    """Refuse what a layer did. One that did nothing is not reached by text, or not any more."""
    for index, layer in watched.items():
        reason = _reason(layer.seen)
        if reason:
            raise _NotServedError(f"layer {index}: {reason}")
    if not any(layer.seen.updates for layer in watched.values()):
        raise _NotServedError(f"none of its {num_layers} layers put keys and values into the cache that it was given")


def _reason(seen: _Seen) -> str:
    """Return why a layer cannot be compressed. Empty: it can, or text never reaches it."""
    if seen.updates == 0 and seen.attentions == 0:
        return ""
    if seen.updates != 1:
        return f"it updates its cache {seen.updates} times a forward, must be once"
    if seen.attentions == 0:
        return (
            "its attention does not read the keys that the cache returned: it does not go through transformers' "
            "attention interface, or changes them in between"
        )
    if seen.attentions > 1:
        return f"its keys are read by {seen.attentions} attentions a forward, must be one"
    return seen.fault


def _forward(model: PreTrainedModel, cache: Any, *, tokens: int = _TOKENS) -> torch.Tensor:
    """Return the hidden states after a few tokens: without the head, which has no cache and may be most of the work."""
    decoder = model.base_model
    parameters = inspect.signature(type(decoder).forward).parameters
    name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
    config = model.config.get_text_config(decoder=True)
    ids = torch.arange(1, tokens + 1, device=_device(model)) % config.vocab_size
    return decoder(input_ids=ids[None], use_cache=True, **{name: cache})[0]


def _device(model: PreTrainedModel) -> torch.device:
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    return model.device if weight is None or weight.is_meta else weight.device


def _compare(model: PreTrainedModel, answer: torch.Tensor, attention: str) -> None:
    """Compare with what the model answers with its own attention and the stock cache."""
    own = model.config._attn_implementation
    switch(model, attention)
    try:
        stock = _forward(model, DynamicCache(config=model.config))
    finally:
        switch(model, own)
    if not _close(stock, answer):
        difference = float((stock - answer).abs().max())
        raise _NotServedError(f"with its attention redirected its hidden states differ by {difference:.3g}")


def switch(model: PreTrainedModel, attention: str) -> None:
    """Set the attention of a model and of all models within it, also where its class says that it cannot be set."""
    model.set_attn_implementation(attention)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != attention:
            text = module.config.get_text_config(decoder=True)
            if text._attn_implementation != attention:
                text._attn_implementation_internal = attention
                module.config._attn_implementation_internal = attention


@contextlib.contextmanager
def _quiet(model: PreTrainedModel) -> Iterator[None]:
    """Compute without gradients, dropout and compilation, and leave the model's modes as they were."""
    training = [module for module in model.modules() if module.training]
    stance = getattr(torch.compiler, "set_stance", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


# ---- what is known, by config: a cache is made from a config, and meets the model at its first step ----

_facts: dict[int, Facts] = {}


def remember(config: Any, facts: Facts) -> None:
    """Let caches of this very config, and of its text part, know."""
    for known in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        if id(known) not in _facts:
            weakref.finalize(known, _facts.pop, id(known), None)
        _facts[id(known)] = facts


def facts_of(config: Any) -> Facts | None:
    """Return what is known of the model that a config is of. None: it was not tried."""
    return _facts.get(id(config))
