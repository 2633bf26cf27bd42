"""Record the attention of a real decoder as a trace: every layer, mean over query heads, float16.

Needs the extra ``transformers`` (``pip install 'pb-kvcache[transformers]'``) and works with any decoder that
transformers runs with eager attention, from a local folder or a local GGUF file. Nothing is downloaded.

Memory: the text goes through the model in pieces, so that the attention of all layers and heads over one piece stays
below 256 MiB. The model, its cache and the trace itself, ``num_layers * tokens**2`` bytes, come on top. A model with
recurrent layers reads the text in one piece, because many of them cannot go on from a state with more than one token.
So does one that chooses positions by an index, whose choice among equals depends on the piece.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import integer
from .._filled_cache import cache_argument, common, filled_layers
from .._text import printable
from ._bars import quiet_bars
from ._extra import extra, versions
from ._model_file import gguf_fields, sha256
from .traces import PackedTrace

__all__ = ["DTYPES", "load_model", "record", "record_ids", "record_texts", "trace_bytes"]

#: Bytes of float32 attention, all layers and heads, that one piece of the text may take.
_PIECE_BYTES = 256 << 20
#: What the model may compute in. The attention weights themselves are float32 in most families.
DTYPES = ("float32", "bfloat16", "float16")
#: A window that no text fills.
_NO_WINDOW = 1 << 30


def load_model(path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """Load a decoder and its tokenizer from this machine, for recording: eager attention, evaluation mode.

    Where standard error is no terminal, transformers' progress bars are off meanwhile.

    Parameters
    ----------
    path
        A folder as transformers saves one, or a ``.gguf`` file, which is dequantised.
    dtype
        What the model computes in, one of :data:`DTYPES`.
    device
        Where it computes, as torch names it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.

    Returns
    -------
    tuple
        The model and the tokenizer.

    Raises
    ------
    ImportError
        The extra is not installed.
    OSError
        There is no such file or folder.
    ValueError
        Transformers cannot make a decoder of it. There is no such dtype or device.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
    if not path.exists():
        raise FileNotFoundError(f"model: there is no file or folder {path}")
    torch, transformers = extra("torch"), extra("transformers")
    try:
        torch.empty(1, device=device)  # before the model is loaded
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device = {device!r}: torch cannot use it here: {reason}; 'cpu' always works") from None
    options: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model: {path} is neither a folder nor a .gguf file")
        for module in ("gguf", "accelerate"):
            extra(module)
        folder, options["gguf_file"] = path.parent, path.name
    try:
        with quiet_bars():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=getattr(torch, dtype), **options
            )
    except Exception as error:  # transformers raises a great many kinds, KeyError and struct.error among them
        raise ValueError(f"model: transformers cannot load {path}: {type(error).__name__}: {error}") from error
    return model.eval().to(device), tokenizer


