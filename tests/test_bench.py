"""The benchmark: equal totals, the same figures however it is run, and what the command prints and writes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pb_kvcache import LayerPlan, PyramidStack, SnapKV, cli, plan
from pb_kvcache._policies import label
from pb_kvcache.lab import bench, traces
from pb_kvcache.lab.bench import Results
from pb_kvcache.lab.findings import best_of, findings, gains, points
from pb_kvcache.lab.replay import replay
from pb_kvcache.lab.traces import PackedTrace

from .conftest import ROOT

SCORING = {"obs_window": 4, "pool_kernel": 1}
QUICK = ["full", "streaming_llm", "tova", "snapkv", "pyramidkv:1", "pyramidkv:4", "pyramidkv:1/4"]


@pytest.fixture(scope="module")
def default() -> Results:
    started = time.perf_counter()
    results = bench.run()
    assert time.perf_counter() - started < 60
    return results


@pytest.fixture(scope="module")
def quick() -> Results:
    return bench.run(traces.funnel(4, 300), ["10%", 60], QUICK)


def measured(results: Results) -> list[dict[str, Any]]:
    """Return what must not depend on the run: all but times."""
    runs = [r.to_dict() for r in results.reports]
    for fields in runs:
        for name in ("seconds", "policy_seconds", "steps_per_second"):
            del fields[name]
    return runs


# --- what is compared


def test_the_default_runs_every_policy_at_every_budget(default: Results) -> None:
    assert (default.trace, default.num_layers, default.length) == ("smollm2-135m", 30, 576)
    assert default.budgets == (29, 58, 115, 230)
    assert default.policies == bench.POLICIES
    pairs = {(r.policy, r.budget) for r in default.reports}
    assert len(pairs) == len(default.reports) == 1 + 9 * 4
    assert ("full", None) in pairs


def test_all_policies_hold_the_same_total(default: Results) -> None:
    for r in default.reports:
        if r.budget is not None:
            assert sum(layer.budget or 0 for layer in r.per_layer) == r.budget * 30, r.policy
            assert r.peak_resident == (r.budget + 1) * 30, r.policy
            assert r.resident_after[-1] == r.budget * 30, r.policy


def test_a_pyramid_of_ratio_one_is_uniform_snapkv(default: Results) -> None:
    for budget in default.budgets:
        reports = {r.policy: r for r in default.at(budget)}
        for one, other in zip(reports["snapkv"].per_layer, reports["pyramidkv:1"].per_layer, strict=True):
            assert one == other


def test_every_policy_is_timed_as_an_object_a_layer_and_as_a_stack_where_there_is_one(
    default: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(default.reports) == len(default.stacks)
    for report, stack in zip(default.reports, default.stacks, strict=True):
        assert default.stack_of(report) is stack
        assert (stack is not None) == report.policy.startswith(("snapkv", "pyramidkv"))
        if stack is not None:
            assert stack.policy_seconds > 0
            assert (stack.policy, stack.budget) == (report.policy, report.budget)
            assert stack.retained_mass == report.retained_mass
            assert np.array_equal(stack.resident_after, report.resident_after)
            for one, other in zip(report.per_layer, stack.per_layer, strict=True):
                assert dataclasses.replace(one, policy_bytes=0) == dataclasses.replace(other, policy_bytes=0)
    driven: list[str] = []

    def spy(trace: object, made: object, *arguments: object, **options: Any) -> object:
        driven.append(f"{options['name']}: {'stack' if isinstance(made, PyramidStack) else type(made(0)).__name__}")
        return replay(trace, made, *arguments, **options)

    monkeypatch.setattr(bench, "replay", spy)
    bench.run(traces.funnel(2, 40), [12], ["full", "tova", "snapkv", "pyramidkv:3"])
    assert driven == [
        "full: FullCache",
        "tova: TOVA",
        "snapkv: SnapKV",
        "snapkv: stack",
        "pyramidkv:3: SnapKV",
        "pyramidkv:3: stack",
    ]


def test_more_memory_retains_more_and_nothing_retains_more_than_all(default: Results) -> None:
    full = default.reports[0]
    for policy in default.policies[1:]:
        masses = [r.retained_mass for r in default.reports if r.policy == policy]
        assert masses == sorted(masses)
        assert masses[-1] < full.retained_mass == full.available_mass


def test_saved_bytes_are_the_models(default: Results) -> None:
    for r in default.reports:
        assert default.saved(r) == (30 * 576 - r.peak_resident) * 768
    assert bench.run("funnel", [100], ["full"]).saved(default.reports[0]) is None


def test_the_inverted_pyramid_turns_the_budgets_round(quick: Results) -> None:
    reports = {r.policy: r for r in quick.at(60)}
    upright, inverted = (
        [layer.budget for layer in reports[name].per_layer] for name in ("pyramidkv:4", "pyramidkv:1/4")
    )
    assert upright == sorted(upright, reverse=True)
    assert upright[0] == pytest.approx(4 * upright[-1], abs=4)
    assert np.allclose(upright, inverted[::-1], atol=1)


def test_a_pyramid_above_the_length_gives_what_is_left_to_other_layers() -> None:
    (r,) = bench.run("funnel-flat", ["80%"], ["pyramidkv:4"]).reports
    budgets = [layer.budget or 0 for layer in r.per_layer]
    assert max(budgets) == 1024
    assert sum(budgets) == 819 * 16


@pytest.mark.parametrize(("budget", "number"), [("5%", 29), ("12.5%", 72), ("100 %", 576), ("7", 7), (9, 9)])
def test_budgets_are_positions_or_parts_of_the_length(budget: str | int, number: int) -> None:
    assert bench.positions(budget, 576) == number


def test_every_policy_runs_at_the_smallest_budgets() -> None:
    """5 % of a short recording is fewer positions than StreamingLLM's usual sinks."""
    reports = bench.run("funnel", budgets=[1, 3]).reports
    assert {report.policy for report in reports} == set(bench.POLICIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace": "smollm"}, "trace = 'smollm': no such trace; known: smollm2-135m, decode-4096, funnel"),
        ({"policies": ["lru"]}, "policy = 'lru': no such policy; known: full, sliding_window, .*, pyramidkv:RATIO"),
        ({"policies": ["pyramidkv:0"]}, "policy = 'pyramidkv:0': the ratio must be"),
        ({"policies": ["pyramidkv:1/0"]}, "policy = 'pyramidkv:1/0': the ratio must be"),
        ({"policies": ["pyramidkv:x"]}, "policy = 'pyramidkv:x': the ratio must be"),
        ({"policies": []}, "policies: none given"),
        ({"budgets": []}, "budgets: none given"),
        (
            {"budgets": ["0"]},
            "budget = '0': must be a whole number of positions of 1 or more, or a percentage above 0%",
        ),
        (
            {"budgets": ["101%"]},
            "budget = '101%': must be a whole number of positions of 1 or more, or a percentage above 0%",
        ),
        ({"budgets": [0]}, "budget = 0: is 0 positions, must be between 1 and the trace's 1024"),
        ({"budgets": ["1025"]}, "budget = 1025: is 1025 positions, must be between 1 and the trace's 1024"),
        (
            {"budgets": ["1.5"]},
            "budget = '1.5': must be a whole number of positions of 1 or more, or a percentage above 0%",
        ),
        (
            {"budgets": ["-3"]},
            "budget = '-3': must be a whole number of positions of 1 or more, or a percentage above 0%",
        ),
        ({"pool_kernel": 2}, "pool_kernel = 2"),
        ({"obs_window": 0, "policies": ["pyramidkv:4"]}, "obs_window = 0"),
        ({"jobs": 0}, "jobs = 0"),
    ],
)
def test_bad_arguments_are_refused_before_the_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.run(**{"trace": "funnel", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budgets": "85"}, "budgets = '85': must be a list of them, not one string"),  # not 8 and 5
        ({"policies": "tova"}, "policies = 'tova': must be a list of them, not one string"),
        ({"obs_window": 1.5, "policies": ["tova"]}, "obs_window = 1.5: must be an integer"),
        ({"jobs": True}, "jobs = True: must be an integer"),
    ],
)
def test_arguments_of_another_kind_are_refused_before_the_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        bench.run(**{"trace": "funnel", **arguments})


