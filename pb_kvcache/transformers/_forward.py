"""Token ids through a model with a cache: what everything here that runs a model itself does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ._generation import CACHE_NAME


def checked_ids(name: str, values: Any, vocabulary: int) -> list[int]:
    """Return the token ids of one sequence: a list, an array or a tensor, ``(n,)`` or ``(1, n)``."""
    if isinstance(values, str):
        raise TypeError(f"{name}: is text where the context is token ids; give both as text, or both as token ids")
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if array.size == 0:
        return []
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: must be token ids, not {array.dtype if array.ndim else type(values).__name__}")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"{name}: has shape {array.shape}, must be one sequence of token ids, (n,) or (1, n)")
    wrong = array[(array < 0) | (array >= vocabulary)]
    if wrong.size:
        raise ValueError(f"{name}: has token {wrong[0]}, must be from 0 to {vocabulary - 1}, the model's vocabulary")
    return array.tolist()  # type: ignore[no-any-return]


def forward(
    model: Any, inner: PreTrainedModel, ids: torch.Tensor, cache: Cache, last_only: bool = False
) -> torch.Tensor:
    """Run tokens after those that a cache has seen, and return their logits, ``(batch, tokens, vocabulary)``."""
    seen = cache.get_seq_length() + ids.shape[1]
    options: dict[str, Any] = {CACHE_NAME: cache, "use_cache": True}
    if last_only and "logits_to_keep" in inspect.signature(inner.forward).parameters:
        options["logits_to_keep"] = 1
    mask = torch.ones(len(ids), seen, dtype=torch.long, device=ids.device)
    return model(input_ids=ids, attention_mask=mask, **options).logits  # type: ignore[no-any-return, unused-ignore]


def greedy(
    step: Callable[[list[int]], torch.Tensor],
    logits: torch.Tensor,
    count: int,
    stop: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[int]:
    """Return the likeliest next tokens, each after the ones before it: `count`, or fewer where `stop` says so of them.

    `step` takes the newest token in and returns the logits after it, ``(1, vocabulary)``: of all of them but the last.
    `logits` are of the first one, ``(vocabulary,)``.
    """
    tokens: list[int] = []
    while True:
        tokens.append(int(logits.argmax()))
        if len(tokens) >= count or stop(tokens):
            return tokens
        logits = step(tokens[-1:])[-1]
