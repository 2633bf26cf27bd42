"""One layer's cache: its rows, which positions they are, and when they are chosen."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .._checks import natural
from ._attention import AttendingCache, Attention
from ._selection import choose
from ._shared import Shared, dumped

#: Rows that a buffer grows by, as in mlx-lm's own cache.
_STEP = 256


class BudgetedKVCache(AttendingCache):
    """One layer's keys and values under a budget. Made by :func:`make_prompt_cache`.

    Until the prompt is over, every token is held. Then each KV head keeps what its layer's budget allows. Every later
    token is kept, those of a second prompt in a conversation as well.

    Attributes
    ----------
    layer
        The place in the model's list of caches.
    offset
        Tokens seen: the position of the next one, whatever was evicted.
    rows
        Positions that each KV head holds.
    prompt
        Tokens of the prompt. 0 while it is read.
    budget
        What the layer may keep of the prompt. None while it is read.
    keys, values
        ``(batch, kv_heads, capacity, head_dim)``, of which the first :attr:`rows` are in use. None before the first
        token.
    """

    def __init__(self, shared: Shared, index: int, layer: int) -> None:
        self._shared = shared
        self._index = index  # among the layers under the budget
        self.layer = layer
        self._clear()

    def _clear(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = self.rows = self.prompt = 0
        self.budget: int | None = None
        self._fixed = 0  # rows that cannot be taken back: those of a prompt of which something was evicted
        self._kept: npt.NDArray[np.uint32] | None = None  # (batch, kv_heads, fixed). None: rows are positions
        self._queries: mx.array | None = None  # the last ones, (batch, q_heads, window or fewer, head_dim)
        self._scale = 1.0
        self._sinks: mx.array | None = None
        self._awaits_attention = False

    # ---- what models ask of a cache ----

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in new keys and values, ``(batch, kv_heads, new, head_dim)``, and return what attention has to read.

        Raises
        ------
        RuntimeError
            The attention of an earlier call did not come here, or the layers have seen different numbers of tokens.
        ValueError
            Another batch, other heads or another dtype than before.
        """
        if self._awaits_attention:
            raise RuntimeError(
                f"layer {self.layer}: the attention of the last step did not reach its cache. Call "
                "pb_kvcache.mlx.use(model) before the first step, and begin again with make_prompt_cache where a step "
                "has failed"
            )
        self._check_incoming(keys, values)
        self._shared.begin_step(self._index, self.layer, self.offset)
        end = self.rows + keys.shape[2]
        if self.keys is None or self.values is None or end > self.keys.shape[2]:
            self.keys = self._grown(self.keys, keys, end)
            self.values = self._grown(self.values, values, end)
        self.keys[..., self.rows : end, :] = keys
        self.values[..., self.rows : end, :] = values
        self.rows = end
        self.offset += keys.shape[2]
        self._awaits_attention = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the rows in use, ``(batch, kv_heads, rows, head_dim)`` twice."""
        if self.keys is None or self.values is None:
            raise RuntimeError(f"layer {self.layer}: its cache is empty")
        if self.rows == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self.rows, :], self.values[..., : self.rows, :]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """Return the mask of `N` new tokens: they see all rows, and each other causally.

        Raises
        ------
        ValueError
            The model asks for a local window, which rows that are no longer neighbours do not have.
        """
        if window_size is not None:
            raise ValueError(
                f"layer {self.layer}: the model asks for a local window of {window_size} on a cache that holds all "
                "positions, which a compressed cache cannot serve"
            )
        if N == 1:
            return None
        if not return_array:
            return "causal"
        mask = mx.arange(self.rows + N)[None] <= mx.arange(self.rows, self.rows + N)[:, None]
        self._shared.mask = mask
        return mask

    def size(self) -> int:
        """Return how many tokens have been seen, as mlx-lm's own cache does."""
        return self.offset

    def empty(self) -> bool:
        """Return whether no token has been seen."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and, while the prompt is read, its last queries. Spare rows included."""
        held = (self.keys, self.values, self._queries)
        return sum(int(array.nbytes) for array in held if array is not None)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Refused: rows are not quantised."""
        raise NotImplementedError("kv_bits: a compressed cache is not quantised; leave kv_bits out")

    # ---- attention ----

    def attend(
        self,
        attention: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Do the attention of the tokens that ``update_and_fetch`` has taken in, and evict after the prompt's last."""
        new = queries.shape[2]
        output = attention(queries, keys, values, cache=self, scale=scale, mask=self._own_mask(mask, new), sinks=sinks)
        if not self.prompt:
            self._remember(queries, float(scale), sinks)
            length = self._shared.prompt_length
            if new == 1 if length is None else self.offset >= length:
                mx.eval(output)  # the last that reads the whole prompt: nothing holds it when the rows are gone
                self.end_prompt()
        self._awaits_attention = False
        return output

    def _own_mask(self, mask: Any, new: int) -> str | None:
        """Return the mask for this layer's rows. The model made its own for the rows of another layer."""
        if new == 1 and mask is None:
            return None
        if (isinstance(mask, str) and mask == "causal") or (mask is not None and mask is self._shared.mask):
            return "causal" if new > 1 else None
        what = "no mask" if mask is None else f"a mask of its own, {mask if isinstance(mask, str) else mask.shape}"
        raise ValueError(
            f"layer {self.layer}: the model gives its attention {what}; layers of different length can only be served "
            "where attention is causal and nothing else"
        )

    def _remember(self, queries: mx.array, scale: float, sinks: mx.array | None) -> None:
        window = self._shared.budgets.selection.window
        if self._queries is not None and queries.shape[2] < window:
            queries = mx.concatenate([self._queries, queries], axis=2)
        # A copy: a slice would hold the queries of the whole call.
        self._queries = mx.contiguous(queries[:, :, -window:])
        self._scale, self._sinks = scale, sinks

    def end_prompt(self) -> None:
        """Evict what the budget does not allow. Nothing happens where the prompt is over or has no token.

        Raises
        ------
        ValueError
            Attention that is not finite, or a budget that the prompt does not allow. Nothing has changed then.
        """
        if self.prompt or self._queries is None:
            return
        keys, values = self.keys_and_values()
        budgets, rule = self._shared.budgets, self._shared.budgets.selection
        batch, kv_heads, n = keys.shape[:3]
        size = kv_heads * (keys.shape[3] * keys.dtype.size + values.shape[3] * values.dtype.size)
        budgets.note_position_bytes(self.layer, size)
        decided = budgets.decide(n, batch)
        keep = min(int(decided[self._index]), n)
        if keep < n:
            weights = None
            if rule.value_weight:
                if self._shared.projections is None:
                    raise RuntimeError(
                        "value_weight: a cache that was loaded before its prompt was over does not know the model"
                    )
                weights = self._shared.projections[self._index].weights(values)
            mx.eval(self._queries, keys, values, *([] if weights is None else [weights]))
            try:
                kept = choose(
                    self._queries, keys, keep, rule=rule, scale=self._scale, sinks=self._sinks, weights=weights
                )
            except ValueError as error:
                raise ValueError(f"layer {self.layer}: {error}") from None
            index = mx.array(kept)[..., None]
            self.keys, self.values = mx.take_along_axis(keys, index, axis=2), mx.take_along_axis(values, index, axis=2)
            mx.eval(self.keys, self.values)  # or the prompt would stay until somebody reads them
            self._kept, self.rows = kept, keep
        # One layer that cannot go back is enough: all of them have to stay at the same token.
        self._fixed = keep if bool((decided < n).any()) else 0
        self.prompt, self.budget = n, int(decided[self._index])
        self._queries = self._sinks = None

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions held, ``(batch, kv_heads, rows)``, ascending."""
        if self.keys is None:
            return np.empty((0, 0, 0), np.int64)
        shape = self.keys.shape[:2]
        if self._kept is None:
            return np.broadcast_to(np.arange(self.rows), (*shape, self.rows)).astype(np.int64)
        later = np.broadcast_to(np.arange(self.prompt, self.offset), (*shape, self.offset - self.prompt))
        return np.concatenate([self._kept.astype(np.int64), later], axis=-1)

    # ---- going back, and files ----

    def is_trimmable(self) -> bool:
        """Return whether tokens can be taken back: after the prompt, or before where its length was given."""
        return bool(self.prompt) or self._shared.prompt_length is not None

    def trim(self, n: int) -> int:
        """Take back the last `n` tokens, or all that there are, and return how many.

        Raises
        ------
        ValueError
            Tokens of a prompt of which something was evicted, or of one that is still read and whose length was not
            given. Nothing has changed.
        """
        n = min(natural("n", n), self.offset)
        if n and not self.is_trimmable():
            raise ValueError(
                f"n = {n}: the prompt is still read, and nobody can tell where it ends when tokens are taken back; "
                "give make_prompt_cache its prompt_length"
            )
        later = self.rows - self._fixed
        if n > later:
            raise ValueError(
                f"n = {n}: must be at most {later}, the tokens after the prompt; the prompt was evicted from"
            )
        if n == self.offset:
            self._clear()
            return n
        self.rows -= n
        self.offset -= n
        if self._queries is not None:
            left = self._queries.shape[2] - n
            self._queries = self._queries[:, :, :left] if left > 0 else None
        if self.offset < self.prompt:  # nothing was evicted, and what follows belongs to the prompt
            self.prompt, self.budget = 0, None
        return n

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, mx.array | None, mx.array | None, mx.array | None, str]:
        """What ``mlx_lm.models.cache.save_prompt_cache`` writes: rows, last queries, sinks, positions, and the rest."""
        keys, values = (None, None) if self.keys is None else self.keys_and_values()
        content = {
            "shared": self._shared.to_json(),
            "index": self._index,
            "layer": self.layer,
            "offset": self.offset,
            "prompt": self.prompt,
            "budget": self.budget,
            "fixed": self._fixed,
            "scale": self._scale,
        }
        kept = None if self._kept is None else mx.array(self._kept)
        return keys, values, self._queries, self._sinks, kept, dumped(content)

    @state.setter
    def state(self, state: Any) -> None:
        try:
            keys, values, queries, sinks, kept, text = state
            content = json.loads(text)
            shared = Shared.from_json(content["shared"])
            numbers = [natural(name, content[name]) for name in ("index", "layer", "offset", "prompt", "fixed")]
            budget, scale = content["budget"], float(content["scale"])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"state: is not one of a BudgetedKVCache ({error})") from None
        self._shared = shared
        self._clear()
        self._index, self.layer, self.offset, self.prompt, self._fixed = numbers
        self.keys, self.values, self._queries, self._sinks = keys, values, queries, sinks
        self.rows = 0 if keys is None else keys.shape[2]
        self._kept = None if kept is None else np.array(kept)
        self.budget, self._scale = budget, scale

    @classmethod
    def from_state(cls, state: Any) -> BudgetedKVCache:
        """Return the cache of a :attr:`state`, as ``mlx_lm.models.cache.load_prompt_cache`` asks for it.

        Raises
        ------
        ValueError
            A state of something else.
        """
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __repr__(self) -> str:
        held = f"{self.rows} rows of {self.offset} tokens"
        return f"<BudgetedKVCache: layer {self.layer}, {held}, {self._shared.budgets.describe()}>"

    # ---- storage and checks ----

    def _grown(self, buffer: mx.array | None, new: mx.array, end: int) -> mx.array:
        """Return a buffer with room for `end` rows and the rows in use."""
        batch, heads, _, size = new.shape
        capacity = -(-end // _STEP) * _STEP
        if buffer is None:
            return mx.zeros((batch, heads, capacity, size), new.dtype)
        room = mx.zeros((batch, heads, capacity - self.rows, size), new.dtype)
        return mx.concatenate([buffer[..., : self.rows, :], room], axis=2)

    def _check_incoming(self, keys: mx.array, values: mx.array) -> None:
        if self.keys is None or self.values is None:
            return
        if keys.shape[0] != self.keys.shape[0]:
            raise ValueError(
                f"layer {self.layer}: the cache holds a batch of {self.keys.shape[0]} and meets one of "
                f"{keys.shape[0]}; make_prompt_cache makes one for a new prompt"
            )
        for name, held, given in (("keys", self.keys, keys), ("values", self.values, values)):
            if given.shape[1] != held.shape[1] or given.shape[3] != held.shape[3] or given.dtype != held.dtype:
                raise ValueError(
                    f"layer {self.layer}: {name} of shape {given.shape} and {given.dtype} for a cache with "
                    f"{held.shape[1]} heads of size {held.shape[3]} and {held.dtype}: is it another model's cache?"
                )
