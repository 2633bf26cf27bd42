"""``pb-kvcache budget``: every layer's share of a pyramid, and what flooring loses."""

from __future__ import annotations

import argparse

from rich.table import Table

from .. import pyramid_budgets
from .._native import lib
from ._output import console, print_json, print_table

#: More layers than any model has. A table of one line a layer would be too long beyond it.
MAX_LAYERS: int = lib.PB_KVCACHE_STACK_MAX_LAYERS


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "budget",
        help="every layer's share of a pyramid",
        description="Print every layer's floored share of a PyramidKV budget, their total, and what flooring loses.",
    )
    parser.add_argument("--layers", type=int, required=True, help="layers of the model")
    parser.add_argument("--budget", type=int, default=512, help="positions per layer on average (default 512)")
    parser.add_argument("--ratio", type=int, default=4, help="first layer's share over the last one's (default 4)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def bar(value: int, most: int, width: int = 40) -> str:
    """Return a horizontal bar of block characters: `most` fills the width."""
    eighths = round(8 * width * value / most) if most else 0
    return "█" * (eighths // 8) + ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8]


def run(args: argparse.Namespace) -> int:
    """Print the shares."""
    if args.layers > MAX_LAYERS:
        raise ValueError(f"--layers {args.layers}: must be at most {MAX_LAYERS}")
    shares = [int(share) for share in pyramid_budgets(args.budget, args.layers, args.ratio)]
    total = sum(shares)
    offered = args.budget * args.layers
    if args.json:
        print_json(
            {
                "budget": args.budget,
                "num_layers": args.layers,
                "pyramid_ratio": args.ratio,
                "shares": shares,
                "total": total,
                "lost_to_flooring": offered - total,
            }
        )
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for layer, share in enumerate(shares):
        table.add_row(str(layer), str(share), bar(share, shares[0]))
    print_table(table)
    console().print(f"total {total} of {offered} positions: flooring loses {offered - total}")
    return 0
