"""What an evaluation's rows say: figures against plain computations, and sentences that claim no more than those."""

from __future__ import annotations

import doctest
import io
import json
import random
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pb_kvcache.lab import verdict
from pb_kvcache.lab._estimate import change, written
from pb_kvcache.lab.verdict import Figures, Summary, summarise

from .evaluation_rows import kl_rows, row, run


def of(summary: Summary, variant: str, budget: str = "64", part: str = "all", name: str = "") -> Figures:
    return next(f for f in summary.at(budget, part, name) if f.variant == variant)


def percentile(values: list[float], part: float) -> float:
    """Return the value below which a part of them lies, straight between the two nearest."""
    values = sorted(values)
    place = part * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def test_two_prompts_by_hand() -> None:
    """Of two prompts a draw has the first twice, both, or the second twice. The ends are in 1/4 of the draws each."""
    f = of(summarise(kl_rows([1.0, 3.0], {"a": [0.5, 3.0]})), "a")
    assert f.count == 2
    assert f.kl == 1.75
    assert f.difference is not None
    assert (f.difference.value, f.difference.low, f.difference.high) == (-0.25, -0.5, 0.0)
    assert f.relative is not None
    assert (f.relative.value, f.relative.low, f.relative.high) == (-0.125, -0.5, 0.0)  # 3.5/4, 1/2, 6/6
    assert (f.better, f.worse) == (0.5, 0.0)
    assert f.worst == ("text-1", 0.0)
    uniform = of(summarise(kl_rows([1.0, 3.0], {"a": [0.5, 3.0]})), "uniform")
    assert (uniform.kl, uniform.difference, uniform.relative, uniform.worst) == (2.0, None, None, None)


def test_intervals_are_those_of_a_loop_over_the_same_draws() -> None:
    rng = random.Random(4)
    uniform = [rng.uniform(0.2, 2) for _ in range(13)]
    other = [u * rng.uniform(0.4, 1.3) for u in uniform]
    found = of(summarise(kl_rows(uniform, {"a": other}), draws=300, seed=7), "a")
    # Prompts are in the order of their names: text-0, text-1, text-10, ...
    order = sorted(range(13), key=lambda n: f"text-{n}")
    means, ratios = [], []
    for draw in np.random.default_rng(7).integers(0, 13, size=(300, 13)).tolist():
        mine = [other[order[i]] for i in draw]
        base = [uniform[order[i]] for i in draw]
        means.append(statistics.fmean(m - b for m, b in zip(mine, base, strict=True)))
        ratios.append(sum(mine) / sum(base) - 1)
    assert found.difference is not None
    assert found.difference.value == pytest.approx(statistics.fmean(other) - statistics.fmean(uniform))
    assert found.difference.low == pytest.approx(percentile(means, 0.025))
    assert found.difference.high == pytest.approx(percentile(means, 0.975))
    assert found.relative is not None
    assert found.relative.value == pytest.approx(sum(other) / sum(uniform) - 1)
    assert found.relative.low == pytest.approx(percentile(ratios, 0.025))
    assert found.relative.high == pytest.approx(percentile(ratios, 0.975))
    apart = [o - u for o, u in zip(other, uniform, strict=True)]
    assert found.better == sum(d < 0 for d in apart) / 13
    assert found.worse == sum(d > 0 for d in apart) / 13
    assert found.worst == (f"text-{apart.index(max(apart))}", pytest.approx(max(apart)))


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        uniform = rng.uniform(1, 2, 30)
        difference = of(
            summarise(kl_rows(uniform, {"a": uniform + rng.normal(0.1, 0.2, 30)}), draws=400), "a"
        ).difference
        assert difference is not None
        inside += difference.low <= 0.1 <= difference.high
    assert 0.88 <= inside / 200 <= 0.99


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 5)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_figures_do_not_depend_on_the_order_of_rows_or_on_other_variants(
    pairs: list[tuple[float, float]], shuffled: Any
) -> None:
    uniform, other = zip(*pairs, strict=True)
    rows = kl_rows(uniform, {"a": other})
    mixed = [*rows, *(r for r in kl_rows(uniform, {"b": other}) if r["variant"] == "b")]
    shuffled.shuffle(mixed)
    first, second = of(summarise(rows, draws=50), "a"), of(summarise(mixed, draws=50), "a")
    assert first == second
    assert first.difference is not None
    assert min(o - u for u, o in pairs) - 1e-9 <= first.difference.low <= first.difference.high
    assert first.difference.high <= max(o - u for u, o in pairs) + 1e-9


