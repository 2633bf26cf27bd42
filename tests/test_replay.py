"""The replay: the registry's table, a slow replay written out, the known sign of a funnel, and policies that cheat."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import (
    H2O,
    TOVA,
    FullCache,
    Policy,
    PyramidKV,
    Scissorhands,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
    _policies,
    pyramid_budgets,
)
from pb_kvcache.lab import traces
from pb_kvcache.lab.replay import ReplayError, replay
from pb_kvcache.lab.traces import PackedTrace

REGISTRY = {
    "tova": (TOVA, ".778128 .882339 .824012 .909793 .885888 .937247"),
    "snapkv": (SnapKV, ".783378 .890183 .821190 .901949 .888049 .941169"),
    "pyramidkv": (PyramidKV, ".783378 .890183 .821190 .901949 .888049 .941169"),
    "streaming_llm": (StreamingLLM, ".736691 .859419 .786153 .883480 .866203 .927572"),
    "h2o": (H2O, ".643895 .886261 .714859 .913715 .784413 .945091"),
    "scissorhands": (Scissorhands, ".641318 .882339 .711377 .906047 .784746 .945091"),
    "sliding_window": (SlidingWindow, ".596637 .742171 .655518 .774107 .754149 .833734"),
}


@pytest.fixture(scope="module")
def decode() -> PackedTrace:
    return traces.decode_4096()


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize(("column", "budget"), [(0, 256), (2, 512), (4, 1024)])
def test_the_registrys_table_to_six_decimals(decode: PackedTrace, name: str, column: int, budget: int) -> None:
    policy, figures = REGISTRY[name]
    mass, recall = figures.split()[column : column + 2]
    report = replay(decode, lambda layer: policy(budget), budget)
    assert f"{report.retained_mass:.6f}" == f"0{mass}"
    assert f"{report.recall:.6f}" == f"0{recall}"
    assert report.evictions == 4096 - budget
    assert report.peak_resident == budget + 1


def random_trace(num_layers: int, length: int, seed: int) -> PackedTrace:
    attention = np.tril(np.random.default_rng(seed).random((num_layers, length, length)) ** 6)
    attention /= attention.sum(axis=2, keepdims=True)
    return traces.pack("random", attention)


def slow_replay(trace: PackedTrace, policies: list[Any], budgets: list[int]) -> dict[str, Any]:
    """Follow the rules of the replay, one position at a time."""
    mass, found, asked, evictions, peak, held = [0.0] * len(policies), 0, 0, 0, 0, 0
    kept: list[list[int]] = [[0] for _ in policies]
    for step in range(1, trace.length):
        rows = trace.rows(step)
        for layer, policy in enumerate(policies):
            row = rows[layer].tolist()
            mass[layer] += sum(row[pos] for pos in kept[layer])
            top = sorted(range(step), key=lambda pos: (-row[pos], pos))[:32]
            found += sum(pos in kept[layer] for pos in top)
            asked += len(top)
            policy.on_decode_step(step, np.array([row[pos] for pos in kept[layer]], np.float32))
            kept[layer].append(step)
        peak = max(peak, sum(len(k) for k in kept))
        for layer, policy in enumerate(policies):
            if len(kept[layer]) > budgets[layer]:
                victims = policy.evict(budgets[layer]).tolist()
                kept[layer] = [pos for pos in kept[layer] if pos not in victims]
                evictions += len(victims)
        held += sum(len(k) for k in kept)
    steps = trace.length - 1
    return {
        "mass": [m / steps for m in mass],
        "recall": found / asked,
        "evictions": evictions,
        "peak": peak,
        "mean": held / steps,
    }


def _maker(row: _policies.Row) -> Callable[[int, int, int], Policy]:
    return lambda budget, layer, layers: row.make(_policies.Setting(layers, 99, budget, 4, 3), None)(layer)


#: By name: from the budget, the layer and the number of layers to a new cache.
MAKERS: dict[str, Callable[[int, int, int], Policy]] = {
    **{row.name: _maker(row) for row in _policies.ROWS.values() if row.bounded and not row.argument},
    "pyramidkv": lambda budget, layer, layers: PyramidKV(budget, layer, layers, 3, budget // 8, 4, 3),
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MAKERS)), st.integers(1, 5), st.integers(2, 70), st.integers(8, 40), st.integers(0, 999))
def test_the_replay_is_the_one_written_out(name: str, layers: int, length: int, budget: int, seed: int) -> None:
    trace = random_trace(layers, length, seed)
    report = replay(trace, lambda layer: MAKERS[name](budget, layer, layers), budget)
    policies = [MAKERS[name](budget, layer, layers) for layer in range(layers)]
    wanted = slow_replay(trace, policies, [policy.effective_budget for policy in policies])
    assert [layer.retained_mass for layer in report.per_layer] == pytest.approx(wanted["mass"], rel=1e-6)
    assert report.retained_mass == pytest.approx(np.mean(wanted["mass"]), rel=1e-6)
    assert report.recall == wanted["recall"]
    assert report.evictions == wanted["evictions"]
    assert report.peak_resident == wanted["peak"]
    assert report.mean_resident == pytest.approx(wanted["mean"])
    assert report.policy_bytes == sum(policy.memory_bytes for policy in policies)


def test_a_report_adds_up() -> None:
    trace = traces.funnel(6, 300)
    report = replay(trace, lambda layer: PyramidKV(40, layer, 6, 4, 8), 40, name="pyramid")
    layers = report.per_layer
    assert (report.policy, report.trace, report.budget, report.steps) == ("pyramid", "funnel", 40, 299)
    assert [layer.budget for layer in layers] == pyramid_budgets(40, 6, 4).tolist()
    assert [layer.peak_resident for layer in layers] == [b + 1 for b in pyramid_budgets(40, 6, 4)]
    assert report.retained_mass == pytest.approx(np.mean([layer.retained_mass for layer in layers]))
    assert report.recall == pytest.approx(np.mean([layer.recall for layer in layers]))
    assert report.evictions == sum(layer.evictions for layer in layers)
    assert report.mean_resident == pytest.approx(sum(layer.mean_resident for layer in layers))
    assert report.peak_resident == max(report.resident_before)
    assert report.worst_layer.retained_mass == min(layer.retained_mass for layer in layers)
    assert np.array_equal(report.resident_before[1:], report.resident_after[:-1] + 6)
    assert 0 < report.policy_seconds < report.seconds
    assert report.steps_per_second == pytest.approx(299 / report.seconds)
    assert report.to_dict()["per_layer"][5]["budget"] == layers[5].budget


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(MAKERS)), st.integers(2, 60), st.data())
def test_steps_count_where_they_are_asked_to(name: str, steps: int, data: st.DataObject) -> None:
    trace = random_trace(3, steps + 1, steps)
    split = data.draw(st.integers(1, steps - 1))

    def run(counted: range | None) -> Any:
        return replay(trace, lambda layer: MAKERS[name](12, layer, 3), 12, steps=counted)

    whole, head, tail = run(None), run(range(1, split + 1)), run(range(split + 1, steps + 1))
    assert (head.first_counted, head.steps, len(head.resident_after)) == (1, split, split)
    assert (tail.first_counted, tail.steps) == (split + 1, steps)
    for field in ("retained_mass", "available_mass"):
        parts = split * getattr(head, field) + (steps - split) * getattr(tail, field)
        assert parts == pytest.approx(steps * getattr(whole, field))
    asked = [min(32, step) for step in range(1, steps + 1)]
    found = sum(asked[:split]) * head.recall + sum(asked[split:]) * tail.recall
    assert found == pytest.approx(sum(asked) * whole.recall)
    # The caches live through the steps that do not count all the same.
    assert tail.evictions == whole.evictions
    assert np.array_equal(tail.resident_after, whole.resident_after)
    assert np.array_equal(head.resident_after, whole.resident_after[:split])


def test_steps_after_the_counted_ones_are_not_asked_for() -> None:
    asked: list[int] = []
    trace = Rows(lambda step: asked.append(step) or np.full((2, step), 0.1, np.float32))  # type: ignore[func-returns-value]
    replay(trace, lambda layer: TOVA(4), 4, steps=range(3, 6))
    assert set(asked) == set(range(1, 6))


@pytest.mark.parametrize("steps", [range(0), range(0, 5), range(1, 51), range(5, 5), range(9, 3), range(1, 9, 2)])
def test_steps_that_the_trace_does_not_have_are_refused(steps: range) -> None:
    with pytest.raises(ValueError, match=r"steps = range\(.*within range\(1, 50\)"):
        replay(random_trace(1, 50, 1), lambda layer: TOVA(9), 9, steps=steps)
    with pytest.raises(TypeError, match=r"steps = 5: must be a range, such as range\(1, 50\)"):
        replay(random_trace(1, 50, 1), lambda layer: TOVA(9), 9, steps=5)  # type: ignore[arg-type]


def test_a_replay_measures_the_same_every_time() -> None:
    trace = traces.funnel(3, 200)
    one, two = (replay(trace, lambda layer: SnapKV(30, 7), 30).to_dict() for _ in range(2))
    for timed in ("seconds", "policy_seconds", "steps_per_second"):
        del one[timed], two[timed]
    assert one == two


def test_a_full_cache_retains_everything() -> None:
    trace = random_trace(3, 50, 1)
    report = replay(trace, lambda layer: FullCache(), None)
    assert report.retained_mass == report.available_mass
    assert report.recall == 1
    assert report.evictions == 0
    assert report.peak_resident == 3 * 50
    assert report.budget is None


# --- what a pyramid is for


def mass(trace: traces.Trace, ratio: int, inverted: bool = False, budget: int = 204) -> float:
    layers = trace.num_layers

    def make(layer: int) -> Policy:
        return PyramidKV(budget, layers - 1 - layer if inverted else layer, layers, ratio)

    return replay(trace, make, budget).retained_mass


def test_a_pyramid_helps_where_layers_narrow_and_harms_where_they_do_not() -> None:
    """20 % of 1,024 positions, 16 layers. What fits the trace wins, by more than rounding."""
    funnel, flat, inverted = (traces.funnel(widths=widths) for widths in ((12, 3), (7, 7), (3, 12)))
    assert mass(funnel, 1) + 0.01 < mass(funnel, 4)
    assert mass(funnel, 4, inverted=True) + 0.05 < mass(funnel, 1)
    assert mass(flat, 4) + 0.05 < mass(flat, 1)
    assert mass(flat, 4, inverted=True) + 0.05 < mass(flat, 1)
    assert mass(inverted, 4) + 0.05 < mass(inverted, 1)
    assert mass(inverted, 1) + 0.01 < mass(inverted, 4, inverted=True)


def test_a_ratio_of_one_is_snapkv() -> None:
    trace = traces.funnel(4, 300)
    uniform = replay(trace, lambda layer: SnapKV(40, 8), 40)
    assert replay(trace, lambda layer: PyramidKV(40, layer, 4, 1, 8), 40).per_layer == tuple(uniform.per_layer)


def test_a_replay_holds_no_square_matrix() -> None:
    trace = traces.funnel(16, 1024)
    tracemalloc.start()
    try:
        replay(trace, lambda layer: SnapKV(102, 25), 102)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 16 * 1024 * 1024 * 8 / 16  # a sixteenth of the attention in double


# --- stacks


class HandStack:
    """A stack of independent policies, driven by hand."""

    def __init__(self, policies: list[Policy]) -> None:
        self.layers = policies
        self.budgets = [policy.effective_budget for policy in policies]
        self.memory_bytes = sum(policy.memory_bytes for policy in policies)

    def on_decode_step(self, pos: int, attn: list[np.ndarray]) -> None:
        for policy, weights in zip(self.layers, attn, strict=True):
            policy.on_decode_step(pos, weights)

    def evict(self) -> list[np.ndarray]:
        return [policy.evict() for policy in self.layers]


def test_a_stack_measures_as_its_layers_do() -> None:
    trace = traces.funnel(5, 250)
    alone = replay(trace, lambda layer: PyramidKV(50, layer, 5, 4, 9), 50)
    stack = replay(trace, HandStack([PyramidKV(50, layer, 5, 4, 9) for layer in range(5)]), 50)
    for one, other in zip(alone.per_layer, stack.per_layer, strict=True):
        assert (one.budget, one.retained_mass, one.recall, one.evictions, one.peak_resident) == (
            other.budget,
            other.retained_mass,
            other.recall,
            other.evictions,
            other.peak_resident,
        )
    assert (alone.policy_bytes, alone.peak_resident) == (stack.policy_bytes, stack.peak_resident)


def test_a_stack_of_another_depth_is_refused() -> None:
    with pytest.raises(ReplayError, match="HandStack: has 2 layers, must have the 3 of the trace funnel"):
        replay(traces.funnel(3, 50), HandStack([SnapKV(20, 5), SnapKV(20, 5)]), 20)


def test_a_stack_that_returns_too_few_arrays_is_refused() -> None:
    stack = HandStack([SnapKV(20, 5), SnapKV(20, 5)])
    stack.evict = lambda: []  # type: ignore[method-assign]
    with pytest.raises(ReplayError, match=r"step 20: HandStack raised .*returned 0 arrays for 2 layers"):
        replay(traces.funnel(2, 50), stack, 20)


# --- fairness and cheats


def test_more_than_the_total_is_refused_before_a_step_is_taken() -> None:
    trace = traces.funnel(4, 60)
    with pytest.raises(ReplayError, match=r"SnapKV: the layers' budgets sum to 84, must be at most .* 20 \* 4 = 80"):
        replay(trace, lambda layer: SnapKV(21, 5), 20)
    # A floor under the deep layers overspends at a steep ratio.
    with pytest.raises(ReplayError, match="the layers' budgets sum to"):
        replay(trace, lambda layer: PyramidKV(20, layer, 4, 9, 15), 20)


@pytest.mark.parametrize(("budget", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_budget_that_is_none_is_refused(budget: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="budget = "):
        replay(traces.funnel(1, 20), lambda layer: SnapKV(), budget)


class Cheat:
    """Keeps the newest two, honestly, until layer 1 does something else at step 5."""

    def __init__(self, layer: int, act: Callable[[Cheat], Any]) -> None:
        self.layer, self.act, self.pos = layer, act, 0

    def on_decode_step(self, pos: int, attn: np.ndarray) -> None:
        self.pos = pos

    def evict(self, budget: int) -> Any:
        honest = [self.pos - 2]
        return self.act(self) if (self.layer, self.pos) == (1, 5) else honest


def fail(cheat: Cheat) -> None:
    raise RuntimeError("oh")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda c: [0], "dropped position 0, which is not kept"),
        (lambda c: [6], "dropped position 6, which is not kept"),
        (lambda c: [-1], "dropped position -1, which is not kept"),
        (lambda c: [3, 3], "dropped position 3, which is not kept any more"),
        (lambda c: [], "keeps 3 positions after evict(2), must be at most that"),
        (lambda c: [1.5], "evict() returned [1.5], must be one-dimensional and hold integers"),
        (lambda c: None, "evict() returned None, must be one-dimensional and hold integers"),
        (fail, "raised RuntimeError('oh')"),
    ],
)
def test_a_policy_that_cheats_is_named_with_step_and_layer(act: Callable[[Cheat], Any], message: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(f"funnel: step 5, layer 1: Cheat {message}")):
        replay(traces.funnel(3, 20), lambda layer: Cheat(layer, act), 2)  # type: ignore[arg-type, return-value]


def test_a_policy_may_drop_more_than_it_has_to() -> None:
    class Forgetful(Cheat):
        def evict(self, budget: int) -> list[int]:
            return [self.pos - 2, self.pos - 1, self.pos]

    report = replay(traces.funnel(1, 12), lambda layer: Forgetful(layer, fail), 2)
    assert report.resident_after.tolist() == [2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert report.evictions == 12
    assert 0 < report.retained_mass < 1


def test_a_policy_that_drops_others_than_it_says_is_found_out() -> None:
    class Liar(SnapKV):
        __slots__ = ()

        def evict(self, budget: int | None = None) -> np.ndarray:
            return super().evict(budget) * 0 + 5 if 5 in self else super().evict(budget)

    with pytest.raises(ReplayError, match=r"(step \d+, layer 0: Liar)"):
        replay(traces.funnel(1, 60), lambda layer: Liar(10, 2), 10)


class Rows(traces.Trace):
    def __init__(self, rows: Callable[[int], np.ndarray]) -> None:
        super().__init__("mine", 2, 10)
        self._rows = rows

    def rows(self, step: int) -> np.ndarray:
        return self._rows(step)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda step: np.zeros((2, step + 1), np.float32), r"mine: step 1: rows have shape (2, 2), must be (2, 1)"),
        (lambda step: np.full((2, step), np.nan, np.float32), "mine: step 1, layer 0, position 0: weight nan"),
        (lambda step: np.full((2, step), -1, np.float32), "mine: step 1, layer 0, position 0: weight -1.0"),
    ],
)
def test_a_users_own_trace_is_checked_at_every_step(rows: Callable[[int], np.ndarray], message: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(message)):
        replay(Rows(rows), lambda layer: SnapKV(5, 1), 5)


def test_what_is_no_policy_is_a_type_error() -> None:
    trace = traces.funnel(2, 20)
    with pytest.raises(TypeError, match=r"make_policy = <SnapKV.*>: has no budgets; must be a function from a layer"):
        replay(trace, SnapKV(5, 1), 5)
    with pytest.raises(TypeError, match="make_policy = None: has no on_decode_step"):
        replay(trace, None, 5)
    with pytest.raises(TypeError, match=r"make_policy\(1\) = None: has no on_decode_step; must be a policy"):
        replay(trace, [SnapKV(5, 1), None].__getitem__, 5)


def test_progress_is_told_of_every_step() -> None:
    seen: list[int] = []
    replay(traces.funnel(1, 20), lambda layer: SnapKV(5, 1), 5, progress=seen.append)
    assert seen == list(range(1, 20))