def record(
    path: str | os.PathLike[str],
    text: str,
    tokens: int,
    *,
    name: str | None = None,
    text_name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> PackedTrace:
    """Load a decoder, run the first tokens of a text through it, and return its attention as a trace.

    Parameters
    ----------
    path
        As for :func:`load_model`.
    text
        What the model reads, from its start, without a chat template.
    tokens
        How many tokens to record, which is the trace's length. At least 2, and no more than the text has and the
        model's positions allow.
    name
        What reports call the trace. None: the name of the file or folder, and that of the text.
    text_name
        What the text is called, so that two recordings of one model have two names.
    metadata
        What only the caller knows, such as licences and sources. It is added to what is found out here, and wins over
        an entry of the same name.
    progress
        Called with the number of tokens recorded so far.
    dtype, device
        As for :func:`load_model`.

    Raises
    ------
    ImportError, OSError, TypeError, ValueError
        As :func:`load_model` and :func:`record_ids`. Also for a text with too few tokens.
    """
    (trace,) = record_texts(
        path,
        {text_name or "": text},
        tokens,
        metadata=metadata,
        progress=None if progress is None else lambda done, total: progress(done),
        dtype=dtype,
        device=device,
    )
    if name:
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
    dtype: str = "float32",
    device: str = "cpu",
) -> Iterator[PackedTrace]:
    """Load a decoder once and yield the attention over each of several texts, each a trace of its own.

    Parameters
    ----------
    path, tokens, metadata, dtype, device
        As for :func:`record`.
    texts
        By name. A trace is called after the model and the text: ``model on text``.
    model_name
        What the traces' names call the model. None: by its file or folder.
    started
        Called with the number of the model's layers before anything is recorded, when all texts were found to be long
        enough. :func:`trace_bytes` says what a trace of them takes.
    progress
        Called with the number of tokens recorded so far, and of all texts' together.

    Raises
    ------
    ImportError, OSError, TypeError, ValueError
        As for :func:`record`, before the first text is recorded. Also where there is no text.
    """
    if integer("tokens", tokens) < 2:
        raise ValueError(f"tokens = {tokens}: must be at least 2")
    if not texts:
        raise ValueError("texts: none given")
    model, tokenizer = load_model(path, dtype=dtype, device=device)
    path = Path(path)
    fields = gguf_fields(path) if path.is_file() else {}
    ids_of = {name: _token_ids(tokenizer, name, text, tokens, fields) for name, text in texts.items()}
    about: dict[str, Any] = {"name": path.stem if path.is_file() else path.name, "type": model.config.model_type}
    if path.is_file():
        about |= {"file": path.name, "sha256": sha256(path)}
        about |= {key: fields[key] for key in ("name_in_file", "licence", "architecture") if key in fields}
    if started is not None:
        started(int(model.config.get_text_config(decoder=True).num_hidden_layers))
    for number, (name, ids) in enumerate(ids_of.items()):
        read = tokenizer.decode(ids)
        found: dict[str, Any] = {
            "model": dict(about),
            "text": {"sha256_of_recorded_part": hashlib.sha256(read.encode("utf-8")).hexdigest()},
            "token_ids": ids,
        }
        if name:
            found["text"]["name"] = name
        for key, value in (metadata or {}).items():
            if isinstance(found.get(key), dict) and isinstance(value, Mapping):
                found[key] |= value
            else:
                found[key] = value
        called = " on ".join(part for part in (model_name or found["model"]["name"], name) if part)

        def show(done: int, before: int = number * tokens) -> None:
            if progress is not None:
                progress(before + done, tokens * len(ids_of))

        yield record_ids(model, ids, name=called, metadata=found, progress=show)


def _token_ids(tokenizer: Any, name: str, text: str, tokens: int, fields: Mapping[str, Any]) -> list[int]:
    """Return a text's first tokens, with the first one that its model puts before a text."""
    # The start of the text is enough. A tokenizer warns of a text that is longer than its model can read.
    start = text[: 64 * tokens]
    if "add_bos_token" in fields:  # releases of transformers differ in whether they heed it
        ids = tokenizer(start, add_special_tokens=False)["input_ids"]
        if fields["add_bos_token"]:
            ids = [tokenizer.bos_token_id, *ids]
    else:
        ids = tokenizer(start)["input_ids"]
    if len(ids) < tokens:
        called = f"the text {printable(name)}" if name else "the text"
        raise ValueError(f"tokens = {tokens}: {called} has only {len(ids)}; record fewer, or a longer text")
    return [int(i) for i in ids[:tokens]]


def trace_bytes(num_layers: int, tokens: int) -> int:
    """Return how many bytes the weights of a trace take before compression: two each.

    The file of the shipped recording is 80 % of it.
    """
    return num_layers * tokens * (tokens - 1)


