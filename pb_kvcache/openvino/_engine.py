"""The compiled model with its caches: one inference for tokens of several sequences, each layer at its own lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from .._checks import shown
from .._options import choice
from ._blocks import LayerBlocks
from ._core import core
from ._inputs import Inputs
from ._sequence import Sequence as Held
from ._transform import to_paged

#: Elements of the cache as OpenVINO calls them, and of the arithmetic that the CPU plugin has for such a cache. Its
#: 8-bit caches put scales beside the rows, which cannot move then.
_DTYPES = {"float32": ("f32", "f32"), "float16": ("f16", "f32"), "bfloat16": ("bf16", "bf16")}

#: Properties that `dtype` sets.
_PRECISIONS = ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT")


class Engine:
    """A compiled model, the memory of its layers' caches, and what a step puts in and takes out.

    Parameters
    ----------
    model
        A stateful decoder, which is changed.
    block
        Rows of a block, which must be those of the CPU plugin.
    dtype
        Of the caches: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    properties
        Of OpenVINO's ``compile_model``.
    """

    def __init__(self, model: Any, *, block: int, dtype: str, properties: Mapping[str, Any]) -> None:
        precisions = dict(zip(_PRECISIONS, choice("dtype", dtype, _DTYPES), strict=True))
        for name in precisions:
            if name in properties:
                raise ValueError(f"properties: has {name}, which dtype says")
        self.num_layers = to_paged(model)
        compiled = core().compile_model(model, "CPU", {**properties, **precisions})
        self.layers = [LayerBlocks(_maker(compiled, layer, block, dtype), block) for layer in range(self.num_layers)]
        self.block = block
        self.vocab = int(compiled.output("logits").get_partial_shape()[2].get_length())
        self._compiled = compiled  # a request does not keep its model
        self._request = compiled.create_infer_request()
        self._inputs = Inputs(self._request, compiled)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' caches, free blocks included."""
        return sum(layer.nbytes for layer in self.layers)

    def run(self, sequences: Sequence[Held], tokens: Sequence[npt.NDArray[np.int64]], window: int = 0) -> None:
        """Read tokens of some sequences, behind what each has read already, and note the logits of their last ones.

        Parameters
        ----------
        sequences, tokens
            One or more sequences, and for each the tokens that follow.
        window
            Last queries of each sequence whose attention :meth:`scores` answers afterwards.

        Raises
        ------
        RuntimeError
            OpenVINO's. The sequences are then as before.
        """
        counts = np.array([len(more) for more in tokens], np.int64)
        before = [[len(table) for table in sequence.tables] for sequence in sequences]
        try:
            self._make_room(sequences, counts)
            self._inputs.set_step(sequences, tokens, window)
            self._request.infer(share_outputs=True)  # not a copy of every layer's scores
        except BaseException:
            for sequence, blocks in zip(sequences, before, strict=True):
                self._return_blocks(sequence, blocks)
            raise
        logits = self._request.get_tensor("logits").data.reshape(len(sequences), -1)
        for sequence, count, row in zip(sequences, counts.tolist(), logits, strict=True):
            sequence.lengths = sequence.lengths + count
            sequence.position += count
            sequence.logits = row.astype(np.float32)  # a copy: the tensor is the next step's as well

    def scores(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the rows' attention in the last run, summed over query heads and the window's queries."""
        return np.array(self._request.get_tensor(f"scores.{layer}").data, np.float32)

    def release(self, sequence: Held) -> None:
        """Take back all blocks of a sequence."""
        self._return_blocks(sequence, [0] * self.num_layers)

    def trim(self, sequences: Sequence[Held], spare: int) -> None:
        """Give the memory of free blocks back to the system, but for `spare` a layer, and tell all sequences."""
        for index, layer in enumerate(self.layers):
            number = layer.trim(spare)
            if number is None:
                continue
            for sequence in sequences:
                sequence.tables[index] = number[sequence.tables[index]]
            self._inputs.set_cache(index, layer.tensors)

    def _make_room(self, sequences: Sequence[Held], counts: npt.NDArray[np.int64]) -> None:
        for index, layer in enumerate(self.layers):
            missing = [
                -(-(int(sequence.lengths[index]) + count) // self.block) - len(sequence.tables[index])
                for sequence, count in zip(sequences, counts.tolist(), strict=True)
            ]
            if not any(missing):
                continue
            blocks, replaced = layer.take(sum(missing))
            for sequence, own in zip(sequences, np.split(blocks, np.cumsum(missing)[:-1]), strict=True):
                sequence.tables[index] = np.concatenate([sequence.tables[index], own])
            if replaced:
                self._inputs.set_cache(index, layer.tensors)

    def _return_blocks(self, sequence: Held, keep: list[int]) -> None:
        for index, layer in enumerate(self.layers):
            table = sequence.tables[index]
            layer.pool.give(table[keep[index] :])
            sequence.tables[index] = table[: keep[index]]


def _maker(compiled: Any, layer: int, block: int, dtype: str) -> Any:
    """Return what makes the tensors of a layer's cache, after checking how the plugin wants them."""
    kinds, shapes = [], []
    for name in (f"key_cache.{layer}", f"value_cache.{layer}"):
        wanted = compiled.input(name)
        kinds.append(wanted.get_element_type())
        shapes.append([side.get_length() if side.is_static else -1 for side in wanted.get_partial_shape()][1:])
    for kind, shape in zip(kinds, shapes, strict=True):
        if kind.get_type_name() != _DTYPES[dtype][0]:
            raise ValueError(f"dtype = {dtype!r}: the CPU plugin makes this cache of {kind.get_type_name()}")
        if len(shape) != 3 or shape[1] != block:
            raise ValueError(f"block = {shown(block)}: must be {shape[1]}, which the CPU plugin's blocks have")

    def make(is_key: bool, blocks: int) -> Any:
        place = 0 if is_key else 1
        return ov.Tensor(kinds[place], ov.Shape([blocks, *shapes[place]]))

    return make
