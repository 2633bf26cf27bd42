"""``pb-kvcache plan``: every layer's budget, adding up exactly, with its bytes and what it saves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import CurveSet, HeadPlan, LayerPlan, plan, save_plan
from .._amount import SHAPES, Amount, Kind, TotalError
from .._checks import positive
from .._dtypes import DTYPE_BITS, dtype_bits
from .._filled_cache import LayerCache, common
from .._head_plan import SHADES
from .._model_config import FAMILIES, read_config
from .._text import read_json
from . import _plan_export
from ._options import Count, Ratio, Share, add_budget, each_budget
from ._output import console, print_json, print_table
from ._plan_figures import draw_heads, draw_layers
from ._sizes import format_size, parse_size
from .budget import MAX_LAYERS, bar


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="every layer's budget, adding up exactly",
        description="Divide a cache over a model's layers, to the last position: as a pyramid or another shape, within "
        "bounds, in whole blocks.",
        examples=(
            "pb-kvcache plan --layers 32 --budget 512 --ratio 4 --kv-heads 8 --head-dim 128",
            "pb-kvcache plan --model config.json --memory 2GiB --sequence 32768 --block 16",
            "pb-kvcache plan --curves smollm2 --budget 64 25% --sequence 1000 -o plan.json",
        ),
    )
    model = parser.add_argument_group("the model")
    which = model.add_mutually_exclusive_group(required=True)
    which.add_argument("--layers", action=Count, metavar="N", help="layers that share the cache")
    which.add_argument(
        "--model",
        metavar="PATH",
        help="a transformers config.json, or its folder: gives layers, heads, head size and dtype. Layers with a "
        "sliding window are left out of the plan. Needs the extra 'transformers' for families other than "
        f"{', '.join(FAMILIES)}",
    )
    which.add_argument(
        "--curves",
        metavar="FILE",
        help="a curve file, or smollm2: what every KV head loses at a few budgets. Gives a plan of the heads",
    )
    model.add_argument(
        "--grid", metavar="LIST", help="with a plain array of curves: its budgets, 16,64,256 for example"
    )
    model.add_argument("--kv-heads", action=Count, metavar="N", help="key-value heads of a layer")
    model.add_argument("--head-dim", action=Count, metavar="N", help="elements of a head")
    model.add_argument("--dtype", metavar="NAME", help=f"element type: {', '.join(DTYPE_BITS)} (default float16)")

    size = parser.add_argument_group("how much there is").add_mutually_exclusive_group(required=True)
    add_budget(size, "positions per planned layer on average, or percentages of --sequence")
    size.add_argument("--total", action=Count, metavar="N", help="positions in all planned layers")
    size.add_argument("--memory", metavar="SIZE", help="bytes for the whole cache, such as 2GiB or 500MB")
    size.add_argument("--fraction", action=Share, metavar="P", help="what --budget says with a percentage")

    form = parser.add_argument_group("how it is divided")
    form.add_argument("--shape", choices=list(SHAPES), help="default pyramid, or weights where --weights is given")
    form.add_argument("--ratio", action=Ratio, metavar="R", help="first layer over last: 4, 1/4 (default 4)")
    form.add_argument("--beta", type=float, metavar="B", help="the paper's parameter: a ratio of 2 * B - 1")
    form.add_argument("--weights", metavar="LIST", help="one per planned layer: 3,2.5,1 or a file with a JSON array")
    form.add_argument(
        "--min",
        type=int,
        metavar="N",
        help="fewest positions of a layer (default 1), or of a head (default the curves' first)",
    )
    form.add_argument(
        "--max", action=Count, metavar="N", help="most positions of a layer or head (default: the sequence)"
    )
    form.add_argument("--sequence", action=Count, metavar="N", help="length of the sequence (default: --max)")
    form.add_argument("--block", action=Count, default=1, metavar="N", help="budgets are multiples of this (default 1)")
    form.add_argument("--groups", action=Count, metavar="N", help="also join the layers in at most N groups")

    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the plan to a file, for every place that takes one"
    )
    _plan_export.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="draw the budgets (needs pb-kvcache[plot])")
    parser.set_defaults(run=run)


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
        self.family: str | None = None if model is None else model.family
        if model is None and args.layers > MAX_LAYERS:
            raise ValueError(f"--layers {args.layers}: must be at most {MAX_LAYERS}")
        self.sequence: int | None = args.max if args.sequence is None else args.sequence
        self.dtype: str = args.dtype or (model.dtype if model else None) or "float16"
        dtype_bits(self.dtype)

        # What a position takes. Without a model and heads that is not known, and a layer of 1 element stands for it.
        self.kv_heads: int | None = args.kv_heads if args.kv_heads is not None or model is None else model.num_kv_heads
        self.head_dim: int | None = args.head_dim if args.head_dim is not None or model is None else model.head_dim
        given = args.kv_heads is not None or args.head_dim is not None
        if given and (self.kv_heads is None or self.head_dim is None):
            raise ValueError("--kv-heads, --head-dim: both must be given, or neither")
        self.layers = [LayerCache(1)] * max(args.layers, 0) if model is None else list(model.layers)
        if given and self.kv_heads is not None and self.head_dim is not None:
            heads, dim = positive("num_kv_heads", self.kv_heads), positive("head_dim", self.head_dim)
            self.layers = [LayerCache.of_heads(heads, dim, c.window) if c.elements else c for c in self.layers]
        self.sized = given or model is not None

        # Which layers are planned: those that hold every position, or, where all slide, those that slide.
        holding = [layer for layer, cache in enumerate(self.layers) if cache.elements]
        self.planned = [layer for layer in holding if self.layers[layer].window is None] or holding
        self.bounded = any(self.layers[layer].window is not None for layer in self.planned)
        most = self.sequence if args.max is None else args.max
        self.plan = self._plan(args, [self._held(layer, most) for layer in self.planned] if self.bounded else most)

    def _plan(self, args: argparse.Namespace, maximum: Any) -> LayerPlan:
        """Return the plan of the planned layers."""
        layers = args.layers if args.model is None else len(self.planned)
        options: dict[str, Any] = {
            "shape": args.shape,
            "ratio": None if args.ratio is None else float(args.ratio),
            "beta": args.beta,
            "weights": None if args.weights is None else _weights(args.weights),
            "minimum": 1 if args.min is None else args.min,
            "maximum": maximum,
            "multiple_of": args.block,
        }
        if args.memory is not None:
            if not self.sized:
                raise ValueError("--memory: needs --kv-heads and --head-dim, or --model")
            elements = common((self.layers[layer] for layer in self.planned), "elements")
            if elements is None:
                raise ValueError("--memory: a position takes more in some layers than in others; give --budget")
            others = self.nbytes({layer: held for layer, held in self.full().items() if layer not in self.planned})
            left = parse_size(args.memory) - others
            if left < 0:
                raise ValueError(
                    f"--memory {args.memory}: the layers with a sliding window take {others} bytes of it already"
                )
            bits = elements * dtype_bits(self.dtype)
            return LayerPlan._of_amount(Amount.of("memory", left, "nbytes"), layers, options, position_bits=bits)
        if args.fraction is not None:
            if self.sequence is None:
                raise ValueError(f"{args.asked}: needs --sequence, or --max")
            return LayerPlan.from_ratio(float(args.fraction), self.sequence, layers, **options)
        return plan(layers, args.budget, total=args.total, **options)

    def _held(self, layer: int, most: int | None) -> int:
        """Return the positions that a layer holds without a plan, where it holds at most `most`. 0: not known."""
        cache = self.layers[layer]
        bounds = [bound for bound in (cache.window, most) if bound is not None]
        return min(bounds, default=0) if cache.elements else 0

    def full(self) -> dict[int, int]:
        """Return the positions of every layer without a plan. Those of a layer without a window need the sequence."""
        return {layer: self._held(layer, self.sequence) for layer in range(len(self.layers))}

    def with_plan(self) -> dict[int, int]:
        """Return the positions of every layer with the plan."""
        return self.full() | dict(zip(self.planned, self.plan.budgets.tolist(), strict=True))

    def nbytes(self, positions: dict[int, int]) -> int:
        """Return the bytes of so many positions of each of the layers, rounded up to a whole byte."""
        elements = sum(self.layers[layer].elements * count for layer, count in positions.items())
        return -(-elements * dtype_bits(self.dtype) // 8)

    def summary(self) -> dict[str, Any]:
        """Return the plan and what follows from it, ready for JSON."""
        held, full = self.with_plan(), None if self.sequence is None else self.full()
        positions, full_positions = sum(held.values()), None if full is None else sum(full.values())
        windows = [cache.window for cache in self.layers]
        saving = None
        if full is not None and full_positions:
            # In bytes where they are known: the layers may differ in what a position takes.
            kept, of = (self.nbytes(held), self.nbytes(full)) if self.sized else (positions, full_positions)
            saving = 1 - kept / of
        return self.plan.to_dict() | {
            "offsets": self.plan.offsets.tolist(),
            "family": self.family,
            "model_layers": len(self.layers),
            "planned_layers": self.planned,
            "windows": windows if any(windows) else None,
            "layers_without_cache": [layer for layer, cache in enumerate(self.layers) if not cache.elements],
            "sequence_length": self.sequence,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "elements_per_position": [cache.elements for cache in self.layers] if self.sized else None,
            "dtype": self.dtype if self.sized else None,
            "positions": positions,
            "nbytes": self.nbytes(held) if self.sized else None,
            "full_positions": full_positions,
            "full_nbytes": None if full is None or not self.sized else self.nbytes(full),
            "saving": saving,
        }


def run(args: argparse.Namespace) -> int:
    """Print the plan, or one for each budget."""
    if args.curves is None and args.grid is not None:
        raise ValueError("--grid: is of curves; give --curves")
    each = each_budget(args)
    if args.plot is not None and len(each) > 1:
        raise ValueError(f"--plot: draws one plan, not those of {len(each)} budgets")
    if args.export is not None and len(each) > 1:
        raise ValueError(f"--export {args.export}: writes one plan, not those of {len(each)} budgets")
    made = [_of_layers(one) if args.curves is None else _of_heads(one) for one in each]
    if args.output is not None and args.export is None:
        plans = [plan for plan, _, _ in made]
        save_plan(args.output, plans[0] if len(plans) == 1 else plans)
    if args.json:
        print_json(made[0][1] if len(made) == 1 else [document for _, document, _ in made])
        return 0
    for one, (_, _, show) in zip(each, made, strict=True):
        if len(made) > 1:
            console().print(f"{one.asked.removeprefix('--')}:")
        show()
    return 0


#: A plan, what JSON says of it, and what prints it.
_Made = tuple["LayerPlan | HeadPlan", dict[str, Any], Callable[[], None]]


def _of_layers(args: argparse.Namespace) -> _Made:
    """Return the plan of a model's layers."""
    request = _Request(args)
    _plan_export.check(args, request)
    summary = request.summary()
    if args.export is not None:
        summary["export"] = _plan_export.write(args, request.plan)
    groups = None if args.groups is None else request.plan.groups(args.groups)
    if args.plot is not None:
        draw_layers(request.planned, request.plan, args.plot)
    if groups is not None:
        summary["groups"] = {
            "groups": [group._asdict() for group in groups],
            "total": groups.total,
            "rounding": groups.rounding,
        }

    def show() -> None:
        print_table(_table(request))
        lines = _lines(request, summary)
        if groups is not None:
            for group in groups:
                first, last = request.planned[group.start], request.planned[group.stop - 1]
                lines.append(f"group: layers {first} to {last}, {group.budget} positions each")
            lines.append(f"groups hold {groups.total} positions, {groups.rounding} fewer than the plan")
        if args.export is not None:
            lines += _plan_export.lines(summary["export"])
        _print_lines(lines)

    return request.plan, summary, show


