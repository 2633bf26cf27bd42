"""How likely continuations are after a compressed context."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .._options import at_least
from ._attention import NAMES, implementation
from ._cache import BudgetedCache
from ._forward import checked_ids, forward
from ._generation import Generate
from ._use import compressed, unwrapped


@dataclass(frozen=True)
class ContinuationScore:
    """How likely one continuation is after the context that it was scored with.

    Attributes
    ----------
    tokens
        Its tokens.
    logprobs
        The natural logarithm of each token's probability after the context and the tokens before it.
    greedy
        Whether every token is the likeliest one at its place: what greedy decoding would have generated.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def logprob(self) -> float:
        """The natural logarithm of the probability of the whole continuation: the sum of `logprobs`."""
        return float(np.sum(self.logprobs))

    @property
    def num_tokens(self) -> int:
        """How many tokens the continuation has."""
        return len(self.tokens)


def loglikelihood(
    model: Any,
    context: Any,
    continuations: Sequence[Any],
    *,
    tokenizer: Any = None,
    cache: Cache | None = None,
    batch_size: int = 8,
    **options: Any,
) -> list[ContinuationScore]:
    """Score continuations after a context that is read once and compressed.

    The first token of every continuation is scored by the context's own last logits, the others by a forward that
    starts from a copy of the compressed cache. Positions go on where the context ends, whatever was evicted. A context
    that fits its budgets is scored as with ``DynamicCache``.

    Parameters
    ----------
    model
        A transformers model, in evaluation mode. One that :func:`use` was not called with is redirected for this call.
    context
        Token ids of one sequence, or text. An empty text is replaced by the tokenizer's token for the beginning of a
        text, or the one for its end, as lm-eval does.
    continuations
        Token ids, or texts where the context is one, each with at least one token. Text is tokenised together with the
        context. White space at the end of the context counts to the continuation, as lm-eval does it.
    tokenizer
        The model's, where context and continuations are texts.
    cache
        An empty cache to read the context into. It holds the context afterwards, so that ``report()`` tells what was
        kept. Any other cache of transformers is taken too: ``DynamicCache`` gives the scores to compare with.
    batch_size
        Continuations that are scored at a time, at least 1. Each holds a copy of the compressed cache meanwhile.
    **options
        What a :class:`BudgetedCache` is made with, in place of `cache`. Without them it is what :func:`use` was given,
        or the default budget. `compress` has no effect, because the context is read in one call.

    Returns
    -------
    One :class:`ContinuationScore` for each continuation, in their order.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule above, or a model that cannot be served. The message names it and the fix.
    RuntimeError
        The model did not use the cache that it was given.
    """
    inner = unwrapped(model)
    if inner.training:
        raise ValueError("model: is in training mode, in which scores are random; model.eval() first")
    at_least("batch_size", batch_size, 1)
    if cache is not None:
        _check_cache(cache, options)
    context_ids, continuation_ids = _encode(inner, context, continuations, tokenizer)
    if not continuation_ids:
        return []
    with contextlib.ExitStack() as stack:
        redirected = implementation(inner.config) in NAMES.values()
        if not redirected and (cache is None or isinstance(cache, BudgetedCache)):
            stack.enter_context(compressed(model, **options))
        if cache is None:
            generate = inner.__dict__.get(Generate.name)
            own = generate.options if redirected and isinstance(generate, Generate) else None
            cache = BudgetedCache(inner.config, **{**(options or own or {}), "compress": "prompt"})
        stack.enter_context(torch.no_grad())
        return _score(model, inner, cache, context_ids, continuation_ids, batch_size)


def _check_cache(cache: Cache, options: dict[str, Any]) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: must be a cache of transformers, such as a BudgetedCache, not {type(cache).__name__}")
    if options:
        raise ValueError(f"cache and {next(iter(options))}: the cache already has its options; give one of the two")
    if cache.get_seq_length():
        raise ValueError(
            f"cache: holds {cache.get_seq_length()} tokens, must be empty, because the context is read into it; "
            "cache.reset()"
        )
    if isinstance(cache, BudgetedCache) and cache._budgets.chunked:
        raise ValueError(
            "cache: was made with compress='decode', must be with 'prompt', because the context is read in one call"
        )


# ---- tokens ----


