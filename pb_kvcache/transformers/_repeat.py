"""What a context's positions are worth to a model that repeats the context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from .._arrays import zeros
from .._options import at_least
from .._scores import repeat_scores
from ._attention import NAMES, implementation
from ._context_layer import ContextLayer
from ._forward import checked_ids, forward
from ._probe import facts_of
from ._selection import Scoring
from ._use import compressed, unwrapped


class _RepeatLayer(ContextLayer):
    """A layer's context, which every block of the repetition finds as it was, and the scores of its positions."""

    def __init__(self, index: int, context: DynamicLayer) -> None:
        super().__init__(context.keys, context.values)
        self.index = index
        self.blocks = 0
        self.scores: torch.Tensor = zeros(tuple(context.keys.shape[1:3]), context.keys)

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
        """Do the attention as the model asks for it, and raise the scores to what the block gives."""
        scoring = Scoring.from_options(options, query.shape[-1])
        if not scoring.plain:
            raise ValueError(
                f"model: layer {self.index} caps its logits or has a logit without a position; a repetition is scored "
                "by the softmax of the products alone"
            )
        own = query.shape[-2]
        repeat_scores(query[0].detach(), key[0].detach(), own=own, scale=scoring.scale, out=self.scores)
        self.blocks += 1
        return stock(module, query, key, value, mask, **options)  # type: ignore[no-any-return]


def repetition_scores(
    model: Any,
    cache: Cache,
    context: Any,
    *,
    request: Any,
    later_request: Any = None,
    block: int = 2048,
    overlap: int = 8,
) -> list[torch.Tensor]:
    """Let a model repeat a context that it has read, and return the largest attention that each position gets.

    It tells what to keep of a context before the questions are known. The context is fed again in blocks, each behind
    the request to repeat it, and every block starts from the context alone. That costs 2.4 times the prefill
    (SmolLM2-135M, 1,024 tokens, one thread of an EPYC). The queries of the request count as well.

    The attention is the model's own, over the whole context and the block. The paper's code differs there: it takes the
    softmax over the part of the context that a block repeats. For a context of one block both are the same.

    Parameters
    ----------
    model
        A transformers model, in evaluation mode. One that :func:`use` was not called with is redirected for this call.
    cache
        A ``DynamicCache`` that holds the context in every layer. It is left as it is.
    context
        The token ids that the cache holds, ``(n,)`` or ``(1, n)``.
    request
        Token ids that ask for the context: such as those of "Repeat the previous context exactly.", with what begins an
        answer in the model's chat format.
    later_request
        Token ids that ask for a part that does not begin the context, such as "Repeat the part of the previous context
        exactly, starting with". The last `overlap` tokens before the part follow. None: `request`.
    block
        Tokens of the context that are fed at once.
    overlap
        Tokens before a part that are named to the model.

    Returns
    -------
    list of torch.Tensor
        Of every layer ``(kv_heads, n)`` float32, where the layer's keys are.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a layer whose attention is more than the softmax of its products with the
        whole context.
    RuntimeError
        The model did not use the cache that it was given.

    Examples
    --------
    >>> cache = DynamicCache()                                              # doctest: +SKIP
    >>> model(context, past_key_values=cache)                               # doctest: +SKIP
    >>> scores = repetition_scores(model, cache, context, request=request)  # doctest: +SKIP
    """
    inner = unwrapped(model)
    if inner.training:
        raise ValueError("model: is in training mode, in which scores are random; model.eval() first")
    vocabulary = int(inner.get_input_embeddings().weight.shape[0])
    ids = checked_ids("context", context, vocabulary)
    ask = checked_ids("request", request, vocabulary)
    ask_later = ask if later_request is None else checked_ids("later_request", later_request, vocabulary)
    block, overlap = at_least("block", block, 1), at_least("overlap", overlap, 0)
    if not ids:
        raise ValueError("context: is empty, must have at least one token")
    with contextlib.ExitStack() as stack:
        if implementation(inner.config) not in NAMES.values():
            stack.enter_context(compressed(model))
        layers = _layers(inner, cache, len(ids))
        stack.enter_context(torch.no_grad())
        starts = range(0, len(ids), block)
        for start in starts:
            before = ask if start == 0 else ask_later + ids[max(0, start - overlap) : start]
            fed = torch.tensor([before + ids[start : start + block]], device=inner.device)
            again = DynamicCache()
            again.layers = list(layers)
            forward(model, inner, fed, again, last_only=True)
    for layer in layers:
        if layer.blocks != len(starts):
            raise RuntimeError(
                f"{type(inner).__name__} did not use the cache that it was given: layer {layer.index} has seen "
                f"{layer.blocks} of {len(starts)} blocks"
            )
    return [layer.scores for layer in layers]


def _layers(inner: Any, cache: Any, n: int) -> list[_RepeatLayer]:
    """Return the layers of a cache that holds a context of `n` tokens, each with scores of 0."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: must be a cache of transformers, such as a DynamicCache, not {type(cache).__name__}")
    facts = facts_of(inner.config)
    layers = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or (facts is not None and index not in facts.layers):
            raise ValueError(
                f"cache: layer {index}, a {type(layer).__name__}, does not keep every position of a context that "
                "causality alone hides, and cannot be scored"
            )
        shape = tuple(layer.keys.shape) if layer.is_initialized else (0,)
        if len(shape) != 4 or shape[0] != 1 or shape[2] != n:
            raise ValueError(
                f"cache: layer {index} has keys of shape {shape}, must be (1, kv_heads, {n}, head_dim): the context "
                "alone, of one sequence"
            )
        layers.append(_RepeatLayer(index, layer))
    if not layers:
        raise ValueError(f"cache: holds no layer, must hold the context, {n} tokens")
    return layers
