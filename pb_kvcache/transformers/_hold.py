"""``decode="hold"``: one native policy per sequence and KV head decides what leaves while tokens are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .._snapkv import SnapKV

if TYPE_CHECKING:
    from ._budgets import Budgets


class Holder:
    """The policies of one layer, and which slot of its buffers holds which position.

    A sequence that holds ``c`` positions has them in its slots ``0 .. c-1``, in any order: keys carry their rotation
    with them. The next token goes to slot ``c``. When its cache is full the victim's slot takes it over, so a step
    moves one row per head and nothing else.
    """

    def __init__(
        self,
        budgets: Budgets,
        decided: npt.NDArray[np.int64],
        columns: torch.Tensor,
        kept: npt.NDArray[np.int64],
        seeds: list[torch.Tensor],
    ) -> None:
        self._counts = kept.copy()  # per sequence; every head of a sequence holds as many
        self._heads = columns.shape[1]
        capacity = int(decided.max()) + 1
        shape = (len(kept), self._heads, capacity)
        held = columns.cpu().numpy()
        # In ascending order of position: the positions, and the slots that they are in.
        self._columns = np.zeros(shape, np.int64)
        self._columns[..., : held.shape[-1]] = held
        self._slots = np.broadcast_to(np.arange(capacity), shape).copy()
        self._policies = []
        for row, budget in enumerate(decided):
            rows = seeds[row].float().cpu().numpy()
            policies = []
            for head in range(self._heads):
                policy = SnapKV(int(budget), budgets.window, budgets.window, budgets.kernel)
                policy.seed(held[row, head, : kept[row]], np.ascontiguousarray(rows[head]))
                policies.append(policy)
            self._policies.append(policies)

    @property
    def slots(self) -> int:
        """Slots that the step in hand reads: what is held, and the new token's."""
        return int(self._counts.max()) + 1

    @property
    def length(self) -> int:
        """Slots that hold something between steps."""
        return int(self._counts.max())

    @property
    def nbytes(self) -> int:
        """Bytes of the policies and the maps."""
        policies: int = sum(policy.memory_bytes for row in self._policies for policy in row)
        return policies + int(self._columns.nbytes) + int(self._slots.nbytes)

    def place(
        self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write a new token, ``(batch, kv_heads, 1, head_dim)``, to every sequence's spare slot."""
        if (self._counts == self._counts[0]).all():
            spare = slice(int(self._counts[0]), int(self._counts[0]) + 1)
            key_buffer[:, :, spare] = key
            value_buffer[:, :, spare] = value
            return
        for row, spare in enumerate(self._counts):
            key_buffer[row, :, spare] = key[row, :, 0]
            value_buffer[row, :, spare] = value[row, :, 0]

    def mask(self, are_tokens: npt.NDArray[np.bool_] | None, device: torch.device) -> torch.Tensor | None:
        """Return which slots the new token sees, ``(batch, 1, 1, slots)``. None for all.

        `are_tokens` says for which sequences the new token is one, not padding. None for all.
        """
        counts = self._counts + (1 if are_tokens is None else are_tokens)
        if (counts == self.slots).all():
            return None
        return torch.as_tensor(np.arange(self.slots) < counts[:, None], device=device)[:, None, None]

    def ascending(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights ``(batch, q_heads, 1, slots)`` by ascending position, as every other cache has them.

        The new token comes last. A shorter sequence of the batch has zeros after it.
        """
        slots = weights.shape[-1]
        order = self._slots[..., :slots].copy()
        for row, count in enumerate(self._counts):
            order[row, :, count] = count
        index = torch.as_tensor(order, device=weights.device).repeat_interleave(weights.shape[1] // self._heads, dim=1)
        return weights.gather(-1, index[:, :, None])

    def step(
        self,
        key_buffer: torch.Tensor,
        value_buffer: torch.Tensor,
        column: int,
        weights: npt.NDArray[np.float32],
        are_tokens: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Show the policies what the new token at `column` attended to, and let the victims' slots go to it.

        `weights` is ``(batch, kv_heads, slots)``, its own slot included.
        """
        moved: list[tuple[int, int, int, int]] = []
        for row, policies in enumerate(self._policies):
            if are_tokens is not None and not are_tokens[row]:
                continue
            count = int(self._counts[row])
            full = 0
            for head, policy in enumerate(policies):
                columns, slots = self._columns[row, head], self._slots[row, head]
                policy.on_decode_step(column, weights[row, head, slots[:count]])
                columns[count] = column
                slots[count] = count
                victims = policy.evict()
                if len(victims) == 0:
                    continue
                full += 1
                index = int(np.searchsorted(columns[: count + 1], victims[0]))
                freed = int(slots[index])
                columns[index:count] = columns[index + 1 : count + 1]
                slots[index:count] = slots[index + 1 : count + 1]
                slots[count - 1] = freed
                moved.append((row, head, count, freed))
            if not full:
                self._counts[row] = count + 1
        if moved:
            rows, heads, source, target = (torch.as_tensor(index) for index in zip(*moved, strict=True))
            for buffer in (key_buffer, value_buffer):
                buffer[rows, heads, target] = buffer[rows, heads, source]

    def columns(self) -> npt.NDArray[np.int64]:
        """Return the held columns, ``(batch, kv_heads, held)``, ascending, -1 fills up at the end."""
        held = self._columns[..., : self.length]
        return np.where(np.arange(self.length) < self._counts[:, None, None], held, -1)

    def select(self, rows: npt.NDArray[np.int64]) -> Holder:
        """Return the policies and maps of the sequences at `rows`. One may come more than once."""
        twin = object.__new__(Holder)
        twin._heads = self._heads
        twin._counts = self._counts[rows]
        twin._columns = self._columns[rows]
        twin._slots = self._slots[rows]
        twin._policies = [[policy.copy() for policy in self._policies[row]] for row in rows]
        return twin

    def copy(self) -> Holder:
        """Return an independent copy."""
        return self.select(np.arange(len(self._counts)))
