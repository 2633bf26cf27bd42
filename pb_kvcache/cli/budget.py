"""``pb-kvcache budget``: every layer's share of a pyramid, and what flooring loses."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

from rich.table import Table

from .. import pyramid_budgets
from .._native import lib
from ._options import Budget, Count, Ratio, add_budget
from ._output import console, print_json, print_table

#: More layers than any model has. A table of one line a layer would be too long beyond it.
MAX_LAYERS: int = lib.PB_KVCACHE_STACK_MAX_LAYERS


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "budget",
        help="every layer's share of a pyramid",
        description="Print every layer's floored share of a PyramidKV budget, their total, and what flooring loses.",
        examples=(
            "pb-kvcache budget --layers 32 --budget 512",
            "pb-kvcache budget --layers 32 --budget 128 25% --sequence 4096 --ratio 1/4",
        ),
    )
    parser.add_argument("--layers", action=Count, metavar="N", required=True, help="layers of the model")
    add_budget(parser, "positions per layer on average", "(default 512)", default=[Budget("512")])
    parser.add_argument("--sequence", action=Count, metavar="N", help="length of the sequence, for percentages")
    parser.add_argument(
        "--ratio",
        action=Ratio,
        metavar="R",
        default=Fraction(4),
        help="first layer's share over the last one's: 4, 1/4 (default 4)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table, a list for several budgets")
    parser.set_defaults(run=run)


def bar(value: int, most: int, width: int = 40) -> str:
    """Return a horizontal bar of block characters: `most` fills the width."""
    eighths = round(8 * width * value / most) if most else 0
    return "█" * (eighths // 8) + ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8]


def shares_of(budget: int, num_layers: int, ratio: Fraction) -> list[int]:
    """Return every layer's floored share: the library's, or, for a ratio that is no whole number, by its formula."""
    if ratio.denominator == 1:
        return [int(share) for share in pyramid_budgets(budget, num_layers, int(ratio))]
    steps = num_layers - 1
    if not steps:
        return [budget]
    p, q = ratio.numerator, ratio.denominator
    return [2 * budget * (p * steps - layer * (p - q)) // ((p + q) * steps) for layer in range(num_layers)]


def run(args: argparse.Namespace) -> int:
    """Print the shares."""
    if args.layers > MAX_LAYERS:
        raise ValueError(f"--layers {args.layers}: must be at most {MAX_LAYERS}")
    budgets = [budget.positions(args.sequence) for budget in args.budget]
    shares = {budget: shares_of(budget, args.layers, args.ratio) for budget in budgets}
    if args.json:
        documents = [_document(budget, shares[budget], args.ratio) for budget in shares]
        print_json(documents[0] if len(documents) == 1 else documents)
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    for budget in shares:
        table.add_column("share" if len(shares) == 1 else f"at {budget}", justify="right")
    if len(shares) == 1:
        table.add_column("")
    for layer, row in enumerate(zip(*shares.values(), strict=True)):
        marks = [bar(row[0], max(shares[budgets[0]]))] if len(shares) == 1 else []
        table.add_row(str(layer), *map(str, row), *marks)
    print_table(table)
    target = console()
    for budget, found in shares.items():
        offered = budget * args.layers
        target.print(f"total {sum(found)} of {offered} positions: flooring loses {offered - sum(found)}")
    return 0


def _document(budget: int, shares: list[int], ratio: Fraction) -> dict[str, Any]:
    """Return one budget's shares as JSON values."""
    total = sum(shares)
    return {
        "budget": budget,
        "num_layers": len(shares),
        "pyramid_ratio": int(ratio) if ratio.denominator == 1 else float(ratio),
        "shares": shares,
        "total": total,
        "lost_to_flooring": budget * len(shares) - total,
    }
