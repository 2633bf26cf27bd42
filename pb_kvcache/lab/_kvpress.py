"""Presses of kvpress as contestants: https://github.com/NVIDIA/kvpress, in an environment that has it.

A press hooks a model's attention modules while the model reads a prompt, so that each press at each budget costs a
prefill of its own. It takes a part to drop, where the library takes positions to keep. Some presses keep other rows in
every head, which they do without freeing any: the dropped rows stay in the tensors and are masked.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: What begins the name of a plan that is a press.
PREFIX = "kvpress:"
#: The attribute of an attention module in which kvpress keeps which rows of which heads are masked.
_MASKED = "masked_key_indices"


def make_press(name: str, *, held: int = 2, budget: int = 1) -> Any:
    """Return a press that keeps `budget` of `held` positions.

    Parameters
    ----------
    name
        ``"kvpress:SnapKVPress"``, or a press around another, ``"kvpress:AdaKVPress:SnapKVPress"``. All other settings
        are kvpress's defaults.
    held
        Positions of the prompt.
    budget
        Those that are to stay, at most `held`.

    Raises
    ------
    ImportError
        kvpress is not installed.
    ValueError
        There is no such press, or it has no part to drop, or it cannot be made from defaults.
    """
    try:
        kvpress = importlib.import_module("kvpress")
    except ImportError as error:
        raise ImportError(
            f"plan = {name!r}: needs kvpress, which is not installed: pip install kvpress, in an environment of its "
            "own, because it needs an older transformers"
        ) from error
    known = [one for one in dir(kvpress) if one.endswith("Press")]
    inner: Any = None
    for word in reversed(name.removeprefix(PREFIX).split(":")):
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            raise ValueError(
                f"plan = {name!r}: kvpress has no {word or 'press without a name'}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        kind = getattr(kvpress, word)
        wants = "press" in inspect.signature(kind).parameters
        if wants != (inner is not None):
            raise ValueError(
                f"plan = {name!r}: {word} "
                + (f"goes around another press, as in {PREFIX}{word}:SnapKVPress" if wants else "takes no other press")
            )
        try:
            inner = kind(press=inner) if wants else kind()
        except Exception as error:  # each press checks in a way of its own, by assertions, too
            raise ValueError(f"plan = {name!r}: {word} cannot be made from its defaults: {error}") from error
    # kvpress keeps int(held * (1 - part)): half a position more makes that exact.
    part = 0.0 if budget >= held else 1 - (budget + 0.5) / held
    try:
        inner.compression_ratio = part
        settable = inner.compression_ratio == part
    except AttributeError:
        settable = False
    if not settable or not hasattr(type(inner), "compression_ratio"):
        raise ValueError(f"plan = {name!r}: this press has no compression_ratio, so that no budget can be given to it")
    return inner


@dataclasses.dataclass
class PressedCache:
    """What a press left of a prompt, and which of it kvpress masks.

    Attributes
    ----------
    layers
        Of transformers' cache.
    masked
        For each attention module its index and kvpress's indices of masked rows, or None.
    seen
        Tokens of the whole sequence so far: the next one's position.
    """

    cache: Any
    masked: dict[int, Any]
    seen: int

    def copy(self) -> PressedCache:
        """Return one that shares nothing that changes."""
        return PressedCache(copy.deepcopy(self.cache), dict(self.masked), self.seen)

    @property
    def head_lengths(self) -> npt.NDArray[np.int64]:
        """Rows of each layer, sequence and head that are not masked, ``(layers, 1, heads)``."""
        lengths = []
        for index, layer in enumerate(self.cache.layers):
            _, heads, rows, _ = layer.keys.shape
            masked = self.masked.get(index)
            gone = 0 if masked is None else np.bincount(masked[1].cpu().numpy(), minlength=heads)
            lengths.append(np.full(heads, rows) - gone)
        most = max(map(len, lengths))
        return np.array([[[*row, *[-1] * (most - len(row))]] for row in lengths], np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are really held, masked rows among them."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def feed(self, model: Any, ids: Sequence[int]) -> Any:
        """Return the logits after each of some tokens, ``(tokens, vocabulary)``."""
        import torch

        # A model makes one causal mask for all layers, and none for a single token. Masked rows get a key that is
        # opposite to all queries at once, which kvpress finds for few of them.
        equal = len({int(layer.keys.shape[2]) for layer in self.cache.layers}) == 1
        masked = any(rows is not None for rows in self.masked.values())
        parts = [list(ids)] if equal and not masked else [[token] for token in ids]
        return torch.cat([self._fed(model, part) for part in parts])

    def _fed(self, model: Any, ids: list[int]) -> Any:
        import torch

        device = self.cache.layers[0].keys.device
        positions = torch.arange(self.seen, self.seen + len(ids), device=device)[None]
        with _plain_attention(model), _masking(model, self.masked):
            output = model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.seen += len(ids)
        return output.logits[0]


def pressed(model: Any, ids: Sequence[int], name: str, budget: int) -> PressedCache:
    """Let a model read a prompt under a press.

    Parameters
    ----------
    model
        A transformers model that kvpress knows, :func:`pb_kvcache.transformers.use` or not.
    ids
        The prompt's tokens.
    name, budget
        As for :func:`make_press`.

    Raises
    ------
    ImportError, ValueError
        As for it, or what the press says of the model or the prompt.
    """
    import torch
    from transformers import DynamicCache

    press = make_press(name, held=len(ids), budget=budget)
    cache = DynamicCache(config=model.config)
    with _plain_attention(model), _masking(model, {}):
        try:
            with press(model):
                model.model(input_ids=torch.tensor([list(ids)], device=model.device), past_key_values=cache)
        except (AssertionError, AttributeError, ValueError) as error:  # presses check by assertions, too
            raise ValueError(f"{name} at {budget} of {len(ids)} positions: {error or type(error).__name__}") from error
        masked = {index: getattr(module, _MASKED, None) for index, module in _modules(model).items()}
    return PressedCache(cache, masked, len(ids))


def _modules(model: Any) -> dict[int, Any]:
    """Return the attention modules by their layer."""
    return {layer.self_attn.layer_idx: layer.self_attn for layer in model.model.layers}


@contextlib.contextmanager
def _masking(model: Any, masked: dict[int, Any]) -> Iterator[None]:
    """Let kvpress mask these rows, and none afterwards."""
    modules = _modules(model)
    for index, module in modules.items():
        setattr(module, _MASKED, masked.get(index))
    try:
        yield
    finally:
        for module in modules.values():
            setattr(module, _MASKED, None)


@contextlib.contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Compute attention as the model would without :func:`pb_kvcache.transformers.use`."""
    from ..transformers._attention import NAMES

    config = model.config.get_text_config(decoder=True)
    ours = config._attn_implementation
    plain = {name: arithmetic for arithmetic, name in NAMES.items()}
    config._attn_implementation = plain.get(ours, ours)
    try:
        yield
    finally:
        config._attn_implementation = ours
