"""``pb-kvcache fit``: which budgets suit a model's layers, and how they do where they were not fitted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from .. import fit, workloads
from ._output import console, print_table
from .bench import listed
from .budget import bar


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "fit",
        help="which budgets suit a model's layers, judged on steps that the fit did not see",
        description=(
            "Replay every layer of a trace alone at a grid of budgets, divide the total where it retains most, and "
            "judge that beside uniform budgets and pyramids: on the steps of the fit, and on steps or a text that it "
            "did not see. Without arguments: the recorded attention of SmolLM2-135M-Instruct at 10 % of its length."
        ),
    )
    names = ", ".join(workloads.names())
    parser.add_argument(
        "--trace",
        default="smollm2-135m",
        help=f"one of {names}, or a file that 'pb-kvcache record' wrote (default smollm2-135m)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--budget", metavar="N", help="positions per layer on average, or a percentage (default 10%%)")
    size.add_argument("--budgets", metavar="LIST", help="several of them, with commas in between")
    parser.add_argument(
        "--holdout",
        type=float,
        metavar="F",
        help="part of the steps that the fit does not see, the last ones (default 0.5, or 0 with --judge)",
    )
    parser.add_argument("--judge", metavar="TRACE", help="judge on another trace of the same model, too")
    parser.add_argument(
        "--objective",
        choices=fit.OBJECTIVES,
        default="mean",
        help="retain most on average over layers, or in the worst layer (default mean)",
    )
    parser.add_argument("--ratios", default="2,4", metavar="LIST", help="of the pyramids beside it (default 2,4)")
    parser.add_argument("--block", type=int, default=1, metavar="N", help="budgets are multiples of this (default 1)")
    parser.add_argument(
        "--recent-window", type=int, metavar="N", help="newest positions that are safe (default min(32, budget // 4))"
    )
    parser.add_argument("--obs-window", type=int, default=16, metavar="N", help="SnapKV's (default 16)")
    parser.add_argument("--pool-kernel", type=int, default=7, metavar="N", help="SnapKV's (default 7)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the fitted plan, or plans, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON, curves included, instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit, judge, and print both."""
    if args.output is not None and not args.output.resolve().parent.is_dir():  # found out before the work
        raise FileNotFoundError(f"output: there is no folder {args.output.resolve().parent}")
    results = fit.run(
        args.trace,
        listed(args.budgets) if args.budgets is not None else [args.budget or "10%"],
        holdout=args.holdout,
        judge_on=args.judge,
        ratios=_ratios(args.ratios),
        multiple_of=args.block,
        objective=args.objective,
        recent_window=args.recent_window,
        obs_window=args.obs_window,
        pool_kernel=args.pool_kernel,
    )
    if args.output is not None:
        files = [result.file() for result in results]
        text = json.dumps(files if len(files) > 1 else files[0])
        args.output.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps([result.to_dict() for result in results]))
        return 0
    first = results[0].fit
    _say(
        f"{first.trace}: {results[0].num_layers} layers, SnapKV of obs_window {args.obs_window}, pool_kernel "
        f"{args.pool_kernel}; fitted to steps {first.steps.start} to {first.steps.stop - 1}, to retain most "
        f"{'on average' if args.objective == 'mean' else 'in the worst layer'}"
    )
    for result in results:
        _say("")
        print_table(_budgets(result))
        _say("")
        print_table(_masses(result))
        for sentence in result.findings():
            _say(sentence)
    if args.output is not None:
        _say(f"plan: {args.output}")
    return 0


def _say(line: str) -> None:
    console().print(line, highlight=False, markup=False, soft_wrap=True)  # a trace may be called anything


def _ratios(text: str) -> list[float]:
    try:
        return [float(word) for word in listed(text)]
    except ValueError:
        raise ValueError(f"--ratios {text}: must be numbers with commas between them") from None


def _budgets(result: fit.Result) -> Table:
    """Return the fitted budgets, a line a layer."""
    made = result.fit.plan
    table = Table(
        box=None,
        pad_edge=False,
        title_justify="left",
        title=f"{result.fit.budget} positions a layer, {made.total} in all, recent window {result.recent_window}",
    )
    table.add_column("layer", justify="right")
    table.add_column("budget", justify="right")
    table.add_column("")
    for layer, budget in enumerate(made.budgets.tolist()):
        table.add_row(str(layer), str(budget), bar(budget, int(made.budgets.max())))
    return table


def _masses(result: fit.Result) -> Table:
    """Return what each plan retains: on average, and in the worst layer."""
    table = Table(box=None, pad_edge=False)
    table.add_column("budgets")
    for place in result.judged:
        table.add_column(f"mass {place}", justify="right")
        table.add_column("worst layer", justify="right")
    for name in result.plans:
        cells = []
        for reports in result.judged.values():
            worst = reports[name].worst_layer
            cells += [f"{reports[name].retained_mass:.4f}", f"{worst.retained_mass:.3f} @{worst.layer:<2}"]
        table.add_row(name, *cells)
    return table
