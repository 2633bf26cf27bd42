"""``pb-kvcache record``: the attention of a real decoder, as a trace file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._dtypes import DTYPE_BITS
from ..lab import record, traces
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
            "Needs pip install 'pb-kvcache[transformers]'."
        ),
        examples=("pb-kvcache record --model path/to/model --text text.txt --tokens 2048 -o mine.npz",),
    )
    add_model(parser, packaged=False, type=Path)
    parser.add_argument("--text", type=Path, required=True, help="the text, UTF-8")
    parser.add_argument("--tokens", action=Count, metavar="N", default=512, help="tokens to record (default 512)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the trace file, .npz")
    parser.add_argument("--name", help="what reports call it (default: the model's name and the text's)")
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
    if args.output.suffix != ".npz":
        raise ValueError(f"output = {args.output}: must end in .npz")
    if not args.output.resolve().parent.is_dir():
        raise FileNotFoundError(f"output: there is no folder {args.output.resolve().parent}")
    try:
        text = args.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {args.text} is not UTF-8: {error}") from None
    sources: dict[str, dict[str, Any]] = {
        "model": {"source": args.model_source, "licence": args.model_licence},
        "text": {"source": args.text_source or args.text.name, "licence": args.text_licence},
    }
    metadata: dict[str, Any] = {
        part: {key: value for key, value in fields.items() if value is not None} for part, fields in sources.items()
    }
    if args.kv_dtype is not None:
        metadata["kv_dtype"] = args.kv_dtype
    with progress("recording", args.tokens) as show_progress:
        trace = record.record(
            args.model,
            text,
            args.tokens,
            name=args.name,
            text_name=args.text.stem,
            metadata=metadata,
            dtype=args.dtype,
            device=args.device,
            progress=lambda done: show_progress(done, args.tokens),
        )
    traces.save(args.output, trace)
    size = args.output.stat().st_size
    layers = f"{trace.num_layers} layers"
    if trace.num_layers != trace.metadata["model_layers"]:
        layers += f" with attention of {trace.metadata['model_layers']}"
    say(f"{args.output}: {layers}, {trace.length} tokens, {size:,} bytes")
    return 0
