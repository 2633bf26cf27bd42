"""Answers to several prompts: read one after the other, decoded together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import integer
from ._sampling import Choose, Sampling
from ._tokens import Streamed, Tokens

if TYPE_CHECKING:
    from ._model import PagedModel


@dataclass
class _Answer:
    """One prompt and what has been answered."""

    index: int
    prompt: list[int]
    choose: Choose
    streamed: Streamed | None  # for a text
    tokens: list[int] = field(default_factory=list)


def generate(
    model: PagedModel,
    tokens: Tokens,
    prompts: Any,
    max_new_tokens: int,
    *,
    stream: Callable[[int, Any], Any] | None,
    parallel: int,
    eos: Any,
    sampling: tuple[Any, ...],
) -> Any:
    """Return the answers, as :meth:`PagedModel.generate` says."""
    if stream is not None and not callable(stream):
        raise TypeError(f"stream: must be a function of an index and what is new, not {type(stream).__name__}")
    one, given = _listed(prompts)
    chosen = Sampling(*sampling)
    answers = []
    for index, prompt in enumerate(given):
        text = isinstance(prompt, str)
        numbers = tokens.encode(prompt) if text else [integer(f"prompts[{index}]", token) for token in prompt]
        if not numbers:
            raise ValueError(f"prompts[{index}]: must have one token or more")
        answers.append(_Answer(index, numbers, chosen.of_prompt(index), Streamed(tokens) if text else None))
    ends = _end_tokens(tokens, eos)

    def ended(answer: _Answer, logits: Any) -> bool:
        """Choose the next token, and tell whether it is the last one."""
        token = answer.choose(answer.prompt + answer.tokens, logits)
        answer.tokens.append(token)
        last = token in ends or len(answer.tokens) == max_new_tokens
        if stream is None:
            return last
        if answer.streamed is None:
            return bool(stream(answer.index, token)) or last
        new = answer.streamed.more(answer.tokens, ended=last)
        return bool(new and stream(answer.index, new)) or last

    waiting = deque(answers)
    going: dict[int, _Answer] = {}
    try:
        while waiting or going:
            while waiting and len(going) < parallel:
                number = model.add(waiting[0].prompt)
                going[number] = waiting.popleft()
                _drop(model, going, [number] if ended(going[number], model.logits(number)) else [])
            logits = model.step({number: answer.tokens[-1] for number, answer in going.items()})
            _drop(model, going, [number for number, row in logits.items() if ended(going[number], row)])
    finally:
        _drop(model, going, list(going))
    made = [answer.tokens if answer.streamed is None else tokens.decode(answer.tokens) for answer in answers]
    return made[0] if one else made


def _drop(model: PagedModel, going: dict[int, _Answer], numbers: list[int]) -> None:
    for number in numbers:
        del going[number]
        model.remove(number)


def _listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Return whether there is one prompt alone, and a list of prompts."""
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts: must be a text, a vector of tokens or a list of them, not {type(prompts).__name__}")
    if len(prompts) == 0:
        return False, []
    if not isinstance(prompts[0], (str, Sequence, np.ndarray)):
        return True, [prompts]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise TypeError(f"prompts[{index}]: must be a text or a vector of tokens, not {type(prompt).__name__}")
    return False, list(prompts)


def _end_tokens(tokens: Tokens, eos: Any) -> set[int]:
    if eos is None:
        return set(tokens.end())
    if isinstance(eos, Sequence) and not isinstance(eos, str):
        return {integer("eos", token) for token in eos}
    return {integer("eos", eos)}
