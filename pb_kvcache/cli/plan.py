"""``pb-kvcache plan``: every layer's budget, adding up exactly, with its bytes and what it saves."""

from __future__ import annotations

import argparse
import importlib
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import LayerPlan, plan
from .._amount import SHAPES
from .._dtypes import DTYPE_BITS, cache_nbytes
from .._files import replacing
from .._model_config import FAMILIES, ModelConfig, read_config
from .._text import read_json
from ._output import console, print_json, print_table
from .budget import MAX_LAYERS, bar

#: Bytes of a unit, in lower case and without the B. Decimal, or binary with an i.
_UNITS = {"": 1} | {
    letter + suffix: base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1000), ("i", 1024))
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="every layer's budget, adding up exactly",
        description="Divide a cache over a model's layers, to the last position: as a pyramid or another shape, within "
        "bounds, in whole blocks.",
    )
    model = parser.add_argument_group("the model")
    which = model.add_mutually_exclusive_group(required=True)
    which.add_argument("--layers", type=int, metavar="N", help="layers that share the cache")
    which.add_argument(
        "--model",
        metavar="PATH",
        help=f"a transformers config.json, or its folder ({', '.join(FAMILIES)}): gives layers, heads, head size and "
        "dtype. Layers with a sliding window are left out of the plan",
    )
    model.add_argument("--kv-heads", type=int, metavar="N", help="key-value heads of a layer")
    model.add_argument("--head-dim", type=int, metavar="N", help="elements of a head")
    model.add_argument("--dtype", metavar="NAME", help=f"element type: {', '.join(DTYPE_BITS)} (default float16)")

    size = parser.add_argument_group("how much there is").add_mutually_exclusive_group(required=True)
    size.add_argument("--budget", type=int, metavar="N", help="positions per planned layer on average")
    size.add_argument("--total", type=int, metavar="N", help="positions in all planned layers")
    size.add_argument("--memory", metavar="SIZE", help="bytes for the whole cache, such as 2GiB or 500MB")
    size.add_argument("--fraction", type=float, metavar="F", help="share of the sequence (needs --sequence)")

    form = parser.add_argument_group("how it is divided")
    form.add_argument("--shape", choices=list(SHAPES), help="default pyramid, or weights where --weights is given")
    form.add_argument("--ratio", type=float, metavar="R", help="first layer over last (default 4)")
    form.add_argument("--beta", type=float, metavar="B", help="the paper's parameter: a ratio of 2 * B - 1")
    form.add_argument("--weights", metavar="LIST", help="one per planned layer: 3,2.5,1 or a file with a JSON array")
    form.add_argument("--min", type=int, default=1, metavar="N", help="fewest positions of a layer (default 1)")
    form.add_argument("--max", type=int, metavar="N", help="most positions of a layer (default: the sequence)")
    form.add_argument("--sequence", type=int, metavar="N", help="length of the sequence (default: --max)")
    form.add_argument("--block", type=int, default=1, metavar="N", help="budgets are multiples of this (default 1)")
    form.add_argument("--groups", type=int, metavar="N", help="also join the layers in at most N groups")

    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="draw the budgets (needs pb-kvcache[plot])")
    parser.set_defaults(run=run)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``2GiB``, ``1.5 GB`` or ``4096`` means, rounded down.

    Raises
    ------
    ValueError
        For anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.ASCII | re.IGNORECASE)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"--memory {text}: must be a number and a unit, such as 2GiB, 500MB or 4096")
    return int(Fraction(found[1]) * _UNITS[found[2].lower()])


