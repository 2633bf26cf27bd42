"""What is said of a benchmark's figures is what was measured."""

from __future__ import annotations

import re

import pytest

from pb_kvcache._policies import label
from pb_kvcache.lab import bench, traces
from pb_kvcache.lab.findings import best_of, findings, gains, layers, points, size

MINUS = "\N{MINUS SIGN}"


def test_findings_are_what_was_measured() -> None:
    quick = bench.run(
        traces.funnel(4, 300), ["10%", 60], ["tova", "snapkv", "pyramidkv:1", "pyramidkv:4", "pyramidkv:1/4"]
    )
    reports = {(r.policy, r.budget): r for r in quick.reports}
    text = " ".join(findings(quick))
    for budget in (30, 60):
        best = max((r for r in quick.reports if r.budget == budget), key=lambda r: r.retained_mass)
        assert re.search(rf"{label(best.policy)} retains most at .*\b{budget}\b", text)
        assert f"{best.retained_mass:.4f}" in text
        gain = 100 * (reports["pyramidkv:4", budget].retained_mass - reports["snapkv", budget].retained_mass)
        assert f"{'+' if gain > 0 else MINUS}{abs(gain):.2f}" in text
    assert "PyramidKV 1/4 (inverted) against uniform SnapKV" in text
    assert "PyramidKV 1 against" not in text
    assert findings(bench.run("funnel", [100], ["full"])) == []


def test_gains_are_differences_to_uniform_budgets_in_the_order_of_the_policies() -> None:
    policies = ["full", "tova", "pyramidkv:1", "snapkv", "pyramidkv:4"]
    results = bench.run(traces.funnel(4, 300), ["10%", 60], policies)
    reports = {(r.policy, r.budget): r for r in results.reports}
    found = gains(results)
    assert [gain.policy for gain in found] == ["tova", "pyramidkv:4"]
    for gain in found:
        pairs = [(reports[gain.policy, budget], reports["snapkv", budget]) for budget in (30, 60)]
        assert gain.mean == tuple(one.retained_mass - uniform.retained_mass for one, uniform in pairs)
        assert gain.worst == tuple(
            one.worst_layer.retained_mass - uniform.worst_layer.retained_mass for one, uniform in pairs
        )
        assert gain.figures == (*gain.mean, *gain.worst)
    assert gains(bench.run("funnel", [100], ["tova"])) == []  # nothing to compare with
    assert gains(bench.run("funnel", [100], ["full", "snapkv"])) == []


def test_each_budget_has_one_that_retains_most() -> None:
    results = bench.run(traces.funnel(4, 300), ["10%", 60], ["full", "tova", "streaming_llm"])
    best = [max((r for r in results.reports if r.budget == at), key=lambda r: r.retained_mass) for at in (30, 60)]
    words = " ".join(best_of(results))
    for report in best:
        assert re.search(rf"{label(report.policy)} retains most at [^.]*\b{report.budget}\b", words)
    assert best_of(bench.run("funnel", [100], ["full"])) == []


def test_points_are_hundredths_with_a_sign_and_zero_has_none() -> None:
    assert [points(gain) for gain in (0.0152, -0.003, 0.00004, -0.00004, 0.0)] == [
        "+1.52",
        f"{MINUS}0.30",
        "0.00",
        "0.00",
        "0.00",
    ]


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (5e12, "5e+03 GB")]
)
def test_sizes_are_in_powers_of_a_thousand(count: float, shown: str) -> None:
    assert size(count) == shown


def test_one_layer_is_no_layers() -> None:
    assert [layers(bench.run(traces.funnel(n, 50), [10], ["tova"])) for n in (1, 2)] == ["1 layer", "2 layers"]
