"""What a step puts into the compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from ._sequence import Sequence as Held
from ._transform import ASKED


class Inputs:
    """The input tensors of a request.

    There are four a layer. Setting all of them takes 3 to 4 ms in a step of SmolLM2-135M, of about 20 ms, and writing
    into those that are set 0.2 ms. So a tensor is another one only where its shape is.
    """

    def __init__(self, request: Any, compiled: Any) -> None:
        self._request = request
        self._place = {name: place for place, tensor in enumerate(compiled.inputs) for name in tensor.get_names()}
        self._memory: dict[str, npt.NDArray[Any]] = {}

    def set_cache(self, layer: int, tensors: tuple[Any, Any]) -> None:
        """Let a layer read and write these keys and values."""
        for name, tensor in zip(("key_cache", "value_cache"), tensors, strict=True):
            self._request.set_input_tensor(self._place[f"{name}.{layer}"], tensor)

    def set_step(
        self,
        sequences: Sequence[Held],
        tokens: Sequence[npt.NDArray[np.int64]],
        window: int,
    ) -> None:
        """Read these tokens behind what each sequence has read, with room for them in its tables."""
        counts = np.array([len(more) for more in tokens])
        ends = counts.cumsum()
        positions = [np.arange(s.position, s.position + len(more)) for s, more in zip(sequences, tokens, strict=True)]
        self._set("input_ids", np.concatenate(tokens), np.int64)
        self._set("position_ids", np.concatenate(positions), np.int64)
        self._set("subsequence_begins", _begins(ends), np.int32)
        self._set("score_aggregation_window", np.minimum(counts, window), np.int32)
        self._set(ASKED, ends - 1, np.int64)
        past = np.array([sequence.lengths for sequence in sequences]).T  # (layers, sequences)
        longest = (past + counts).max(axis=1)
        for layer, lengths in enumerate(past):
            tables = [sequence.tables[layer] for sequence in sequences]
            self._set(f"past_lens.{layer}", lengths, np.int32)
            self._set(f"max_context_len.{layer}", longest[layer], np.int32)
            self._set(f"block_indices.{layer}", np.concatenate(tables), np.int32)
            self._set(f"block_indices_begins.{layer}", _begins(np.array([len(t) for t in tables]).cumsum()), np.int32)

    def _set(self, name: str, values: Any, kind: Any) -> None:
        memory = self._memory.get(name)
        if memory is not None and memory.shape == values.shape:
            memory[...] = values
            return
        tensor = ov.Tensor(np.array(values, kind))
        self._request.set_input_tensor(self._place[name], tensor)
        self._memory[name] = tensor.data


def _begins(ends: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([[0], ends])
