"""``pb-kvcache bench``: what each policy keeps of a real model's attention at equal total memory."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from .._policies import label, policy_names
from ..lab import bench, page, traces
from ..lab.findings import TIMES, Gain, best_of, gains, layers, points, size, step_time
from ._options import Budgets, Count, add_budget
from ._output import complain, console, print_json, print_table, progress, say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="what each policy keeps of a real model's attention",
        description=(
            "Replay a trace of a model's attention through every policy at equal memory, and print what each retains "
            "and what that costs. Without arguments: the shipped recording of SmolLM2-135M-Instruct, four budgets, "
            "some seconds."
        ),
        examples=(
            "pb-kvcache bench",
            "pb-kvcache bench --budget 64 20% --policies full,tova,snapkv,pyramidkv:1/4",
            "pb-kvcache bench --trace mine.npz --report page",
        ),
    )
    parser.add_argument(
        "--trace",
        default="smollm2-135m",
        help=f"one of {', '.join(traces.names())}, or a file that 'pb-kvcache record' wrote (default smollm2-135m)",
    )
    default = f"(default {' '.join(bench.BUDGETS).replace('%', '%%')}, or what the plans among the policies have)"
    add_budget(parser, "positions per layer on average", tail=default)
    # What it was called before. Hidden, since one name is enough.
    parser.add_argument("--budgets", dest="budget", action=Budgets, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--policies",
        default=",".join(bench.POLICIES),
        help=f"comma-separated, of {', '.join(policy_names())} (default {', '.join(bench.POLICIES)})",
    )
    parser.add_argument(
        "--obs-window",
        action=Count,
        metavar="N",
        default=16,
        help="observed steps that make the score of SnapKV and pyramids (default 16)",
    )
    parser.add_argument(
        "--pool-kernel",
        action=Count,
        metavar="N",
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
    policies = listed(args.policies)
    with progress("replaying") as show_progress:
        results = bench.run(
            args.trace,
            args.budget,
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
        (complain if args.json else say)(f"report: {path}")
    return 0


def listed(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _command(args: argparse.Namespace) -> str:
    """Return the command line that measures the same again."""
    words = ["pb-kvcache", "bench"]
    defaults = {"trace": "smollm2-135m", "policies": ",".join(bench.POLICIES), "obs_window": 16, "pool_kernel": 7}
    for name, default in defaults.items():
        if getattr(args, name) != default:
            words += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    return shlex.join(words if args.budget is None else [*words, "--budget", *args.budget])


def show(results: bench.Results) -> None:
    """Print a table a budget, and what the policies gain over uniform budgets."""
    target = console()
    target.print(
        f"{results.trace}: {layers(results)}, {results.length} positions; SnapKV and pyramids: "
        f"obs_window {results.obs_window}, pool_kernel {results.pool_kernel}"
    )
    for budget in results.budgets:
        target.print()
        print_table(table(results, budget))
    if gained := gains(results):
        target.print()
        print_table(gain_table(results, gained))
    target.print()
    for sentence in (*best_of(results), TIMES):
        target.print(sentence)


def table(results: bench.Results, budget: int) -> Table:
    """Return one budget's table."""
    rows = Table(
        box=None,
        pad_edge=False,
        title_justify="left",
        title=f"{budget} positions a layer ({100 * budget / results.length:.0f} %), "
        f"{budget * results.num_layers} in all, recent window {bench.recent_window(budget)}",
    )
    rows.add_column("policy", no_wrap=True)
    for title in ("mass", "worst\nlayer", "recall", "K/V\nsaved", "policy\nmemory", "time\na step", "in a\nstack"):
        rows.add_column(Text(title), justify="right", no_wrap=True)
    reports = results.at(budget)
    best = max((r.retained_mass for r in reports if r.budget is not None), default=None)
    for r in reports:
        saved, worst = results.saved(r), r.worst_layer
        rows.add_row(
            short_label(r.policy),
            f"{r.retained_mass:.4f}",
            f"{worst.retained_mass:.3f} @{worst.layer:<2}",
            f"{r.recall:.4f}",
            "-" if saved is None else size(saved),
            size(r.policy_bytes),
            step_time(r),
            step_time(results.stack_of(r)),
            style="bold" if r.budget is not None and r.retained_mass == best else None,
        )
    return rows


def gain_table(results: bench.Results, gained: Sequence[Gain]) -> Table:
    """Return what each policy gains over uniform budgets: on average over layers, then in the worst layer."""
    rows = Table(
        box=None,
        pad_edge=False,
        title_justify="left",
        title="points of retained mass over uniform SnapKV",
    )
    rows.add_column("policy", no_wrap=True)
    for part in ("mean", "worst"):
        for budget in results.budgets:
            rows.add_column(Text(f"{part}\n{budget}"), justify="right", no_wrap=True)
    most = [max(column) for column in zip(*(gain.figures for gain in gained), strict=True)]
    for gain in gained:
        cells = (
            Text(points(figure), "bold" if figure == best > 0 else "")
            for figure, best in zip(gain.figures, most, strict=True)
        )
        rows.add_row(short_label(gain.policy), *cells)
    return rows


def short_label(policy: str) -> str:
    """Return a policy's name for a column that is to be narrow: a ratio below 1 says by itself that it is inverted."""
    return label(policy).removesuffix(" (inverted)")