def _encode(
    inner: PreTrainedModel, context: Any, continuations: Any, tokenizer: Any
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of the context and of every continuation."""
    if isinstance(continuations, (str, bytes)) or not isinstance(continuations, Sequence):
        raise TypeError(
            f"continuations: must be a list of continuations, not {type(continuations).__name__}; [text] for one"
        )
    vocabulary = int(inner.get_input_embeddings().weight.shape[0])
    if not isinstance(context, str):
        ids = checked_ids("context", context, vocabulary)
        if not ids:
            raise ValueError(
                "context: is empty, must have at least one token, because it is what the first token of a continuation "
                "is scored by; [tokenizer.bos_token_id] stands for the beginning of a text"
            )
        return ids, [
            _filled(index, checked_ids(f"continuations[{index}]", continuation, vocabulary))
            for index, continuation in enumerate(continuations)
        ]
    if tokenizer is None:
        raise ValueError("tokenizer: is missing, and the context is text; pass the model's tokenizer, or token ids")
    ids, listed = [], []
    for index, continuation in enumerate(continuations):
        if not isinstance(continuation, str):
            raise TypeError(
                f"continuations[{index}]: must be text as the context is, not {type(continuation).__name__}"
            )
        ids, own = _encode_text(tokenizer, context, continuation)
        listed.append(_filled(index, own))
    return ids, listed


def _filled(index: int, ids: list[int]) -> list[int]:
    if not ids:
        raise ValueError(f"continuations[{index}]: has no token of its own after the context, must have at least one")
    return ids


def _encode_text(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of what follows it, the border where lm-eval draws it."""
    before = context.rstrip()
    after = context[len(before) :] + continuation
    if before:
        ids = _tokens(tokenizer, before)
        # Tokenised together: a word's first token depends on what stands before it.
        return ids, _tokens(tokenizer, before + after)[len(ids) :]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError(
            "context: is empty, and the tokenizer has no token for the beginning or the end of a text; give a context"
        )
    ids = list(tokenizer(after, add_special_tokens=False).input_ids)
    return [first], ids[1:] if ids[:1] == [first] else ids


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text with the tokenizer's special ones, of which the first is not repeated."""
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not begun).input_ids)


# ---- scores ----


def _score(
    model: Any,
    inner: PreTrainedModel,
    cache: Cache,
    context: list[int],
    continuations: list[list[int]],
    batch_size: int,
) -> list[ContinuationScore]:
    ids = torch.tensor([context], device=inner.device)
    last = forward(model, inner, ids, cache, last_only=True)[0, -1:]  # (1, vocabulary)
    if cache.get_seq_length() != len(context):
        raise RuntimeError(
            f"{type(inner).__name__} did not use the cache that it was given, which holds {cache.get_seq_length()} "
            f"tokens of a context of {len(context)}"
        )
    if isinstance(cache, BudgetedCache):
        cache.text = ids

    scores: dict[int, ContinuationScore] = {}
    for index, tokens in enumerate(continuations):
        if len(tokens) == 1:
            scores[index] = _continuation(tokens, last)
    # Neighbours in length share a batch. What fills up the shorter ones comes after their tokens, which never see it.
    longer = sorted(
        (index for index in range(len(continuations)) if index not in scores), key=lambda i: -len(continuations[i])
    )
    for start in range(0, len(longer), batch_size):
        batch = longer[start : start + batch_size]
        width = max(len(continuations[index]) for index in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=inner.device)
        for row, index in enumerate(batch):
            ids[row, : len(continuations[index]) - 1] = torch.tensor(continuations[index][:-1])
        twin = copy.deepcopy(cache)
        if isinstance(twin, BudgetedCache):
            twin._scoring = True
        if len(batch) > 1:
            # As beam search does it, because every kind of layer can do that.
            twin.reorder_cache(torch.zeros(len(batch), dtype=torch.long, device=inner.device))
        logits = forward(model, inner, ids, twin)
        for row, index in enumerate(batch):
            tokens = continuations[index]
            own = logits[row, : len(tokens) - 1]
            scores[index] = _continuation(tokens, torch.cat([last.to(own.device), own]))
    return [scores[index] for index in range(len(continuations))]


def _continuation(tokens: list[int], logits: torch.Tensor) -> ContinuationScore:
    """Score tokens by the logits before each of them, ``(tokens, vocabulary)``."""
    wanted = torch.tensor(tokens, device=logits.device)
    logprobs = logits.float().log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0]
    greedy = bool((logits.argmax(dim=-1) == wanted).all())
    return ContinuationScore(tuple(tokens), tuple(logprobs.tolist()), greedy)