def _print_lines(lines: list[str]) -> None:
    target = console()
    for line in lines:
        target.print(line, soft_wrap=True)


def _of_heads(args: argparse.Namespace) -> _Made:
    """Return the plan of the heads that a curve file gives."""
    _plan_export.check(args)
    for name in ("shape", "ratio", "beta", "weights", "groups", "kv_heads"):
        if getattr(args, name) is not None and (name != "groups" or args.export is None):
            raise ValueError(
                f"--curves and --{name.replace('_', '-')}: the curves already say how the total is divided"
            )
    grid = None if args.grid is None else _grid(args.grid)
    curves = CurveSet.load(args.curves, grid)
    units = curves.num_layers * curves.num_kv_heads
    sequence = args.max if args.sequence is None else args.sequence
    dtype = args.dtype or "float16"
    head_dim = curves.measured.get("head_dim") if args.head_dim is None else args.head_dim
    if args.memory is not None and head_dim is None:
        raise ValueError("--memory: needs --head-dim, which the curve file does not say")
    amounts: dict[Kind, Any] = {"budget": args.budget, "total": args.total}
    amounts["fraction"] = None if args.fraction is None else float(args.fraction)
    amounts["memory"] = None if args.memory is None else parse_size(args.memory)
    amount = Amount.one_of(amounts)
    assert amount is not None  # argparse asks for one
    if args.fraction is not None and sequence is None:
        raise ValueError(f"{args.asked}: needs --sequence, or --max")
    bits = 2 * positive("head_dim", 1 if head_dim is None else head_dim) * dtype_bits(dtype)
    total = amount.total(units, position_bits=bits, length=sequence or 0, multiple_of=args.block)
    most = sequence if args.max is None else args.max
    try:
        plan_of_heads = curves.plan(total=total, minimum=args.min, maximum=most, multiple_of=args.block)
    except TotalError as error:
        raise amount.refusal(error, units, "heads", position_bits=bits, length=sequence or 0) from None
    exported: dict[str, Any] | None = None
    if args.export is not None:
        layers = _plan_export.layers_of(curves, plan_of_heads, args)
        losses = _plan_export.losses(curves, plan_of_heads, layers, args.groups)
        exported = _plan_export.write(args, layers) | {"predicted_loss": losses}
    if args.plot is not None:
        draw_heads(plan_of_heads, args.plot)
    nbytes = None if head_dim is None else plan_of_heads.nbytes(head_dim, dtype)
    own: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "nbytes": nbytes, "sequence_length": sequence}
    if exported is not None:
        own["export"] = exported

    def show() -> None:
        try:
            SHADES.encode(console().encoding)
            shades = SHADES
        except UnicodeEncodeError:
            shades = ".:-=+*#@"
        lines = [*plan_of_heads.picture(shades).splitlines(), str(plan_of_heads).splitlines()[-1]]
        if nbytes is not None:
            lines.append(f"{format_size(nbytes)} for heads of {head_dim} {dtype} elements")
        if sequence is not None:
            saving = 1 - plan_of_heads.total / (units * sequence)
            lines.append(f"saves {saving:.1%} of the full cache at {sequence} tokens")
        if exported is not None:
            lines += _plan_export.lines(exported)
        _print_lines(lines)

    return plan_of_heads, plan_of_heads.to_dict() | own, show


