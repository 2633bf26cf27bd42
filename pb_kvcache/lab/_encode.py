"""Token ids of prompts: of a context and the question after it, at most so many together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Encoder"]

#: Characters before a text that decide how its first token is cut.
_TAIL = 40
#: Characters that are encoded in one call. A tokenizer logs a warning for more than its model can read.
_PIECE = 4000
#: Changes of the number of words until a prompt has its length. Two or three are usual.
_TRIES = 20


class Encoder:
    """A tokenizer as this package uses it.

    Parameters
    ----------
    tokenizer
        ``tokenizer(text)["input_ids"]`` are the ids, with the model's first token where it has one, and without it with
        ``add_special_tokens=False``. Transformers' tokenizers are such.

    Raises
    ------
    TypeError
        It is not such an object.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        try:
            plain = self.ids("a")
            whole = [int(i) for i in tokenizer("a")["input_ids"]]
        except (TypeError, KeyError, ValueError) as error:
            raise TypeError(
                f"tokenizer = {type(tokenizer).__name__}: tokenizer(text, add_special_tokens=False)['input_ids'] must "
                f"be token ids, as transformers' tokenizers give them: {error}"
            ) from error
        found = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        #: What the tokenizer puts before a text. What it puts after one, an end mark, no prompt needs.
        self.first = whole[: found[0]] if found else []

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing before it."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def start(self, text: str) -> list[int]:
        """Return the ids of a text that a prompt starts with."""
        return self.first + self.ids(text)

    def after(self, before: str, text: str) -> list[int]:
        """Return the ids of a text as it follows another one.

        The two are encoded together, since many tokenizers cut a text's first word in another way at a prompt's start.
        Where the joint has a token of both, the text is encoded alone.
        """
        tail = self.ids(before[-_TAIL:])
        both = self.ids(before[-_TAIL:] + text)
        return both[len(tail) :] if both[: len(tail)] == tail else self.ids(text)

    def long(self, text: str) -> list[int]:
        """Return the ids of a text of any length, encoded in pieces of whole lines where it has lines."""
        ids: list[int] = []
        piece, before = "", ""
        for line in text.splitlines(keepends=True):
            for part in (line[i : i + _PIECE] for i in range(0, len(line), _PIECE)):
                if piece and len(piece) + len(part) > _PIECE:
                    ids += self.after(before, piece)
                    piece, before = "", piece
                piece += part
        return ids + self.after(before, piece)

    def prompt(self, context: Callable[[int], str], question: str, length: int) -> tuple[list[int], list[int]]:
        """Return the ids of the longest context that fits, and of the question after it.

        Parameters
        ----------
        context
            A number of words -> the context with so many of them between what it must say.
        question
            What follows it.
        length
            Tokens of both at most.

        Raises
        ------
        ValueError
            Not even a context of 0 words fits.
        """

        def encoded(words: int) -> tuple[list[int], list[int]]:
            text = context(words)
            return self.start(text), self.after(text, question)

        def room(ids: tuple[list[int], list[int]]) -> int:
            return length - len(ids[0]) - len(ids[1])

        best = encoded(0)
        if room(best) < 0:
            raise ValueError(
                f"length = {length}: the shortest such prompt has {length - room(best)} tokens; ask for more"
            )
        most, beyond = 0, length + 1  # so many words fit, so many do not: no word has less than a token
        rate = 1.4  # tokens a word, as English has with most tokenizers
        for _ in range(_TRIES):
            words = min(max(most + max(1, int(room(best) / rate)), most + 1), beyond - 1)
            if words <= most or room(best) == 0:
                break
            tried = encoded(words)
            if room(tried) < 0:
                beyond = words
                rate = max(rate, (room(best) - room(tried)) / (words - most)) * 1.02
            else:
                rate = max((room(best) - room(tried)) / (words - most), 0.5)
                most, best = words, tried
        return best