def test_the_scoring_of_snapkv_and_pyramids_can_be_set() -> None:
    trace = traces.funnel(3, 200)
    plain, other = (bench.run(trace, [40], ["tova", "snapkv", "pyramidkv:3"], **s).reports for s in ({}, SCORING))
    assert plain[0].per_layer == other[0].per_layer
    assert plain[1].retained_mass != other[1].retained_mass
    assert plain[2].retained_mass != other[2].retained_mass
    alone = replay(trace, lambda layer: SnapKV(40, 10, 4, 1), 40)
    assert other[1].per_layer == alone.per_layer


# --- plans from a file


def noisy(num_layers: int, length: int, seed: int) -> PackedTrace:
    """Return a trace whose layers differ."""
    attention = np.tril(np.random.default_rng(seed).random((num_layers, length, length)))
    attention **= np.linspace(2, 12, num_layers)[:, None, None]
    attention /= attention.sum(axis=2, keepdims=True)
    return traces.pack("noisy", attention)


def write(path: Path, *plans: LayerPlan) -> str:
    documents = [made.to_dict() for made in plans]
    path.write_text(json.dumps(documents if len(documents) > 1 else documents[0]), encoding="utf-8")
    return f"plan:{path}"


def test_the_benchmark_runs_a_plan_at_its_own_budget(tmp_path: Path) -> None:
    trace = noisy(4, 100, 10)
    plans = [plan(4, budget, ratio=3, minimum=10) for budget in (12, 30)]
    policy = write(tmp_path / "p.json", *plans)
    results = bench.run(trace, policies=["snapkv", policy])
    assert results.budgets == (12, 30)
    for budget, made in zip((12, 30), plans, strict=True):
        uniform, planned = results.at(budget)
        assert [layer.budget for layer in planned.per_layer] == made.budgets.tolist()
        stack = PyramidStack(4, recent_window=bench.recent_window(budget), plan=made)
        together = results.stack_of(planned)
        assert together is not None
        assert together.per_layer == replay(trace, stack, budget).per_layer
        assert planned.peak_resident == uniform.peak_resident
    assert label(policy) == "SnapKV, p.json"
    assert any("SnapKV, p.json against uniform" in sentence for sentence in findings(results))
    one = write(tmp_path / "q.json", plans[0])
    assert bench.run(trace, ["12"], [one]).reports[0].retained_mass == results.at(12)[1].retained_mass
    with pytest.raises(ValueError, match=r"has no plan of 13 positions a layer, only of 12$"):
        bench.run(trace, ["13"], [one])
    with pytest.raises(ValueError, match="plan: has 4 budgets, must have one for each of the 5 layers"):
        bench.run(noisy(5, 100, 1), policies=[one])
    pytest.importorskip("joblib", reason="needs the bench extra")
    again = bench.run(trace, policies=["snapkv", policy], jobs=2)
    assert [r.per_layer for r in again.reports] == [r.per_layer for r in results.reports]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not a plan"),
        (b"{", "not a plan"),
        (b"[]", "an empty list"),
        (b"3", "neither a layer plan nor a head plan"),
        (b"[" * 100_000, "not a plan"),
        (b'{"num_layers": 4}', "it has no budgets"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"p.json: .*{message}"):
        bench.run("funnel", policies=[f"plan:{path}"])


