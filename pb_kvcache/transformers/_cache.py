"""The cache itself: which layers are compressed, and what its user asks of it."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from .._curves import CurveSet
from .._selection import DEFAULT, Default, Selection, rule_of
from ._attention import NAMES, not_compiled, plain_implementation
from ._budgets import Budgets
from ._bytes import storage_bytes
from ._layer import BudgetedLayer
from ._probe import Facts, facts_of
from ._ranks import Ranks
from ._report import CacheLayerReport, CacheReport, CacheSequenceReport

if TYPE_CHECKING:
    from .._head_plan import HeadPlan
    from .._plan import LayerPlan

_NOT_USED = (
    "the model's attention never reached its compressed cache: call pb_kvcache.transformers.use(model) before the "
    "first step, then cache.reset(). Where that was done, the model changes keys between its cache and its attention, "
    "and cannot be served"
)


class BudgetedCache(Cache):  # type: ignore[misc, unused-ignore]
    """A cache for transformers models in which every layer keeps what its budget says of a prompt.

    The prompt is read with full attention. Then each KV head of each layer keeps the last `window` positions and those
    that the window's queries attended to most, as many as the layer's budget says. The rest is freed, layer by layer
    while the prompt is read. Positions are never renumbered.

    Layers with a sliding window, and layers without keys and values, stay what they are in ``DynamicCache``. A prompt
    that fits its budgets is not touched, and then the model computes the same as with ``DynamicCache``, bit for bit.

    Parameters
    ----------
    config
        ``model.config``, of a model that :func:`use` was called with.
    budget
        Positions kept per layer on average, the window included. At least ``window + 1``. 512 where none of `plan`,
        `memory` and `fraction` is given.
    ratio
        The first layer's share over the last one's, any number above 0. 1 is uniform, below 1 the inverted
        pyramid. Where neither it nor `beta` nor `weights` is given, it is 1, and 4 for :class:`PyramidKVCache`.
    beta
        The paper's parameter instead: the last layer keeps ``budget / beta``.
    weights
        A curve of one's own instead: one positive number per full-attention layer.
    plan
        What every full-attention layer keeps: from :func:`pb_kvcache.plan`, or a file that
        :func:`pb_kvcache.save_plan` wrote. A :class:`pb_kvcache.HeadPlan` says what every KV head of every such layer
        keeps, of all ranks of a tensor-parallel model. Then each head has rows of its own number in memory. With
        ``decode="grow"`` what a head cannot use of a short prompt goes to the others.
    curves
        Instead of a plan, what every KV head loses at each budget: a :class:`pb_kvcache.CurveSet` or its file. It
        divides what `budget`, `memory` or `fraction` allow, anew for each length of a prompt: what a head cannot use of
        a short one goes where the curves gain most. A budget is then positions per KV head on average. Where the curves
        say which rule they were measured under and no other is asked for, that one chooses.
    memory
        Bytes that the kept keys and values of the whole batch may take after the prompt, on all ranks together.
    fraction
        Share of the prompt that is kept, above 0 and at most 1, and at least one position more than is always kept.
    selection
        The rule that chooses: a :class:`pb_kvcache.Selection` or the name of one, ``"snapkv"`` (the default),
        ``"output"`` or ``"mixed"``. Or some of its fields one by one:
    window
        Last queries of the prompt that choose, 32 where nothing is said.
    protect, sinks
        Last and first positions that are always kept. None for `protect`: those of the window.
    kernel, pooling, edge
        Neighbours, odd, over which scores are pooled, and how: ``"max"`` or ``"avg"``, and whether an average divides
        at the ends by the neighbours that there are, ``"count"``, or as if zeros lay beyond, ``"kernel"``.
    reduce
        How the query heads of a KV head become one score: ``"mean"``, ``"max"`` or ``"sum"``.
    decode
        ``"grow"`` keeps every token after the prompt. ``"hold"`` keeps each layer at its budget: one native
        :class:`pb_kvcache.SnapKV` per KV head and sequence sees the attention of every step and drops one position
        for each new one. A call with several tokens then runs them one by one through each layer's attention.
    compress
        ``"prompt"``: the first call brings the whole prompt, and each layer is compressed as soon as its attention is
        done. ``"decode"``: the prompt comes in several calls (``prefill_chunk_size`` of ``generate``), and layers are
        compressed at the first call with a single token. Until then everything is held.

    heads
        None: all KV heads of a layer keep the same. ``"adakv"``: the layer's positions go to the heads whose scores are
        highest (arXiv 2407.11550), for each sequence. The layer's total stays what it is. See
        :func:`pb_kvcache.adakv_budgets`.
    alpha
        The part of the budget, the window not counted, that every head is sure of with ``"adakv"``.
    allocate
        None: as the curve, a plan or curves say. ``"prompt"``: each prompt divides the total over the heads of all
        layers by what its own last 32 positions would lose of every layer's output. A budget is then positions per KV
        head on average. The prompt is held whole in every layer until the prefill ends.
    merge
        Whether the rows that stay take in those that leave: None, or a method of :func:`pb_kvcache.merge`,
        ``"nearest"``, ``"fitted"`` or ``"macro"``. A head merges where 8 of its rows or more may take others in. Every
        row then has a bias of 4 bytes, which attention adds to its logit.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule above, or a model that cannot be served. The message names the fix.

    Notes
    -----
    For inference: gradients do not flow into what is held. Which positions are kept depends on the end of the prompt.
    A second question in the same conversation finds what the first one left (compress without the question, or start
    from a :meth:`copy` of an uncompressed cache, where that matters).
    """

    #: The first layer's share over the last one's where nothing else is asked for.
    _default_ratio = 1.0

    def __init__(
        self,
        config: Any,
        budget: int | None = None,
        ratio: float | None = None,
        beta: float | None = None,
        plan: LayerPlan | HeadPlan | str | os.PathLike[str] | None = None,
        *,
        curves: CurveSet | str | os.PathLike[str] | None = None,
        weights: Any = None,
        memory: int | None = None,
        fraction: float | None = None,
        selection: Selection | str | None = None,
        window: int | None = None,
        protect: int | None = None,
        sinks: int = DEFAULT.sinks,
        kernel: int = DEFAULT.kernel,
        pooling: str = DEFAULT.pooling,
        edge: str = DEFAULT.edge,
        reduce: str = DEFAULT.reduce,
        decode: str = "grow",
        compress: str = "prompt",
        heads: str | None = None,
        alpha: float = 0.2,
        allocate: str | None = None,
        merge: str | None = None,
    ) -> None:
        if isinstance(config, PreTrainedModel):
            raise TypeError("config: is a model; pass model.config")
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config: must be a model's config, not {type(config).__name__}")
        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
            raise ValueError(
                f"config: is of an encoder-decoder model; {type(self).__name__} serves decoder-only models"
            )
        if (getattr(text, "num_kv_shared_layers", None) or 0) > 0 or "reuse" in (
            getattr(text, "kv_sharing_modes", None) or ()
        ):
            raise ValueError(
                "config: some layers of this model read the keys of others, which compression would change under them; "
                "use DynamicCache"
            )
        layers = list(DynamicCache(config=config).layers)
        if curves is not None:
            curves = CurveSet.of(curves)
        rule = rule_of(
            _rule_of_curves(curves, selection, window, protect, sinks, kernel, pooling, edge, reduce),
            window=window,
            protect=protect,
            sinks=sinks,
            kernel=kernel,
            pooling=pooling,
            edge=edge,
            reduce=reduce,
        )
        facts = facts_of(config)
        self.compressed_layers = tuple(
            index
            for index, layer in enumerate(layers)
            if type(layer) is DynamicLayer and (facts is None or index in facts.layers)
        )
        self._config = config
        self._tried = facts is not None
        self._budgets = Budgets(
            len(self.compressed_layers),
            ranks=Ranks() if facts is None else facts.ranks,
            budget=budget,
            default_ratio=self._default_ratio,
            ratio=ratio,
            beta=beta,
            weights=weights,
            layer_plan=plan,
            curves=curves,
            memory=memory,
            fraction=fraction,
            selection=rule,
            decode=decode,
            compress=compress,
            heads=heads,
            alpha=alpha,
            allocate=allocate,
            merge=merge,
        )
        if rule.score == "repeat":
            raise ValueError(
                "selection: score = 'repeat': no prefill makes it; repetition_scores does, and BudgetedCache.filled "
                "takes what it returns"
            )
        if rule.score in ("expected", "mixed"):
            _check_layouts(facts, self.compressed_layers, rule.score)
        if rule.value_weight:
            _check_projections(facts, self.compressed_layers, "selection: weighs values by")
        if self._budgets.by_prompt:
            _check_projections(facts, self.compressed_layers, "allocate: judges what is kept by")
            if rule.second_hop:
                raise ValueError("allocate and second_hop: what a second hop keeps at other budgets is not known")
        for index, layer in enumerate(self.compressed_layers):
            layers[layer] = BudgetedLayer(self._budgets, index, layer, facts)
        super().__init__(layers=layers)
        self._last: BudgetedLayer | None = None
        self._seen = 0  # tokens that every layer has seen, or is about to
        self._scoring = False  # whether what follows are continuations to score, which are no chunks of a prompt
        #: The tokens that are held, ``(batch, seen)``, where ``generate`` told. For its next call to compare.
        self.text: torch.Tensor | None = None

    @classmethod
    def filled(cls, config: Any, context: Cache, scores: Any, **options: Any) -> BudgetedCache:
        """Return a cache that holds what scores choose of a context that another cache holds whole.

        For contexts whose question is not known yet: :func:`repetition_scores` makes the scores. The selection's
        pooling, protected positions and sinks hold as always; its own score is not made.

        Parameters
        ----------
        config
            The model's.
        context
            A ``DynamicCache`` of the model, that holds the context in every layer. It is left as it is.
        scores
            For each layer of the model, ``(kv_heads, n)`` or ``(batch, kv_heads, n)`` float32, finite. None for a layer
            that is not compressed.
        **options
            As for the class. `compress` and `merge` and a selection that weighs values need the prompt's forward.

        Raises
        ------
        TypeError, ValueError
            As for the class, and where contexts and scores do not fit it.
        """
        for name, plain in (("compress", "prompt"), ("merge", None), ("allocate", None)):
            if options.get(name) not in (None, plain):
                raise ValueError(f"{name}: needs the prompt's forward, which a cache that is filled does not see")
        rule = options.get("selection")
        if isinstance(rule, Selection) and rule.score != "window":  # what no prefill makes is given here
            options["selection"] = dataclasses.replace(rule, score="window")
        cache = cls(config, **options)
        if isinstance(rule, Selection):
            cache._budgets.selection = rule
        if cache._budgets.selection.value_weight:
            raise ValueError("selection: weighs values, which needs the prompt's forward; multiply the scores instead")
        if cache._budgets.selection.second_hop:
            raise ValueError("second_hop: needs the prompt's queries, which a cache that is filled does not see")
        if not isinstance(context, Cache):
            raise TypeError(f"context: must be a cache of transformers, not {type(context).__name__}")
        if len(context.layers) != len(cache.layers) or len(scores) != len(cache.layers):
            raise ValueError(
                f"context and scores: have {len(context.layers)} and {len(scores)} layers, the model "
                f"{len(cache.layers)}"
            )
        lengths = set()
        for index, (layer, whole) in enumerate(zip(cache.layers, context.layers, strict=True)):
            if not isinstance(layer, BudgetedLayer):
                cache.layers[index] = copy.deepcopy(whole)
                continue
            given = _checked_scores(scores[index], whole, index)
            lengths.add(given.shape[-1])
            if len(lengths) > 1:
                raise ValueError(f"context: layers hold {sorted(lengths)} positions, must hold the same number")
            layer.fill(whole.keys, whole.values, given)
        cache._seen = lengths.pop() if lengths else int(context.get_seq_length())
        return cache

    # ---- what transformers asks of a cache ----

    @not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one layer's new keys and values.

        Raises
        ------
        RuntimeError
            :func:`use` was not called with the model, or a step before failed.
        ValueError
            Another batch size, dtype, device or model than before.
        """
        if self._last is not None and self._last.awaits_attention:
            raise RuntimeError(_NOT_USED)
        if self._budgets.failed_layer is not None:
            raise RuntimeError(
                f"a step before this one failed in layer {self._budgets.failed_layer}, so that the layers have seen "
                "different tokens: cache.reset()"
            )
        if layer_idx >= len(self.layers):
            raise ValueError(f"this cache has {len(self.layers)} layers and meets layer {layer_idx}: of another model?")
        layer = self.layers[layer_idx]
        seen = self._agree(layer, layer_idx, key_states.shape[-2])
        if isinstance(layer, BudgetedLayer):
            if not layer.is_initialized:
                stock = plain_implementation(self._config)
                if stock is not None:
                    raise RuntimeError(
                        f"the model's attention is {stock!r}: call pb_kvcache.transformers.use(model) before the first "
                        "step, and make the cache from that model's own config"
                    )
            if layer.index == 0:
                self._check_chunk(layer, key_states.shape[-2])
            if layer.seen and key_states.requires_grad and torch.is_grad_enabled():
                self._warn_of_gradients()
        held = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if isinstance(layer, BudgetedLayer):
            self._last = layer
        self._seen = seen
        return held  # type: ignore[no-any-return, unused-ignore]

    def _agree(self, layer: Any, layer_idx: int, new: int) -> int:
        """Return how many tokens every layer has seen after this step. All have to be at the same step."""
        before = _tokens_seen(layer)
        if before is None or before + new == self._seen:  # this layer's part of the step in hand
            return self._seen
        counts = sorted({seen for other in self.layers if (seen := self._counted(other)) is not None})
        if before != self._seen or counts not in ([], [before]):
            raise RuntimeError(
                f"layer {layer_idx}: has seen {before} tokens where the step is at {self._seen} (layers have seen "
                f"{', '.join(map(str, counts))}), because a step before this one failed half-way: cache.reset()"
            )
        return before + new

    def _counted(self, layer: Any) -> int | None:
        """Return the tokens that a layer has seen. None where it counts none, or may be one that text never reaches."""
        seen = _tokens_seen(layer)
        reached = self._tried and isinstance(layer, BudgetedLayer)
        return seen if seen or reached else None

    def _check_chunk(self, layer: BudgetedLayer, new: int) -> None:
        """Warn where the prompt seems to come in chunks, of which only the first would be compressed."""
        follows = layer.seen > 0 and layer.prompt == layer.seen and layer.decided is not None
        if not follows or self._scoring or new < layer.prompt or self._budgets.hold:
            return
        assert layer.decided is not None
        if layer.length < layer.seen or layer.seen + new > self._most_budget(layer.seen + new, len(layer.decided)):
            warnings.warn(
                f"{new} tokens follow the prompt of {layer.prompt} in one call, and none of them will be evicted. If "
                "this is one prompt in chunks, make the cache with compress='decode'",
                UserWarning,
                stacklevel=2,
            )

    def _most_budget(self, length: int, batch: int) -> int:
        return int(self._budgets.decide(length, batch).max(initial=0))

    def _warn_of_gradients(self) -> None:
        if self._budgets.warned_of_gradients:
            return
        self._budgets.warned_of_gradients = True
        warnings.warn(
            "gradients do not flow through what this cache holds: call the model under torch.no_grad(), or train with "
            "DynamicCache or without a cache",
            UserWarning,
            stacklevel=2,
        )

    def reset(self) -> None:
        """Forget everything: the next prompt may have another batch size."""
        # Layers that are not compressed are made anew: some zero what they hold, for this batch size alone.
        for index, fresh in enumerate(DynamicCache(config=self._config).layers):
            if isinstance(self.layers[index], BudgetedLayer):
                self.layers[index].reset()
            else:
                self.layers[index] = fresh
        self._budgets.forget()
        self._last = None
        self._seen = 0
        self.text = None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted positions are gone."""
        BudgetedLayer.crop(None)  # type: ignore[arg-type]

    @property
    def is_croppable(self) -> bool:
        """False: assisted decoding refuses this cache."""
        return False

    def copy(self) -> BudgetedCache:
        """Return an independent cache with the same content: for a prompt that is used more than once."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._budgets = self._budgets.copy()
        twin._last = None
        twin.layers = [
            layer.copy(twin._budgets) if isinstance(layer, BudgetedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetedCache:
        return self.copy()

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Give the keys and values of every layer, ``(batch, kv_heads, held, head_dim)``. None for a layer without.

        Where heads hold different numbers: the layer's buffers, ``(batch, rows, head_dim)``, head after head.
        """
        for layer in self.layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None)

    @property
    def is_initialized(self) -> bool:
        """Whether the cache has seen a token."""
        return self._seen > 0 or any(getattr(layer, "is_initialized", False) for layer in self.layers)

    # ---- what its user asks of it ----

    @property
    def budgets(self) -> npt.NDArray[np.int64]:
        """What every layer may keep of the prompt, shape ``(num_layers,)``, 0 for a layer that is not compressed.

        Before a prompt: for one that is long enough. After it: for this one, the most of any sequence of the batch.
        With a head plan the most of any KV head.
        """
        budgets = np.zeros(len(self.layers), np.int64)
        nominal = None
        for layer in self._compressed():
            if layer.decided is not None:
                budgets[layer.model_layer] = layer.decided.max()
                continue
            nominal = self._budgets.nominal() if nominal is None else nominal
            budgets[layer.model_layer] = nominal[layer.index].max()
        return budgets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Positions that every layer holds per KV head, shape ``(num_layers,)``: of the longest sequence of a batch."""
        lengths = np.zeros(len(self.layers), np.int64)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BudgetedLayer):
                lengths[index] = layer.counts.max(initial=0)
            elif isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.dim() == 4:
                lengths[index] = layer.keys.shape[-2]
        return lengths

    @property
    def head_lengths(self) -> npt.NDArray[np.int64]:
        """Positions that every KV head holds, ``(num_layers, kv_heads)``: of the longest sequence. -1: no such head.

        Layers that are not compressed have -1 throughout.
        """
        held = [layer.head_lengths if isinstance(layer, BudgetedLayer) else None for layer in self.layers]
        heads = max((len(lengths) for lengths in held if lengths is not None), default=0)
        lengths = np.full((len(held), heads), -1, np.int64)
        for index, row in enumerate(held):
            if row is not None:
                lengths[index, : len(row)] = row
        return lengths

    def positions(self, layer: int) -> npt.NDArray[np.int64]:
        """Return the positions that a layer holds, ``(batch, kv_heads, kept)``, ascending.

        Absolute: a token's index in its own sequence, padding not counted, as its rotary phase has it. -1 fills up the
        shorter sequences of a batch, at the end.

        Raises
        ------
        IndexError
            No such layer.
        ValueError
            A layer that is not compressed.
        """
        return self._layer(layer).positions()

    def _layer(self, layer: int) -> BudgetedLayer:
        if not -len(self.layers) <= layer < len(self.layers):
            raise IndexError(f"layer = {layer}: the model has {len(self.layers)}")
        found = self.layers[layer]
        if not isinstance(found, BudgetedLayer):
            raise ValueError(f"layer = {layer}: is not compressed; compressed_layers has the ones that are")
        return found

    def _compressed(self) -> list[BudgetedLayer]:
        return [layer for layer in self.layers if isinstance(layer, BudgetedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that the cache really holds: all tensors of all layers, spare room and policies included."""
        return sum(_nbytes(layer) for layer in self.layers)

    @property
    def nbytes_full(self) -> int:
        """Bytes of the keys and values that ``DynamicCache`` would hold after the same tokens."""
        return sum(
            layer.nbytes_full if isinstance(layer, BudgetedLayer) else _used_nbytes(layer) for layer in self.layers
        )

    def report(self) -> CacheReport:
        """Return what every layer keeps, evicted and holds. ``print(cache.report())`` shows a table."""
        decided = any(layer.decided is not None for layer in self._compressed())
        known = decided or not self._budgets.amount.needs_prompt
        budgets = self.budgets if known else np.zeros(len(self.layers), np.int64)
        rows = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BudgetedLayer):
                sequences = self._sequences(layer)
                rows.append(
                    CacheLayerReport(
                        layer=index,
                        kind=self._kind(layer),
                        budget=int(budgets[index]) if known else None,
                        seen=max((sequence.seen for sequence in sequences), default=0),
                        kept=max((max(sequence.kept) for sequence in sequences), default=0),
                        evicted=max((max(sequence.evicted) for sequence in sequences), default=0),
                        nbytes=layer.nbytes,
                        nbytes_full=layer.nbytes_full,
                        sequences=sequences,
                    )
                )
                continue
            seen = int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
            held = int(self.lengths[index])
            rows.append(
                CacheLayerReport(
                    layer=index,
                    kind=f"not compressed: {type(layer).__name__}",
                    budget=None,
                    seen=seen,
                    kept=held,
                    evicted=seen - held,
                    nbytes=_nbytes(layer),
                    nbytes_full=_used_nbytes(layer),
                    sequences=(),
                )
            )
        name = self._config.get_text_config(decoder=True)._attn_implementation
        plain = next((plain for plain, own in NAMES.items() if own == name), name)
        return CacheReport(f"{type(self).__name__}: {self._budgets.describe()}", str(plain), tuple(rows))

    def _sequences(self, layer: BudgetedLayer) -> tuple[CacheSequenceReport, ...]:
        kept = layer.counts
        return tuple(
            CacheSequenceReport(
                budget=None if layer.decided is None else int(layer.decided[row].max()),
                head_budgets=() if layer.decided is None else _per_head(layer.decided[row], kept.shape[1]),
                seen=int(seen),
                kept=tuple(int(count) for count in kept[row]),
                evicted=tuple(int(seen - count) for count in kept[row]),
                what=layer.ran[row] if layer.decided is not None else "prompt not finished",
            )
            for row, seen in enumerate(layer.tokens)
        )

    def _kind(self, layer: BudgetedLayer) -> str:
        if not layer.seen:
            return "empty"
        if not layer.prompt:
            return "prompt not finished: full"
        after = "held by SnapKV" if self._budgets.hold else "then all kept"
        return f"{', '.join(dict.fromkeys(layer.ran))}, {after}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self._budgets.describe()}; {len(self.compressed_layers)} of {len(self.layers)} "
            f"layers compressed, {self._seen} tokens seen>"
        )


def _per_head(budgets: Any, heads: int) -> tuple[int, ...]:
    """Return one sequence's budgets in a layer, a number or one for each head, as one for each head."""
    return tuple(int(budget) for budget in np.broadcast_to(budgets, heads))


class PyramidKVCache(BudgetedCache):
    """A :class:`BudgetedCache` with the paper's pyramid as its default: more in early layers (arXiv 2406.02069)."""

    _default_ratio = 4.0


def _rule_of_curves(curves: CurveSet | None, selection: Selection | str | None, *fields: Any) -> Selection | str | None:
    """Return the rule that is asked for: that of the curves where none is, nor a field of one."""
    if curves is None or selection is not None:
        return selection
    given = [field for field in fields if field is not None and not isinstance(field, Default)]
    return None if given else curves.selection


def _check_projections(facts: Facts | None, layers: tuple[int, ...], what: str) -> None:
    """Refuse `what` needs a layer's output projection where it is not known."""
    if facts is None:
        raise ValueError(
            f"{what} the model's output projection, which use(model) finds; call it, with its probe, before the cache "
            "is made"
        )
    missing = [layer for layer in layers if facts.layers[layer].projection is None]
    if missing:
        raise ValueError(
            f"{what} the model's output projection, and layer {missing[0]} has none within its attention module; use "
            f"{'a rule without value_weight' if what.startswith('selection') else 'a plan or curves'}"
        )


def _check_layouts(facts: Facts | None, layers: tuple[int, ...], score: str) -> None:
    """Refuse a score that needs queries before rotation where a layer's rotation is not known."""
    if facts is None:
        raise ValueError(
            f"selection: score = {score!r}: needs the prompt's queries before rotation, and use(model) finds how to "
            "get them; call it, with its probe, before the cache is made"
        )
    missing = [layer for layer in layers if facts.layers[layer].layout is None]
    if missing:
        raise ValueError(
            f"selection: score = {score!r}: needs the prompt's queries before rotation, and how layer {missing[0]} of "
            "this model rotates them is not known"
        )


def _checked_scores(scores: Any, whole: Any, index: int) -> torch.Tensor:
    """Return scores of a layer's whole context, ``(batch, kv_heads, n)``."""
    keys = getattr(whole, "keys", None)
    if type(whole) is not DynamicLayer or not isinstance(keys, torch.Tensor) or keys.dim() != 4:
        raise ValueError(f"context: layer {index}, a {type(whole).__name__}, does not hold every position's keys")
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores: of layer {index} must be a tensor, not {type(scores).__name__}")
    given = scores[None] if scores.dim() == 2 else scores
    if given.shape != keys.shape[:3]:
        raise ValueError(
            f"scores: of layer {index} have shape {tuple(scores.shape)}, must be {tuple(keys.shape[1:3])}, or "
            f"{tuple(keys.shape[:3])}"
        )
    return given.to(keys.device, torch.float32)


def _tokens_seen(layer: Any) -> int | None:
    """Return the tokens that a layer with keys and values has seen. None for one that does not count them."""
    if isinstance(layer, BudgetedLayer):
        return layer.seen
    return int(layer.get_seq_length()) if isinstance(layer, DynamicLayer) else None


def _tensors(layer: Any) -> list[torch.Tensor]:
    """Return every tensor of a layer that is not compressed: keys, values, and the states of other kinds."""
    found: dict[int, torch.Tensor] = {}
    waiting = list(vars(layer).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return list(found.values())


def _nbytes(layer: Any) -> int:
    if isinstance(layer, BudgetedLayer):
        return layer.nbytes
    return storage_bytes(_tensors(layer))


def _used_nbytes(layer: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(layer))
