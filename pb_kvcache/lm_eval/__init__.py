"""The model ``pb_kvcache`` of lm-eval: a decoder with a compressed cache, measured on lm-eval's tasks.

    python -m pb_kvcache.lm_eval run --model pb_kvcache --model_args pretrained=MODEL,budget=512 --tasks TASKS

This is lm-eval's own command, which knows the model by then. Needs the extra ``lm-eval``
(``pip install 'pb-kvcache[lm-eval]'``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

try:
    import torch
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as _error:
    raise ImportError(
        f"pb_kvcache.lm_eval needs lm_eval, torch and transformers: pip install 'pb-kvcache[lm-eval]' ({_error})"
    ) from _error

from .._options import at_least
from ..transformers import BudgetedCache, loglikelihood, use

__all__ = ["CompressedLM"]

_log = logging.getLogger(__name__)

#: What a cache is made with: everything of it that is not the model.
_OPTIONS = tuple(name for name in inspect.signature(BudgetedCache).parameters if name != "config")

#: A context with its continuation, in tokens, and the texts that they are of.
_Request = tuple["tuple[str, str] | None", list[int], list[int]]


@register_model("pb_kvcache")  # type: ignore[untyped-decorator, unused-ignore]
class CompressedLM(HFLM):  # type: ignore[misc, unused-ignore]
    """A decoder whose every context is compressed before anything is generated or scored after it.

    Each request reads its context with full attention, keeps what the budgets say, and goes on from there. Scores are
    those of :func:`pb_kvcache.transformers.loglikelihood`. Requests with the same context, such as the choices of one
    question, read it once.

    Parameters
    ----------
    pretrained
        A name or a folder of transformers, or a model, which stays as :func:`pb_kvcache.transformers.use` makes it.
    rolling_block
        Tokens of a text that tasks of kind ``loglikelihood_rolling`` score at a time, each block after the compressed
        text before it. None refuses such tasks: by lm-eval's rule a block follows one token, so that there would be
        nothing to compress.
    attention
        The arithmetic of attention, as :func:`pb_kvcache.transformers.use` takes it.
    **kwargs
        What :class:`pb_kvcache.transformers.BudgetedCache` takes (``budget``, ``plan``, ``ratio``, ``window``, ...),
        and what lm-eval's ``hf`` takes (``dtype``, ``device``, ``max_length``, ``peft``, ...). `batch_size` counts
        prompts for generation, and continuations of one context for scores.

    Raises
    ------
    TypeError, ValueError
        A model that cannot be served, or a bad option. The message names it and the fix.
    """

    def __init__(
        self, pretrained: Any, *, rolling_block: int | None = None, attention: str | None = None, **kwargs: Any
    ) -> None:
        if rolling_block is not None:
            at_least("rolling_block", rolling_block, 1)
        if str(kwargs.get("batch_size", 1)).startswith("auto"):
            raise ValueError(
                f"batch_size = {kwargs['batch_size']!r}: lm-eval tries batches without a cache, which says nothing of "
                "a compressed one; give a number"
            )
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        unknown = sorted(set(kwargs) - set(inspect.signature(HFLM).parameters))
        if unknown and not isinstance(pretrained, str):  # lm-eval would drop them without a word
            raise TypeError(f"{unknown[0]}: is no option of the cache ({', '.join(_OPTIONS)}) nor of lm-eval's model")
        super().__init__(pretrained, **kwargs)
        self.rolling_block = rolling_block
        # With None alone the default budget: without any option use() would compress nothing by itself.
        use(self.model, attention, **(options or {"budget": None}))

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score every continuation after its context. Those of one context are scored together."""
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            contexts.setdefault(self._fitting(context, continuation), []).append(index)
        answers: dict[int, tuple[float, bool]] = {}
        progress = tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        )
        for tokens, indices in contexts.items():
            with torch.autocast(
                self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
            ):
                scores = loglikelihood(
                    self.model,
                    tokens,
                    [requests[index][2] for index in indices],
                    batch_size=override_bs or self.batch_size,
                )
            for index, score in zip(indices, scores, strict=True):
                answers[index] = score.logprob, score.greedy
                if requests[index][0] is not None:  # a text's block has no entry of its own in lm-eval's cache
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            progress.update(len(indices))
        progress.close()
        return [answers[index] for index in range(len(requests))]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """Return the end of a context that fits the model with its continuation. The last token is never read."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"max_length = {self.max_length}: a continuation has {len(continuation)} tokens, more than that; raise "
                "it, if the model can read more"
            )
        if len(context) > room:
            _log.warning(
                "A context of %d tokens and its continuation of %d exceed max_length = %d: the context's last %d are "
                "read",
                len(context),
                len(continuation),
                self.max_length,
                room,
            )
        return tuple(context[-room:])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in blocks of `rolling_block` tokens, each after the compressed text before it."""
        if self.rolling_block is None:
            raise ValueError(
                "rolling_block: is not given, and this task scores whole texts (loglikelihood_rolling). By lm-eval's "
                "rule all of a text is scored after one token, which leaves nothing to compress; rolling_block=N "
                "scores N tokens at a time, each block after the compressed text before it"
            )
        totals = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="Running rolling requests"):
            (text,) = request.args
            tokens = self.tok_encode(text)
            before = [self.prefix_token_id, *tokens]
            blocks: list[_Request] = [
                # The text before a block is cut where the model can read no more, as it is by lm-eval: no warning.
                (None, before[max(0, start + len(block) - self.max_length) : start + 1], block)
                for start in range(0, len(tokens), self.rolling_block)
                if (block := tokens[start : start + self.rolling_block])
            ]
            total = float(sum(logprob for logprob, _ in self._loglikelihood_tokens(blocks, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals
