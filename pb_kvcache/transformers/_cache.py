"""The cache itself: which layers are compressed, and what its user asks of it."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from ._budgets import Budgets
from ._layer import PyramidKVLayer
from ._report import CacheLayerReport, CacheReport
from ._use import NAMES, plain_implementation

if TYPE_CHECKING:
    from .._plan import LayerPlan

_NOT_USED = (
    "the model's attention never reached PyramidKVCache: call pb_kvcache.transformers.use(model) before the first "
    "step, then cache.reset(). Where that was done, the model changes keys between its cache and its attention, and "
    "cannot be served"
)


class PyramidKVCache(Cache):  # type: ignore[misc, unused-ignore]
    """A cache for transformers models in which every layer keeps its own share of a prompt (arXiv 2406.02069).

    The prompt is read with full attention. Then each KV head of each layer keeps the last `window` positions and those
    that the window's queries attended to most, as many as the layer's budget says: many in the first layers, few in
    the last. The rest is freed, layer by layer while the prompt is read. Positions are never renumbered.

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
        pyramid. It is 4 where neither `beta` nor `weights` is given.
    beta
        The paper's parameter instead: the last layer keeps ``budget / beta``.
    weights
        A curve of one's own instead: one positive number per full-attention layer.
    plan
        What every full-attention layer keeps, from :func:`pb_kvcache.plan`.
    memory
        Bytes that the kept keys and values of the whole batch may take after the prompt.
    fraction
        Share of the prompt that is kept, above 0 and at most 1, and at least ``window + 1`` positions.
    window
        Last queries of the prompt that choose. Their positions are always kept.
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

    def __init__(
        self,
        config: Any,
        budget: int | None = None,
        ratio: float | None = None,
        beta: float | None = None,
        plan: LayerPlan | None = None,
        *,
        weights: Any = None,
        memory: int | None = None,
        fraction: float | None = None,
        window: int = 32,
        kernel: int = 7,
        pooling: str = "max",
        edge: str = "count",
        reduce: str = "mean",
        decode: str = "grow",
        compress: str = "prompt",
    ) -> None:
        if isinstance(config, PreTrainedModel):
            raise TypeError("config: is a model; pass model.config")
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config: must be a model's config, not {type(config).__name__}")
        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
            raise ValueError("config: is of an encoder-decoder model; PyramidKVCache serves decoder-only models")
        if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "kv_sharing_modes", None):
            raise ValueError(
                "config: some layers of this model read the keys of others, which compression would change under them; "
                "use DynamicCache"
            )
        layers = list(DynamicCache(config=config).layers)
        self.compressed_layers = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)
        self._config = config
        self._budgets = Budgets(
            len(self.compressed_layers),
            budget=budget,
            ratio=ratio,
            beta=beta,
            weights=weights,
            layer_plan=plan,
            memory=memory,
            fraction=fraction,
            window=window,
            kernel=kernel,
            pooling=pooling,
            edge=edge,
            reduce=reduce,
            decode=decode,
            compress=compress,
        )
        for index, layer in enumerate(self.compressed_layers):
            layers[layer] = PyramidKVLayer(self._budgets, index, layer)
        super().__init__(layers=layers)
        self._last: PyramidKVLayer | None = None

    # ---- what transformers asks of a cache ----

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
        if isinstance(layer, PyramidKVLayer):
            if not layer.is_initialized:
                stock = plain_implementation(self._config)
                if stock is not None:
                    raise RuntimeError(
                        f"the model's attention is {stock!r}: call pb_kvcache.transformers.use(model) before the first "
                        "step, and make the cache from that model's own config"
                    )
            if layer.index == 0:
                self._check_chunk(layer, key_states.shape[-2])
            self._last = layer
        return super().update(  # type: ignore[no-any-return, unused-ignore]
            key_states, value_states, layer_idx, *args, **kwargs
        )

    def _check_chunk(self, layer: PyramidKVLayer, new: int) -> None:
        """Warn where the prompt seems to come in chunks, of which only the first would be compressed."""
        follows = layer.seen and layer.prompt == layer.seen and layer.length < layer.seen
        if follows and new >= layer.prompt and not self._budgets.hold:
            warnings.warn(
                f"{new} tokens follow the prompt of {layer.prompt} in one call, and none of them will be evicted. If "
                "this is one prompt in chunks, make the cache with compress='decode'",
                UserWarning,
                stacklevel=2,
            )

    def reset(self) -> None:
        """Forget everything: the next prompt may have another batch size."""
        super().reset()
        for layer in self.layers:
            # Up to transformers 5.3 a layer with a window zeroes what it holds, for this batch size alone.
            if isinstance(layer, DynamicLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False
        self._budgets.forget()
        self._last = None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted positions are gone."""
        PyramidKVLayer.crop(None)  # type: ignore[arg-type]

    @property
    def is_croppable(self) -> bool:
        """False: assisted decoding refuses this cache."""
        return False

    def copy(self) -> PyramidKVCache:
        """Return an independent cache with the same content: for a prompt that is used more than once."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._budgets = self._budgets.copy()
        twin._last = None
        twin.layers = [
            layer.copy(twin._budgets) if isinstance(layer, PyramidKVLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PyramidKVCache:
        return self.copy()

    # ---- what its user asks of it ----

    @property
    def budgets(self) -> npt.NDArray[np.int64]:
        """What every layer may keep of the prompt, shape ``(num_layers,)``, 0 for a layer that is not compressed.

        Before a prompt: for one that is long enough. After it: for this one, the most of any sequence of the batch.
        """
        budgets = np.zeros(len(self.layers), np.int64)
        nominal = None
        for layer in self._compressed():
            if layer.decided is not None:
                budgets[layer.model_layer] = layer.decided.max()
                continue
            nominal = self._budgets.nominal() if nominal is None else nominal
            budgets[layer.model_layer] = nominal[layer.index]
        return budgets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Positions that every layer holds per KV head, shape ``(num_layers,)``: of the longest sequence of a batch."""
        lengths = np.zeros(len(self.layers), np.int64)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PyramidKVLayer):
                lengths[index] = layer.length
            elif isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.dim() == 4:
                lengths[index] = layer.keys.shape[-2]
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

    def _layer(self, layer: int) -> PyramidKVLayer:
        if not -len(self.layers) <= layer < len(self.layers):
            raise IndexError(f"layer = {layer}: the model has {len(self.layers)}")
        found = self.layers[layer]
        if not isinstance(found, PyramidKVLayer):
            raise ValueError(f"layer = {layer}: is not compressed; compressed_layers has the ones that are")
        return found

    def _compressed(self) -> list[PyramidKVLayer]:
        return [layer for layer in self.layers if isinstance(layer, PyramidKVLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that the cache really holds: all tensors of all layers, spare room and policies included."""
        return sum(_nbytes(layer) for layer in self.layers)

    @property
    def nbytes_full(self) -> int:
        """Bytes of the keys and values that ``DynamicCache`` would hold after the same tokens."""
        return sum(
            layer.nbytes_full if isinstance(layer, PyramidKVLayer) else _used_nbytes(layer) for layer in self.layers
        )

    def report(self) -> CacheReport:
        """Return what every layer keeps, evicted and holds. ``print(cache.report())`` shows a table."""
        decided = any(layer.decided is not None for layer in self._compressed())
        known = decided or not self._budgets.amount.needs_prompt
        budgets = self.budgets if known else np.zeros(len(self.layers), np.int64)
        rows = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PyramidKVLayer):
                seen = int(layer.tokens.max(initial=0))
                kept = int((layer.columns()[:, :1] >= 0).sum(axis=-1).max(initial=0))
                rows.append(
                    CacheLayerReport(
                        layer=index,
                        kind=self._kind(layer),
                        budget=int(budgets[index]) if known else None,
                        seen=seen,
                        kept=kept,
                        evicted=seen - kept,
                        nbytes=layer.nbytes,
                        nbytes_full=layer.nbytes_full,
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
                )
            )
        name = self._config.get_text_config(decoder=True)._attn_implementation
        plain = next((plain for plain, own in NAMES.items() if own == name), name)
        return CacheReport(self._budgets.describe(), str(plain), tuple(rows))

    def _kind(self, layer: PyramidKVLayer) -> str:
        if not layer.seen:
            return "empty"
        if not layer.prompt:
            return "prompt not finished: full"
        after = "held by SnapKV" if self._budgets.hold else "then all kept"
        return f"{layer.ran}, {after}"

    def __repr__(self) -> str:
        seen = self._compressed()[0].seen if self.compressed_layers else 0
        return (
            f"<PyramidKVCache: {self._budgets.describe()}; {len(self.compressed_layers)} of {len(self.layers)} layers "
            f"compressed, {seen} tokens seen>"
        )


def _tensors(layer: Any) -> list[torch.Tensor]:
    found = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _nbytes(layer: Any) -> int:
    if isinstance(layer, PyramidKVLayer):
        return layer.nbytes
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(layer))


def _used_nbytes(layer: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(layer))