def test_a_difference_takes_the_prompts_that_both_sides_have() -> None:
    rows = kl_rows([1.0] * 10, {"a": [0.5] * 10})
    rows = [r for r in rows if (r["variant"], r["prompt"]) not in {("uniform", "text-3"), ("a", "text-4")}]
    f = of(summarise(rows), "a")
    assert f.count == 9
    assert f.difference is not None
    assert f.difference.count == 8
    alone = [r for r in rows if r["variant"] != "uniform"]
    assert of(summarise(alone), "a").difference is None
    assert summarise(alone).sentences() == []


def test_no_rows_say_nothing() -> None:
    summary = summarise([])
    assert summary.sentences() == []
    assert verdict.table(summary) == []


def test_medians_and_means_of_what_is_held() -> None:
    rows = [
        row(f"text-{n}", bytes=b, rows=r, decode_ms=ms, same=s, nll=nll)
        for n, (b, r, ms, s, nll) in enumerate(
            [(10, 1.0, 5.0, 0.5, 1.0), (30, 2.0, 1.0, 1.0, 2.0), (1000, 9.0, 2.0, 0.9, None)]
        )
    ]
    f = of(summarise(rows), "uniform")
    assert (f.bytes, f.rows, f.decode_ms) == (30, 2.0, 2.0)
    assert f.same == pytest.approx(0.8)
    assert f.nll == 1.5


def test_a_time_that_nobody_took_is_a_dash() -> None:
    summary = summarise([row("text-0", decode_ms=None)])
    assert of(summary, "uniform").decode_ms is None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(verdict.table(summary)[1])
    assert console.export_text().split()[-2:] == ["-", "1"]


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((0.25, 0.15, 0.36), ".25 [.15, .36]"),
        ((1.5, -0.004, 2.0), "1.50 [0, 2.00]"),
        ((-0.03, -0.05, 0.01), "\N{MINUS SIGN}.030 [\N{MINUS SIGN}.050, .010]"),
        ((0.00123, 0.0, 0.002), ".0012 [0, .0020]"),
        ((0.0,), "0"),
        ((0.1 + 0.1 * 2 - 0.29,), ".010"),
    ],
)
def test_figures_of_one_kind_have_the_same_decimals(figures: tuple[float, ...], text: str) -> None:
    assert written(*figures) == text


def test_the_example_of_the_module_runs() -> None:
    failed, tried = doctest.testmod(verdict)
    assert (failed, tried > 0) == (0, True)


def test_a_part_of_the_length_is_one_budget_for_prompts_of_any_length() -> None:
    rows = [row(f"text-{n}", variant, "25%", tokens=100 + 8 * n) for n in range(8) for variant in ("uniform", "a")]
    summary = summarise([*rows, row("text-0", budget="16"), row("text-0", "a", "64")])
    assert summary.budgets == ("16", "25%", "64")  # by the positions that they are, on average
    assert of(summary, "a", "25%").count == 8


def test_sentences_name_what_is_better_worse_and_neither() -> None:
    rng = random.Random(0)
    uniform = [rng.uniform(0.5, 1) for _ in range(30)]
    better = [u - 0.25 for u in uniform]
    better[0] = uniform[0] + 0.01
    others = {
        "pyramid:4": [u + 0.125 for u in uniform],
        "adakv": [u + rng.choice((-0.1, 0.1)) for u in uniform],
        "plan.json": better,
    }
    (said,) = summarise(kl_rows(uniform, others)).sentences()
    best, worse, neither = said.removeprefix("At 64: ").split("; ")
    assert best == "plan.json lowers KL by .24 [.22, .25], better on 97 % of 30 prompts"
    assert worse == "pyramid:4 is worse than uniform by .12 [.12, .12], on 100 % of 30 prompts"
    assert neither.startswith("adakv shows no clear difference to uniform, ")
    assert neither.endswith(" on 30 prompts.")