# --- how it is run


def test_it_measures_the_same_every_time(quick: Results) -> None:
    assert measured(bench.run(traces.funnel(4, 300), ["10%", 60], QUICK)) == measured(quick)


def test_no_more_processes_are_asked_for_than_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    joblib = pytest.importorskip("joblib")
    asked: list[int] = []

    def parallel(n_jobs: int, **options: object) -> object:
        asked.append(n_jobs)
        return original(n_jobs=1, **options)

    original = joblib.Parallel
    monkeypatch.setattr(joblib, "Parallel", parallel)
    for jobs in (100_000, 2, -1):
        bench.run(traces.funnel(2, 50), [10], ["tova", "h2o", "snapkv"], jobs=jobs)
    assert asked == [3, 2, -1]


def test_progress_starts_with_the_number_of_runs_and_counts_them(quick: Results) -> None:
    seen: list[tuple[int, int]] = []
    bench.run(traces.funnel(2, 50), [10], ["full", "tova"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_jobs_measure_the_same(quick: Results, tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="needs the bench extra")
    assert measured(bench.run(traces.funnel(4, 300), ["10%", 60], QUICK, jobs=2)) == measured(quick)
    traces.save(tmp_path / "mine.npz", traces.funnel(2, 60))
    one, two = (bench.run(tmp_path / "mine.npz", ["20%"], ["snapkv", "tova"], jobs=jobs) for jobs in (1, 2))
    assert measured(one) == measured(two)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the runs that go wrong, in a module that new workers find: those of another test have another path."""
    loky = pytest.importorskip("joblib.externals.loky", reason="needs the bench extra")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    loky.get_reusable_executor().shutdown(wait=True)
    yield importlib.import_module("bench_faults")
    loky.get_reusable_executor().shutdown(wait=True)


JOBS = ["bench", "--trace", "funnel-flat", "--budgets", "20%", "--policies", "tova,h2o,snapkv", "--jobs"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_a_worker_that_is_killed_is_refused_in_one_line(
    faults: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_replay", faults.killed)
    assert cli.main([*JOBS, "2"]) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(
        r"pb-kvcache: jobs = 2: a worker process was ended, .* with [01] of 3 runs done and the run of (tova|h2o) at "
        r"205 positions a layer next\. Fewer jobs take less memory, and jobs = 1 needs no workers\n",
        captured.err,
    )
    assert captured.out == ""


def test_a_trace_that_workers_cannot_read_is_not_blamed_on_memory(faults: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="un-serialize"):
        bench.run(faults.Unreadable("unreadable", 1, 20), [5], ["tova", "h2o"], jobs=2)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_that_finds_no_memory_is_named(
    jobs: str, faults: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_replay", faults.starved)
    assert cli.main([*JOBS, jobs]) == 2
    assert re.fullmatch(
        r"pb-kvcache: the run of (tova|h2o) at 205 positions a layer: not enough memory\. Fewer jobs take less\. "
        r"Unable to allocate 1 PiB\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_trace_that_changes_between_runs_is_read_once_or_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("joblib", reason="needs the bench extra")
    path = tmp_path / "t.npz"
    original, first = bench._tasks, traces.funnel(2, 60)

    def changed(*arguments: Any) -> Any:  # after the trace was first read, and before the first run
        if change == "removed":
            path.unlink()
        else:
            traces.save(path, traces.funnel(2, 60, seed=9))
        return original(*arguments)

    monkeypatch.setattr(bench, "_tasks", changed)
    arguments = ["bench", "--trace", str(path), "--budgets", "20%", "--policies", "tova,snapkv", "--jobs"]
    traces.save(path, first)
    assert cli.main([*arguments, "1"]) == 0
    capsys.readouterr()
    traces.save(path, first)
    assert cli.main([*arguments, "2"]) == 2
    said = {
        "removed": f"pb-kvcache: {path}: No such file or directory\n",
        "replaced": f"pb-kvcache: {path}: is not the file any more that it was when the benchmark began\n",
    }
    assert capsys.readouterr().err == said[change]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed")
def test_jobs_go_to_a_dask_cluster_that_the_caller_set_up(quick: Results) -> None:
    joblib = pytest.importorskip("joblib", reason="needs the bench extra")
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client, joblib.parallel_config(backend="dask"):
        results = bench.run(traces.funnel(4, 300), ["10%", 60], QUICK, jobs=-1)
        ran = client.run(lambda: "pb_kvcache.lab.bench" in sys.modules)
    assert any(ran.values()), "the workers did the work"
    assert measured(results) == measured(quick)


def test_without_joblib_one_job_runs_and_more_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    assert len(bench.run(traces.funnel(2, 50), [10], ["full", "tova"]).reports) == 2
    with pytest.raises(ImportError, match=r"joblib: pip install 'pb-kvcache\[bench\]'"):
        bench.run(traces.funnel(2, 50), [10], ["full", "tova"], jobs=2)


# --- the command


def test_the_command_prints_a_table_a_budget(capsys: pytest.CaptureFixture[str], quick: Results) -> None:
    assert cli.main(["bench", "--trace", "funnel", "--budgets", "10%,204", "--policies", "full, tova,pyramidkv:4"]) == 0
    out = capsys.readouterr().out
    assert "funnel: 16 layers, 1024 positions" in out
    assert re.search(r"102 positions a layer \(10 %\), 1632 in all, recent window 25", out)
    assert re.search(r"204 positions a layer \(20 %\), 3264 in all, recent window 32", out)
    for name in ("full cache", "TOVA", "PyramidKV 4"):
        assert len(re.findall(rf"^{name}  ", out, re.MULTILINE)) == 2
    assert max(len(line) for line in out.splitlines()) <= 80
    assert len(re.findall(r"^policy +mass +layer +recall +saved +memory +a step +stack$", out, re.MULTILINE)) == 2
    assert len(re.findall(r"^TOVA .* \d+ µs +-$", out, re.MULTILINE)) == 2
    assert len(re.findall(r"^PyramidKV 4 .* \d+ µs +\d+ µs$", out, re.MULTILINE)) == 2
    assert "Time a step: on_decode_step and evict of all layers, an object for each layer" in " ".join(out.split())


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--json", "--budgets", "20%", "--policies", "snapkv,pyramidkv:4"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["budgets"] == [{"budget": 115, "recent_window": 28}]
    assert [r["policy"] for r in document["runs"]] == ["snapkv", "pyramidkv:4"]
    assert len(document["runs"][1]["per_layer"]) == 30
    assert document["metadata"]["model"]["licence"] == "Apache-2.0"
    assert document["machine"]["numpy"] == np.__version__
    for member in document["runs"]:
        assert set(member["stack"]) == {"policy_bytes", "policy_seconds", "seconds"}
        assert member["policy_seconds"] > 0 < member["stack"]["policy_seconds"]


def test_the_command_writes_a_report_and_says_how_to_make_it_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    arguments = ["--trace", "funnel", "--budget", "20%", "--policies", "tova", "--report", str(tmp_path / "page")]
    assert cli.main(["bench", *arguments]) == 0
    assert str(tmp_path / "page" / "index.html") in capsys.readouterr().out.replace("\n", "")
    text = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "<code>pb-kvcache bench --trace funnel --policies tova --budget 20%</code>" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing"], "trace = 'nothing': no such trace; known: smollm2-135m"),
        (["--trace", "nowhere.npz"], "nowhere.npz"),
        (["--trace", "junk.npz"], "junk.npz: not a trace file"),
        (["--policies", "lru"], "no such policy; known: full"),
        (["--policies", ","], "policies: none given"),
        (["--budget", "many"], "--budget many: must be"),
        (["--budget", "-3%"], "--budget -3%: must be"),
        (["--jobs", "0"], "jobs = 0"),
        (["--report", "junk.npz"], "junk.npz"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--report" in arguments:
        pytest.importorskip("matplotlib", reason="needs the bench extra")
    monkeypatch.chdir(tmp_path)
    Path("junk.npz").write_bytes(b"junk")
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_report_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--report", str(tmp_path / "r")]) == 2
    assert "pip install 'pb-kvcache[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


# --- what the documentation claims


def rows(results: Results) -> list[str]:
    """Return the lines of a table as the documentation shows it."""
    lines = []
    for policy in results.policies:
        reports = [r for budget in results.budgets for r in results.at(budget) if r.policy == policy]
        cells = [f"{r.retained_mass:.4f} / {r.worst_layer.retained_mass:.3f} / {r.recall:.4f}" for r in reports]
        lines.append(f"| {label(policy)} | {' | '.join(cells)} |")
    return lines


def test_the_documented_figures_are_what_the_commands_measure(default: Results) -> None:
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if line.count(" / ") >= 8]
    some = ["tova", "snapkv", "pyramidkv:2", "pyramidkv:4", "pyramidkv:1/4"]
    wanted = [*rows(default), *rows(bench.run(policies=some, pool_kernel=1)), *rows(bench.run("funnel", policies=some))]
    assert shown == wanted
    for gain in gains(default):
        cells = [f"{points(mean)} / {points(worst)}" for mean, worst in zip(gain.mean, gain.worst, strict=True)]
        assert f"| {label(gain.policy)} | {' | '.join(cells)} |" in text
    for sentence in best_of(default):
        assert sentence in text
