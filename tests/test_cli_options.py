"""Options that mean the same in every command: budgets, ratios and counts, names that are nearly right, help texts."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from fractions import Fraction

import pytest

from pb_kvcache import _quantities, cli
from pb_kvcache._suggest import did_you_mean
from pb_kvcache.cli import make_parser
from pb_kvcache.cli._options import Budget
from pb_kvcache.cli._parser import Parser
from pb_kvcache.lab import tasks, traces
from pb_kvcache.lab._variants import make_variants

Capture = pytest.CaptureFixture[str]


def commands() -> dict[str, Parser]:
    """Return the parser of each command, and that of the program under the empty name."""
    parser = make_parser()
    found: dict[str, Parser] = {"": parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


COMMANDS = commands()
#: What each command needs beside a budget.
NEEDED = {
    "budget": ("--layers", "4"),
    "plan": ("--layers", "4"),
    "bench": ("--trace", "funnel", "--policies", "tova"),
    "evaluate": ("--model", "none", "-o", "none"),
    "calibrate": ("--model", "none", "--text", "none", "-o", "none.json"),
}


def refusal(capsys: Capture, *arguments: str) -> str:
    """Return the one line that a refused command line gets."""
    try:
        status: object = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err


# --- budgets, ratios, shares


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("64", 64),
        (" 64 ", 64),
        ("25%", Fraction(1, 4)),
        ("12.5 %", Fraction(1, 8)),
        ("100%", Fraction(1)),
        (".5%", Fraction(1, 200)),
        ("4294967296", 2**32),
        *(
            (text, None)
            for text in ("0", "-3", "0%", "101%", "-3%", "1.5", "", "%", "1e3", "many", "1/4", "٣", "1" * 50)
        ),
    ],
)
def test_a_budget_is_a_number_of_positions_or_a_percentage(text: str, amount: object) -> None:
    assert _quantities.budget(text) == amount


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("4", Fraction(4)),
        ("1/4", Fraction(1, 4)),
        ("0.25", Fraction(1, 4)),
        (".25", Fraction(1, 4)),
        ("4.", Fraction(4)),
        *((text, None) for text in ("0", "0.0", "-4", "1/0", "0/4", "1.5/2", "", ".", "nan", "inf", "1e3", "1/4/2")),
    ],
)
def test_a_ratio_is_a_number_or_a_fraction_above_0(text: str, ratio: object) -> None:
    assert _quantities.ratio(text) == ratio


@pytest.mark.parametrize("command", NEEDED)
def test_every_command_answers_a_budget_that_is_none_with_one_rule(command: str, capsys: Capture) -> None:
    for wrong in ("0", "-3", "-3%", "0%", "101%", "1.5", "many", ","):
        said = refusal(capsys, command, *NEEDED[command], "--budget", wrong)
        assert said == (
            f"pb-kvcache: --budget {wrong}: must be a whole number of positions of 1 or more, or a percentage above 0% "
            "and at most 100%, such as 64 or 25%\n"
        )


@pytest.mark.parametrize("command", NEEDED)
@pytest.mark.parametrize("given", [["64", "25%"], ["64,25%"], ["64,", "25 %"]])
def test_every_command_takes_several_budgets(command: str, given: list[str]) -> None:
    args = make_parser().parse_args([command, *NEEDED[command], "--budget", *given])
    assert args.budget == ["64", "25%"]
    assert [budget.positions(200) for budget in args.budget] == [64, 50]


@pytest.mark.parametrize("command", ["budget", "plan"])
def test_a_percentage_is_of_the_sequence(command: str, capsys: Capture) -> None:
    arguments = [command, "--layers", "4", "--budget", "25%", "64", "--sequence", "1024", "--json"]
    assert cli.main(arguments) == 0
    first, second = json.loads(capsys.readouterr().out)
    name = "shares" if command == "budget" else "budgets"
    assert cli.main([command, "--layers", "4", "--budget", "256", "--sequence", "1024", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[name] == first[name]
    assert sum(second[name]) <= 256
    assert "--budget 25%: " in refusal(capsys, command, "--layers", "4", "--budget", "25%")


def test_a_share_that_is_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--budget 0\.1%: is no position of 100"):
        Budget("0.1%").positions(100)


def test_a_plan_for_each_budget_is_printed_and_written(capsys: Capture, tmp_path: object) -> None:
    arguments = ["plan", "--layers", "2", "--budget", "10", "20", "-o", f"{tmp_path}/p.json"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.index("budget 10:") < out.index("total 20 ") < out.index("budget 20:") < out.index("total 40 ")
    assert cli.main(["bench", "--trace", "funnel", "--policies", f"plan:{tmp_path}/p.json"]) == 2  # of two layers
    assert "has 2 budgets" in capsys.readouterr().err
    assert "--plot: draws one plan" in refusal(capsys, *arguments, "--plot", "x.png")


@pytest.mark.parametrize("ratio", ["1/4", "0.25"])
def test_a_ratio_below_1_turns_the_pyramid_round(ratio: str, capsys: Capture) -> None:
    assert cli.main(["budget", "--layers", "5", "--budget", "100", "--ratio", ratio, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert cli.main(["budget", "--layers", "5", "--budget", "100", "--ratio", "4", "--json"]) == 0
    assert document["shares"] == json.loads(capsys.readouterr().out)["shares"][::-1]
    assert document["pyramid_ratio"] == 0.25
    assert cli.main(["plan", "--layers", "5", "--budget", "100", "--ratio", ratio, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budgets"] == [40, 70, 100, 130, 160]


@pytest.mark.parametrize("command", ["budget", "plan"])
def test_a_ratio_that_is_none_gets_one_rule(command: str, capsys: Capture) -> None:
    for wrong in ("0", "-3", "-1/4", "1/0", "steep"):
        said = refusal(capsys, command, "--layers", "4", "--budget", "9", "--ratio", wrong)
        assert said == (
            f"pb-kvcache: --ratio {wrong}: must be a number or a fraction above 0, such as 4, 0.25 or 1/4\n"
        )


def test_counts_get_one_rule(capsys: Capture) -> None:
    for command, option in (("budget", "layers"), ("plan", "layers"), ("plan", "block"), ("bench", "pool-kernel")):
        for wrong in ("0", "-3", "many", "1.5"):
            said = refusal(capsys, command, "--budget", "8", f"--{option}", wrong)
            assert said == f"pb-kvcache: --{option} {wrong}: must be a whole number of 1 or more\n"


# --- names that are nearly right


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["benhc"], "COMMAND benhc: must be one of .*; did you mean bench\\?"),
        (["zzz"], "COMMAND zzz: must be one of [a-z, ]+ \\(--help"),
        (["plan", "--layers", "4", "--budgt", "9"], "--budgt: no such option; did you mean --budget\\?"),
        (["budget", "--leyers=4"], "--leyers: no such option; did you mean --layers\\?"),
        (["budget", "-layers", "4"], "-layers: no such option; did you mean --layers\\?"),
        (["bench", "--zzz"], "--zzz: no such option \\("),
        (
            ["plan", "--layers", "4", "--budget", "9", "--shape", "pyramd"],
            "--shape pyramd: .*; did you mean pyramid\\?",
        ),
        (["bench", "--trace", "smollm2"], "no such trace; .*; did you mean smollm2-135m\\?"),
        (["bench", "--trace", "funnel", "--policies", "snap"], "no such policy; .*; did you mean snapkv\\?"),
        (["completion", "bsh"], "shell bsh: must be one of bash, zsh, tcsh; did you mean bash\\?"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(
    arguments: list[str], said: str, capsys: Capture
) -> None:
    assert re.search(said, refusal(capsys, *arguments))


def test_tasks_plans_rules_and_merges_are_suggested() -> None:
    with pytest.raises(ValueError, match=r"; did you mean retrieval\?$"):
        tasks.make("retreival", lambda text, **_: {"input_ids": [1] * len(text)}, count=1, length=9)
    for arguments, meant in (
        ((["pyramid"], ["snapkv"], ["none"]), "pyramid:RATIO"),
        ((["uniform"], ["snapvk"], ["none"]), "snapkv"),
        ((["uniform"], ["snapkv"], ["fited"]), "fitted"),
    ):
        with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
            make_variants(*arguments)


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert did_you_mean("zzz", traces.names()) == ""
    assert did_you_mean("", traces.names()) == ""
    assert did_you_mean("FUNNEL", traces.names()) == "; did you mean funnel?"


# --- help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_prints_in_ascii_and_ends_with_examples_that_parse(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "%%" not in out
    shown = out.rpartition("\nexample:\n")[2].splitlines()
    assert shown == [f"  {line}" for line in COMMANDS[command].examples]
    assert shown
    for line in shown:
        words = shlex.split(line.partition(" > ")[0])
        assert words[: 1 + len(command.split())] == ["pb-kvcache", *command.split()]
        assert callable(make_parser().parse_args(words[1:]).run)


def test_help_texts_are_short() -> None:
    for parser in COMMANDS.values():
        assert len(parser.description or "") < 420
        for action in parser._actions:
            assert len(action.help or "") < 280, action.option_strings


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_knows_commands_and_options(shell: str, capsys: Capture) -> None:
    pytest.importorskip("shtab", reason="needs the completion extra")
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for word in ("calibrate", "completion", "--pool-kernel" if shell != "tcsh" else "pool-kernel"):
        assert word in out


def test_completion_without_shtab_names_the_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'pb-kvcache[completion]'" in refusal(capsys, "completion", "bash")