def record_ids(
    model: Any,
    ids: Sequence[int],
    *,
    name: str = "recording",
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> PackedTrace:
    """Run tokens through a loaded transformers decoder and return its attention as a trace.

    The trace has the layers that attend and cache keys and values of their own: not the recurrent layers of a hybrid,
    nor those that read another layer's cache.

    Parameters
    ----------
    model
        A decoder made with ``attn_implementation="eager"``, in evaluation mode.
    ids
        Token ids, at least 2 and no more than the model has positions.
    name, metadata
        The trace's. Added to the metadata are which of the model's layers were recorded, the number of query heads that
        were averaged, the KV heads and the head dimension or, where a position's elements are no such product, their
        number, as the model's cache has them, and the versions of what recorded it.
    progress
        Called with the number of tokens recorded so far.

    Raises
    ------
    ValueError
        Too few or too many tokens. The model gives no attention, or attention to less than all positions before: it is
        not eager. It cannot run with transformers' own cache.
    """
    torch = extra("torch")
    config = model.config.get_text_config(decoder=True)
    length = len(ids)
    limit = getattr(config, "max_position_embeddings", None)
    if length < 2:
        raise ValueError(f"tokens = {length}: must be at least 2")
    if limit and length > limit:
        raise ValueError(f"tokens = {length}: must be at most the model's {limit} positions")
    if getattr(config, "_attn_implementation", "eager") != "eager":
        raise ValueError(
            f"model: runs {config._attn_implementation} attention, which gives no weights; load it with "
            "attn_implementation='eager'"
        )
    run = _Run(model, config)
    rows: list[Any] = []  # of a piece: float16, shape (recorded layers, tokens, positions before and with them)
    tensor = torch.as_tensor([list(ids)], device=next(model.parameters()).device)
    piece = run.piece(length)
    weights = np.empty(0, np.float16)
    with torch.inference_mode():
        for start in range(0, length, piece):
            end = min(start + piece, length)
            rows = run.attend(tensor[:, start:end], end)
            layers = len(rows)
            if start == 0:
                weights = np.empty(layers * (length * (length - 1) // 2), np.float16)
            for layer, mean in enumerate(rows):
                # Without what each token gave to itself.
                for step in range(max(start, 1), end):
                    first = layers * (step * (step - 1) // 2) + layer * step
                    weights[first : first + step] = mean[step - start, :step]
            if progress is not None:
                progress(end)
    recorder = {"weights": "float16, mean over query heads, without the token's own", **versions()}
    return PackedTrace(name, len(rows), length, weights, run.found() | {"recorder": recorder} | dict(metadata or {}))


class _Run:
    """A decoder with a cache that keeps every position, so that the columns of its attention are positions."""

    def __init__(self, model: Any, config: Any) -> None:
        self.decoder = model.base_model  # the vocabulary's logits are not needed
        self.cache = extra("transformers").DynamicCache(config=config)
        for layer in self.cache.layers:
            if getattr(layer, "sliding_window", None) is not None:
                layer.sliding_window = _NO_WINDOW  # the mask still hides what lies before the model's own window
        self.options: dict[str, Any] = {
            cache_argument(self.decoder): self.cache,
            "use_cache": True,
            "output_attentions": True,
            "return_dict": True,
        }
        self.family = getattr(config, "model_type", type(model).__name__)
        self.model_layers = int(config.num_hidden_layers)
        self.query_heads = int(getattr(config, "num_attention_heads", None) or 1)
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")

    def piece(self, length: int) -> int:
        """Return how many tokens go through the model at a time."""
        if any(hasattr(layer, state) for layer in self.cache.layers for state in ("conv_states", "indexer_keys")):
            return length
        return max(1, min(length, _PIECE_BYTES // (4 * self.model_layers * self.query_heads * length)))

    def attend(self, tokens: Any, end: int) -> list[npt.NDArray[np.float16]]:
        """Run a piece of the text that ends at position `end`, and return each recorded layer's mean over heads."""
        try:
            given = self.decoder(tokens, **self.options).attentions or ()
        except Exception as error:  # a cache of the model's own, among others
            raise ValueError(f"model: {self.family} does not run with a DynamicCache: {error}") from error
        self.layers = filled_layers(self.cache)
        self.recorded = [index for index, layer in enumerate(self.layers) if layer.elements]
        if not self.recorded:
            raise ValueError(f"model: {self.family} has no layer that caches keys and values; nothing can be evicted")
        if len(given) >= len(self.layers):  # an entry a layer, also for those without attention
            given = [given[index] for index in self.recorded]
        given = [attention for attention in given if attention is not None]
        if len(given) != len(self.recorded):
            raise ValueError(
                f"model: {len(given)} layers gave attention, {len(self.recorded)} cache keys and values: is it eager?"
            )
        means = []
        for index, attention in zip(self.recorded, given, strict=True):
            shape = tuple(attention.shape)
            if shape[:1] + shape[2:] != (1, tokens.shape[1], end):
                raise ValueError(
                    f"model: layer {index} gave attention of shape {shape}, "
                    f"must be (1, heads, {tokens.shape[1]}, {end}): is it eager, and over all positions?"
                )
            self.query_heads = shape[1]
            means.append(attention[0].float().mean(dim=0).to(extra("torch").float16).cpu().numpy())
        return means

    def found(self) -> dict[str, Any]:
        """Return what the run has shown of the model."""
        own = [self.layers[index] for index in self.recorded]
        sizes: dict[str, Any] = {name: common(own, name) for name in ("num_kv_heads", "head_dim")}
        if None in sizes.values():
            sizes = {"kv_elements": common(own, "elements") or [layer.elements for layer in own]}
        return sizes | {
            "model_layers": self.model_layers,
            "layers": self.recorded,
            "num_query_heads": self.query_heads,
            "kv_dtype": "float16" if self.dtype == "float32" else self.dtype,
            "dtype": self.dtype,
        }
