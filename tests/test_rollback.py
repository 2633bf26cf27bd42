"""Steps taken back: everything is as before them, to the last bit of a saved state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import FullCache, Policy, PyramidStack, SnapKV, _policies

from .reference_state import state
from .test_evict_rows import REFERENCES, parameters, reference_of


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_calls_lead_where_the_reference_goes_by_whole_copies(name: str, data: st.DataObject) -> None:
    params = parameters(data, name) | {"max_rollback": data.draw(st.integers(0, 5))}
    cache: Policy = _policies.CLASSES[name](**params)
    reference = reference_of(name, params)
    for _ in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["step"] * 5 + ["rollback"] * 3 + ["evict", "copy", "load"]))
        if kind == "step" and len(cache) < cache.capacity:
            pos = max(reference.kept, default=-1) + data.draw(st.integers(1, 3))
            weights = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=len(cache), max_size=len(cache))
            row = data.draw(st.none() | weights)
            cache.on_decode_step(pos, row)
            reference.step(pos, row)
        elif kind == "rollback":
            count = data.draw(st.integers(0, cache.rollback_count()))
            cache.rollback(count)
            reference.rollback(count)
        elif kind == "evict":
            budget = data.draw(st.none() | st.integers(0, 9))
            assert cache.evict(budget).tolist() == reference.evict(budget)
        elif kind == "copy":  # what can be taken back is copied, too
            cache = cache.copy()
        elif kind == "load":
            saved = cache.save()
            other: Policy = _policies.CLASSES[name](**params)
            other.load(saved)
            assert (other.save(), other.rollback_count()) == (saved, 0)
        assert cache.rollback_count() == len(reference.past)
        assert cache.save() == state(reference)


@pytest.mark.parametrize("obs_window", [1, 3, 16])
def test_drafts_that_are_thrown_away_leave_no_trace(obs_window: int) -> None:
    rng = np.random.default_rng(3)
    params = {"budget": 20, "recent_window": 2, "obs_window": obs_window, "pool_kernel": 3, "spare": 8}
    drafting = SnapKV(**params, max_rollback=8)
    plain = SnapKV(**params)
    for pos in range(1, 120):
        row = rng.random(len(plain), np.float32)
        for cache in (drafting, plain):
            cache.on_decode_step(pos, row)
        drafts = min(drafting.capacity - len(drafting), int(rng.integers(0, 9)))
        for draft in range(drafts):
            drafting.on_decode_step(pos + 1 + draft, rng.random(len(drafting), np.float32))
        drafting.rollback(drafts)
        if rng.random() < 0.4 or len(plain) == plain.capacity:
            assert drafting.evict().tolist() == plain.evict().tolist()
        assert drafting.save() == plain.save()  # a state says nothing of what can be taken back


def test_a_stack_takes_back_in_all_layers_or_in_none() -> None:
    stack = PyramidStack(3, plan=[9, 5, 3], recent_window=1, obs_window=2, pool_kernel=1, spare=6, max_rollback=4)
    for pos in range(1, 5):
        stack.on_decode_step(pos, [np.full(len(layer), 0.5, np.float32) for layer in stack.layers])
    scores = [layer.window_score(0) for layer in stack.layers]
    for pos in range(5, 8):
        stack.on_decode_step(pos, [np.full(len(layer), pos, np.float32) for layer in stack.layers])
    assert (stack.rollback_count(), stack.resident, stack.peak_resident) == (4, 24, 24)
    twin = copy.copy(stack)
    stack.rollback(3)
    assert [kept.tolist() for kept in stack.kept] == [[0, 1, 2, 3, 4]] * 3
    assert [layer.window_score(0) for layer in stack.layers] == scores
    assert (stack.rollback_count(), stack.resident, stack.peak_resident) == (1, 15, 24)
    with pytest.raises(ValueError, match="count = 2: must be at most the steps that can be taken back now, 1"):
        stack.rollback(2)
    twin.rollback(4)
    assert [kept.tolist() for kept in twin.kept] == [[0, 1, 2, 3]] * 3
    stack.seed(1, [2, 3])
    assert stack.rollback_count() == 0


def test_a_full_cache_takes_back_every_step_since_it_was_seeded() -> None:
    cache = FullCache()
    cache.seed([3, 5])
    for pos in (6, 7, 9):
        cache.on_decode_step(pos, None)
    cache.rollback(1)
    assert (cache.kept.tolist(), cache.rollback_count()) == ([3, 5, 6, 7], 2)
    with pytest.raises(ValueError, match="count = 3: must be at most the steps that can be taken back now, 2"):
        cache.rollback(3)
    assert cache.copy().rollback_count() == 2
    cache.rollback(2)
    assert cache.kept.tolist() == [3, 5]


@pytest.mark.parametrize("make", [lambda: SnapKV(max_rollback=2), FullCache, lambda: PyramidStack(2, max_rollback=2)])
def test_what_is_no_number_of_steps_is_refused(make: Any) -> None:
    cache = make()
    cache.on_decode_step(1, None)
    with pytest.raises(TypeError, match=r"count = 1\.0: must be an integer"):
        cache.rollback(1.0)
    with pytest.raises(ValueError, match="count = -1: must be 0 or more"):
        cache.rollback(-1)
    with pytest.raises(ValueError, match="must be at most the steps that can be taken back now, 1"):
        cache.rollback(2**70)
    assert cache.rollback_count() == 1


def test_max_rollback_is_a_parameter_and_is_named_where_it_is_too_large() -> None:
    for kind in _policies.CLASSES.values():
        cache: Any = kind(max_rollback=3)
        assert cache.max_rollback == 3
        assert "max_rollback=3" in repr(cache)
        assert cache.memory_bytes > kind().memory_bytes
        assert cache.copy().max_rollback == 3
    with pytest.raises(ValueError, match=r"^max_rollback = 4294967295: with .* memory does not fit"):
        SnapKV(budget=2**31, max_rollback=2**32 - 1)
    with pytest.raises(ValueError, match=r"^max_rollback = 4294967295"):
        PyramidStack(2, 2**30, max_rollback=2**32 - 1)
