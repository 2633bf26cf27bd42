"""Record the attention of a GGUF model that llama.cpp runs: the same trace, of the model as it is quantised.

Needs the extra ``llama-cpp`` (``pip install 'pb-kvcache[llama-cpp]'``), which has no torch in it. transformers runs a
GGUF file dequantised, and only of families that it can read. llama.cpp runs every file of its own, as it serves it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import integer
from .._text import printable
from ._llama_cpp import Model
from ._model_file import sha256
from .traces import PackedTrace

__all__ = ["record_gguf", "record_texts"]

#: Bytes of float32 attention, all heads of one layer, that one piece of the text may take.
_PIECE_BYTES = 64 << 20
#: The most tokens of a piece: llama.cpp's own.
_MOST = 512


def record_gguf(
    path: str | os.PathLike[str],
    text: str,
    tokens: int,
    *,
    name: str | None = None,
    text_name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> PackedTrace:
    """Run the first tokens of a text through a GGUF model with llama.cpp, and return its attention as a trace.

    The arguments are those of :func:`pb_kvcache.lab.record.record`. The text becomes tokens as the file says. The model
    computes as llama.cpp does: with the file's quantised weights, and keys and values in float16.

    Raises
    ------
    ImportError
        The extra is not installed.
    OSError
        There is no such file.
    TypeError, ValueError
        llama.cpp cannot load or run the file. The file is no .gguf. Fewer than 2 tokens, more than the text has, or
        more than the model has positions. Layers without attention weights, which is so where none attends.
    """
    (trace,) = record_texts(path, {text_name or "": text}, tokens, metadata=metadata, progress=_of_one(progress))
    if name is not None:
        trace.name = name
    return trace


def record_texts(
    path: str | os.PathLike[str],
    texts: Mapping[str, str],
    tokens: int,
    *,
    model_name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    started: Callable[[int], object] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[PackedTrace]:
    """Load a GGUF model once and yield the attention over each of several texts, each a trace of its own.

    The arguments are those of :func:`pb_kvcache.lab.record.record_texts`. What is refused is as for
    :func:`record_gguf`, before the first text is recorded.
    """
    if integer("tokens", tokens) < 2:
        raise ValueError(f"tokens = {tokens}: must be at least 2")
    if not texts:
        raise ValueError("texts: none given")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"model: there is no file {path}")
    if path.suffix != ".gguf":
        raise ValueError(f"model: {path} is not a .gguf file, and llama.cpp reads those alone")
    with Model(path) as model:
        if not model.is_decoder:
            raise ValueError(f"model: {path} is no decoder whose tokens attend to those before them alone")
        ids_of = {name: _token_ids(model, name, text, tokens) for name, text in texts.items()}
        if started is not None:
            started(model.num_layers)
        for number, (name, ids) in enumerate(ids_of.items()):

            def show(done: int, before: int = number * tokens) -> None:
                if progress is not None:
                    progress(before + done, tokens * len(ids_of))

            layers, weights = _weights(model, ids, show)
            found = _found(model, path, ids, layers)
            if name:
                found["text"]["name"] = name
            for key, value in (metadata or {}).items():
                if isinstance(found.get(key), dict) and isinstance(value, Mapping):
                    found[key] |= value
                else:
                    found[key] = value
            called = " on ".join(part for part in (model_name or found["model"]["name"], name) if part)
            yield PackedTrace(called, len(layers), tokens, weights, found)


def _of_one(progress: Callable[[int], object] | None) -> Callable[[int, int], object] | None:
    return None if progress is None else lambda done, total: progress(done)


def _token_ids(model: Model, name: str, text: str, tokens: int) -> list[int]:
    """Return a text's first tokens."""
    ids = model.tokens(text[: 64 * tokens])  # the start of the text is enough
    if len(ids) < tokens:
        called = f"the text {printable(name)}" if name else "the text"
        raise ValueError(f"tokens = {tokens}: {called} has only {len(ids)}; record fewer, or a longer text")
    if tokens > model.positions:
        raise ValueError(f"tokens = {tokens}: must be at most the model's {model.positions} positions")
    return ids[:tokens]


def _weights(
    model: Model, ids: list[int], progress: Callable[[int], object] | None
) -> tuple[list[int], npt.NDArray[np.float16]]:
    """Return the layers that attend, and their packed weights."""
    length = len(ids)
    means: dict[int, npt.NDArray[np.float16]] = {}  # of a piece
    owning = model.num_layers - model.number("attention.shared_kv_layers", 0)  # the last read another one's cache

    def take(layer: int, start: int, softmax: npt.NDArray[np.float32]) -> None:
        if layer < owning:
            if softmax.shape[2] < start + softmax.shape[1]:
                raise ValueError(
                    f"model: layer {layer} gave attention of shape {softmax.shape}, not over all positions"
                )
            means[layer] = softmax.mean(axis=0).astype(np.float16)

    piece = max(1, min(length, _MOST, _PIECE_BYTES // (4 * model.num_query_heads * length)))
    layers: list[int] = []
    weights = np.empty(0, np.float16)
    start = 0
    for end in model.attention(ids, piece, take):
        if start == 0:
            layers = sorted(means)
            if not layers:
                raise ValueError("model: no layer gave attention weights; nothing can be recorded")
            weights = np.empty(len(layers) * (length * (length - 1) // 2), np.float16)
        if sorted(means) != layers:
            raise ValueError(f"model: layers {sorted(means)} gave attention, must be {layers} as before")
        for index, layer in enumerate(layers):
            for step in range(max(start, 1), end):  # without what each token gave to itself
                first = len(layers) * (step * (step - 1) // 2) + index * step
                weights[first : first + step] = means[layer][step - start, :step]
        means.clear()
        start = end
        if progress is not None:
            progress(end)
    return layers, weights


def _found(model: Model, path: Path, ids: list[int], layers: list[int]) -> dict[str, Any]:
    """Return what is known of a recording, under the names that a recording with transformers has."""
    about = {"name_in_file": "general.name", "licence": "general.license", "architecture": "general.architecture"}
    fields = {name: text for name, key in about.items() if (text := model.field(key)) is not None}
    recorder = {"weights": "float16, mean over query heads, without the token's own"}
    for package in ("pb-kvcache", "llama-cpp-python", "numpy"):
        recorder[package] = importlib.metadata.version(package)
    return {
        **model.kv_sizes(layers),
        "model_layers": model.num_layers,
        "layers": layers,
        "num_query_heads": model.num_query_heads,
        "kv_dtype": "float16",
        "dtype": model.description(),
        "model": {
            "name": path.stem,
            "type": fields.get("architecture"),
            "file": path.name,
            "sha256": sha256(path),
            **fields,
        },
        "text": {"sha256_of_recorded_part": hashlib.sha256(model.text(ids).encode("utf-8")).hexdigest()},
        "token_ids": ids,
        "recorder": recorder,
    }
