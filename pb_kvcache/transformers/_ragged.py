"""The rows of a layer whose KV heads hold different numbers of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ._attention import with_bias
from ._bytes import storage_bytes

#: The attention of the model: (query, key, value, boolean mask or None) to (output, weights or None).
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor | None]"
]

#: Rows that a head has beyond what it holds, at least. It grows by a 64th otherwise. Growing copies the layer.
_ROOM = 8


class RaggedRows:
    """Keys and values of one layer, each head of each sequence at its own offset and of its own length.

    Both lie in one buffer ``(batch, rows, head_dim)``, where `rows` is what the heads of a sequence need together. What
    is kept of the prompt comes first in a head, then every later token.

    Parameters
    ----------
    keys, values
        The prompt's, ``(batch, kv_heads, n, head_dim)``. Read during the call only.
    chosen
        For every sequence, for every head, the columns that stay, ascending.
    rooms
        Rows of every head, where they never grow.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        chosen: list[list[torch.Tensor]],
        rooms: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.columns = [[columns.to(torch.int32) for columns in heads] for heads in chosen]
        self.kept = np.array([[len(columns) for columns in heads] for heads in chosen], np.int64)
        self.lengths = self.kept.copy()  # (batch, kv_heads), rows in use
        #: What is added to a row's logits, ``(batch, rows)`` float32. None: nothing.
        self.bias: torch.Tensor | None = None
        self._lay_out(keys, values, self._roomy(self.lengths) if rooms is None else rooms)
        for row, heads in enumerate(chosen):
            for head, columns in enumerate(heads):
                for whole, buffer in ((keys, self.keys), (values, self.values)):
                    place = buffer[row].narrow(0, int(self.starts[row, head]), len(columns))
                    torch.index_select(whole[row, head], 0, columns, out=place)

    @staticmethod
    def _roomy(needed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return needed + np.maximum(_ROOM, needed // 64)

    def _lay_out(self, keys: torch.Tensor, values: torch.Tensor, rooms: npt.NDArray[np.int64]) -> None:
        """Make buffers like `keys` and `values` with room for so many rows in every head."""
        self.rooms = rooms
        self.starts = np.zeros_like(rooms)
        np.cumsum(self.rooms[:, :-1], axis=1, out=self.starts[:, 1:])
        rows = int(self.rooms.sum(axis=1).max())
        with torch.inference_mode(False):
            # 0 * NaN is NaN: rows without a token must be numbers, because the padded way reads some.
            self.keys, self.values = (
                torch.zeros(len(rooms), rows, like.shape[-1], dtype=like.dtype, device=like.device)
                for like in (keys, values)
            )
            if self.bias is not None:
                self.bias = torch.zeros(self.keys.shape[:2], dtype=torch.float32, device=keys.device)
        self._note_alike()

    def _note_alike(self) -> None:
        """Note whether all sequences have the same lengths, so that one call serves a head of all of them."""
        self.alike = bool((self.lengths == self.lengths[:1]).all() and (self.starts == self.starts[:1]).all())
        #: The row behind what every head holds, in the flat buffers.
        with torch.inference_mode(False):  # changed in place later, in whatever mode
            self._next = torch.as_tensor((self.offsets + self.lengths).ravel(), device=self.keys.device)
        self._left = int((self.rooms - self.lengths).min())  # tokens that still fit

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return int(self.lengths.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, of the columns, and of where the next rows go."""
        tensors = [self.keys, self.values, self._next, *(columns for heads in self.columns for columns in heads)]
        tensors += [] if self.bias is None else [self.bias]
        return storage_bytes(tensors)

    def put_merged(self, merged: list[Any]) -> None:
        """Put merged rows in the place of the first rows of every head: keys, values and biases of each sequence.

        None for a sequence whose rows stay as they are.
        """
        self.bias = torch.zeros(self.keys.shape[:2], dtype=torch.float32, device=self.keys.device)
        for row, rows in enumerate(merged):
            for buffer, heads in zip((self.keys, self.values, self.bias), rows or (), strict=False):
                for head, one in enumerate(heads):
                    buffer[row].narrow(0, int(self.starts[row, head]), len(one)).copy_(one)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put new tokens, ``(batch, kv_heads, new, head_dim)``, behind what every head holds."""
        new = keys.shape[2]
        if new > self._left:
            self._grow(new)
        rows = self._next
        if new > 1:
            rows = (rows[:, None] + torch.arange(new, device=rows.device)).flatten()
        for buffer, states in ((self.keys, keys), (self.values, values)):
            # One call for all heads: a narrow() and a copy for each take three times as long.
            flat = buffer.view(-1, buffer.shape[-1])
            flat.index_copy_(0, rows, states.reshape(-1, buffer.shape[-1]).to(buffer.dtype))
        self._next += new
        self._left -= new
        self.lengths += new

    def _grow(self, new: int) -> None:
        old, starts = [self.keys, self.values], self.starts
        old += [] if self.bias is None else [self.bias]
        self._lay_out(self.keys, self.values, self._roomy(self.lengths + new))
        grown = [self.keys, self.values]
        grown += [] if self.bias is None else [self.bias]
        for row in range(self.batch):
            for head in range(self.kv_heads):
                length = int(self.lengths[row, head])
                for before, after in zip(old, grown, strict=True):
                    source = before[row].narrow(0, int(starts[row, head]), length)
                    after[row].narrow(0, int(self.starts[row, head]), length).copy_(source)

    def _places(self) -> list[tuple[slice, int, int, int]]:
        """Return (sequences, head, offset, length): of all sequences where they are alike, else one by one."""
        groups = [slice(None)] if self.alike else [slice(row, row + 1) for row in range(self.batch)]
        return [
            (rows, head, int(self.starts[rows, head][0]), int(self.lengths[rows, head][0]))
            for rows in groups
            for head in range(self.kv_heads)
        ]

    def attend(
        self, attend: Attend, query: torch.Tensor, later: torch.Tensor | None, padded: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the last tokens that were appended, every query head to the rows of its KV head.

        Parameters
        ----------
        attend
            The model's attention: (query, key, value, mask) to (output ``(batch, new, q_heads, head_dim)``, weights).
        query
            ``(batch, q_heads, new, head_dim)``.
        later
            Which of the tokens after the prompt are tokens, ``(batch, later)``. None for all.
        padded
            Whether all heads have to be in one call, as wide as the longest of them.
        """
        if padded:
            return self._attend_padded(attend, query, later)
        group = query.shape[1] // self.kv_heads
        outputs = []
        for rows, head, start, length in self._places():
            mask = _mask(query.shape[2], length, None if later is None else later[rows], query.device)
            if self.bias is not None:
                mask = with_bias(mask, self.bias[rows].narrow(1, start, length)[:, None], 1)
            asked = query.narrow(1, head * group, group)
            key, value = (self._view(buffer, rows, start, length) for buffer in (self.keys, self.values))
            outputs.append(attend(asked if self.alike else asked[rows], key, value, mask)[0])
        if self.alike:
            return torch.cat(outputs, dim=2), None
        rows_of = (outputs[row * self.kv_heads : (row + 1) * self.kv_heads] for row in range(self.batch))
        return torch.cat([torch.cat(heads, dim=2) for heads in rows_of], dim=0), None

    def _view(self, buffer: torch.Tensor, rows: slice, start: int, length: int) -> torch.Tensor:
        """Return one head's rows, ``(sequences, 1, length, head_dim)``. In one call, not in three."""
        each, width = buffer.stride()[:2]
        first = 0 if self.alike else rows.start * each
        size = (self.batch if self.alike else 1, 1, length, buffer.shape[-1])
        return buffer.as_strided(size, (each, each, width, 1), first + start * width)

    def _attend_padded(
        self, attend: Attend, query: torch.Tensor, later: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do it in one call: for attention that has parameters of its own for every head."""
        key, value = self.padded()
        most, new = key.shape[2], query.shape[2]
        group = query.shape[1] // self.kv_heads
        mask = torch.zeros(self.batch, query.shape[1], new, most, dtype=torch.bool, device=query.device)
        for rows, head, _, length in self._places():
            seen = _mask(new, length, None if later is None else later[rows], query.device)
            mask[rows, head * group : (head + 1) * group, :, :length] = True if seen is None else seen
        if self.bias is not None:
            mask = with_bias(mask, self.padded_bias(), group)
        return attend(query, key, value, mask)

    def padded_bias(self) -> torch.Tensor:
        """Return the biases as wide as the longest head, ``(batch, kv_heads, most)``, zeros beyond."""
        assert self.bias is not None
        bias = self.bias.new_zeros(self.batch, self.kv_heads, int(self.lengths.max()))
        for rows, head, start, length in self._places():
            bias[rows, head, :length] = self.bias[rows].narrow(1, start, length)
        return bias

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as wide as the longest head, ``(batch, kv_heads, most, head_dim)``, zeros beyond."""
        shape = (self.batch, self.kv_heads, int(self.lengths.max()))
        key, value = (buffer.new_zeros(*shape, buffer.shape[-1]) for buffer in (self.keys, self.values))
        for rows, head, start, length in self._places():
            key[rows, head, :length] = self.keys[rows].narrow(1, start, length)
            value[rows, head, :length] = self.values[rows].narrow(1, start, length)
        return key, value

    def use(self, lengths: npt.NDArray[np.int64]) -> None:
        """Say how many rows of every head are in use."""
        if not np.array_equal(lengths, self.lengths):
            self.lengths = lengths
            self._note_alike()

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each head begins in the flat buffers ``(batch * rows, head_dim)``, ``(batch, kv_heads)``."""
        first: npt.NDArray[np.int64] = np.arange(self.batch)[:, None] * self.keys.shape[1]
        return self.starts + first

    def held(self, prompt: int) -> npt.NDArray[np.int64]:
        """Return the columns that every head holds, ``(batch, kv_heads, held)``, ascending, -1 at the end."""
        columns = np.full((*self.lengths.shape, int(self.lengths.max())), -1, np.int64)
        for row in range(self.batch):
            for head in range(self.kv_heads):
                kept, length = int(self.kept[row, head]), int(self.lengths[row, head])
                columns[row, head, :kept] = self.columns[row][head].cpu().numpy()
                columns[row, head, kept:length] = np.arange(prompt, prompt + length - kept)
        return columns

    def select(self, rows: torch.Tensor) -> RaggedRows:
        """Return what the sequences at `rows` hold, in that order. One may come more than once."""
        order = rows.cpu().numpy()
        twin = object.__new__(RaggedRows)
        with torch.inference_mode(False):
            twin.keys, twin.values = (
                buffer.index_select(0, rows.to(buffer.device)) for buffer in (self.keys, self.values)
            )
            twin.bias = None if self.bias is None else self.bias.index_select(0, rows.to(self.bias.device))
        twin.columns = [list(self.columns[row]) for row in order] if self.columns else []
        twin.kept, twin.lengths = self.kept[order], self.lengths[order]
        twin.starts, twin.rooms = self.starts[order], self.rooms[order]
        twin._note_alike()
        return twin

    def copy(self) -> RaggedRows:
        """Return an independent copy."""
        return self.select(torch.arange(self.batch))


def _mask(new: int, length: int, later: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return who of the last `new` of `length` tokens may see which, ``(batch or 1, 1, new, length)``. None for all."""
    if new == 1 and later is None:
        return None
    allowed = torch.ones(1, 1, new, length, dtype=torch.bool, device=device).tril_(length - new)
    if later is not None:
        visible = torch.nn.functional.pad(later, (length - later.shape[1], 0), value=True)
        allowed = allowed & visible[:, None, None, :]
    return allowed