def _grid(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--grid {text}: must be integers with commas between them") from None


def _table(request: _Request) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "budget", *(["bytes"] if request.sized else [])):
        table.add_column(name, justify="right")
    table.add_column("")
    most = int(request.plan.budgets.max())
    for layer, held in request.with_plan().items():
        if layer in request.planned:
            mark = bar(held, most)
        elif request.layers[layer].elements:
            mark = "sliding window, not planned"
        else:
            mark = "no keys and values of its own"
        nbytes = [format_size(request.nbytes({layer: held}))] if request.sized else []
        table.add_row(str(layer), str(held), *nbytes, mark)
    return table


def _lines(request: _Request, summary: dict[str, Any]) -> list[str]:
    """Return what is said below the table."""
    lines = [str(request.plan).splitlines()[-1]]
    if request.plan.total != request.plan.requested:
        lines = str(request.plan).splitlines()[-2:]
    windows = [cache.window for cache in request.layers if cache.window is not None]
    if request.bounded:
        each = f"{windows[0]} positions" if len(set(windows)) == 1 else f"{min(windows)} to {max(windows)} positions"
        lines.append(f"every layer slides over {each}: that is the most a budget can be")
    elif windows:
        lines.append(f"with the sliding windows {summary['positions']} positions in {len(request.layers)} layers")
    if summary["layers_without_cache"]:
        lines.append(f"{len(summary['layers_without_cache'])} layers hold no keys and values of the prompt")
    if request.sized:
        elements = sorted({cache.elements for cache in request.layers if cache.elements})
        what = f"{request.kv_heads} key-value heads of {request.head_dim} {request.dtype} elements"
        if request.kv_heads is None or request.head_dim is None:
            what = f"{' or '.join(map(str, elements))} {request.dtype} elements a position and layer"
        lines.append(f"{format_size(summary['nbytes'])} for {what}")
    if summary["saving"] is not None:
        full = f"{summary['full_positions']} positions"
        if summary["full_nbytes"] is not None:
            full += f", {format_size(summary['full_nbytes'])}"
        cache = "the full cache" if request.family is None else "what the model itself would hold"
        lines.append(f"saves {summary['saving']:.1%} of {cache} at {request.sequence} tokens ({full})")
    return lines