def test_an_interval_that_includes_0_is_no_difference() -> None:
    (said,) = summarise(kl_rows([1.0] * 8, {"a": [0.0] * 5 + [1.9] * 3})).sentences()
    assert "a shows no clear difference to uniform" in said
    (same,) = summarise(kl_rows([1.0] * 8, {"a": [1.0] * 8})).sentences()
    assert same == "At 64: a shows no clear difference to uniform, 0 [0, 0] on 8 prompts."


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_fewer_than_8_prompts_are_too_few(count: int) -> None:
    (said,) = summarise(kl_rows([1.0] * count, {"a": [0.5] * count, "b": [2.0] * count})).sentences()
    if count < 8:
        assert said == f"At 64: N is {count}, too small for a verdict, which takes 8 prompts or more."
    else:
        assert "a lowers KL" in said
        assert "b is worse" in said


def test_a_variant_that_few_prompts_have_gets_no_verdict() -> None:
    rows = kl_rows([1.0] * 9, {"a": [0.5] * 9, "b": [0.5] * 9})
    rows = [r for r in rows if r["variant"] != "b" or r["prompt"] < "text-3"]
    (said,) = summarise(rows).sentences()
    assert "a lowers KL by .50" in said
    assert "b lowers" not in said
    assert said.endswith("of b N is 3, too small for a verdict, which takes 8 prompts or more.")


def test_a_kind_that_is_worse_is_named() -> None:
    rows = []
    for kind, kl in (("prose", 0.5), ("code", 0.5), ("licence", 1.25)):
        for n in range(8):
            name = f"text-{kind}-{n}"
            rows += [row(name, kind=kind, kl=[1.0]), row(name, "a", kind=kind, kl=[kl])]
    rows += [row("text-x", kind="logs", kl=[1.0]), row("text-x", "a", kind="logs", kl=[1.1])]
    said = summarise(rows).sentences()
    assert said[1] == (
        "At 64 by kind, a: lower KL in 2 of 3, clearly worse in licence by .25 [.25, .25] (N 8); 1 with fewer than "
        "8 prompts, too few for a verdict, of which 1 has a higher mean."
    )


def test_variants_of_which_the_same_is_to_say_by_kind_share_a_sentence() -> None:
    rows = []
    for kind in ("prose", "code"):
        for n in range(8):
            name = f"text-{kind}-{n}"
            rows += [row(name, v, kind=kind, kl=[kl]) for v, kl in (("uniform", 1.0), ("a", 0.5), ("b", 0.25))]
    assert summarise(rows).sentences()[1:] == ["At 64 by kind, a and b: lower KL in 2 of 2, clearly worse in none."]


def scored(full: int, uniform: int, other: int, *, count: int = 20, chance: float = 0.25) -> list[dict[str, Any]]:
    """Return rows of a task where the first prompts are answered, so many by each."""
    rows = []
    for variant, right in (("full", full), ("uniform", uniform), ("a", other)):
        budget = None if variant == "full" else "64"
        for n in range(count):
            values = {"task": "retrieval", "kind": "8 keys", "score": float(n < right), "chance": chance}
            rows.append(row(f"retrieval-{n:02}", variant, budget, **values))
    return rows


def test_scores_are_compared_where_the_full_cache_is_above_chance() -> None:
    summary = summarise(scored(18, 4, 14))
    assert summary.reference("retrieval").ranked
    first, _, third = summary.sentences()
    assert first.startswith("retrieval: the full cache scores .90 [")
    assert "chance is .25" in first
    assert third.startswith("retrieval at 64: uniform scores .20; a scores .70, higher by .50 [")
    assert third.endswith("N is 20.")
    assert "a scores .10, lower by .40 [" in summarise(scored(18, 10, 2)).sentences()[2]
    assert "a scores .20, no clear difference, 0 [0, 0]" in summarise(scored(18, 4, 4)).sentences()[2]


