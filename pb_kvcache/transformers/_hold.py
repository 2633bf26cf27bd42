"""``decode="hold"``: the native caches of one layer decide what leaves while tokens are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .._decode_weights import DTYPES, DecodeWeights
from .._hold import Hold

if TYPE_CHECKING:
    from ._budgets import Budgets
    from ._selection import Scoring

_DTYPES = {getattr(torch, name): name for name in DTYPES}


class Holder:
    """The caches of one layer, one for each sequence and KV head, over the rows of the layer's buffers.

    The buffers are contiguous, ``(batch, kv_heads, capacity, head_dim)``, or of any shape whose rows are `head_dim`
    elements. Slot ``s`` of a cache is the row ``offset + s`` of the flat buffer, ``(rows, head_dim)``: see
    :meth:`lay_out`.

    A cache that holds ``c`` positions has them in its slots ``0 .. c-1``, in any order: keys carry their rotation with
    them. The next token goes to slot ``c``. Once its budget is full the victim's slot takes the newest row over, so a
    step moves one row per cache and nothing else.

    Parameters
    ----------
    budgets
        The selection's window, protected positions and kernel are read.
    decided
        What is held of every sequence, ``(batch,)``, or of every sequence and head, ``(batch, kv_heads)``.
    columns
        The columns in the slots, ``(batch, kv_heads, slots)``, ascending.
    kept
        How many of them there are, of the shape of `decided`.
    seeds
        Of every sequence, for every head, the attention of the prompt's last queries to those columns, ``(queries,
        kept)`` or wider. None for a sequence whose attention is not known.
    """

    def __init__(
        self,
        budgets: Budgets,
        decided: npt.NDArray[np.int64],
        columns: torch.Tensor,
        kept: npt.NDArray[np.int64],
        seeds: list[Any],
    ) -> None:
        shape = columns.shape[:2]
        self._budgets = _per_head(decided, shape)
        selection = budgets.selection
        self._hold = Hold(self._budgets.ravel(), selection.protected, selection.window, selection.kernel)
        held = columns.cpu().numpy()
        counts = _per_head(kept, shape)
        for row, seed in enumerate(seeds):
            for head in range(shape[1]):
                count = int(counts[row, head])
                rows = None if seed is None else seed[head][:, :count].float().cpu().numpy()
                self._hold.seed(row * shape[1] + head, held[row, head, :count], rows)
        self._set_counts(counts)
        self._rectangle = 0
        self._offsets = np.empty(0, np.uint64)
        self._weigh: DecodeWeights | None = None
        self._views: tuple[Any, ...] | None = None

    def lay_out(self, offsets: npt.NDArray[np.integer[Any]]) -> None:
        """Say in which row of the flat buffers each cache's slot 0 is, ``(batch, kv_heads)``: not equally far apart."""
        self._rectangle = 0
        self._offsets = np.ascontiguousarray(offsets, np.uint64).ravel()
        self._weigh = None

    def _rows_of(self, buffer: torch.Tensor) -> npt.NDArray[np.uint64]:
        """Return the row of each cache's slot 0: as laid out, or of caches of equal room."""
        if len(self._offsets) == self._counts.size and self._rectangle in (0, buffer.shape[-2]):
            return self._offsets
        self._rectangle = buffer.shape[-2]
        self._offsets = np.arange(self._counts.size, dtype=np.uint64) * np.uint64(self._rectangle)
        self._weigh = None
        return self._offsets

    def _set_counts(self, counts: npt.NDArray[np.int64]) -> None:
        """Note what every cache holds, ``(batch, kv_heads)``, and what follows from it at every step."""
        self._counts = counts
        self._seen = (counts + 1).astype(np.uint32).ravel()  # slots that a new token's queries see
        self._most = int(counts.max())
        self._even = bool((counts == self._most).all())
        self._full = bool((counts == self._budgets).all())

    @property
    def slots(self) -> int:
        """Slots that the step in hand reads: what is held, and the new token's."""
        return self._most + 1

    @property
    def length(self) -> int:
        """Slots that hold something between steps."""
        return self._most

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, of what is known of them, and, from the first step on, of what weighs their slots."""
        known = sum(int(array.nbytes) for array in (self._counts, self._budgets, self._seen))
        return self._hold.memory_bytes + known + (0 if self._weigh is None else self._weigh.nbytes)

    def place(
        self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a new token, ``(batch, kv_heads, 1, head_dim)``, to every cache's spare slot.

        Returns the slots that the step reads, of keys and of values, ``(batch, kv_heads, slots, head_dim)``. Of buffers
        whose caches were laid out apart: the buffers.
        """
        if key_buffer.dim() < key.dim():
            self._place_apart(key_buffer, key)
            self._place_apart(value_buffer, value)
            return key_buffer, value_buffer
        views = self._views
        if views is None or views[0] is not key_buffer or views[1] is not value_buffer or views[2] != self._most:
            # A narrow() costs as much as the copy. Once the budgets are full they are the same at every step.
            views = (
                key_buffer,
                value_buffer,
                self._most,
                *(buffer.narrow(2, self._most, 1) for buffer in (key_buffer, value_buffer)),
                *(buffer.narrow(2, 0, self.slots) for buffer in (key_buffer, value_buffer)),
            )
            self._views = views
        if self._even:
            views[3].copy_(key)
            views[4].copy_(value)
        else:
            self._place_apart(key_buffer, key)
            self._place_apart(value_buffer, value)
        return views[5], views[6]

    def _place_apart(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        """Write a new token's rows, each behind what its cache holds."""
        starts = self._rows_of(buffer).astype(np.int64)
        target = torch.as_tensor(starts + self._counts.ravel(), device=buffer.device)
        flat = buffer.view(-1, buffer.shape[-1])
        flat.index_copy_(0, target, new.reshape(-1, new.shape[-1]).to(buffer.dtype))

    def clear_bias(self, bias: torch.Tensor) -> None:
        """Let the new token's slot, of every cache, have no bias. `bias` has one for each row of the buffers."""
        flat = bias.view(-1)
        target = torch.as_tensor(
            self._rows_of(bias[..., None]).astype(np.int64) + self._counts.ravel(), device=bias.device
        )
        flat.index_fill_(0, target, 0.0)

    def seen(self, are_tokens: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
        """Return how many slots a new token's queries see, ``(batch, kv_heads)``."""
        return self._counts + (1 if are_tokens is None else are_tokens[:, None])

    def mask(self, are_tokens: npt.NDArray[np.bool_] | None, device: torch.device, q_heads: int) -> torch.Tensor | None:
        """Return which slots the new token sees, ``(batch, 1 or q_heads, 1, slots)``. None for all.

        `are_tokens` says for which sequences the new token is one, not padding. None for all.
        """
        if self._even and (are_tokens is None or are_tokens.all()):
            return None
        counts = self._counts + (1 if are_tokens is None else are_tokens[:, None])
        if (counts == self.slots).all():
            return None
        alike = (counts == counts[:, :1]).all()  # the heads of a sequence
        counts = counts[:, :1] if alike else counts.repeat(q_heads // counts.shape[1], axis=1)
        return torch.as_tensor(np.arange(self.slots) < counts[..., None], device=device)[:, :, None]

    def ascending(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights ``(batch, q_heads, 1, slots)`` by ascending position, as every other cache has them.

        The new token comes last. A shorter cache has zeros after it.
        """
        batch, kv_heads = self._counts.shape
        order = np.tile(np.arange(weights.shape[-1]), (batch * kv_heads, 1))
        for cache, count in enumerate(self._counts.ravel()):
            order[cache, :count] = self._hold.slots(cache)
        index = torch.as_tensor(order.reshape(batch, kv_heads, -1), device=weights.device)
        return weights.gather(-1, index.repeat_interleave(weights.shape[1] // kv_heads, dim=1)[:, :, None])

    def weigh(
        self,
        key_buffer: torch.Tensor,
        query: torch.Tensor,
        scoring: Scoring,
        reduce: str,
        are_tokens: npt.NDArray[np.bool_] | None,
    ) -> npt.NDArray[np.float32] | None:
        """Return what the new token gave to every slot, ``(batch * kv_heads, slots)``, each group of heads reduced.

        On the processor, from `query` ``(batch, q_heads, 1, head_dim)`` and the keys. None where that is not the place,
        or the two are not of one type: :meth:`Scoring.decode_weights` then does the same. Overwritten by the next call.
        """
        if key_buffer.device.type != "cpu" or query.dtype != key_buffer.dtype or query.dtype not in _DTYPES:
            return None
        offsets = self._rows_of(key_buffer)
        if self._weigh is None:
            sinks = scoring.sinks
            self._weigh = DecodeWeights(
                offsets,
                int(self._budgets.max()) + 1,
                group=query.shape[1] // self._counts.shape[1],
                head_dim=query.shape[-1],
                dtype=_DTYPES[query.dtype],
                scale=scoring.scale,
                softcap=scoring.softcap,
                sinks=None if sinks is None else sinks.float().cpu().numpy(),
                reduce=reduce,
            )
        seen = self._seen
        if are_tokens is not None:
            seen = (self._counts + are_tokens[:, None]).astype(np.uint32).ravel()
        query = query.contiguous()
        return self._weigh(query.data_ptr(), key_buffer.data_ptr(), key_buffer.numel(), seen)

    def step(
        self,
        buffers: list[torch.Tensor],
        column: int,
        weights: npt.NDArray[np.float32],
        are_tokens: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Show the caches what the new token at `column` attended to, and let the victims' slots go to it.

        `buffers` are those of keys, of values, and of the biases where there are some. `weights` is
        ``(batch, kv_heads, slots)`` or ``(batch * kv_heads, slots)``, its own slot included.
        """
        heads = self._counts.shape[1]
        joins = None if are_tokens is None else are_tokens.repeat(heads)
        moves = self._hold.step(column, weights.reshape(self._counts.size, weights.shape[-1]), joins)
        if len(moves):
            offsets = self._rows_of(buffers[0])
            for buffer in buffers:
                _move(buffer if buffer.dim() == buffers[0].dim() else buffer[..., None], offsets, moves)
        if not self._full:
            new = 1 if are_tokens is None else are_tokens[:, None]
            self._set_counts(np.minimum(self._counts + new, self._budgets))

    def columns(self) -> npt.NDArray[np.int64]:
        """Return the held columns, ``(batch, kv_heads, held)``, ascending, -1 fills up at the end."""
        held = np.full((self._counts.size, self.length), -1, np.int64)
        for cache, count in enumerate(self._counts.ravel()):
            held[cache, :count] = self._hold.kept(cache)
        return held.reshape(*self._counts.shape, -1)

    def select(self, rows: npt.NDArray[np.int64]) -> Holder:
        """Return the caches of the sequences at `rows`. One may come more than once."""
        heads = self._counts.shape[1]
        twin = object.__new__(Holder)
        twin._budgets = self._budgets[rows]
        twin._hold = self._hold.select((np.asarray(rows)[:, None] * heads + np.arange(heads)).ravel())
        twin._set_counts(self._counts[rows])
        twin._rectangle = 0
        twin._offsets = np.empty(0, np.uint64)
        twin._weigh = None
        twin._views = None
        return twin

    def copy(self) -> Holder:
        """Return an independent copy."""
        return self.select(np.arange(len(self._counts)))


def _move(buffer: torch.Tensor, offsets: npt.NDArray[np.uint64], moves: npt.NDArray[np.uint32]) -> None:
    """Copy rows of a contiguous buffer as the caches ask for, whose slots begin at the rows `offsets`."""
    if buffer.device.type != "cpu":
        _move_rows(buffer, offsets, moves)
        return
    # Four calls of torch for a few rows take as long as the policies do.
    Hold.move(buffer.data_ptr(), buffer.nbytes, buffer.shape[-1] * buffer.itemsize, offsets, moves)


def _move_rows(buffer: torch.Tensor, offsets: npt.NDArray[np.uint64], moves: npt.NDArray[np.uint32]) -> None:
    """Do the same with torch, on any device."""
    rows = moves.T.astype(np.int64)
    rows[1:] += offsets.astype(np.int64)[rows[0]]
    _, source, target = torch.as_tensor(rows, device=buffer.device).unbind()
    matrix = buffer.view(-1, buffer.shape[-1])
    matrix.index_copy_(0, target, matrix.index_select(0, source))


def _per_head(numbers: npt.NDArray[np.int64], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return one number for each sequence and head from those, or from one for each sequence."""
    given = numbers if numbers.ndim == 2 else numbers[:, None]
    return np.broadcast_to(given, shape).astype(np.int64)
