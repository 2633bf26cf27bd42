"""``pb-kvcache bench``: what each policy keeps of a real model's attention at equal total memory."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.table import Table

from .._policies import label, policy_names
from ..lab import bench, page, traces
from ..lab.findings import TIMES, findings, layers, size, step_time
from ._output import console, print_json, print_table, progress, say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="what each policy keeps of a real model's attention",
        description=(
            "Replay a trace of a model's attention through every policy, all holding the same number of positions over "
            "all layers, and print what they retain and what that costs. Without arguments: the recorded attention of "
            "SmolLM2-135M-Instruct, 30 layers, at four budgets. That takes some seconds."
        ),
    )
    parser.add_argument(
        "--trace",
        default="smollm2-135m",
        help=f"one of {', '.join(traces.names())}, or a file that 'pb-kvcache record' wrote (default smollm2-135m)",
    )
    parser.add_argument(
        "--budgets",
        help="positions per layer on average, or percentages of the length, comma-separated "
        f"(default {','.join(bench.BUDGETS).replace('%', '%%')}, or what the plans among the policies have)",
    )
    parser.add_argument(
        "--policies",
        default=",".join(bench.POLICIES),
        help=f"comma-separated, of {', '.join(policy_names())} (default {','.join(bench.POLICIES)})",
    )
    parser.add_argument(
        "--obs-window",
        type=int,
        default=16,
        help="observed steps that make the score of SnapKV and pyramids (default 16)",
    )
    parser.add_argument(
        "--pool-kernel",
        type=int,
        default=7,
        help="kept neighbours that SnapKV and pyramids pool, 1 for none (default 7)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, -1 for one a core, by joblib (extra 'bench'; default 1, without joblib)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, every layer included, instead of tables")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write DIR/index.html, a page with plots (extra 'bench')"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print what was measured."""
    if args.report is not None:
        page.require_matplotlib()
        args.report.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is found out before the work
    budgets = None if args.budgets is None else listed(args.budgets)
    policies = listed(args.policies)
    with progress("replaying") as show_progress:
        results = bench.run(
            args.trace,
            budgets,
            policies,
            obs_window=args.obs_window,
            pool_kernel=args.pool_kernel,
            jobs=args.jobs,
            progress=show_progress,
        )
    if args.json:
        print_json(results.to_dict(), indent=1)
    else:
        show(results)
    if args.report is not None:
        path = page.write(results, args.report, _command(args))
        say(f"report: {path}", sys.stderr if args.json else None)
    return 0


def listed(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _command(args: argparse.Namespace) -> str:
    """Return the command line that measures the same again."""
    words = ["pb-kvcache", "bench"]
    defaults = {
        "trace": "smollm2-135m",
        "budgets": None,
        "policies": ",".join(bench.POLICIES),
        "obs_window": 16,
        "pool_kernel": 7,
    }
    for name, default in defaults.items():
        if getattr(args, name) != default:
            words += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    return shlex.join(words)


def show(results: bench.Results) -> None:
    """Print a table a budget, and the findings."""
    target = console()
    target.print(
        f"{results.trace}: {layers(results)}, {results.length} positions; SnapKV and pyramids: "
        f"obs_window {results.obs_window}, pool_kernel {results.pool_kernel}",
        highlight=False,
    )
    for budget in results.budgets:
        target.print()
        print_table(table(results, budget))
    target.print()
    target.print(TIMES, highlight=False)
    for sentence in findings(results):
        target.print(sentence, highlight=False)


def table(results: bench.Results, budget: int) -> Table:
    """Return one budget's table."""
    rows = Table(
        box=None,
        pad_edge=False,
        title_justify="left",
        title=f"{budget} positions a layer ({100 * budget / results.length:.0f} %), "
        f"{budget * results.num_layers} in all, recent window {bench.recent_window(budget)}",
    )
    rows.add_column("policy")
    kept = ("mass", "worst layer", "recall", "peak", "mean", "K/V saved")
    for title in (*kept, "policy memory", "time a step", "in a stack"):
        rows.add_column(title, justify="right")
    reports = results.at(budget)
    best = max((r.retained_mass for r in reports if r.budget is not None), default=None)
    for r in reports:
        saved, worst = results.saved(r), r.worst_layer
        rows.add_row(
            label(r.policy),
            f"{r.retained_mass:.4f}",
            f"{worst.retained_mass:.3f} @{worst.layer:<2}",
            f"{r.recall:.4f}",
            str(r.peak_resident),
            f"{r.mean_resident:.0f}",
            "-" if saved is None else size(saved),
            size(r.policy_bytes),
            step_time(r),
            step_time(results.stack_of(r)),
            style="bold" if r.budget is not None and r.retained_mass == best else None,
        )
    return rows