@pytest.mark.parametrize("full", [0, 5, 7])
def test_a_task_that_the_full_cache_fails_ranks_nothing(full: int) -> None:
    summary = summarise(scored(full, 0, 20))
    assert not summary.reference("retrieval").ranked
    said = summary.sentences()
    assert said[0].endswith("That is not clearly above chance, so the scores of retrieval rank nothing.")
    assert not any("higher" in sentence for sentence in said)
    assert any("no ranking" in str(table.title) for table in verdict.table(summary))


def test_few_prompts_of_a_task_get_no_verdict_on_scores() -> None:
    said = summarise(scored(7, 0, 7, count=7)).sentences()
    assert said[0].endswith("N is too small for a verdict on scores, which takes 8 prompts or more.")
    assert not any("higher" in sentence for sentence in said)


def test_scores_of_several_tasks_are_not_added_up() -> None:
    summary = summarise(run({"a": 0.5}))
    assert of(summary, "a", "16").score is None
    assert of(summary, "a", "16", "task", "retrieval").score is not None
    assert summary.parts() == [
        ("all", ""),
        ("task", "retrieval"),
        ("task", "text"),
        ("kind", "text code"),
        ("kind", "text prose"),
    ]


def test_a_variant_that_holds_more_is_told() -> None:
    rows = kl_rows([1.0] * 8, {"a": [0.5] * 8})
    for r in rows:
        r["rows"] = 66.0 if r["variant"] == "a" else 64.0
    assert summarise(rows).sentences()[-1] == (
        "At 64, a holds 66.0 rows a head where uniform holds 64.0: budgets are not equal."
    )


def test_many_comparisons_are_told() -> None:
    rows = kl_rows([1.0] * 8, {f"v{n}": [0.5] * 8 for n in range(20)})
    assert summarise(rows).sentences()[-1].startswith("These are 20 comparisons with intervals of 95 %: about 1 would")


def test_two_rows_of_one_thing_and_figures_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="'text-0' has two rows of 'uniform' at 64"):
        summarise([row("text-0"), row("text-0")])
    with pytest.raises(ValueError, match="kl of 'uniform' for 'text-0' is nan, not finite"):
        summarise([row("text-0", kl=[1.0, float("nan")])])


def test_a_uniform_cache_without_divergence_has_no_relative_change() -> None:
    f = of(summarise(kl_rows([0.0] * 8, {"a": [0.5] * 8})), "a")
    assert f.relative is None
    assert f.difference is not None
    assert f.difference.value == 0.5


def test_the_dictionary_is_json_and_has_the_sentences() -> None:
    summary = summarise(run({"a": 0.5, "b": 1.5}))
    read = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert read["sentences"] == summary.sentences()
    assert read["draws"] == 2000
    first = next(f for f in read["figures"] if f["variant"] == "a")
    assert set(first["worst"]) == {"prompt", "difference"}
    assert set(first["difference"]) == {"value", "low", "high", "count"}


def test_tables_fit_80_columns_and_do_not_break_words() -> None:
    names = ["plan.json output fitted", "a-plan-with-a-name-of-30-chars output", "kvpress:ExpectedAttentionPress"]
    summary = summarise(run(dict.fromkeys(names, 0.5), prompts=40))
    console = Console(width=80, record=True, file=io.StringIO())
    for table in verdict.table(summary):
        console.print(table)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "…" not in text
    for word in {word for name in names for word in name.split()}:
        assert word in text.split()
    for f in summary.figures:
        if f.part == "all" and f.difference is not None:
            assert change(f.difference) in text


def test_names_do_not_become_markup_or_control_a_terminal() -> None:
    evil = "[red]x[/red]\x1b[31m"
    rows = [r | {"task": evil if r["task"] == "retrieval" else "text"} for r in run({evil: 0.5}, ("16",))]
    console = Console(width=200, record=True, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    for table in verdict.table(summarise(rows)):
        console.print(table)
    text = console.export_text(styles=False)
    assert text.count(r"[red]x[/red]\x1b[31m") >= 4
    assert "\x1b" not in text
