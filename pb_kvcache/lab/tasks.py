"""Prompts whose answers are known, for judging what eviction costs: made from a seed, or read from files.

``text`` takes parts of files and their true continuation. ``retrieval``, ``niah``, ``vt``, ``cwe`` and ``fwe`` make
facts or lists and ask for them. The last four ask what the tasks of the same names in RULER ask (Hsieh et al. 2024,
arXiv:2404.06654), in other words, and smaller, so that a small model can answer some of them. ``jsonl:FILE`` reads
prompts from a file.

A prompt is a context, which may be compressed before the question is known, and a question. Its ids are those of plain
text, without a chat template: the question ends with the beginning of its answer, so that a model that was never
instructed answers it as well. The seed, the task and the number of an item decide all of it. More items of the same
seed are the same ones and further ones.

>>> from pb_kvcache.lab import tasks
>>> items = tasks.make("retrieval", tokenizer, count=30, length=1000)
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._checks import natural, positive
from .._suggest import did_you_mean
from .._text import printable
from ._encode import Encoder
from ._filler import NAMES, WORDS, Filler, shipped
from ._metrics import score
from ._prompt_file import read_prompts, read_text

__all__ = ["CONTINUATION", "TASKS", "Item", "make", "score"]

#: Tokens of a text's true continuation: one that follows the prompt, and 32 that follow it.
CONTINUATION = 33

#: Multiples of it, modulo 1, are spread evenly however many there are: no two items take the same part or depth.
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1
#: Tokens that a model may write beside its answer: a full stop, a word too much.
_SLACK = 4
#: Tokens to answer a question of a file at least, since it does not end with the beginning of its answer.
_SENTENCE = 32
#: Characters of a text file that are read at least, which is some 500,000 tokens.
_MOST_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Item:
    """One prompt and what is right after it.

    Attributes
    ----------
    name
        Unique within a task and stable for a seed: ``"retrieval-3"``.
    task
        ``"text"``, ``"retrieval"``, ``"niah"``, ``"vt"``, ``"cwe"``, ``"fwe"`` or ``"jsonl"``.
    kind
        Kind of text or subtask: a file's name without its suffix, ``"8 keys"``.
    context
        Token ids that may be compressed before the question is known. The model's first token is the first of them,
        where the tokenizer adds one.
    question
        Token ids after it. None for ``text``.
    answers
        The right answers. None for ``text``.
    continuation
        Token ids that are right after the prompt: the file's own, or those of the first answer.
    metric
        How :func:`score` compares a prediction with the answers. Empty where there are none.
    chance
        The score to expect of a guess that has read the prompt and understood nothing of it: one of the keys' words, as
        many entries of a list as are asked for. 0 where nothing can be guessed.
    max_new_tokens
        How many tokens to let a model answer. ``text`` has as many as its continuation.
    """

    name: str
    task: str
    kind: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answers: tuple[str, ...]
    continuation: tuple[int, ...]
    metric: str
    chance: float
    max_new_tokens: int


@dataclass(frozen=True)
class _Draft:
    """A made prompt before its length is settled."""

    kind: str
    context: Callable[[int], str]  # a number of words -> the context with so many between its facts, or in its list
    question: str
    answers: tuple[str, ...]
    metric: str
    chance: float


@dataclass(frozen=True)
class _Source:
    """What one item is made from."""

    filler: Filler
    index: int  # of the item
    draw: random.Random  # of this item alone
    key: str  # names the item and its seed
    place: float  # where its part of the filler begins, 0 to 1
    depth: float  # where what is asked for stands in the context, 0 to 1

    def scattered(self, intro: str, facts: Sequence[tuple[float, str]]) -> Callable[[int], str]:
        """Return the context with facts at their depths between sentences of the filler, each on a line of its own."""
        facts = sorted(facts)

        def context(words: int) -> str:
            sentences = self.filler.part(self.place, words)
            lines, done = [intro, ""], 0
            for depth, fact in facts:
                upto = int(depth * (len(sentences) + 1))
                if upto > done:
                    lines.append(" ".join(sentences[done:upto]))
                lines.append(fact)
                done = upto
            if done < len(sentences):
                lines.append(" ".join(sentences[done:]))
            return "\n".join(lines) + "\n"

        return context


# --- the tasks


def _retrieval(source: _Source, keys: int) -> _Draft:
    draw = source.draw
    names = draw.sample(source.filler.without("names", NAMES, keys), keys)
    words = draw.sample(source.filler.without("words", WORDS, keys), keys)
    thing = draw.choice(_THINGS)
    depths = [source.depth, *(draw.random() for _ in range(keys - 1))]
    facts = [
        (depth, f"The {thing} of {name} is {word}.") for depth, name, word in zip(depths, names, words, strict=True)
    ]
    return _Draft(
        kind=f"{keys} keys",
        context=source.scattered(f"Below is a text. Between its lines stands the {thing} of some people.", facts),
        question=f"\nAs the text above says, the {thing} of {names[0]} is",
        answers=(words[0],),
        metric="exact",
        chance=1 / keys,
    )


#: What the keys of a prompt are.
_THINGS = ("password", "secret word", "favourite word")


def _niah(source: _Source) -> _Draft:
    draw = source.draw
    name = draw.choice(source.filler.without("names", NAMES, 1))
    number = _number(source, 7, set())
    return _Draft(
        kind="1 number",
        context=source.scattered(
            "Below is a text. Between its lines stands the special number of one person.",
            [(source.depth, f"The special number of {name} is {number}.")],
        ),
        question=f"\nAs the text above says, the special number of {name} is",
        answers=(number,),
        metric="contains",
        chance=0.0,
    )


def _number(source: _Source, digits: int, taken: set[str]) -> str:
    """Return a number of so many digits that neither the filler nor the prompt has yet."""
    while True:
        number = str(source.draw.randrange(10 ** (digits - 1), 10**digits))
        if number not in source.filler.vocabulary and number not in taken:
            taken.add(number)
            return number


_CHAINS, _LINKS = 4, 3


def _vt(source: _Source) -> _Draft:
    draw = source.draw
    facts, taken, chains, values = [], set[str](), [], []
    for _ in range(_CHAINS):
        chain: list[str] = []
        while len(chain) < _LINKS:
            name = "".join(draw.choices(string.ascii_uppercase, k=3))
            if name.lower() not in source.filler.vocabulary and name not in taken:
                taken.add(name)
                chain.append(name)
        value = _number(source, 5, taken)
        depths = sorted(draw.random() for _ in chain)
        for depth, name, given in zip(depths, chain, (value, *chain), strict=False):
            facts.append((depth, f"VAR {name} = {given}"))
        chains.append(chain)
        values.append(value)
    return _Draft(
        kind=f"{_CHAINS} chains of {_LINKS}",
        context=source.scattered("Below is a text. Between its lines variables get values.", facts),
        question=f"\nDirectly or through another one, the {_LINKS} variables with the value {values[0]} are: VAR",
        answers=tuple(chains[0]),
        metric="set",
        chance=1 / _CHAINS,
    )


_COMMON, _COMMON_SHARE, _FEWEST_ENTRIES = 5, 1 / 20, 40


def _cwe(source: _Source) -> _Draft:
    draw = source.draw
    known = {word for words in source.filler.sentences for word in words if word.isascii() and word.islower()}
    pool = sorted({word for word in known if word.isalpha() and 4 <= len(word) <= 8} | set(WORDS))
    draw.shuffle(pool)
    common, others = pool[:_COMMON], pool[_COMMON:]

    def context(words: int) -> str:
        entries = max(words, _FEWEST_ENTRIES)
        often = max(4, int(entries * _COMMON_SHARE))
        rest = entries - _COMMON * often
        distinct = min(len(others), (rest + 1) // 2)  # each twice, or more where the words run out
        listed = common * often + [others[i % distinct] for i in range(rest)]
        return _listed(source, "Below is a list of words. A few of them occur much more often than the others.", listed)

    return _Draft(
        kind=f"{_COMMON} words",
        context=context,
        question=f"\nThe {_COMMON} most frequent words of the list above are:",
        answers=tuple(common),
        metric="set",
        chance=_copied([_COMMON_SHARE] * _COMMON),
    )


_RANKS, _FREQUENT = 30, 3


def _fwe(source: _Source) -> _Draft:
    draw = source.draw
    coded: list[str] = []
    while len(coded) < _RANKS:
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
        if word not in coded and word not in source.filler.vocabulary:
            coded.append(word)
    total = sum(1 / rank for rank in range(1, _RANKS + 1))

    def context(words: int) -> str:
        entries = max(words, _FEWEST_ENTRIES)
        counts = [int(entries / (rank * total)) for rank in range(1, _RANKS + 1)]
        for i in range(entries - sum(counts)):  # what rounding left goes to the rarest
            counts[-1 - i % (_RANKS - 1 - _FREQUENT)] += 1
        listed = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        return _listed(source, "Below is a list of words of a made-up language.", listed)

    return _Draft(
        kind=f"{_FREQUENT} words",
        context=context,
        question=f"\nThe {_FREQUENT} most frequent words of the list above are:",
        answers=tuple(coded[:_FREQUENT]),
        metric="set",
        chance=_copied([1 / (rank * total) for rank in range(1, _FREQUENT + 1)]),
    )


def _listed(source: _Source, intro: str, entries: list[str]) -> str:
    """Return a list of entries in an order that the item and their number decide, ten on a line."""
    random.Random(f"{source.key} {len(entries)}").shuffle(entries)
    lines = [" ".join(entries[i : i + 10]) for i in range(0, len(entries), 10)]
    return "\n".join([intro, "", *lines]) + "\n"


def _copied(shares: Sequence[float]) -> float:
    """Return the part of some words that is found by copying as many entries of a list, given their shares of it."""
    return sum(1 - (1 - share) ** len(shares) for share in shares) / len(shares)


#: Name -> what makes an item's draft.
_MADE: dict[str, Callable[[_Source], _Draft]] = {
    "retrieval": lambda source: _retrieval(source, 8),
    "niah": _niah,
    "vt": _vt,
    "cwe": _cwe,
    "fwe": _fwe,
}

#: The tasks by name. ``retrieval:K`` has K keys, and ``jsonl:FILE`` reads a file.
TASKS = ("text", *_MADE)
_MOST_KEYS = 64


def make(
    task: str,
    tokenizer: Any,
    *,
    count: int,
    length: int,
    seed: int = 0,
    filler: str | None = None,
    texts: Sequence[str | os.PathLike[str]] = (),
) -> list[Item]:
    """Return the items of one task.

    Parameters
    ----------
    task
        One of :data:`TASKS`. Also ``"retrieval:K"``, with K of 2 to 64 keys in place of 8, and ``"jsonl:FILE"``, with
        one prompt a line, whose fields are ``context``, ``question`` and ``answers``, or those of LongBench's or
        RULER's files.
    tokenizer
        The model's, as transformers makes them.
    count
        How many items.
    length
        Tokens of context and question. Made prompts and texts have so many, or a few less, never more. Prompts of a
        file are not cut: the lines with at most so many tokens are taken.
    seed
        Decides texts, facts, places and which lines of a file are taken.
    filler
        The text between the facts of made prompts, in place of the shipped one: the text itself, at least 100 words.
    texts
        Files for ``text``, in UTF-8, which take turns. None: the shipped filler. Other tasks do not read them.

    Raises
    ------
    OSError
        A file cannot be read.
    TypeError, ValueError
        An argument is refused: the message names it. A text, a filler or a file has too little for so many items of
        this length: the message says how much it has.
    """
    if not isinstance(task, str):
        raise TypeError(f"task = {task!r}: must be a string, not {type(task).__name__}")
    count, length, seed = positive("count", count), positive("length", length), natural("seed", seed)
    name, colon, argument = task.partition(":")
    encoder = Encoder(tokenizer)
    if task == "text":
        return _texts(encoder, count, length, seed, texts, filler)
    if name == "jsonl" and argument:
        return _prompts(encoder, argument, count, length, seed)
    if name not in _MADE or (colon and name != "retrieval"):
        raise ValueError(
            f"task = {task!r}: must be one of {', '.join(TASKS)}, retrieval:K or jsonl:FILE{did_you_mean(name, TASKS)}"
        )
    draft = _MADE[name]
    if colon:
        if not argument.isdecimal() or not 2 <= int(argument) <= _MOST_KEYS:
            raise ValueError(f"task = {task!r}: keys must be an integer from 2 to {_MOST_KEYS}")
        draft = functools.partial(_retrieval, keys=int(argument))
    text = Filler(shipped() if filler is None else filler)
    return [_made(encoder, task, draft(source), length, source) for source in _sources(text, task, count, seed)]


def _sources(filler: Filler, task: str, count: int, seed: int) -> Iterator[_Source]:
    first = random.Random(f"{task} {seed}")
    place, depth = first.random(), first.random()
    for index in range(count):
        key = f"{task} {seed} {index}"
        # Another multiple for the depth, so that depth and place are not one and the same.
        yield _Source(
            filler,
            index,
            random.Random(key),
            key,
            (place + index * _GOLDEN) % 1,
            (depth + index * _SILVER) % 1,
        )


def _made(encoder: Encoder, task: str, draft: _Draft, length: int, source: _Source) -> Item:
    context, question = encoder.prompt(draft.context, draft.question, length)
    # The answer as the model would write it, and where it would stop.
    right = encoder.after(draft.question, " " + ", ".join(draft.answers))
    return Item(
        name=f"{task}-{source.index}",
        task=task.partition(":")[0],
        kind=draft.kind,
        context=tuple(context),
        question=tuple(question),
        answers=draft.answers,
        continuation=tuple(encoder.after(draft.question, " " + draft.answers[0])),
        metric=draft.metric,
        chance=draft.chance,
        max_new_tokens=len(right) + _SLACK,
    )


def _texts(
    encoder: Encoder,
    count: int,
    length: int,
    seed: int,
    texts: Sequence[str | os.PathLike[str]],
    filler: str | None,
) -> list[Item]:
    """Return parts of files that have no token in common, the files in turn."""
    if isinstance(texts, (str, os.PathLike)):
        raise TypeError(f"texts = {texts!r}: must be a sequence of paths, not one")
    named = [(os.fspath(path), read_text(path)) for path in texts] or [
        ("filler", shipped() if filler is None else filler)
    ]
    size = length - len(encoder.first) + CONTINUATION
    if length <= len(encoder.first):
        raise ValueError(f"length = {length}: must be above the {len(encoder.first)} tokens that the tokenizer adds")
    # Enough for 64 parts at 4 characters a token, and then some: the rest of a huge file would take minutes.
    most = max(_MOST_CHARACTERS, 256 * size)
    parts = []
    for kind, (path, text) in zip(_kinds([path for path, _ in named]), named, strict=True):
        ids = encoder.long(text[:most])
        if len(ids) < size:
            raise ValueError(
                f"{printable(path)}: has {len(ids)} tokens, a prompt of length = {length} and its continuation "
                f"take {size}; give a longer text or a smaller length"
            )
        draw = random.Random(f"text {seed} {kind}")
        offset = draw.randrange(len(ids) % size + 1)
        starts = list(range(offset, len(ids) - size + 1, size))
        draw.shuffle(starts)
        parts.append([(kind, ids[start : start + size]) for start in starts])
    turns = [part for turn in itertools.zip_longest(*parts) for part in turn if part is not None]
    if len(turns) < count:
        raise ValueError(
            f"count = {count}: the texts have {len(turns)} parts of {size} tokens that do not overlap; give more or "
            "longer texts, or ask for fewer or shorter prompts"
        )
    return [
        Item(
            name=f"text-{index}",
            task="text",
            kind=kind,
            context=(*encoder.first, *ids[:-CONTINUATION]),
            question=(),
            answers=(),
            continuation=tuple(ids[-CONTINUATION:]),
            metric="",
            chance=0.0,
            max_new_tokens=CONTINUATION,
        )
        for index, (kind, ids) in enumerate(turns[:count])
    ]


def _kinds(paths: Sequence[str]) -> list[str]:
    """Return what files are called in results: their names without suffix, or all of a path where two have one name."""
    stems = [Path(path).stem for path in paths]
    kinds = [stem if stems.count(stem) == 1 else path for stem, path in zip(stems, paths, strict=True)]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"texts: {printable(kind)} is given twice")
    return kinds


def _prompts(encoder: Encoder, path: str, count: int, length: int, seed: int) -> list[Item]:
    """Return lines of a file that are short enough, in an order that the seed decides."""
    prompts = read_prompts(path)
    random.Random(f"jsonl {seed}").shuffle(prompts)
    items: list[Item] = []
    sizes: list[int] = []
    for prompt in prompts:
        if len(items) == count:
            break
        context, question = (
            [*encoder.first, *encoder.long(prompt.context)],
            encoder.after(prompt.context, prompt.question),
        )
        sizes.append(len(context) + len(question))
        if sizes[-1] > length:
            continue
        answers = [encoder.after(prompt.question, " " + answer) for answer in prompt.answers]
        items.append(
            Item(
                name=f"jsonl:{path}-{prompt.line}",
                task="jsonl",
                kind=prompt.kind,
                context=tuple(context),
                question=tuple(question),
                answers=prompt.answers,
                continuation=tuple(answers[0]),
                metric=prompt.metric,
                chance=0.0,
                max_new_tokens=max(_SENTENCE, (sum if prompt.metric == "set" else max)(map(len, answers)) + _SLACK),
            )
        )
    if len(items) < count:
        if len(prompts) < count:
            raise ValueError(f"count = {count}: {printable(path)} has {len(prompts)} prompts")
        raise ValueError(
            f"length = {length}: {len(items)} of the {len(prompts)} prompts of {printable(path)} are as short as that, "
            f"and count = {count}; {sorted(sizes)[count - 1]} tokens would do"
        )
    return items
