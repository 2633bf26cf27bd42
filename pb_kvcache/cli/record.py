"""``pb-kvcache record``: the attention of a real decoder, as a trace file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .._dtypes import DTYPE_BITS
from ..lab import record, record_gguf, traces
from ..lab._texts import file_names, read_texts
from ..lab.findings import size
from ._options import Count, add_model
from ._output import progress, say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "record",
        help="record a decoder's attention as a trace",
        description=(
            "Run the first tokens of a text through a decoder on this machine and save every layer's attention, mean "
            "over heads, as a trace for 'pb-kvcache bench --trace'. Of a hybrid: the layers with attention. "
            "Needs pip install 'pb-kvcache[transformers]', or pb-kvcache[llama-cpp] with --with llama-cpp."
        ),
        examples=("pb-kvcache record --model path/to/model --text text.txt --tokens 2048 -o mine.npz",),
    )
    add_model(parser, packaged=False, type=Path)
    parser.add_argument(
        "--with",
        dest="engine",
        choices=("transformers", "llama-cpp"),
        default="transformers",
        help="what runs the model (default transformers). llama-cpp takes any .gguf file, quantised as it is",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='a text each, UTF-8, or a .jsonl file with a text a line: {"name": ..., "text": ...}',
    )
    parser.add_argument("--tokens", action=Count, metavar="N", default=512, help="tokens to record (default 512)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="the trace file, .npz, or a folder where there are several texts",
    )
    parser.add_argument("--name", help="what reports call the model (default: its file's name), before the text's name")
    parser.add_argument(
        "--kv-dtype",
        choices=list(DTYPE_BITS),
        help="how the model's K and V are stored where it serves (default: --dtype, or float16 where that is float32)",
    )
    parser.add_argument("--model-source", help="where the model comes from, for the record")
    parser.add_argument("--model-licence", help="the model's licence, for the record")
    parser.add_argument("--text-source", help="where the text comes from, for the record (default: the file's name)")
    parser.add_argument("--text-licence", help="the text's licence, for the record")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record, save, and say what was saved."""
    texts = read_texts(args.text)
    files = _files(args.output, list(texts))
    only = args.text[0].name if len(args.text) == 1 else None  # of several, each text's name says which it is
    sources: dict[str, dict[str, Any]] = {
        "model": {"source": args.model_source, "licence": args.model_licence},
        "text": {
            "source": args.text_source or only,
            "licence": args.text_licence,
        },
    }
    metadata: dict[str, Any] = {
        part: {key: value for key, value in fields.items() if value is not None} for part, fields in sources.items()
    }
    if args.kv_dtype is not None:
        metadata["kv_dtype"] = args.kv_dtype

    def started(layers: int) -> None:
        say(_growth(layers, args.tokens, len(files)), sys.stderr)

    own: dict[str, Any] = {}
    if args.engine == "transformers":
        record_texts: Any = record.record_texts
        own = {"dtype": args.dtype, "device": args.device}
    else:
        record_texts = record_gguf.record_texts
        for name, plain in (("dtype", "float32"), ("device", "cpu")):
            if getattr(args, name) != plain:
                raise ValueError(f"--{name}: is of transformers; llama.cpp computes as the file is, on the CPU")
    with progress("recording", args.tokens * len(files)) as show_progress:
        recorded = record_texts(
            args.model,
            texts,
            args.tokens,
            model_name=args.name,
            metadata=metadata,
            started=started,
            progress=show_progress,
            **own,
        )
        done = []
        for file, trace in zip(files, recorded, strict=True):
            file.parent.mkdir(exist_ok=True)
            traces.save(file, trace)
            done.append(_line(file, trace))
    for line in done:
        say(line)
    return 0


def _files(output: Path, names: list[str]) -> list[Path]:
    """Return the trace file of each text: the output itself where there is one, files in it where there are several."""
    if not output.resolve().parent.is_dir():
        raise FileNotFoundError(f"output: there is no folder {output.resolve().parent}")
    if len(names) > 1:
        if output.suffix == ".npz" or (output.exists() and not output.is_dir()):
            raise ValueError(f"output = {output}: must be a folder, since {len(names)} texts make a file each")
        return [output / name for name in file_names(names)]
    if output.suffix != ".npz":
        raise ValueError(f"output = {output}: must end in .npz")
    return [output]


def _growth(layers: int, tokens: int, count: int) -> str:
    """Say how large the files will be at most."""
    one = record.trace_bytes(layers, tokens)
    several = f" a text, {size(one * count)} in all" if count > 1 else ""
    return (
        f"recording {tokens} tokens in {layers} layers: a file of up to {size(one)}{several}; twice the tokens take "
        "four times that"
    )


def _line(file: Path, trace: traces.Trace) -> str:
    """Say what was saved."""
    layers = f"{trace.num_layers} layers"
    if trace.num_layers != trace.metadata["model_layers"]:
        layers += f" with attention of {trace.metadata['model_layers']}"
    return f"{file}: {trace.name}, {layers}, {trace.length} tokens, {file.stat().st_size:,} bytes"
