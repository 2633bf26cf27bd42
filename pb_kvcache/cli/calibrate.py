"""``pb-kvcache calibrate``: budgets for every KV head from a model's own answers, judged before they are written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import CurveSet
from .._files import replacing
from .._selection import Selection
from .._text import write_json
from ..lab import _own_text, calibrate, evaluate, tasks
from ..lab.tasks import Item
from ..lab.verdict import table
from ._options import Count, add_budget, add_model
from ._output import complain, print_table, progress, say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "calibrate",
        help="budgets for every KV head, from a model's own answers",
        description=(
            "Measure what each KV head of a model loses where it keeps fewer positions, on prompts from texts, and "
            "divide budgets by it. The plans are judged at once on prompts that were not measured, beside uniform "
            "budgets and a pyramid. Where they do not win, nothing is written and the exit status is 1. Needs "
            "pip install 'pb-kvcache[transformers]'."
        ),
        examples=("pb-kvcache calibrate --model smollm2 --text a.txt b.txt --budget 64 25% -o plan.json",),
    )
    add = parser.add_argument
    add_model(parser)
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts like those to come, UTF-8")
    add("--prompts", action=Count, metavar="N", default=8, help="prompts that are measured (default 8)")
    add("--length", action=Count, metavar="N", default=1024, help="tokens of a prompt (default 1024)")
    add("--select", default="mixed", choices=Selection.NAMES, help="the rule that ranks positions (default mixed)")
    add_budget(parser, "a plan for each: positions per KV head on average, or percentages of --length", required=True)
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the plan file, .json")
    add("--curves", type=Path, metavar="FILE", help="also write the curves, .npz, from which any budget is planned")
    add("--judge", type=Path, nargs="+", default=[], metavar="FILE", help="texts to judge on (default: further parts)")
    add("--judge-prompts", action=Count, metavar="N", default=8, help="prompts to judge on (default 8)")
    add(
        "--no-outcome", action="store_true", help="output errors alone: a quarter of the time, and plans that gain less"
    )
    add("--force", action="store_true", help="write plans that do not win, too")
    add("--seed", type=int, default=0, help="of the prompts' places in the texts (default 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, judge, and write what wins."""
    for name, path, suffix in (("output", args.output, ".json"), ("curves", args.curves, ".npz")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{name} = {path}: must end in {suffix}")
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {path.resolve().parent}")
    args.budget = [budget.positions(args.length) for budget in args.budget]
    least = Selection.named("snapkv").always_kept + 1
    for budget in args.budget:
        if not least <= budget < args.length:
            raise ValueError(
                f"budget = {budget}: must be at least {least}, the least of uniform budgets with SnapKV's rule, which "
                f"plans are compared with, and below the {args.length} tokens of a prompt"
            )
    loaded = evaluate.load(args.model, dtype=args.dtype, device=args.device)
    measured, judged = _items(args, loaded[1])
    with progress("measuring") as show_progress:
        curves = calibrate.calibrate(
            loaded[0],
            # Every second prompt is followed by the model's own answer, the others by the text's.
            [(item.context, item.continuation if number % 2 == 0 else ()) for number, item in enumerate(measured)],
            selection=args.select,
            outcome=not args.no_outcome,
            measured={
                "model": Path(args.model).name,
                "model_sha256": evaluate.identity(loaded[0])["sha256"],
                "texts": ", ".join(path.name for path in args.text),
                "seed": args.seed,
                "dtype": args.dtype,
            },
            progress=show_progress,
        )
    plans = [curves.plan(budget) for budget in args.budget]  # what is refused is refused before the judging
    with progress("judging") as show_progress:
        found = calibrate.judge(
            loaded, curves, judged, budgets=args.budget, selection=args.select, progress=show_progress
        )
    say(f"measured on {len(measured)} prompts of {args.length} tokens from {curves.measured['texts']}")
    say(f"judged on {len(judged)} others from {', '.join(path.name for path in args.judge) or 'the same texts'}")
    for one in table(found.summary):
        print_table(one)
    for sentence in [*found.summary.sentences(), *found.losses()]:
        say(sentence)
    if not found.wins and not args.force:
        complain("the plans do not win on prompts that they did not see: nothing is written (--force writes them)")
        return 1
    _write(args, curves, plans, found)
    return 0


def _items(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Item], list[Item]]:
    """Return the prompts to measure and those to judge on, which share no part of a text."""
    more = 0 if args.judge else args.judge_prompts
    items = tasks.make(
        "text", tokenizer, count=args.prompts + more, length=args.length, seed=args.seed, texts=args.text
    )
    if not args.judge:
        return items[: args.prompts], items[args.prompts :]
    judged = tasks.make(
        "text", tokenizer, count=args.judge_prompts, length=args.length, seed=args.seed, texts=args.judge
    )
    known = _own_text.marks(item.context for item in items)
    _own_text.refuse(f"judge = {', '.join(map(str, args.judge))}", known, judged)
    return items, judged


def _write(args: argparse.Namespace, curves: CurveSet, plans: list[Any], found: calibrate.Judgement) -> None:
    """Write the plans, with how they were made and what the judge said, and the curves."""
    verdict = found.to_dict()
    entries = [
        plan.to_dict() | {"budget": budget, "measured": curves.measured, "judged": verdict[str(budget)]}
        for budget, plan in zip(args.budget, plans, strict=True)
    ]
    with replacing(args.output) as file:
        file.write((write_json(entries[0] if len(entries) == 1 else entries, indent=2) + "\n").encode())
    say(f"plan: {args.output}")
    if args.curves is not None:
        curves.save(args.curves)
        say(f"curves: {args.curves}")
