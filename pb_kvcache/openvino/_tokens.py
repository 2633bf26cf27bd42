"""Text to tokens and back, by the tokenizer of openvino-genai or of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ._genai import genai


class Tokens:
    """A tokenizer, made when it is needed first.

    Parameters
    ----------
    source
        A tokenizer of openvino-genai or transformers, or a folder with ``openvino_tokenizer.xml``.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._made: Any = None

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return not isinstance(self._source, Path) or (self._source / "openvino_tokenizer.xml").exists()

    @property
    def _tokenizer(self) -> Any:
        if self._made is not None:
            return self._made
        if not self.known:
            raise ValueError(f"prompts: text needs a tokenizer, and {self._source} has none; give tokenizer=")
        if not isinstance(self._source, Path):
            self._made = self._source
            return self._made
        self._made = genai("prompts: text").Tokenizer(str(self._source))
        return self._made

    @property
    def _is_genai(self) -> bool:
        return type(self._tokenizer).__module__.startswith("openvino_genai")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with what the tokenizer puts before it."""
        if self._is_genai:
            return [int(token) for token in np.asarray(self._tokenizer.encode(text).input_ids.data)[0]]
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        if not tokens:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def end(self) -> list[int]:
        """Return the tokens that end a text, if there are any."""
        if not self.known:
            return []
        tokenizer = self._tokenizer
        token = tokenizer.get_eos_token_id() if self._is_genai else tokenizer.eos_token_id
        return [] if token is None or token < 0 else [int(token)]


class Streamed:
    """What of a growing answer's text has been told.

    Several tokens may make one letter: an end that may still change is kept back until the next token.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._told = ""

    def more(self, answer: list[int], *, ended: bool) -> str:
        """Return the text that is new since the last call."""
        text = self._tokens.decode(answer)
        if not text.startswith(self._told) or (text.endswith("\N{REPLACEMENT CHARACTER}") and not ended):
            return ""
        new = text[len(self._told) :]
        self._told = text
        return new
