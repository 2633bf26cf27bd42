"""``pb-kvcache evaluate``: what a model still answers from a smaller cache, against uniform budgets."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from .._curves import SHIPPED
from .._text import read_json
from ..lab import evaluate, evaluation_files, evaluation_page, tasks, verdict
from ..lab._variants import MERGES, PLANS
from ..lab.tasks import Item
from ._options import Count, add_budget, add_model
from ._output import complain, console, print_table, progress, say


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="what a model still answers from a smaller cache",
        description=(
            "Read prompts once each, compress what was read by every plan at every budget, and compare what the model "
            "says next with what it says from the full cache, and with right answers. Differences are to uniform "
            "budgets, with 95 % intervals. The same command continues an interrupted one. Needs "
            "pip install 'pb-kvcache[transformers]'."
        ),
        examples=(
            "pb-kvcache evaluate --model smollm2 --text mine.txt --budget 64 25% -o out",
            "pb-kvcache evaluate --model smollm2 --task retrieval --budget 128 --plan smollm2 -o out",
        ),
    )
    add = parser.add_argument
    add_model(parser)
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="texts to go on with, UTF-8")
    add("--task", nargs="+", default=[], help=f"made prompts: {', '.join(tasks.TASKS[1:])}, or retrieval:KEYS")
    add("--jsonl", type=Path, nargs="+", default=[], metavar="FILE", help="prompts of your own, one a line")
    add(
        "--filler", type=Path, metavar="FILE", help="the text between the facts of made prompts, instead of the shipped"
    )
    add_budget(parser, "positions per KV head on average, or percentages of what is held", required=True)
    add(
        "--plan",
        nargs="+",
        default=["uniform"],
        help=f"{', '.join([*PLANS, *SHIPPED])}, a plan or curve file, kvpress:PRESS",
    )
    add(
        "--select",
        nargs="+",
        help="snapkv, output, mixed, expected, keydiff, repeat (default: the rule that a plan was measured under, or "
        "snapkv)",
    )
    add("--merge", nargs="+", default=["none"], help=f"{', '.join(MERGES)}")
    add("--question", choices=evaluate.QUESTIONS, default="seen", help="whether the choice may see it (default seen)")
    add(
        "--prompts",
        action=Count,
        metavar="N",
        default=10,
        help="prompts of each task, and of the texts together (default 10)",
    )
    add("--length", action=Count, metavar="N", default=1000, help="tokens of a prompt (default 1000)")
    add("--seed", type=int, default=0, help="of the prompts (default 0)")
    add(
        "--answer",
        action=Count,
        metavar="N",
        default=evaluate.ANSWER,
        help="answer tokens that are compared (default 32)",
    )
    add("--jobs", type=int, default=1, help="prompts at a time, by joblib (extra 'bench'; default 1, without joblib)")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where everything is written")
    add("--report", action="store_true", help="also write DIR/index.html, a page with plots (extra 'plot')")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the prompts, run what is not there yet, and print what it says."""
    if args.report:
        evaluation_page.require_matplotlib()
    variants = evaluate.make_variants(args.plan, args.select, args.merge)
    _, tokenizer = evaluate.load(args.model, dtype=args.dtype, device=args.device)
    items = _items(args, tokenizer)
    file = args.output / evaluate.FILE
    try:
        with progress("judging") as show_progress:
            rows = evaluate.evaluate(
                args.model,
                items,
                budgets=args.budget,
                variants=variants,
                question=args.question,
                directory=args.output,
                jobs=args.jobs,
                answer=args.answer,
                dtype=args.dtype,
                device=args.device,
                progress=show_progress,
            )
    except KeyboardInterrupt:
        complain(f"interrupted; what is done is in {file}, and the same command continues")
        raise
    header = _header(file) | {"command": _command(args)}
    summary = verdict.summarise(rows)
    evaluation_files.write(rows, header, summary, args.output)
    _show(summary)
    say(f"results: {args.output / 'results.json'}")
    if args.report:
        say(f"report: {evaluation_page.write(rows, summary, args.output, _command(args), header)}")
    return 0


def _items(args: argparse.Namespace, tokenizer: object) -> list[Item]:
    """Return the prompts that were asked for. Texts of the package where nothing was."""
    filler = None
    if args.filler is not None:
        try:
            filler = args.filler.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"filler: {args.filler} is not UTF-8: {error}") from None
    names = [*args.task, *(f"jsonl:{path}" for path in args.jsonl)]
    if args.text or not names:
        names.insert(0, "text")
    items: list[Item] = []
    for name in dict.fromkeys(names):
        items += tasks.make(
            name,
            tokenizer,
            count=args.prompts,
            length=args.length,
            seed=args.seed,
            filler=filler,
            texts=args.text if name == "text" else (),
        )
    return items


def _header(file: Path) -> dict[str, object]:
    with file.open("rb") as lines:
        header: dict[str, object] = read_json(lines.readline())
    return header


def _show(summary: verdict.Summary) -> None:
    """Print the tables, the full cache's first, and the verdict."""
    for table in verdict.table(summary):
        print_table(table)
        console().print()
    for sentence in summary.sentences():
        console().print(sentence, highlight=False)


def _command(args: argparse.Namespace) -> str:
    """Return the command line that measures the same again."""
    words = ["pb-kvcache", "evaluate", "--model", str(args.model)]
    defaults: dict[str, object] = {
        "text": [],
        "task": [],
        "jsonl": [],
        "filler": None,
        "budget": None,
        "plan": ["uniform"],
        "select": None,
        "merge": ["none"],
        "question": "seen",
        "prompts": 10,
        "length": 1000,
        "seed": 0,
        "answer": evaluate.ANSWER,
        "dtype": "float32",
        "device": "cpu",
    }
    for name, default in defaults.items():
        value = getattr(args, name)
        if value != default:
            values: Sequence[object] = value if isinstance(value, list) else [value]
            words += ["--" + name, *map(str, values)]
    return shlex.join([*words, "-o", str(args.output)])
