"""Evictions that tell rows and leave whole blocks: against the references, and what `compact` makes of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import FullCache, Policy, PyramidStack, SlidingWindow, SnapKV, _policies, compact

from .reference import POLICIES as OF_RING
from .reference import rows_of
from .reference_baselines import POLICIES as BASELINES
from .reference_baselines import SECOND

REFERENCES: dict[str, Any] = OF_RING | BASELINES


def parameters(data: st.DataObject, name: str) -> dict[str, int]:
    budget = data.draw(st.integers(1, 9))
    params = {"budget": budget, "spare": data.draw(st.integers(0, 9))}
    for other in ([SECOND[name]] if name in SECOND else []) + (["recent_window"] if name in OF_RING else []):
        params[other] = data.draw(st.integers(0, budget - 1))
    return params | ({"obs_window": 2, "pool_kernel": 3} if name in OF_RING else {})


def reference_of(name: str, params: dict[str, int]) -> Any:
    single = {"layer": 0, "num_layers": 1, "pyramid_ratio": 4} if name == "pyramidkv" else {}
    return REFERENCES[name](**single, **params)


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_victims_and_rows_are_those_of_the_reference(name: str, data: st.DataObject) -> None:
    params = parameters(data, name)
    cache: Policy = _policies.CLASSES[name](**params)
    reference = reference_of(name, params)
    for pos in range(1, data.draw(st.integers(2, 40))):
        if len(cache) < cache.capacity:
            row = data.draw(
                st.none() | st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(cache), max_size=len(cache))
            )
            cache.on_decode_step(pos, row)
            reference.step(pos, row)
        if len(cache) == cache.capacity or data.draw(st.integers(0, 4)) == 0:
            budget = data.draw(st.none() | st.integers(0, 12))
            multiple_of = data.draw(st.integers(1, 6))
            which: Any = data.draw(st.sampled_from(["kept", "victims"]))
            before = cache.kept.tolist()
            count = cache.evict_count(budget, multiple_of)
            victims, rows = cache.evict_rows(budget, multiple_of, which)
            expected = reference.evict(budget, multiple_of)
            assert victims.tolist() == expected
            assert count == len(expected)
            assert rows.tolist() == rows_of(before, expected, which)
            assert rows.dtype == victims.dtype == np.uint32
            assert cache.kept.tolist() == reference.kept


@settings(max_examples=100, deadline=None)
@given(
    kept=st.integers(1, 40), budget=st.integers(0, 30), recent=st.integers(0, 19), multiple_of=st.integers(1, 2**32 - 1)
)
def test_what_an_eviction_leaves_is_whole_blocks_of_what_is_asked_for(
    kept: int, budget: int, recent: int, multiple_of: int
) -> None:
    multiple_of = multiple_of % 50 + 1 if multiple_of % 3 else multiple_of
    cache = SnapKV(budget=20, recent_window=recent, spare=20)
    cache.seed(range(kept))
    victims, _ = cache.evict_rows(budget, multiple_of)
    left = kept - len(victims)
    target = min(budget, 20)
    if len(victims):
        assert left % multiple_of == 0
        assert left >= min(recent, kept)
    # One block less would be below what is safe, or nothing; it has to be dropped where it is above the target.
    if left > target:
        assert left - (left - 1) % multiple_of - 1 < max(recent, target > 0)
    assert len(victims) == 0 or left + multiple_of > min(target, kept)


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_the_rows_that_stay_are_what_compact_takes(multiple_of: int) -> None:
    rng = np.random.default_rng(1)
    heads = 3
    cache = SnapKV(budget=10, recent_window=2, obs_window=4, pool_kernel=3, spare=5)
    held = np.empty((heads, 0, 2), np.float32)
    for pos in range(200):
        if pos:
            cache.on_decode_step(pos, rng.random(len(cache), np.float32))
        held = np.concatenate([held, np.full((heads, 1, 2), pos, np.float32)], axis=1)
        if len(cache) == cache.capacity:
            gathered = held.copy()
            _, rows = cache.evict_rows(None, multiple_of)
            front = compact(held, [rows] * heads)
            assert all(np.array_equal(head, gathered[h, rows]) for h, head in enumerate(front))
            held = held[:, : len(cache)]
        assert np.array_equal(held[0, :, 0], cache.kept)  # each row still stands for its position


def test_the_rows_of_a_stack_are_what_compact_takes_for_each_layers_heads() -> None:
    layers, heads = 2, 3
    rng = np.random.default_rng(2)
    stack = PyramidStack(layers * heads, plan=[9, 5, 7, 3, 8, 4], recent_window=2, obs_window=2, pool_kernel=1, spare=6)
    for pos in range(1, 9):
        stack.on_decode_step(pos, [rng.random(len(layer), np.float32) for layer in stack.layers])
    before = [np.tile(kept.astype(np.float32)[:, None], (1, 2)) for kept in stack.kept]
    victims, rows = stack.evict_rows()
    assert [len(array) for array in victims] == [0, 4, 2, 6, 1, 5]
    for layer in range(layers):
        mine = slice(layer * heads, (layer + 1) * heads)
        front = compact(np.stack(before[mine]), rows[mine])
        for head, kept in zip(front, stack.kept[mine], strict=True):
            assert np.array_equal(head[:, 0], kept)
    victims, rows = stack.evict_rows(which="victims")
    assert [len(array) for array in victims + rows] == [0] * 12


def test_a_full_cache_tells_that_all_rows_stay() -> None:
    cache = FullCache()
    cache.on_decode_step(1, None)
    victims, rows = cache.evict_rows(0, 16)
    assert (victims.tolist(), rows.tolist(), cache.evict_count(0)) == ([], [0, 1], 0)
    assert cache.evict_rows(which="victims")[1].tolist() == []


@pytest.mark.parametrize("make", [lambda: SlidingWindow(2), FullCache, lambda: PyramidStack(2)])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"multiple_of": 0}, ValueError, "multiple_of = 0: must be greater than 0"),
        ({"multiple_of": -1}, ValueError, "multiple_of = -1: must be between 0"),
        ({"multiple_of": 1.5}, TypeError, "multiple_of = 1.5: must be an integer"),
        ({"which": "both"}, ValueError, "which = 'both': must be one of kept, victims"),
    ],
)
def test_what_is_no_eviction_is_refused(make: Any, arguments: Any, error: Any, message: str) -> None:
    cache = make()
    with pytest.raises(error, match=message):
        cache.evict_rows(**arguments)
    with pytest.raises(ValueError, match="multiple_of = 0"):
        cache.evict_count(multiple_of=0)


def test_spare_is_a_parameter_and_is_named_where_it_is_too_large() -> None:
    for kind in _policies.CLASSES.values():
        cache: Any = kind(spare=5)
        assert cache.spare == 5
        assert cache.capacity == 518
        assert "spare=5" in repr(cache)
        assert cache.copy().spare == 5
        with pytest.raises(ValueError, match=r"^spare = 4294967295: with .* the capacity or the memory does not fit"):
            kind(spare=2**32 - 1)
        with pytest.raises(ValueError, match=r"^budget = 4294967295"):
            kind(budget=2**32 - 1, spare=1)
    stack = PyramidStack(2, budget=4, recent_window=1, spare=3)
    assert (stack.spare, [layer.capacity for layer in stack.layers]) == (3, [10, 8])
    assert stack.copy().spare == 3
    with pytest.raises(ValueError, match=r"^spare = 4294967295"):
        PyramidStack(2, plan=[40, 40], spare=2**32 - 1)
