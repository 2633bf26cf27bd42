"""A prompt that a model has read once, held whole: caches of any kind start from it without reading it again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .._options import at_least
from .._selection import SCORES, Selection
from ._attention import NAMES, implementation
from ._cache import BudgetedCache
from ._forward import checked_ids, forward, greedy
from ._layer import JUDGED, BudgetedLayer
from ._probe import facts_of
from ._use import unwrapped


class HeldPrompt:
    """What a model's layers hold after a prompt, and what choosing and merging need to know of its queries.

    A cache that :meth:`compressed` makes is the one that would have read the prompt itself, so that many budgets,
    plans and rules are compared at the price of one prefill. Made by :meth:`read`.

    Attributes
    ----------
    length
        Tokens of the prompt.
    logits
        Of the token after it, ``(vocabulary,)`` float32.
    """

    def __init__(self, config: Any, read: BudgetedCache, logits: torch.Tensor, window: int) -> None:
        self._config = config
        self._read = read
        self._window = window
        self.logits = logits
        self.length = read._seen

    @classmethod
    def read(cls, model: Any, input_ids: Any, *, window: int = 96) -> HeldPrompt:
        """Let a model read a prompt.

        Parameters
        ----------
        model
            A transformers model in evaluation mode, that :func:`use` was called with.
        input_ids
            Token ids of one sequence, ``(n,)`` or ``(1, n)``.
        window
            The most last queries that a rule may look at later.

        Raises
        ------
        TypeError, ValueError
            An argument that breaks a rule, or a model without :func:`use`.
        RuntimeError
            The model did not use the cache that it was given.
        """
        inner = unwrapped(model)
        if inner.training:
            raise ValueError("model: is in training mode, in which its answers are random; model.eval() first")
        if implementation(inner.config) not in NAMES.values():
            raise ValueError("model: call pb_kvcache.transformers.use(model) first, so that caches can be compressed")
        window = at_least("window", window, 1)
        ids = checked_ids("input_ids", input_ids, int(inner.get_input_embeddings().weight.shape[0]))
        if not ids:
            raise ValueError("input_ids: is empty, must have at least one token")
        facts = facts_of(inner.config)
        layers = () if facts is None else tuple(facts.layers.values())
        turned = bool(layers) and all(layer.layout is not None for layer in layers)
        # Whatever a rule or a merge may ask for later. Nothing is chosen by it.
        gathering = Selection(window=window, score="mixed" if turned else "window")
        cache = BudgetedCache(
            inner.config, budget=window + 1, selection=gathering, compress="decode", merge="fitted" if turned else None
        )
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=inner.device)
            logits = forward(model, inner, tokens, cache, last_only=True)[0, -1].float()
        for layer in cache.layers:
            if isinstance(layer, BudgetedLayer) and layer.seen not in (0, len(ids)):
                raise RuntimeError(f"{type(inner).__name__} did not use the cache that it was given")
        return cls(inner.config, cache, logits, window)

    def full(self) -> DynamicCache:
        """Return a cache of transformers that holds the whole prompt. What is done with it leaves this one as it is."""
        cache = DynamicCache(config=self._config)
        for index, held in enumerate(self._read.layers):
            if not isinstance(held, BudgetedLayer):
                cache.layers[index] = copy.deepcopy(held)
            elif held.seen:
                assert held.keys is not None
                layer = DynamicLayer()  # its update makes new tensors, so that these are shared
                layer.update(held.keys, held.values)
                cache.layers[index] = layer
        return cache

    def compressed(self, **options: Any) -> BudgetedCache:
        """Return the cache that :class:`BudgetedCache` with these options would be after the prompt.

        Parameters
        ----------
        **options
            As for :class:`BudgetedCache`.

        Raises
        ------
        TypeError, ValueError
            As for it. A rule with a larger window than this prompt was read with, with a second hop, or whose score no
            prefill makes.
        """
        cache, taken = self.taken(**options)
        with torch.no_grad():
            if cache._budgets.by_prompt:
                cache._budgets.waiting = {layer.index: layer for layer in taken}
                cache._budgets.end_prompts()
            else:
                for layer in taken:
                    layer.end_prompt()
        return cache

    def taken(self, **options: Any) -> tuple[BudgetedCache, list[BudgetedLayer]]:
        """Return such a cache before anything was chosen, and its layers that hold the prompt whole."""
        cache = BudgetedCache(self._config, **options)
        rule = cache._budgets.selection
        needed = rule.window + (JUDGED if cache._budgets.by_prompt else 0)
        if needed > self._window:
            raise ValueError(
                f"selection: looks at the last {needed} queries, and the prompt was read for {self._window} at most; "
                f"HeldPrompt.read(..., window={needed})"
            )
        if rule.second_hop:
            raise ValueError("second_hop: needs all queries of the prompt, of which the last ones are held alone")
        known = self._read._budgets.selection.score
        if rule.score in SCORES[1:3] and known == SCORES[0]:
            raise ValueError(
                f"selection: score = {rule.score!r}: needs the prompt's queries before rotation, which are not known "
                "for this model"
            )
        taken = []
        for index, held in enumerate(self._read.layers):
            layer = cache.layers[index]
            if not isinstance(layer, BudgetedLayer) or not isinstance(held, BudgetedLayer):
                cache.layers[index] = copy.deepcopy(held)
            elif held.seen:
                layer.take(held)
                taken.append(layer)
        cache._seen = self.length
        return cache, taken

    def answer(self, model: Any, count: int) -> list[int]:
        """Return the next tokens that a model is surest of with the full cache: its own answer, ``count`` tokens."""
        inner, cache = unwrapped(model), self.full()
        with torch.inference_mode():
            return greedy(
                lambda ids: forward(model, inner, torch.tensor([ids], device=inner.device), cache)[0],
                self.logits,
                count,
            )

    @property
    def head_dim(self) -> int | None:
        """Elements of a key, where all layers have the same number."""
        held = [layer.held()[0] for layer in self._read.layers if isinstance(layer, BudgetedLayer) and layer.seen]
        sizes = {int(keys.shape[-1]) for keys in held}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def nbytes_full(self) -> int:
        """Bytes of the keys and values in what :meth:`full` returns."""
        return self._read.nbytes_full

    @property
    def nbytes(self) -> int:
        """Bytes that the whole prompt takes, with what is known of its queries."""
        return self._read.nbytes
