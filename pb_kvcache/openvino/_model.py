"""A model in OpenVINO whose layers keep as much of each prompt as their budgets say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._blocks import block_moves
from .._busy import in_turn, new_turn
from .._checks import integer, shown
from .._options import at_least
from .._plan import LayerPlan
from .._select import select_from_scores
from .._selection import Selection
from .._tensor import plain_array
from ._budgets import Budgets
from ._engine import Engine
from ._generate import generate
from ._load import load
from ._sequence import Sequence as Held
from ._tokens import Tokens

_T = TypeVar("_T")


class PagedModel:
    """A decoder on the CPU with a paged cache for each layer, which several sequences share.

    A prompt is read with full attention. Then each layer keeps the positions that the prompt's last queries attended to
    most, as many as its budget says, closes the holes in its blocks, and other sequences take the blocks that this
    frees. Decoding goes on with each layer at its own length. All KV heads of a layer keep the same positions, because
    OpenVINO's operation has one block table for them.

    Parameters
    ----------
    path
        A folder with ``openvino_model.xml`` of a stateful decoder, as optimum-intel and openvino-genai write them, or a
        ``.gguf`` file, which openvino-genai reads.
    plan
        Every layer's budget: a :class:`pb_kvcache.LayerPlan`, or the path of a file with one.
    budget
        Positions per layer on average instead, 512 if nothing is given. In a prompt shorter than a layer's budget the
        layer keeps everything, and the others take over what it leaves.
    selection
        A :class:`pb_kvcache.Selection` or its name, ``"snapkv"`` by default. OpenVINO tells the window's attention,
        summed over all query heads, so the rule must need no more: no values' norms, no second hop, no maximum.
    block
        Rows of a block. The CPU plugin has 32.
    chunk
        Tokens of a prompt that are read at once, at least the selection's window. None: all of them. Smaller chunks
        need less memory for what lies between the layers.
    dtype
        Of the cache: ``"float32"``, ``"float16"``, or, on processors that have it, ``"bfloat16"``, in which all
        arithmetic is then done. The plugin's own default is a cache of 8 bits, whose rows cannot move.
    tokenizer
        Of openvino-genai or transformers, for prompts that are text. None: the folder's, or the GGUF file's.
    ir
        For a GGUF file: a folder for the IR that is made of it. Where it is there already it is read instead, which
        takes a fraction of the time.
    properties
        For OpenVINO's ``compile_model``, such as ``{"INFERENCE_NUM_THREADS": 1}``.

    Raises
    ------
    ImportError
        openvino or openvino-genai is missing, or has other private parts than those that are used here.
    FileNotFoundError, TypeError, ValueError
        An argument breaks a rule, or the model cannot be served. The message names it.

    Examples
    --------
    >>> model = PagedModel("smollm2", budget=512)                        # doctest: +SKIP
    >>> model.generate("The capital of France is", 20)                   # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: LayerPlan | str | os.PathLike[str] | None = None,
        *,
        budget: int | None = None,
        selection: Selection | str | None = None,
        block: int = 32,
        chunk: int | None = None,
        dtype: str = "float32",
        tokenizer: Any = None,
        ir: str | os.PathLike[str] | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        rule = Selection.of("snapkv" if selection is None else selection)
        self._chunk = None if chunk is None else at_least("chunk", chunk, rule.window)
        model, found = load(path, ir)
        self._engine = Engine(model, block=at_least("block", block, 1), dtype=dtype, properties=properties or {})
        self._budgets = Budgets(self._engine.num_layers, budget=budget, plan=plan, selection=rule)
        self._tokens = Tokens(found if tokenizer is None else tokenizer)
        self._sequences: dict[int, Held] = {}
        self._next = 0
        self._turn = new_turn()

    # --- what is held ---

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._engine.num_layers

    @property
    def selection(self) -> Selection:
        """The rule by which positions are chosen."""
        return self._budgets.selection

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that are held, in the order in which they came."""
        return tuple(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, with the rows that are free in a block and the blocks that are free."""
        return self._engine.nbytes

    def budgets(self, length: int) -> npt.NDArray[np.int64]:
        """Return the rows that each layer keeps of a prompt of so many tokens, ``(num_layers,)``."""
        return np.array(self._budgets.decide(at_least("length", length, 1)))

    def lengths(self, sequence: int) -> npt.NDArray[np.int64]:
        """Return the rows of a sequence in each layer, ``(num_layers,)``."""
        return np.array(self._held(sequence).lengths)

    def positions(self, sequence: int, layer: int) -> npt.NDArray[np.uint32]:
        """Return the positions of a sequence that a layer holds, ascending."""
        index = integer("layer", layer)
        if not 0 <= index < self.num_layers:
            raise ValueError(f"layer = {shown(index)}: must be between 0 and {self.num_layers - 1}")
        return self._held(sequence).positions(index)

    def logits(self, sequence: int) -> npt.NDArray[np.float32]:
        """Return the logits behind the last token of a sequence, ``(vocab,)``."""
        return np.array(self._held(sequence).logits)

    # --- sequences that come, go on and go ---

    def add(self, prompt: npt.ArrayLike) -> int:
        """Read a prompt, evict what the budgets do not cover, and return the new sequence's number.

        Raises
        ------
        TypeError, ValueError
            The prompt is no vector of one or more tokens of the vocabulary.
        RuntimeError
            Another thread is in a call, or OpenVINO fails. Nothing is held of the prompt then.
        """
        return self._alone(self._add, self._token_vector("prompt", prompt))

    def step(self, tokens: Mapping[int, int]) -> dict[int, npt.NDArray[np.float32]]:
        """Read one token more of some of the sequences, all at once.

        Memory that evictions and departures left free goes back to the system here, so that a prompt that came in
        between could take it.

        Parameters
        ----------
        tokens
            For each sequence that goes on its next token.

        Returns
        -------
        dict
            For each of these sequences the logits behind that token, ``(vocab,)``.

        Raises
        ------
        TypeError, ValueError
            There is no such sequence or token. Nothing is read then.
        RuntimeError
            Another thread is in a call, or OpenVINO fails. All sequences are as before.
        """
        if not isinstance(tokens, Mapping):
            raise TypeError(f"tokens: must map sequences to their next tokens, not be a {type(tokens).__name__}")
        for sequence in tokens:
            self._held(sequence)
        checked = {sequence: self._token_vector(f"tokens[{sequence}]", [token]) for sequence, token in tokens.items()}
        return self._alone(self._step, checked)

    def remove(self, sequence: int) -> None:
        """Forget a sequence. Its blocks are free for others.

        Raises
        ------
        TypeError, ValueError
            There is no such sequence.
        """
        self._held(sequence)
        self._alone(self._remove, sequence)

    def trim(self) -> None:
        """Give the memory of free blocks back to the system.

        A step does so by itself, but for one block a sequence and layer, into which it may write.
        """
        self._alone(self._trim, 0)

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int,
        *,
        stream: Callable[[int, Any], Any] | None = None,
        parallel: int = 8,
        eos: int | Sequence[int] | None = None,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        logits_processor: Any = None,
    ) -> Any:
        """Return the answers to prompts, which are read one after the other and decoded together.

        Parameters
        ----------
        prompts
            A text, a vector of tokens, or a list of either. A text must have its chat template already.
        max_new_tokens
            Tokens of an answer at most.
        stream
            Called with a prompt's index and what is new of its answer: text for a text, a token for tokens. If it
            returns True that answer ends.
        parallel
            Sequences that are decoded together at most. When one ends the next prompt is read.
        eos
            Tokens that end an answer. None: the tokenizer's, where there is one. An empty list: none.
        do_sample
            Whether tokens are drawn. Else the likeliest one is taken, the lower on a tie.
        temperature, top_k, top_p
            For ``do_sample=True``: transformers' logits processors of these names, in that order.
        seed
            For ``do_sample=True``: prompt i is drawn for with ``seed + i``, whatever the other prompts are.
        logits_processor
            More of transformers' logits processors, applied before these.

        Returns
        -------
        str or list
            As the prompts are. Tokens have the one that ended them, text has not.

        Raises
        ------
        TypeError, ValueError
            An argument breaks a rule. The message names it.
        ImportError
            Sampling without torch and transformers.
        """
        return generate(
            self,
            self._tokens,
            prompts,
            at_least("max_new_tokens", max_new_tokens, 1),
            stream=stream,
            parallel=at_least("parallel", parallel, 1),
            eos=eos,
            sampling=(do_sample, temperature, top_k, top_p, seed, logits_processor),
        )

    # --- the same, alone and checked ---

    def _alone(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return in_turn(self, self._turn, function, *arguments)

    def _held(self, sequence: Any) -> Held:
        number = integer("sequence", sequence)
        if number not in self._sequences:
            raise ValueError(f"sequence = {shown(number)}: is not held; held are {list(self._sequences)}")
        return self._sequences[number]

    def _token_vector(self, name: str, tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
        array = plain_array(name, tokens, "integers")
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"{name}: has shape {array.shape}, must be a vector of one or more tokens")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name}: must be integers, not of dtype {array.dtype}")
        beyond = (array < 0) | (array >= self._engine.vocab)
        if beyond.any():
            place = int(np.flatnonzero(beyond)[0])
            raise ValueError(f"{name}[{place}] = {array[place]}: must be between 0 and {self._engine.vocab - 1}")
        return array.astype(np.int64)

    def _add(self, prompt: npt.NDArray[np.int64]) -> int:
        sequence = Held(self.num_layers)
        try:
            *first, last = self._pieces(prompt)
            for piece in first:
                self._engine.run([sequence], [piece])
            self._engine.run([sequence], [last], self.selection.window)
            self._evict(sequence)
        except BaseException:
            self._engine.release(sequence)
            raise
        number = self._next
        self._next += 1
        self._sequences[number] = sequence
        return number

    def _pieces(self, prompt: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return a prompt in chunks, of which the last one holds the window's queries."""
        n = len(prompt)
        if self._chunk is None or n <= self._chunk:
            return [prompt]
        end = n - max(n % self._chunk, self.selection.window)
        return np.split(prompt, [*range(self._chunk, end, self._chunk), end])

    def _evict(self, sequence: Held) -> None:
        """Keep of a prompt that was just read what the budgets say, and close the holes."""
        n = sequence.position
        budgets = self._budgets.decide(n)
        if budgets.min() == n:
            return
        kept = []
        for index, budget in enumerate(budgets.tolist()):
            layer = self._engine.layers[index]
            rows = np.arange(n, dtype=np.uint32)
            if budget < n:
                scored = self._engine.scores(index)[None, : n - self.selection.protected]
                rows = select_from_scores(scored, budget, selection=self.selection)[0]
            moves = block_moves(rows, sequence.tables[index], layer.block)
            layer.move(moves)
            sequence.tables[index] = moves.table
            kept.append(moves.order)
        sequence.keep(kept)

    def _step(self, tokens: dict[int, npt.NDArray[np.int64]]) -> dict[int, npt.NDArray[np.float32]]:
        if not tokens:
            return {}
        if any(layer.pool.free > len(self._sequences) for layer in self._engine.layers):
            self._trim(len(self._sequences))
        held = [self._sequences[number] for number in tokens]
        self._engine.run(held, list(tokens.values()))
        return {number: sequence.logits.copy() for number, sequence in zip(tokens, held, strict=True)}

    def _remove(self, sequence: int) -> None:
        self._engine.release(self._sequences.pop(sequence))

    def _trim(self, spare: int) -> None:
        self._engine.trim(list(self._sequences.values()), spare)
