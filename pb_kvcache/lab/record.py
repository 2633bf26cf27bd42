"""Record the attention of a real decoder as a trace: every layer, mean over query heads, float16.

Needs the extra ``transformers`` (``pip install 'pb-kvcache[transformers]'``) and works with any decoder that
transformers runs with eager attention, from a local folder or a local GGUF file. Nothing is downloaded.

Memory: the text goes through the model in pieces, so that the attention of all layers and heads over one piece stays
below 256 MiB. The model, its cache and the trace itself, ``num_layers * tokens**2`` bytes, come on top.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._checks import integer
from .traces import PackedTrace

__all__ = ["load_model", "record", "record_ids"]

#: Bytes of float32 attention, all layers and heads, that one piece of the text may take.
_PIECE_BYTES = 256 << 20


def _extra(module: str) -> Any:
    """Import a module of the extra, or say which extra it belongs to."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"recording needs {module}, which is not installed: pip install 'pb-kvcache[transformers]'"
        ) from error


def load_model(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Load a decoder and its tokenizer from this machine, for recording: float32, eager attention, evaluation mode.

    Parameters
    ----------
    path
        A folder as transformers saves one, or a ``.gguf`` file, which is dequantised.

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
        Transformers cannot make a decoder of it.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"model: there is no file or folder {path}")
    torch, transformers = _extra("torch"), _extra("transformers")
    options: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model: {path} is neither a folder nor a .gguf file")
        for module in ("gguf", "accelerate"):
            _extra(module)
        folder, options["gguf_file"] = path.parent, path.name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, **options
        )
    except Exception as error:  # transformers raises a great many kinds, KeyError and struct.error among them
        raise ValueError(f"model: transformers cannot load {path}: {type(error).__name__}: {error}") from error
    return model.eval(), tokenizer


def record(
    path: str | os.PathLike[str],
    text: str,
    tokens: int,
    *,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
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
        What reports call the trace. None: the name of the file or folder.
    metadata
        What only the caller knows, such as licences and sources. It is added to what is found out here, and wins over
        an entry of the same name.
    progress
        Called with the number of tokens recorded so far.

    Raises
    ------
    ImportError, OSError, TypeError, ValueError
        As :func:`load_model` and :func:`record_ids`. Also for a text with too few tokens.
    """
    if integer("tokens", tokens) < 2:
        raise ValueError(f"tokens = {tokens}: must be at least 2")
    model, tokenizer = load_model(path)
    path = Path(path)
    fields = _gguf_fields(path) if path.is_file() else {}
    # The start of the text is enough. A tokenizer warns of a text that is longer than its model can read.
    start = text[: 64 * tokens]
    if "add_bos_token" in fields:  # releases of transformers differ in whether they heed it
        ids = tokenizer(start, add_special_tokens=False)["input_ids"]
        if fields["add_bos_token"]:
            ids = [tokenizer.bos_token_id, *ids]
    else:
        ids = tokenizer(start)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"tokens = {tokens}: the text has only {len(ids)}")
    ids = [int(i) for i in ids[:tokens]]
    read = tokenizer.decode(ids)
    found: dict[str, Any] = {
        "model": {"name": path.stem if path.is_file() else path.name, "type": model.config.model_type},
        "text": {"sha256_of_recorded_part": hashlib.sha256(read.encode("utf-8")).hexdigest()},
        "token_ids": ids,
    }
    if path.is_file():
        found["model"] |= {"file": path.name, "sha256": _sha256(path)}
        found["model"] |= {key: fields[key] for key in ("name_in_file", "licence", "architecture") if key in fields}
    for key, value in (metadata or {}).items():
        if isinstance(found.get(key), dict) and isinstance(value, Mapping):
            found[key] |= value
        else:
            found[key] = value
    return record_ids(model, ids, name=name or found["model"]["name"], metadata=found, progress=progress)


def record_ids(
    model: Any,
    ids: Sequence[int],
    *,
    name: str = "recording",
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> PackedTrace:
    """Run tokens through a loaded transformers decoder and return its attention as a trace.

    Parameters
    ----------
    model
        A decoder made with ``attn_implementation="eager"``, in evaluation mode.
    ids
        Token ids, at least 2 and no more than the model has positions.
    name, metadata
        The trace's. Added to the metadata are the number of KV heads, the head dimension, the number of query heads
        that were averaged, and the versions of what recorded it.
    progress
        Called with the number of tokens recorded so far.

    Raises
    ------
    ValueError
        Too few or too many tokens. A layer that gives no attention, or attention to less than all positions before:
        the attention is not eager, or the layer has none.
    """
    torch, transformers = _extra("torch"), _extra("transformers")
    config = model.config.get_text_config(decoder=True)
    length, layers = len(ids), int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
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
    # The text goes through in pieces: each piece attends to all before it, which the cache holds.
    piece = max(1, min(length, _PIECE_BYTES // (4 * layers * heads * length)))
    decoder = model.base_model  # the vocabulary's logits are not needed
    keyword = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    # Without the config the cache keeps every position even where a layer slides, so that columns are positions.
    cache = transformers.DynamicCache()
    weights = np.empty(layers * (length * (length - 1) // 2), np.float16)
    tensor = torch.as_tensor([list(ids)], device=next(model.parameters()).device)
    with torch.inference_mode():
        for start in range(0, length, piece):
            end = min(start + piece, length)
            output = decoder(
                tensor[:, start:end], use_cache=True, output_attentions=True, return_dict=True, **{keyword: cache}
            )
            attentions = output.attentions or ()
            for layer in range(layers):
                attention = attentions[layer] if layer < len(attentions) else None
                shape = tuple(attention.shape) if attention is not None else ()
                if attention is None or shape[:1] + shape[2:] != (1, end - start, end):
                    raise ValueError(
                        f"model: layer {layer} gave attention of shape {shape}, "
                        f"must be (1, heads, {end - start}, {end}): is it eager, and over all positions?"
                    )
                # The mean over heads, without what each token gave to itself.
                mean = attention[0].float().mean(dim=0).to(torch.float16).cpu().numpy()
                for step in range(max(start, 1), end):
                    first = layers * (step * (step - 1) // 2) + layer * step
                    weights[first : first + step] = mean[step - start, :step]
            del output, attentions, attention
            if progress is not None:
                progress(end)
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    found = {
        "num_query_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(head_dim),
        "kv_dtype": "float16",
        "recorder": {"weights": "float16, mean over query heads, without the token's own", **_versions()},
    }
    return PackedTrace(name, layers, length, weights, found | dict(metadata or {}))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _gguf_fields(path: Path) -> dict[str, Any]:
    """Return what a GGUF file says of its model: name, licence, ..."""
    reader = _extra("gguf").GGUFReader(path)
    wanted = {
        "general.name": "name_in_file",
        "general.license": "licence",
        "general.architecture": "architecture",
        "tokenizer.ggml.add_bos_token": "add_bos_token",
    }
    return {ours: reader.fields[theirs].contents() for theirs, ours in wanted.items() if theirs in reader.fields}


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("pb-kvcache", "torch", "transformers", "tokenizers", "gguf", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
