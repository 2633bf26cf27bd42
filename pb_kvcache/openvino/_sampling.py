"""How the next token is chosen: the likeliest one, or drawn after transformers' logits processors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import uint32

#: From the tokens so far and the last one's logits to the next token.
Choose = Callable[[list[int], npt.NDArray[np.float32]], int]


class Sampling:
    """The options of :meth:`PagedModel.generate` that say how a token is chosen, checked."""

    def __init__(
        self, do_sample: Any, temperature: Any, top_k: Any, top_p: Any, seed: Any, logits_processor: Any
    ) -> None:
        if not isinstance(do_sample, bool):
            raise TypeError(f"do_sample = {do_sample!r}: must be True or False")
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        for name, value in given.items():
            if value is not None and not do_sample:
                raise ValueError(f"{name} = {value!r}: is for do_sample=True")
        self.do_sample = do_sample
        self._seed = None if seed is None else uint32("seed", seed)
        self._torch: Any = None
        self._processors: Any = None
        if not do_sample and logits_processor is None:
            return
        try:
            self._torch = importlib.import_module("torch")
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            name = "do_sample" if do_sample else "logits_processor"
            raise ImportError(
                f"{name}: needs torch and transformers: pip install 'pb-kvcache[transformers]' ({error})"
            ) from None
        self._processors = transformers.LogitsProcessorList(logits_processor or [])
        # In the order of transformers' own generate().
        if temperature is not None:
            self._processors.append(transformers.TemperatureLogitsWarper(temperature))
        if top_k is not None:
            self._processors.append(transformers.TopKLogitsWarper(top_k=top_k))
        if top_p is not None:
            self._processors.append(transformers.TopPLogitsWarper(top_p=top_p))

    def of_prompt(self, index: int) -> Choose:
        """Return the choice for one prompt: its draws do not depend on the other prompts."""
        if self._processors is None:
            return lambda tokens, logits: int(logits.argmax())
        torch = self._torch
        generator = torch.Generator()
        if self._seed is None:
            generator.seed()
        else:
            generator.manual_seed(self._seed + index)

        def choose(tokens: list[int], logits: npt.NDArray[np.float32]) -> int:
            scores = self._processors(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])
            if not self.do_sample:
                return int(scores.argmax())
            return int(torch.multinomial(torch.softmax(scores[0], dim=-1), 1, generator=generator))

        return choose
