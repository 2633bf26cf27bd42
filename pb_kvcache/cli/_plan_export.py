"""``pb-kvcache plan --export``: the plan as an engine's configuration, and what equal lengths lose by the curves."""

from __future__ import annotations

import argparse
from typing import Any

from .. import CurveSet, HeadPlan, LayerPlan, plan, predicted_loss, save_engine_export
from .._engine_export import ENGINES


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--export",
        choices=ENGINES,
        help="write -o as a configuration of this engine instead: a window for each layer, in blocks of --block. The "
        "engine keeps the newest positions. --groups N allows at most N windows",
    )


def check(args: argparse.Namespace, request: Any = None) -> None:
    """Refuse arguments that no export follows from, before anything is written.

    `request` has the layers of a model and those of them that are planned. None: all are.
    """
    if args.export is None:
        return
    if args.output is None:
        raise ValueError(f"--export {args.export}: needs -o FILE")
    if request is not None and len(request.planned) < len(request.layers):
        left = [layer for layer in range(len(request.layers)) if layer not in request.planned]
        raise ValueError(
            f"--export {args.export}: layer {left[0]} of the model has a sliding window or no cache of its own, and an "
            "export needs a budget for every layer"
        )


def layers_of(curves: CurveSet, heads: HeadPlan, args: argparse.Namespace) -> LayerPlan:
    """Return the plan of the layers that holds as many positions as a plan of the heads, rounded down to blocks."""
    most = args.sequence if args.max is None else args.max
    total = heads.total // heads.num_kv_heads // args.block * args.block
    return curves.layer_plan(total=total, minimum=args.min, maximum=most, multiple_of=args.block)


def write(args: argparse.Namespace, layers: LayerPlan) -> dict[str, Any]:
    """Write the export of a plan, and return what is said of it, ready for JSON."""
    save_engine_export(args.output, layers, args.export, groups=args.groups)
    groups = None if args.groups is None else layers.groups(args.groups)
    windows = layers.budgets if groups is None else groups.budgets
    return {
        "engine": args.export,
        "file": args.output,
        "windows": windows.tolist(),
        "rounding": 0 if groups is None else groups.rounding,
    }


def losses(curves: CurveSet, heads: HeadPlan, layers: LayerPlan, groups: int | None) -> dict[str, float]:
    """Return the predicted loss of the heads' plan, and of the same total with equal lengths, by name."""
    uniform = plan(layers.num_layers, total=layers.total, shape="uniform", multiple_of=layers.multiple_of)
    found = {"heads": predicted_loss(curves, heads), "layers": predicted_loss(curves, layers)}
    if groups is not None:
        found["groups"] = predicted_loss(curves, layers.groups(groups))
    return found | {"uniform": predicted_loss(curves, uniform)}


def lines(said: dict[str, Any]) -> list[str]:
    """Return what is printed of an export."""
    count = len(set(said["windows"]))
    found = [
        f"{said['engine']}: {len(said['windows'])} layers, {count} window{'s' if count > 1 else ''} of "
        f"{min(said['windows'])} to {max(said['windows'])} positions, {said['rounding']} positions fewer than the plan",
        "the engine keeps the newest positions of each layer and selects none",
    ]
    if "predicted_loss" in said:
        named = ", ".join(f"{name} {loss:.4f}" for name, loss in said["predicted_loss"].items())
        found.append(f"predicted loss of these lengths where positions are selected: {named}")
    return found