def format_size(nbytes: int) -> str:
    """Return a size in a unit that a person reads: ``2.5 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"


def _weights(text: str) -> list[float]:
    """Return the weights of a list ``3,2.5,1``, or of a file that holds a JSON array."""
    if re.fullmatch(r"[-+.,\sA-Za-z0-9]*", text) and not (text and Path(text).exists()):
        try:
            return [float(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"--weights {text}: must be numbers with commas between them, or a file") from None
    try:
        content = read_json(Path(text).read_bytes())
    except ValueError as error:
        raise ValueError(f"--weights {text}: {error}") from None
    if not isinstance(content, list):
        raise ValueError(f"--weights {text}: must hold a JSON array")
    return content


class _Request:
    """The arguments, checked against each other, and the plan that follows."""

    def __init__(self, args: argparse.Namespace) -> None:
        model = None if args.model is None else read_config(args.model)
        self.model: ModelConfig | None = model
        self.layers: int = args.layers if model is None else model.num_layers
        if self.layers > MAX_LAYERS:
            raise ValueError(f"--layers {self.layers}: must be at most {MAX_LAYERS}")
        for name in ("max", "sequence"):
            if getattr(args, name) is not None and getattr(args, name) <= 0:
                raise ValueError(f"--{name} {getattr(args, name)}: must be greater than 0")
        self.sequence: int | None = args.max if args.sequence is None else args.sequence
        self.windows: list[int | None] = [None] * max(self.layers, 0) if model is None else list(model.windows)
        maximum = self.sequence if args.max is None else args.max
        self.note = ""
        if model is not None and self.windows and all(self.windows):
            # No layer attends to more, so the windows bound the plan.
            window = max(w for w in self.windows if w is not None)
            maximum = window if maximum is None else min(maximum, window)
            self.windows = [None] * self.layers
            self.note = f"every layer slides over {window} positions: that is the most a budget can be"
        self.planned = [layer for layer, window in enumerate(self.windows) if window is None]

        self.kv_heads: int | None = args.kv_heads if args.kv_heads is not None or model is None else model.num_kv_heads
        self.head_dim: int | None = args.head_dim if args.head_dim is not None or model is None else model.head_dim
        self.dtype: str = args.dtype or (model.dtype if model else None) or "float16"
        if (self.kv_heads is None) != (self.head_dim is None):
            raise ValueError("--kv-heads, --head-dim: both must be given, or neither")

        self.plan = self._plan(args, maximum)

    def _plan(self, args: argparse.Namespace, maximum: int | None) -> LayerPlan:
        """Return the plan of the layers that have no window of their own."""
        layers = self.layers if self.model is None else len(self.planned)
        options: dict[str, Any] = {
            "shape": args.shape,
            "ratio": args.ratio,
            "beta": args.beta,
            "weights": None if args.weights is None else _weights(args.weights),
            "minimum": args.min,
            "maximum": maximum,
            "multiple_of": args.block,
        }
        if args.memory is not None:
            if self.kv_heads is None or self.head_dim is None:
                raise ValueError("--memory: needs --kv-heads and --head-dim, or --model")
            windows = self._window_bytes()
            left = parse_size(args.memory) - windows
            if left < 0:
                raise ValueError(
                    f"--memory {args.memory}: the layers with a sliding window take {windows} bytes of it already"
                )
            return LayerPlan.from_memory(left, self.kv_heads, self.head_dim, self.dtype, layers, **options)
        if args.fraction is not None:
            if self.sequence is None:
                raise ValueError("--fraction: needs --sequence, or --max")
            return LayerPlan.from_ratio(args.fraction, self.sequence, layers, **options)
        return plan(layers, args.budget, total=args.total, **options)

    def _window_positions(self) -> int:
        """Return the positions that the layers outside the plan hold."""
        limit = self.sequence
        return sum(w if limit is None else min(w, limit) for w in self.windows if w is not None)

    def bytes_of(self, positions: int) -> int | None:
        """Return the bytes of so many positions of one layer. None where heads and their size are not known."""
        if self.kv_heads is None or self.head_dim is None:
            return None
        return cache_nbytes(positions, self.kv_heads, self.head_dim, self.dtype)

    def _window_bytes(self) -> int:
        return self.bytes_of(self._window_positions()) or 0

    def summary(self) -> dict[str, Any]:
        """Return the plan and what follows from it, ready for JSON."""
        positions = self.plan.total + self._window_positions()
        full = None if self.sequence is None else self.sequence * len(self.planned) + self._window_positions()
        return self.plan.to_dict() | {
            "offsets": self.plan.offsets.tolist(),
            "family": None if self.model is None else self.model.family,
            "model_layers": self.layers,
            "planned_layers": self.planned,
            "windows": self.windows if any(self.windows) else None,
            "sequence_length": self.sequence,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype if self.kv_heads is not None else None,
            "positions": positions,
            "nbytes": self.bytes_of(positions),
            "full_positions": full,
            "full_nbytes": None if full is None else self.bytes_of(full),
            "saving": None if full is None else 1 - positions / full,
        }


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    request = _Request(args)
    summary = request.summary()
    groups = None if args.groups is None else request.plan.groups(args.groups)
    if args.plot is not None:
        _draw(request, args.plot)
    if args.json:
        if groups is not None:
            summary["groups"] = {
                "groups": [group._asdict() for group in groups],
                "total": groups.total,
                "rounding": groups.rounding,
            }
        print_json(summary)
        return 0
    print_table(_table(request))
    lines = _lines(request, summary)
    if groups is not None:
        for group in groups:
            first, last = request.planned[group.start], request.planned[group.stop - 1]
            lines.append(f"group: layers {first} to {last}, {group.budget} positions each")
        lines.append(f"groups hold {groups.total} positions, {groups.rounding} fewer than the plan")
    target = console()
    for line in lines:
        target.print(line, highlight=False, soft_wrap=True)
    return 0


def _table(request: _Request) -> Table:
    table = Table(box=None, pad_edge=False)
    known = request.bytes_of(1) is not None
    for name in ("layer", "budget", *(["bytes"] if known else [])):
        table.add_column(name, justify="right")
    table.add_column("")
    budgets = iter(request.plan.budgets.tolist())
    most = int(request.plan.budgets.max())
    for layer, window in enumerate(request.windows):
        if window is None:
            budget = next(budgets)
            mark = bar(budget, most)
        else:
            budget = window if request.sequence is None else min(window, request.sequence)
            mark = "sliding window, not planned"
        nbytes = request.bytes_of(budget)
        table.add_row(str(layer), str(budget), *([] if nbytes is None else [format_size(nbytes)]), mark)
    return table


def _lines(request: _Request, summary: dict[str, Any]) -> list[str]:
    """Return what is said below the table."""
    lines = [str(request.plan).splitlines()[-1]]
    if request.plan.total != request.plan.requested:
        lines = str(request.plan).splitlines()[-2:]
    if request.note:
        lines.append(request.note)
    if summary["windows"] is not None:
        lines.append(f"with the sliding windows {summary['positions']} positions in {request.layers} layers")
    if summary["nbytes"] is not None:
        lines.append(
            f"{format_size(summary['nbytes'])} for {request.kv_heads} key-value heads of {request.head_dim} "
            f"{request.dtype} elements"
        )
    if summary["saving"] is not None:
        full = f"{summary['full_positions']} positions"
        if summary["full_nbytes"] is not None:
            full += f", {format_size(summary['full_nbytes'])}"
        lines.append(f"saves {summary['saving']:.1%} of the full cache at {request.sequence} tokens ({full})")
    return lines


def _draw(request: _Request, path: str) -> None:
    """Draw the planned layers' budgets to a file."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("--plot: needs matplotlib: pip install 'pb-kvcache[plot]'") from None
    figure = figure_module.Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(request.planned, request.plan.budgets, width=0.9, color="#4477aa")
    mean = request.plan.total / request.plan.num_layers
    axes.axhline(mean, color="#aa3377", linewidth=1, label=f"mean {mean:g}")
    axes.set_xlabel("layer")
    axes.set_ylabel("positions")
    axes.set_title(str(request.plan).splitlines()[-1].partition(";")[0], fontsize=10)
    axes.legend(frameon=False)
    with replacing(path) as file:
        try:
            figure.savefig(file, format=Path(path).suffix[1:] or "png")
        except RuntimeError as error:  # a format whose program is not there, such as pgf and its TeX
            raise ValueError(str(error)) from error
