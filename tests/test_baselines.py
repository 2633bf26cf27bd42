"""The baselines: each rule with its right value, and any sequence of calls against the slow reference."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import (
    H2O,
    TOVA,
    CacheFullError,
    FullCache,
    Policy,
    Scissorhands,
    SlidingWindow,
    StreamingLLM,
    _policies,
)

from .conftest import ROOT, Run
from .reference import Refused
from .reference_baselines import NAMES, POLICIES, SECOND

CLASSES = {name: _policies.CLASSES[name] for name in NAMES}
#: A budget of 4, and a recent window or sinks of 1 where the policy has them.
SMALL = {name: {"budget": 4} | ({SECOND[name]: 1} if name in SECOND else {}) for name in NAMES}
#: Few values, so that ties are common.
WEIGHTS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 1 / 3, 2.0**-149, 3.0e38])


def parameters(name: str) -> st.SearchStrategy[dict[str, int]]:
    def for_budget(budget: int) -> st.SearchStrategy[dict[str, int]]:
        second = {SECOND[name]: st.integers(0, budget - 1)} if name in SECOND else {}
        return st.fixed_dictionaries({"budget": st.just(budget), "spare": st.integers(0, 3)} | second)

    return st.integers(1, 9).flatmap(for_budget)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_sequence_of_calls_keeps_and_drops_what_the_reference_does(name, data):
    params = data.draw(parameters(name))
    cache, reference = CLASSES[name](**params), POLICIES[name](**params)
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["step"] * 3 + ["null"] + ["evict"] * 2 + ["foreign", "seed", "reset"]))
        if kind in ("step", "null"):
            pos = (reference.kept[-1] if reference.kept else -1) + data.draw(st.integers(1, 3))
            count = len(reference.kept)
            row = data.draw(st.lists(WEIGHTS, min_size=count, max_size=count)) if kind == "step" else None
            attn = None if row is None else np.array(row, np.float32)
            try:
                reference.step(pos, None if attn is None else attn.tolist())
            except Refused:  # full
                with pytest.raises(CacheFullError):
                    cache.on_decode_step(pos, attn)
            else:
                cache.on_decode_step(pos, attn)
        elif kind in ("evict", "foreign"):
            budget = None if kind == "evict" else data.draw(st.integers(0, 12))
            assert cache.evict(budget).tolist() == reference.evict(budget)
        elif kind == "seed":
            positions = sorted(data.draw(st.sets(st.integers(0, 40), max_size=reference.capacity)))
            count = len(positions)
            rows = data.draw(st.lists(st.lists(WEIGHTS, min_size=count, max_size=count), max_size=3))
            seeded = np.array(rows, np.float32).reshape(len(rows), count)
            cache.seed(positions, seeded if rows else None)
            reference.seed(positions, seeded.tolist())
        else:
            cache.reset()
            reference.reset()
        assert cache.kept.tolist() == reference.kept
        if name not in ("sliding_window", "streaming_llm"):
            assert [cache.window_score(pos) for pos in cache.kept] == [reference.score(pos) for pos in reference.kept]


def fed(name: str, rows: list[list[float] | None], **params: int) -> Policy:
    """Return a cache after steps 1, 2, ... with these weights, and no eviction."""
    cache = CLASSES[name](**params)
    for pos, row in enumerate(rows, start=1):
        cache.on_decode_step(pos, row)
    return cache


def test_h2o_sums_attention_and_an_unobserved_step_adds_nothing():
    rows = [[1.0], None, [0.25, 0.5, 0.25], [0.0, 0.5, 0.25, 0.25]]
    cache = fed("h2o", rows, budget=4, recent_window=0)
    assert [cache.window_score(pos) for pos in range(5)] == [1.25, 1.0, 0.5, 0.25, 0.0]
    assert cache.evict(2).tolist() == [2, 3, 4]  # nothing protects the newest without a window


def test_h2o_sums_in_double():
    tiny = 2.0**-40
    cache = fed("h2o", [[1.0], [tiny, 0.0], [tiny, 0.0, 0.0]], budget=4, recent_window=0)
    assert cache.window_score(0) == 1.0 + 2 * tiny  # float32 would have lost both


def test_tova_ranks_the_latest_step_only():
    cache = fed("tova", [[1.0], [0.125, 0.875], [0.75, 0.125, 0.125]], budget=3)
    assert cache.evict().tolist() == [1]  # tie of 1 and 2: the lower; what 1 received before does not matter


def test_tova_spares_what_no_step_has_weighed_even_above_the_budget():
    cache = fed("tova", [[1.0], [0.5, 0.5], None, None], budget=4)
    assert cache.evict(0).tolist() == [0, 1]
    assert cache.kept.tolist() == [2, 3, 4]
    assert cache.evict(0).tolist() == []
    cache.on_decode_step(5, [0.5, 0.25, 0.25])
    assert cache.evict(2).tolist() == [3, 4]
    assert cache.kept.tolist() == [2, 5]


def test_a_tova_cache_full_of_unobserved_positions_stays_full_until_it_is_seeded_with_attention():
    cache = TOVA(budget=2)
    cache.seed([0, 1, 2])
    assert cache.evict().tolist() == []
    with pytest.raises(CacheFullError):
        cache.on_decode_step(3, [0.5, 0.25, 0.25])
    cache.seed([0, 1, 2], [[0.5, 0.25, 0.25]])
    assert cache.evict().tolist() == [1]


def test_scissorhands_vote_is_strictly_more_than_an_even_share_in_double():
    third = np.float32(1 / 3)  # in double 0.3333333432674408, above 1/3; its predecessor is below
    cache = Scissorhands(budget=4, recent_window=0)
    cache.on_decode_step(1, [1.0])
    cache.on_decode_step(2, [0.5, 0.5])
    assert [cache.window_score(pos) for pos in (0, 1, 2)] == [0.0, 0.0, 0.0]
    cache.on_decode_step(3, np.array([third, np.nextafter(third, np.float32(0)), 0.4], np.float32))
    assert [cache.window_score(pos) for pos in (0, 1, 2, 3)] == [1.0, 0.0, 1.0, 0.0]
    assert cache.evict(2).tolist() == [1, 3]


def test_streaming_llm_pins_positions_not_places():
    cache = StreamingLLM(budget=4, sinks=2)
    cache.seed([1, 5, 6, 7, 8])  # position 0 is gone: 1 is the only sink held
    assert cache.evict(2).tolist() == [5, 6, 7]
    assert cache.evict(0).tolist() == [8]
    assert cache.evict(0).tolist() == []
    assert cache.kept.tolist() == [1]


def test_sliding_window_drops_the_oldest_and_obeys_a_foreign_budget():
    cache = fed("sliding_window", [None] * 4, budget=4)
    assert cache.evict(100).tolist() == [0]  # never above its own budget
    assert cache.evict(0).tolist() == [1, 2, 3, 4]
    assert len(cache) == 0


@pytest.mark.parametrize("name", ["sliding_window", "streaming_llm"])
def test_a_policy_without_a_score_says_so(name):
    cache = CLASSES[name](**SMALL[name])
    with pytest.raises(TypeError, match="has no score"):
        cache.window_score(0)


@pytest.mark.parametrize("name", CLASSES)
def test_a_refused_step_changes_nothing(name):
    rows = [[1.0], [0.75, 0.25]]
    cache, twin = fed(name, rows, **SMALL[name]), fed(name, rows, **SMALL[name])
    for pos, attn, message in [
        (2, [0.5, 0.25, 0.25], "pos = 2"),
        (3, [0.5, 0.5], "has 2 weights"),
        (3, [0.5, -0.5, 1.0], r"attn\[1\] = -0.5"),
        (3, [0.5, 0.5, np.nan], r"attn\[2\] = nan"),
        (3, [0.5, 0.5, np.inf], r"attn\[2\] = inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.on_decode_step(pos, attn)
    assert cache.kept.tolist() == twin.kept.tolist()
    for policy in (cache, twin):
        policy.on_decode_step(3, [0.25, 0.5, 0.25])
        policy.on_decode_step(4, [0.25, 0.25, 0.25, 0.25])
    assert cache.evict(2).tolist() == twin.evict(2).tolist()
    assert cache.kept.tolist() == twin.kept.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), "budget = 0: must be greater than 0"),
        (lambda: TOVA(0), "budget = 0: must be greater than 0"),
        (lambda: H2O(0), "budget = 0: must be greater than 0"),
        (lambda: H2O(32), "recent_window = 32: must be smaller than budget = 32"),
        (lambda: Scissorhands(31), "recent_window = 32: must be smaller than budget = 31"),
        (lambda: StreamingLLM(4), "sinks = 4: must be smaller than budget = 4"),
        (lambda: StreamingLLM(0, 0), "budget = 0: must be greater than 0"),
        (lambda: SlidingWindow(2**32 - 1), "budget = 4294967295: .* does not fit"),
        (lambda: StreamingLLM(2**32 - 1), "budget = 4294967295: .* does not fit"),
        (lambda: SlidingWindow(2**32), "budget = 4294967296: must be between 0 and 4294967295"),
        (lambda: H2O(recent_window=-1), "recent_window = -1: must be between"),
    ],
)
def test_refused_parameters_name_the_parameter_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", CLASSES)
def test_a_copy_goes_its_own_way_from_the_same_state(name):
    cache = fed(name, [[1.0], [0.75, 0.25], None, [0.25, 0.25, 0.25, 0.25]], **SMALL[name])
    twin = copy.copy(cache)
    assert twin.evict().tolist() == cache.evict().tolist()
    assert twin.kept.tolist() == cache.kept.tolist()
    cache.on_decode_step(5, None)
    assert 5 not in twin


@pytest.mark.parametrize(("name", "bytes_per_position"), [("sliding_window", 4), ("h2o", 12), ("tova", 12)])
def test_memory_is_what_the_header_says(name, bytes_per_position):
    low, high = CLASSES[name](budget=100), CLASSES[name](budget=1100)
    assert high.memory_bytes - low.memory_bytes == 1000 * bytes_per_position


def test_full_cache_keeps_everything_and_its_memory_is_honest():
    cache = FullCache()
    for pos in range(1, 1000):
        cache.on_decode_step(pos, np.full(pos, 1 / pos, np.float32))
        assert cache.evict(4).tolist() == []
    assert cache.kept.tolist() == list(range(1000))
    assert 4 * 1000 <= cache.memory_bytes <= 2 * 4 * 1000
    assert 999 in cache
    assert 1000 not in cache
    assert -1 not in cache
    assert "x" not in cache
    cache.reset()
    assert (cache.kept.tolist(), cache.memory_bytes) == ([0], 4)


def test_full_cache_has_the_interface_of_a_policy():
    cache = FullCache()
    assert isinstance(cache, Policy)
    cache.seed([3, 5], [[0.5, 0.5]])
    twin, loaded = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    cache.on_decode_step(9, None)
    assert (cache.kept.tolist(), twin.kept.tolist(), loaded.kept.tolist()) == ([3, 5, 9], [3, 5], [3, 5])
    assert cache.effective_budget == cache.capacity == 2**32 - 1
    assert repr(cache) == "<FullCache(): 3 kept, never evicts>"
    with pytest.raises(TypeError, match="has no score"):
        cache.window_score(3)
    cache.seed([])
    cache.on_decode_step(0, [])
    assert cache.kept.tolist() == [0]


class Mine(FullCache):
    """A full cache of the user's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_copies_and_pickles_of_a_subclass_of_the_full_cache_are_of_the_subclass():
    cache = Mine("x")
    cache.seed([3, 5])
    for twin in (cache.copy(), copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert type(twin) is Mine
        assert (twin.name, twin.kept.tolist()) == ("x", [3, 5])


def test_full_cache_refuses_what_every_policy_refuses():
    cache = FullCache()
    cache.on_decode_step(4, [1.0])
    for pos, attn, message in [
        (4, None, "pos = 4"),
        (5, [1.0], "has 1 weights"),
        (5, [1.0, -1.0], r"attn\[1\] = -1.0"),
        (5, [np.nan, 1.0], r"attn\[0\] = nan"),
        (5, [1.0, np.inf], r"attn\[1\] = inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.on_decode_step(pos, attn)
    with pytest.raises(ValueError, match="budget = -1"):
        cache.evict(-1)
    for positions, weights, message in [
        ([1, 1], None, r"positions\[1\] = 1"),
        ([1, 2], [[1.0]], "must be .rows, 2."),
        ([1], [[-1.0]], r"attn\[0, 0\] = -1"),
        ([-1], None, r"positions\[0\] = -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.seed(positions, weights)
    assert cache.kept.tolist() == [0, 4]


#: A program as it is written for the policy registry: one header per policy, defaults from macros, no statuses.
REGISTRY_PROGRAM = """
#include <policybook/kv_cache/h2o.h>
#include <policybook/kv_cache/kv_cache.h>
#include <policybook/kv_cache/scissorhands.h>
#include <policybook/kv_cache/sliding_window.h>
#include <policybook/kv_cache/streaming_llm.h>
#include <policybook/kv_cache/tova.h>
#include <stdio.h>

static void drive(const pb_kvcache_vtable *vtable, const void *params, uint32_t budget)
{
    uint32_t victims[64];
    float attn[64];
    size_t kept = 1;
    uint32_t sum = 0;
    pb_kvcache *policy = vtable->create(params, NULL, NULL);
    for (uint32_t pos = 1; pos < 40; ++pos) {
        for (size_t i = 0; i < kept; ++i) {
            attn[i] = i == 0 ? 0.5f : 0.5f / (float)kept;
        }
        vtable->on_decode_step(policy, pos, attn, kept);
        ++kept;
        if (kept > budget) {
            size_t dropped = vtable->evict(policy, budget, victims, 64);
            kept -= dropped;
            sum += victims[0];
        }
    }
    vtable->destroy(policy);
    printf("%zu %u\\n", kept, (unsigned)sum);
}

int main(void)
{
    pb_kvcache_sliding_window_params sliding_window = PB_KVCACHE_SLIDING_WINDOW_PARAMS_DEFAULT;
    pb_kvcache_streaming_llm_params streaming_llm = PB_KVCACHE_STREAMING_LLM_PARAMS_DEFAULT;
    pb_kvcache_h2o_params h2o = PB_KVCACHE_H2O_PARAMS_DEFAULT;
    pb_kvcache_tova_params tova = PB_KVCACHE_TOVA_PARAMS_DEFAULT;
    pb_kvcache_scissorhands_params scissorhands = PB_KVCACHE_SCISSORHANDS_PARAMS_DEFAULT;
    sliding_window.budget = streaming_llm.budget = h2o.budget = tova.budget = scissorhands.budget = 8u;
    h2o.recent_window = scissorhands.recent_window = 2u;
    drive(&pb_kvcache_sliding_window, &sliding_window, 8u);
    drive(&pb_kvcache_streaming_llm, &streaming_llm, 8u);
    drive(&pb_kvcache_h2o, &h2o, 8u);
    drive(&pb_kvcache_tova, &tova, 8u);
    drive(&pb_kvcache_scissorhands, &scissorhands, 8u);
    return 0;
}
"""


def test_a_program_for_the_registry_compiles_and_links_unchanged(c_build: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "main.c").write_text(REGISTRY_PROGRAM)
    run(
        *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc' / 'include'}", tmp_path / "main.c"),
        *(c_build / "libpb_kvcache.a", "-o", tmp_path / "main"),
    )
    # 32 evictions, one by one. The oldest: 0 to 31. With 4 sinks: 4 to 35. By attention, of which position 0 gets most
    # and the others equally much: the newest that is open, which has the least (H2O, from 6 to 37); of equals the
    # oldest (TOVA and votes, from 1 to 32).
    sums = [sum(range(first, first + 32)) for first in (0, 4, 6, 1, 1)]
    assert run(tmp_path / "main").stdout == "".join(f"8 {number}\n" for number in sums)
