"""One layer of the cache: its keys and values, which positions they are, and when they are chosen."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from ._attention import LAYER_MARK, LOCAL_WINDOW_DIMS, OwnMask, not_compiled, with_bias
from ._budgets import Budgets
from ._bytes import storage_bytes
from ._hold import Holder
from ._merging import merged_rows
from ._output_error import budget_grid, output_differences, output_errors, rank_order
from ._probe import Facts
from ._prompt_queries import PromptQueries
from ._ragged import Attend, RaggedRows
from ._rotary import rotation_of
from ._selection import Prompt, Scoring, choose
from ._value_weights import projection_products, value_weights

#: Slots that a buffer has beyond what it holds, at least. It grows by an eighth otherwise. Growing copies the layer: at
#: 512 slots that is 8 rows copied for each token, where attention reads all 512.
ROOM = 32

#: Last positions of a prompt that are judged where the prompt divides the total.
JUDGED = 32


class BudgetedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer under a budget. Made by :class:`BudgetedCache`.

    A *column* is a token's index in the padded input: what the model's 2-D mask counts. The slots of the buffers hold
    first what is kept of the prompt, then every later token in order (``decode="grow"``), or whatever the policies
    keep (``decode="hold"``).
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    watches = False  # the probe's layers do

    def __init__(self, budgets: Budgets, index: int, model_layer: int, facts: Facts | None) -> None:
        super().__init__()
        self.budgets = budgets  # shared by the layers of a cache
        self._facts = facts
        self.index = index  # among the compressed layers
        self.model_layer = model_layer
        self.awaits_attention = False
        self._clear()

    def _clear(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.awaits_attention = False
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None
        self._bias_buffer: torch.Tensor | None = None  # (batch, kv_heads, capacity) float32: added to a slot's logits
        self._incoming: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0  # slots in use
        self.seen = 0  # tokens seen, as columns
        self.prompt = 0  # columns of the prompt; 0 while it may still grow
        self.prompt_slots = 0  # slots that the prompt has kept
        self.decided: npt.NDArray[np.int64] | None = None  # the budget of every sequence
        self.ran: list[str] = []  # what chose the positions of every sequence
        self._columns: torch.Tensor | None = None  # (batch, kv_heads, prompt_slots), int32; None: the prompt is whole
        self._slot_valid: torch.Tensor | None = None  # (batch, prompt_slots), bool; None: all
        self._mask: torch.Tensor | None = None  # the model's 2-D mask as last seen; None: all tokens
        self._queries: torch.Tensor | None = None  # the last queries of a prompt that comes in chunks
        self._all_queries: torch.Tensor | None = None  # of the prompt, while positions are chosen
        self._weights: torch.Tensor | None = None  # of values, from the division of the total to the choice
        self._scoring: Scoring | None = None
        self._before: list[PromptQueries] = []  # of every sequence, while the prompt is read and where it is wanted
        self._given: torch.Tensor | None = None  # (batch, kv_heads, n): scores that come from elsewhere
        self._attention: weakref.ref[torch.nn.Module] | None = None  # the module whose attention this layer serves
        self._holder: Holder | None = None
        self._ragged: RaggedRows | None = None  # in place of the buffers, where heads hold different numbers

    # ---- what transformers asks of a layer ----

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Note the device and the dtype. Buffers come with the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.value_dtype = self.dtype if value_states is None else value_states.dtype  # autocast may leave them apart
        self.is_initialized = True

    @not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new keys and values, ``(batch, kv_heads, new, head_dim)``, and return what attention has to read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_incoming(key_states, value_states)
        new = key_states.shape[-2]
        if self.seen and not self.prompt and new == 1:  # the first decode step after a prompt in chunks
            self._end_or_divide()
        keys, values = key_states, value_states
        self._incoming = (key_states.detach(), value_states.detach())
        if self._ragged is not None and self._holder is None:
            self._ragged.append(*self._incoming)
            self._incoming = None
            self.length += new
            self._show()  # growing has made new buffers
        elif self.seen and self._holder is None:
            self._append(*self._incoming)
            self._incoming = None
            keys, values = self.keys, self.values
        self.seen += new
        self.awaits_attention = True
        keys = keys.view(keys.shape)  # a tensor of our own to carry the mark
        setattr(keys, LAYER_MARK, self)
        return keys, values

    @not_compiled
    def get_seq_length(self) -> int:
        """Return how many tokens have been seen: the position of the next one, whatever was evicted."""
        return self.seen

    @not_compiled
    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Return the length and the offset of a mask. The offset says that this layer makes its own."""
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.length + new, OwnMask(self.seen - self.length)

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.3

    def reset(self) -> None:
        """Forget everything. The next prompt may have another batch size."""
        self._clear()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted positions cannot be brought back, so a compressed layer cannot go back in time."""
        raise NotImplementedError(
            "a compressed cache cannot be cropped: evicted positions are gone. Assisted and prompt-lookup decoding "
            "need a cache that can; use them with DynamicCache, or keep a copy() of the cache from before"
        )

    def offload(self) -> None:
        """Refused: layers stay on their device."""
        raise NotImplementedError("a compressed cache does not offload: its layers stay on the model's device")

    prefetch = offload

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence ``i`` what sequence ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        if self._batch:
            self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices`, in that order. One may come more than once."""
        if not self._batch:
            return
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().squeeze(-1)

        def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, rows.to(tensor.device))

        with torch.no_grad(), torch.inference_mode(False):
            self._key_buffer = pick(self._key_buffer)
            self._value_buffer = pick(self._value_buffer)
            self._bias_buffer = pick(self._bias_buffer)
            self._columns, self._slot_valid = pick(self._columns), pick(self._slot_valid)
            self._queries, self._mask = pick(self._queries), pick(self._mask)
        order = rows.cpu().numpy()
        if self._before:
            self._before = [copy.deepcopy(self._before[row]) for row in order]
        if self.decided is not None:
            self.decided = self.decided[order]
            self.ran = [self.ran[row] for row in order]
        if self._holder is not None:
            self._holder = self._holder.select(order)
        if self._ragged is not None:
            self._ragged = self._ragged.select(rows)
            if self._holder is not None:
                self._holder.lay_out(self._ragged.offsets)
        self._show()

    @property
    def _batch(self) -> int:
        """Sequences that are held. 0 for none."""
        if self._ragged is not None:
            return self._ragged.batch
        return 0 if self._key_buffer is None else int(self._key_buffer.shape[0])

    # ---- attention ----

    def attend(
        self,
        module: torch.nn.Module,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        additive: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do the attention of the step that `update` has just taken in, and compress after the prompt's.

        `module` is the model's attention. `padding` is the model's 2-D mask ``(batch, seen)``, None where all are
        tokens. `additive` that the arithmetic turns masks into sums; `options` what the model passes on to its
        attention function.
        """
        self.awaits_attention = False
        self.budgets.failed_layer = self.model_layer  # unless the end of this is reached
        if not self.prompt:
            self._attention = weakref.ref(module)
        output = self._attend(attend, query, key, value, padding, additive, options)
        self.budgets.failed_layer = None
        return output

    def _attend(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        additive: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        padding = self._check_padding(padding)
        self._mask = padding
        new = query.shape[-2]
        if self._holder is not None:
            scoring = Scoring.from_options(options, query.shape[-1])
            return self._attend_holding(attend, query, padding, scoring, additive)
        if self._ragged is not None:
            later = None if padding is None else padding[:, self.prompt :]
            return self._ragged.attend(attend, query, None if later is None or later.all() else later, additive)
        past = self.length - new if self._incoming is None else 0
        mask = self._own_mask(past, new, padding, additive, key.device)
        if self._bias_buffer is not None:
            mask = with_bias(mask, self._bias_buffer.narrow(2, 0, past + new), query.shape[1] // key.shape[1])
        output = attend(query, key, value, mask)
        if not self.prompt:
            # Under autocast the products would be of half precision, where most scores tie.
            with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
                self._read_prompt(query.detach(), Scoring.from_options(options, query.shape[-1]))
        return output

    def _own_mask(
        self, past: int, new: int, padding: torch.Tensor | None, additive: bool, device: torch.device
    ) -> torch.Tensor | None:
        """Return who may see whom, ``(batch or 1, 1, new, past + new)``. None where causality alone says it.

        The same answer as the stock mask functions while nothing has been evicted, so that the same arithmetic runs.
        """
        visible = self._visible(past, new, padding)
        if new == 1:
            return None if visible is None else visible[:, None, None, :]
        if visible is None and past == 0 and not additive:
            return None  # the arithmetic's own causal case
        causal = torch.ones(new, past + new, dtype=torch.bool, device=device).tril_(past)[None, None]
        return causal if visible is None else causal & visible[:, None, None, :]

    def _visible(self, past: int, new: int, padding: torch.Tensor | None) -> torch.Tensor | None:
        """Return which slots hold a token, ``(batch, past + new)``. None for all."""
        total = past + new
        if self._columns is None and self._slot_valid is None:  # slots are columns
            return None if padding is None else padding[:, :total]
        later = None if padding is None else padding[:, self.prompt : self.prompt + total - self.prompt_slots]
        if later is not None and bool(later.all()):
            later = None
        if later is None and self._slot_valid is None:
            return None
        reference = later if self._slot_valid is None else self._slot_valid
        assert reference is not None
        batch, device = reference.shape[0], reference.device
        kept = self._slot_valid
        if kept is None:
            kept = torch.ones(batch, self.prompt_slots, dtype=torch.bool, device=device)
        if later is None:
            later = torch.ones(batch, total - self.prompt_slots, dtype=torch.bool, device=device)
        return torch.cat([kept, later], dim=1)

    def _attend_holding(
        self,
        attend: Attend,
        query: torch.Tensor,
        padding: torch.Tensor | None,
        scoring: Scoring,
        additive: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend token by token: the policies see every step, so several tokens equal one at a time."""
        assert self._incoming is not None
        assert self._holder is not None
        keys, values = self._incoming
        self._incoming = None
        new = query.shape[-2]
        if new == 1:
            output, row = self._hold_token(attend, query, keys, values, self.seen - 1, padding, scoring, additive)
            outputs, rows = [output], [] if row is None else [row]
        else:
            outputs, rows = [], []
            for token in range(new):
                one_query, key, value = (tensor.narrow(2, token, 1) for tensor in (query, keys, values))
                column = self.seen - new + token
                output, row = self._hold_token(attend, one_query, key, value, column, padding, scoring, additive)
                outputs.append(output)
                rows += [] if row is None else [row]
        if self.length != self._holder.length or self.keys is None:
            self.length = self._holder.length
            self._show()
        most = max((row.shape[-1] for row in rows), default=0)
        rows = [torch.nn.functional.pad(row, (0, most - row.shape[-1])) for row in rows]
        output = outputs[0] if new == 1 else torch.cat(outputs, dim=1)
        return output, torch.cat(rows, dim=2) if rows else None

    def _hold_token(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        column: int,
        padding: torch.Tensor | None,
        scoring: Scoring,
        additive: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the one token at `column`, then show the policies what it attended to.

        Returns the output, and the model's own weights where its arithmetic gives them.
        """
        holder, ragged = self._holder, self._ragged
        key_buffer, value_buffer = self._key_buffer, self._value_buffer
        if ragged is not None:
            key_buffer, value_buffer = ragged.keys, ragged.values
        assert holder is not None
        assert key_buffer is not None
        assert value_buffer is not None
        are_tokens = None if padding is None else padding[:, column].cpu().numpy()
        with torch.no_grad():
            held, held_values = holder.place(key_buffer, value_buffer, key, value)
            mask = None if ragged is not None else holder.mask(are_tokens, query.device, query.shape[1])
            bias = self._bias_buffer if ragged is None else ragged.bias
            if bias is not None:
                holder.clear_bias(bias)
            if self._bias_buffer is not None:
                narrowed = self._bias_buffer.narrow(2, 0, held.shape[2])
                mask = with_bias(mask, narrowed, query.shape[1] // held.shape[1])
            if query.requires_grad:  # the next token writes into what backward reads
                held, held_values = held.clone(), held_values.clone()
        if ragged is None:
            output, row = attend(query, held, held_values, mask)
        else:
            ragged.use(holder.seen(are_tokens))
            output, row = ragged.attend(attend, query, None, additive)
        if row is not None:
            row = holder.ascending(row.detach())
        weights = None
        if bias is None:  # the native attention knows none
            weights = holder.weigh(key_buffer, query, scoring, self.budgets.selection.reduce, are_tokens)
        if weights is None and ragged is not None:
            held, mask = ragged.padded()[0], holder.mask(are_tokens, query.device, query.shape[1])
            if ragged.bias is not None:
                mask = with_bias(mask, ragged.padded_bias(), query.shape[1] // held.shape[1])
        if weights is None:
            with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
                weights = (
                    scoring.decode_weights(query.detach(), held, mask, self.budgets.selection.reduce).cpu().numpy()
                )
        holder.step([key_buffer, value_buffer, *([] if bias is None else [bias])], column, weights, are_tokens)
        return output, row

    # ---- the prompt ----

    def _read_prompt(self, query: torch.Tensor, scoring: Scoring) -> None:
        """Take in what a forward brought of the prompt. Without chunks the prompt ends with it."""
        self._scoring = scoring
        self._note_queries(query)
        if self.budgets.chunked or self.budgets.by_prompt:
            if self._incoming is not None:
                self._append(*self._incoming)
                self._incoming = None
            last = self._last_queries
            queries = query if self._queries is None else torch.cat([self._queries, query[:, :, -last:]], dim=2)
            self._queries = queries[:, :, -last:].clone()
            if self.budgets.by_prompt:
                self.budgets.waiting[self.index] = self
                if not self.budgets.chunked and self.index == self.budgets.num_layers - 1:
                    self.budgets.end_prompts()
            return
        self._queries = query[:, :, -self.budgets.selection.window :]
        self._all_queries = query if self.budgets.selection.second_hop else None
        self.end_prompt()
        self._all_queries = None

    @property
    def _last_queries(self) -> int:
        """How many of a prompt's last queries are looked at: the window's, and those that are judged."""
        return self.budgets.selection.window + (JUDGED if self.budgets.by_prompt else 0)

    def _note_queries(self, query: torch.Tensor) -> None:
        """Remember what scores and merging need of the prompt's queries before rotation, of each sequence apart."""
        wants_moments = self.budgets.selection.score in ("expected", "mixed")
        if not wants_moments and self.budgets.merge not in ("fitted", "macro"):
            return
        module = None if self._attention is None else self._attention()
        layout = None if self._facts is None else self._facts.layers[self.model_layer].layout
        batch, new = query.shape[0], query.shape[2]
        rotations = [
            None if module is None or layout is None else rotation_of(module, row, layout, new) for row in range(batch)
        ]
        if any(rotation is None for rotation in rotations):
            if wants_moments:
                raise ValueError(
                    f"layer {self.model_layer}: was not told the rotation of its {new} positions, which the score "
                    f"{self.budgets.selection.score!r} needs"
                )
            return  # the window's queries alone
        if not self._before:
            assert self._incoming is not None or self._key_buffer is not None
            heads = self._heads
            sample = self.budgets.merge == "fitted"
            self._before = [PromptQueries(heads, moments=wants_moments, sample=sample) for _ in range(batch)]
        for row, (rotation, before) in enumerate(zip(rotations, self._before, strict=True)):
            assert rotation is not None
            if self._mask is None:
                before.add(query[row], rotation)
                continue
            columns = self._mask[row, self.seen - new : self.seen].nonzero().squeeze(-1)
            before.add(query[row][:, columns], rotation.part(columns))

    @property
    def _heads(self) -> int:
        """KV heads of the prompt that is being read."""
        keys = self._key_buffer if self._incoming is None else self._incoming[0]
        assert keys is not None
        return int(keys.shape[1])

    def _end_or_divide(self) -> None:
        """End the prompt, where the prompts of all layers divide the total: of all of them."""
        if self.budgets.waiting:
            self.budgets.end_prompts()
        else:
            self.end_prompt()

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the prompt that is being read."""
        if self._incoming is not None:
            return self._incoming
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    @property
    def kv_heads(self) -> int:
        """KV heads of the prompt that is being read."""
        return int(self.held()[0].shape[1])

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of every sequence of the prompt that is being read, padding not counted."""
        if self._mask is None:
            return [self.seen] * int(self.held()[0].shape[0])
        lengths: list[int] = self._mask[:, : self.seen].sum(dim=1).tolist()
        if 0 in lengths:
            raise ValueError(f"attention_mask: sequence {lengths.index(0)} is all padding")
        return lengths

    def measure(self) -> None:
        """Let the budgets take note of what a position of this layer costs."""
        self.budgets.measure(self.model_layer, *self.held())

    def prompt_losses(self) -> list[tuple[list[int], torch.Tensor]]:
        """Return what every KV head would lose of its output at some budgets, one grid and curve for each sequence.

        The prompt's last positions are judged, and those before them choose. A curve is ``(kv_heads, points)``. A grid
        of one point: the sequence is too short to tell.
        """
        assert self._queries is not None
        assert self._scoring is not None
        keys, values = self.held()
        rule = self.budgets.selection
        width = self._queries.shape[1] // self.kv_heads * values.shape[-1]
        products = projection_products(self._projection(), self.kv_heads, width)
        weights = self._weights = self._value_weights(values)
        curves = []
        for row, length in enumerate(self.prompt_lengths):
            before = length - JUDGED
            grid = budget_grid(rule.always_kept + 1, max(before, 1))
            if before <= rule.always_kept + 1:
                curves.append(([length], torch.zeros(self.kv_heads, 1)))
                continue
            where = self._token_columns(row, self.seen, scored=True)
            whole = self._prompt_of(row, where, keys, values, weights)
            first = Prompt(
                whole.keys[:, :before],
                whole.values[:, :before],
                self._queries[row][:, -JUDGED - min(rule.window, before) : -JUDGED],
                self._scoring,
                None if whole.weights is None else whole.weights[:, :before],
                before=whole.before,
            )
            differences = output_differences(
                self._queries[row][:, -JUDGED:],
                (whole.keys[:, before:], whole.values[:, before:]),
                (first.keys, first.values),
                rank_order(first, rule, grid),
                grid,
                self._scoring,
            )
            curves.append((grid, output_errors(differences, products).mean(dim=-1)))
        return curves

    def end_prompt(self) -> None:
        """Choose what to keep of the prompt, and free the rest."""
        keys, values = self.held()
        lengths = self.prompt_lengths
        self._incoming = None
        columns = self.seen
        batch = keys.shape[0]
        self.budgets.measure(self.model_layer, keys, values)
        self.budgets.check_heads(self.model_layer, keys.shape[1])
        self.decided = np.array(
            [self.budgets.decide(length, batch, row)[self.index] for row, length in enumerate(lengths)], np.int64
        )
        tokens = np.array(lengths) if self.decided.ndim == 1 else np.array(lengths)[:, None]
        kept = np.minimum(self.decided, tokens)
        self.prompt = columns
        hold = self.budgets.hold
        capacity = int(self.decided.max()) + 1 if hold else 0
        seeds: list[Any] | None = [] if hold else None
        if not hold and (kept == tokens).all():  # nothing to evict
            if self._key_buffer is None:
                self._append(keys, values)
            self.prompt_slots = columns
            self.ran = ["nothing evicted"] * batch
        else:
            self.ran = []
            chosen: list[Any] = []
            merged: list[Any] = []
            adakv = self.budgets.adakv
            apart = adakv or self.decided.ndim == 2  # every head has columns of its own
            if adakv:
                self.decided, kept = (np.repeat(one[:, None], keys.shape[1], axis=1) for one in (self.decided, kept))
            weights = self._value_weights(values) if self._weights is None else self._weights
            for row in range(batch):
                where = self._token_columns(row, columns, hold or bool((kept[row] < lengths[row]).any()))
                try:
                    prompt = self._prompt_of(row, where, keys, values, weights)
                    picked, method, seed = choose(
                        prompt, kept[row] if apart and not adakv else int(kept[row].max()), self.budgets, seed=hold
                    )
                except ValueError as error:  # attention that is not finite
                    raise ValueError(
                        f"layer {self.model_layer}: positions of sequence {row} cannot be ranked by the attention to "
                        f"them: {error}"
                    ) from error
                merged.append(self._merge_rows(prompt, picked))
                if apart:
                    picked = [columns_of if where is None else where[columns_of] for columns_of in picked]
                    counts = [len(columns_of) for columns_of in picked]
                    if counts != kept[row].tolist():  # AdaKV has divided the layer's positions
                        kept[row] = self.decided[row] = counts
                elif where is not None:
                    picked = where[picked]
                chosen.append(picked)
                self.ran.append(method)
                if seeds is not None:
                    seeds.append(seed)
            if not apart:
                self._gather(keys, values, chosen, kept, capacity)
            else:
                self._ragged = RaggedRows(keys, values, chosen, self.decided + 1 if hold else None)
                self._key_buffer = self._value_buffer = None
                self.length = int(kept.max())
            if any(rows is not None for rows in merged):
                self._put_merged(merged)
        if hold:
            assert seeds is not None
            columns_held = self._columns if self._ragged is None else torch.from_numpy(self._ragged.held(columns))
            assert columns_held is not None
            self._holder = Holder(self.budgets, self.decided, columns_held, kept, seeds)
            self._columns = self._slot_valid = None
            if self._ragged is not None:
                self._ragged.columns = []  # the holder knows them
                self._holder.lay_out(self._ragged.offsets)
        self._queries = self._weights = self._given = self._attention = None
        self._before = []
        self._show()

    def fill(self, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor) -> None:
        """Take in a whole prompt, ``(batch, kv_heads, n, head_dim)``, and choose by scores ``(batch, kv_heads, n)``."""
        self.lazy_initialization(keys, values)
        self._incoming = (keys.detach(), values.detach())
        self.seen = keys.shape[2]
        self._given = scores
        with torch.no_grad():
            self.end_prompt()

    def take(self, held: BudgetedLayer) -> None:
        """Take in the prompt that another layer holds whole, as if this one had read it. Nothing is chosen yet."""
        assert held.keys is not None
        assert held.values is not None
        assert held._queries is not None
        self.lazy_initialization(held.keys, held.values)
        self._incoming = (held.keys, held.values)
        self.seen = held.seen
        self._mask, self._scoring, self._attention = held._mask, held._scoring, held._attention
        self._queries = held._queries[:, :, -self._last_queries :]
        self._before = held._before

    def ranked(self, grid: list[int]) -> torch.Tensor:
        """Return the positions of the one prompt that was taken in, as :func:`rank_order` does, ``(kv_heads, n)``."""
        keys, values = self.held()
        prompt = self._prompt_of(0, None, keys, values, self._value_weights(values))
        return rank_order(prompt, self.budgets.selection, grid)

    def _value_weights(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return what scores are multiplied by, ``(batch, kv_heads, n)``. None: nothing."""
        if not self.budgets.selection.value_weight:
            return None
        assert self._queries is not None
        return value_weights(self._projection(), values, self._queries.shape[1])

    def _projection(self) -> torch.nn.Module:
        """Return the output projection of this layer's attention."""
        module = None if self._attention is None else self._attention()
        name = None if self._facts is None else self._facts.layers[self.model_layer].projection
        if module is None or name is None:
            raise RuntimeError(f"layer {self.model_layer}: its output projection is gone; the model was deleted")
        return module.get_submodule(name)

    def _prompt_of(
        self,
        row: int,
        where: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> Prompt:
        """Return one sequence's prompt, of which `where` are the columns. None: all."""
        columns = slice(None) if where is None else where
        one = keys[row][:, columns]
        query = None
        if self._queries is not None:
            query = self._queries[row][:, -min(self.budgets.selection.window, one.shape[1]) :]
        return Prompt(
            one,
            values[row][:, columns],
            query,
            self._scoring,
            None if weights is None else weights[row][:, columns],
            None if self._given is None else self._given[row][:, columns],
            self._before[row] if self._before else None,
            None if self._all_queries is None else self._all_queries[row][:, columns],
        )

    def _merge_rows(self, prompt: Prompt, picked: Any) -> tuple[Any, Any, Any] | None:
        """Return the kept rows of one sequence with the others merged into them. None: they stay as they are."""
        if self.budgets.merge is None:
            return None
        protect = self.budgets.selection.protected
        try:
            return merged_rows(prompt, picked, method=self.budgets.merge, protect=protect)
        except ValueError as error:
            raise ValueError(f"layer {self.model_layer}: {error}") from error

    def _put_merged(self, merged: list[Any]) -> None:
        """Put merged rows in the place of the rows that were copied, and their biases beside them."""
        with torch.inference_mode(False):
            if self._ragged is not None:
                self._ragged.put_merged(merged)
                return
            assert self._key_buffer is not None
            assert self._value_buffer is not None
            shape = self._key_buffer.shape[:3]
            self._bias_buffer = torch.zeros(shape, dtype=torch.float32, device=self._key_buffer.device)
            for row, rows in enumerate(merged):
                for buffer, heads in zip(
                    (self._key_buffer, self._value_buffer, self._bias_buffer), rows or (), strict=False
                ):
                    for head, one in enumerate(heads):
                        buffer[row, head, : len(one)] = one

    def _token_columns(self, row: int, columns: int, scored: bool) -> torch.Tensor | None:
        """Return the columns of a sequence that are tokens. None for all.

        Where positions are `scored` the window's queries have to be the sequence's last tokens, one after another, up
        to the last column.
        """
        if self._mask is None:
            return None
        mask = self._mask[row, :columns]
        where = mask.nonzero().squeeze(-1)
        window = self._last_queries
        if scored and not bool(mask[-min(window, len(where)) :].all()):
            raise ValueError(
                f"attention_mask: sequence {row} has padding among its last {window} columns, where the queries that "
                "choose the positions are; pad on the left"
            )
        return where

    def _gather(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        chosen: list[torch.Tensor],
        kept: npt.NDArray[np.int64],
        capacity: int,
    ) -> None:
        """Copy the chosen columns into new buffers. The old keys and values are no longer referenced after it."""
        batch, kv_heads = keys.shape[:2]
        slots = int(kept.max())
        capacity = capacity or slots + ROOM
        with torch.inference_mode(False):
            even = bool((kept == slots).all())
            make = torch.empty if even else torch.zeros  # 0 * NaN is NaN: slots without a token must be numbers
            key_buffer, value_buffer = (
                make(batch, kv_heads, capacity, whole.shape[-1], dtype=whole.dtype, device=whole.device)
                for whole in (keys, values)
            )
            held = torch.zeros(batch, kv_heads, slots, dtype=torch.int32, device=keys.device)
            for row, columns in enumerate(chosen):
                count = columns.shape[-1]
                held[row, :, :count] = columns
                for head in range(kv_heads):  # rows copied whole: several times faster than an element-wise gather
                    torch.index_select(keys[row, head], 0, columns[head], out=key_buffer[row, head, :count])
                    torch.index_select(values[row, head], 0, columns[head], out=value_buffer[row, head, :count])
            self._key_buffer, self._value_buffer = key_buffer, value_buffer
            self._columns = held
            self._slot_valid = None
            if not even:
                counts = torch.as_tensor(kept, device=keys.device)
                self._slot_valid = torch.arange(slots, device=keys.device) < counts[:, None]
        self.length = self.prompt_slots = slots

    # ---- storage ----

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy new keys and values behind the old ones, into a larger buffer where there is no room."""
        end = self.length + keys.shape[-2]
        if self._key_buffer is None or self._key_buffer.shape[2] < end:
            with torch.no_grad(), torch.inference_mode(False):
                capacity = end + max(ROOM, end // 8)
                self._key_buffer = self._grown(self._key_buffer, keys, capacity)
                self._value_buffer = self._grown(self._value_buffer, values, capacity)
                if self._bias_buffer is not None:
                    more = capacity - self._bias_buffer.shape[2]
                    self._bias_buffer = torch.nn.functional.pad(self._bias_buffer, (0, more))
        assert self._value_buffer is not None
        # Neither of them has a gradient. narrow() costs half of what a slice does, at every layer of every token.
        self._key_buffer.narrow(2, self.length, end - self.length).copy_(keys)
        self._value_buffer.narrow(2, self.length, end - self.length).copy_(values)
        self.length = end
        self._show()

    def _grown(self, buffer: torch.Tensor | None, like: torch.Tensor, capacity: int) -> torch.Tensor:
        grown = like.new_empty((*like.shape[:2], capacity, like.shape[-1]))
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def _show(self) -> None:
        """Let `keys` and `values` be the slots in use. Of ragged rows, ``(batch, rows, head_dim)``, all."""
        if self._ragged is not None:
            self.keys, self.values = self._ragged.keys, self._ragged.values
        if self._key_buffer is not None and self._value_buffer is not None:
            self.keys = self._key_buffer.narrow(2, 0, self.length)
            self.values = self._value_buffer.narrow(2, 0, self.length)

    def copy(self, budgets: Budgets) -> BudgetedLayer:
        """Return an independent layer with the same content."""
        twin = BudgetedLayer(budgets, self.index, self.model_layer, self._facts)
        if self.awaits_attention:
            raise RuntimeError("a cache cannot be copied in the middle of a forward")
        for name, value in vars(self).items():
            if name in ("budgets", "keys", "values"):
                continue
            if isinstance(value, (torch.Tensor, np.ndarray, Holder, RaggedRows)):
                value = value.clone() if isinstance(value, torch.Tensor) else value.copy()
            setattr(twin, name, value)
        if twin._holder is not None and twin._ragged is not None:
            twin._holder.lay_out(twin._ragged.offsets)
        if self.index in self.budgets.waiting:
            budgets.waiting[self.index] = twin
        twin.ran = list(self.ran)
        twin._before = copy.deepcopy(self._before)
        twin._show()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetedLayer:
        return self.copy(self.budgets)

    # ---- what is held ----

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor and policy that this layer holds, spare room included."""
        tensors = [self._key_buffer, self._value_buffer, self._bias_buffer, self._columns, self._slot_valid]
        tensors += [self._queries, self._all_queries, self._weights, self._given]
        before = sum(queries.nbytes for queries in self._before)
        held: int = before + storage_bytes(tensor for tensor in tensors if tensor is not None)
        held += 0 if self._mask is None else self._mask.nbytes  # maybe a part of the model's own
        held += 0 if self._ragged is None else self._ragged.nbytes
        return held + (self._holder.nbytes if self._holder is not None else 0)

    @property
    def nbytes_full(self) -> int:
        """Bytes that the keys and values of every token seen would take."""
        if self._ragged is not None:
            batch, kv_heads = self._ragged.lengths.shape
            buffers = [self._ragged.keys, self._ragged.values]
        elif self._key_buffer is None or self._value_buffer is None:
            return 0
        else:
            batch, kv_heads = self._key_buffer.shape[:2]
            buffers = [self._key_buffer, self._value_buffer]
        width = sum(buffer.shape[-1] * buffer.element_size() for buffer in buffers)
        return int(batch * kv_heads * self.seen * width)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that each sequence has seen, padding not counted."""
        batch = self._batch
        if self._mask is None:
            return np.full(batch, self.seen, np.int64)
        missing = self.seen - self._mask.shape[1]
        return self._mask.sum(dim=1).cpu().numpy() + missing  # type: ignore[no-any-return, unused-ignore]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Tokens that every KV head of every sequence holds, ``(batch, kv_heads)``.

        Not the slots in use: those of a shorter sequence may hold no token.
        """
        counts: npt.NDArray[np.int64] = (self.columns() >= 0).sum(axis=-1)
        return counts

    @property
    def head_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens that every KV head holds, ``(kv_heads,)``: of the longest sequence."""
        longest: npt.NDArray[np.int64] = self.counts.max(axis=0, initial=0)
        return longest

    def columns(self) -> npt.NDArray[np.int64]:
        """Return the kept columns, ``(batch, kv_heads, kept)``, ascending, -1 fills up shorter sequences at the end."""
        if not self._batch:
            return np.empty((0, 0, 0), np.int64)
        if self._holder is not None:
            return self._holder.columns()
        if self._ragged is not None:
            return self._only_tokens(self._ragged.held(self.prompt))
        assert self._key_buffer is not None
        batch, kv_heads = self._key_buffer.shape[:2]
        if self._columns is None:
            slots = np.broadcast_to(np.arange(self.length), (batch, kv_heads, self.length)).astype(np.int64)
        else:
            later = np.arange(self.prompt, self.prompt + self.length - self.prompt_slots)
            kept = self._columns.cpu().numpy().astype(np.int64)
            if self._slot_valid is not None:
                kept[~np.broadcast_to(self._slot_valid.cpu().numpy()[:, None], kept.shape)] = -1
            slots = np.concatenate([kept, np.broadcast_to(later, (batch, kv_heads, len(later)))], axis=-1)
        return self._only_tokens(slots)

    def _only_tokens(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the columns that are tokens, ascending, -1 at the end. -1 may stand anywhere before."""
        if self._mask is not None:
            mask = self._mask.cpu().numpy()
            row = np.arange(len(slots))[:, None, None]
            slots = np.where((slots >= 0) & mask[row, np.maximum(slots, 0)], slots, -1)
        # Ascending, the fill at the end.
        return np.where((order := np.sort(np.where(slots < 0, 2**62, slots), axis=-1)) == 2**62, -1, order)

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the kept positions: columns counted without the sequence's padding, as rotary phases count them."""
        columns = self.columns()
        if self._mask is None or columns.size == 0:
            return columns
        index = self._mask.cpu().numpy().cumsum(axis=1) - 1
        row = np.arange(len(columns))[:, None, None]
        return np.where(columns < 0, -1, index[row, np.maximum(columns, 0)])

    # ---- checks ----

    def _check_incoming(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.device != self.device or values.device != self.device:
            raise ValueError(
                f"layer {self.model_layer}: keys on {keys.device} and values on {values.device} for a cache on "
                f"{self.device}; a layer has to stay on one device: move the model, then cache.reset()"
            )
        if (keys.dtype, values.dtype) != (self.dtype, self.value_dtype):
            raise ValueError(
                f"layer {self.model_layer}: keys of {keys.dtype} and values of {values.dtype} for a cache of "
                f"{self.dtype} and {self.value_dtype}; use one dtype, with or without autocast "
                "throughout, or cache.reset() after changing it"
            )
        batch = self._batch
        if not batch:
            return
        if keys.shape[0] != batch:
            raise ValueError(
                f"this cache holds {batch} sequence{'s' if batch != 1 else ''} and meets a batch of {keys.shape[0]}: "
                "cache.reset() for a new prompt, cache.batch_repeat_interleave(n) to continue each n times"
            )
        if self._ragged is not None:
            heads, size = self._ragged.kv_heads, self._ragged.keys.shape[-1]
        else:
            assert self._key_buffer is not None
            heads, size = self._key_buffer.shape[1], self._key_buffer.shape[3]
        if keys.shape[1] != heads or keys.shape[3] != size:
            raise ValueError(
                f"layer {self.model_layer}: keys of shape {tuple(keys.shape)} for a cache with "
                f"{heads} heads of size {size}: is it another model's cache?"
            )

    def _check_padding(self, padding: torch.Tensor | None) -> torch.Tensor | None:
        if padding is None:
            if self._mask is None:
                return None
            # Padding stays padding, also where a later call brings no mask or one that has none left to show.
            later = self.seen - self._mask.shape[1]
            return torch.nn.functional.pad(self._mask, (0, later), value=True)
        if padding.dim() == LOCAL_WINDOW_DIMS:
            raise ValueError(
                f"layer {self.model_layer}: this model asks for a local window on a layer that its config calls full "
                "attention, which a compressed cache cannot serve"
            )
        if padding.dim() != 2:
            raise ValueError(
                f"attention_mask: has shape {tuple(padding.shape)}; with a compressed cache pass the 2-D padding mask "
                "(batch, tokens seen), because layers of different length need masks of their own"
            )
        return padding[:, : self.seen].to(self.device, torch.bool)
