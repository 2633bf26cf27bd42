"""Saved states: the reference's bytes, the same victims after loading, and nothing else is taken for a state."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import H2O, TOVA, FullCache, Policy, PyramidStack, SnapKV, _policies, plan

from .reference_state import checksum, state
from .test_evict_rows import REFERENCES, parameters, reference_of

SMALL: dict[str, int] = {"recent_window": 1, "obs_window": 3, "pool_kernel": 3, "spare": 2}


def decoded(cache: Policy, first: int, steps: int, seed: int) -> list[list[int]]:
    """Decode steps with weights that the seed alone decides, evict now and then, and return all victims."""
    rng = np.random.default_rng(seed)
    victims = []
    for pos in range(first, first + steps):
        if len(cache) == cache.capacity or rng.random() < 0.3:
            victims.append(cache.evict().tolist())
        if len(cache) < cache.capacity:
            row = (rng.integers(0, 5, len(cache)) / 4).astype(np.float32)
            cache.on_decode_step(pos, row if rng.random() < 0.8 else None)
    return victims


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_state_is_the_references_bytes_and_goes_on_with_the_same_victims(name: str, data: st.DataObject) -> None:
    params = parameters(data, name)
    cache: Policy = _policies.CLASSES[name](**params)
    reference = reference_of(name, params)
    for pos in range(1, data.draw(st.integers(1, 30))):
        if len(cache) == cache.capacity:
            cache.evict()
            reference.evict(None)
        if len(cache) < cache.capacity:  # tova may have nothing to drop
            weights = st.lists(st.sampled_from([0.0, -0.0, 0.1, 3e38]), min_size=len(cache), max_size=len(cache))
            row = data.draw(st.none() | weights)
            cache.on_decode_step(pos, row)
            reference.step(pos, row)
    saved = cache.save()
    assert saved == state(reference)
    other: Policy = _policies.CLASSES[name](**params)
    decoded(other, 1, 10, 5)
    other.load(saved)
    assert other.save() == saved
    assert decoded(other, 100, 20, 6) == decoded(cache, 100, 20, 6)
    assert other.save() == cache.save()


def stepped(kind: type[Any], **params: int) -> Any:
    cache = kind(budget=4, **params)
    decoded(cache, 1, 12, 1)
    return cache


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_changed_byte_is_taken_for_a_state(data: st.DataObject) -> None:
    cache = stepped(SnapKV, **SMALL)
    saved = bytearray(cache.save())
    cache.on_decode_step(100, None)
    before = cache.save()
    at = data.draw(st.integers(0, len(saved) - 1))
    saved[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=f"^data: {len(saved)} bytes, "):
        cache.load(saved)
    with pytest.raises(ValueError, match="the bytes must be a whole saved state, undamaged"):
        cache.load(before[: data.draw(st.integers(0, len(before) - 1))])
    assert cache.save() == before


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from([SnapKV, TOVA, H2O]))
def test_bytes_with_a_right_checksum_are_refused_or_lead_to_a_cache_like_any_other(
    data: st.DataObject, kind: type[Any]
) -> None:
    params = {SnapKV: SMALL, TOVA: {}, H2O: {"recent_window": 1}}[kind]
    cache = stepped(kind, **params)
    body = bytearray(cache.save()[:-8])
    for _ in range(data.draw(st.integers(1, 3))):  # behind the shape: numbers that could be lengths, positions, weights
        at = 4 * data.draw(st.integers(17, len(body) // 4 - 1))
        number = data.draw(st.integers(0, 8) | st.integers(0, 2**32 - 1))
        body[at : at + 4] = number.to_bytes(4, "little")
    before = cache.save()
    try:
        cache.load(bytes(body) + checksum(bytes(body)))
    except ValueError:
        assert cache.save() == before
        return
    kept = cache.kept.tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= cache.capacity
    assert all(0 <= cache.window_score(pos) < np.inf for pos in kept)
    saved = cache.save()
    other = kind(budget=4, **params)
    other.load(saved)
    first = max(kept, default=0) + 1
    if first < 2**32 - 50:
        assert decoded(other, first, 20, 2) == decoded(cache, first, 20, 2)


def test_a_state_of_other_parameters_is_refused_and_the_parameters_are_named() -> None:
    saved = stepped(SnapKV, **SMALL).save()
    for params in ({"budget": 5}, {"recent_window": 2}, {"obs_window": 4}, {"pool_kernel": 5}, {"spare": 1}):
        cache = SnapKV(**({"budget": 4} | SMALL | params))
        with pytest.raises(ValueError, match="saved from another policy or with other parameters than <SnapKV"):
            cache.load(saved)
        assert cache.kept.tolist() == [0]
    with pytest.raises(ValueError, match="other parameters than <TOVA"):
        TOVA(4).load(saved)
    with pytest.raises(ValueError, match="other parameters than <PyramidStack"):
        PyramidStack(1, budget=4, **SMALL).load(saved)
    later = saved[:8] + b"\2" + saved[9:]
    with pytest.raises(ValueError, match="the saved state must be of this version"):
        stepped(SnapKV, **SMALL).load(later)


@pytest.mark.parametrize("data", ["text", 5, None, [1, 2]])
def test_what_is_no_buffer_is_refused(data: Any) -> None:
    for cache in (SnapKV(), PyramidStack(1)):
        with pytest.raises(TypeError, match="data: must be bytes or a buffer of bytes"):
            cache.load(data)


def test_any_buffer_of_the_bytes_will_do() -> None:
    cache = stepped(SnapKV, **SMALL)
    saved = cache.save()
    apart = np.zeros(2 * len(saved), np.uint8)
    apart[::2] = np.frombuffer(saved, np.uint8)
    unaligned = memoryview(b"x" + saved)[1:]
    for data in (bytearray(saved), memoryview(saved), np.frombuffer(saved, np.uint8), apart[::2], unaligned):
        other = SnapKV(budget=4, **SMALL)
        other.load(data)
        assert other.save() == saved


class Named(SnapKV):
    """A policy of the user's, made from something else than the parameters."""

    def __init__(self, name: str) -> None:
        super().__init__(budget=4, **SMALL)
        self.name = name


class NamedStack(PyramidStack):
    def __init__(self, name: str) -> None:
        super().__init__(2, budget=4, **SMALL)
        self.name = name


def test_pickles_are_independent_caches_of_the_same_state() -> None:
    for kind in _policies.CLASSES.values():
        cache: Any = kind(
            **{"budget": 4}
            | ({"recent_window": 1} if "recent_window" in kind._PARAMETERS else {})
            | ({"sinks": 1} if "sinks" in kind._PARAMETERS else {})
        )
        decoded(cache, 1, 9, 3)
        twin = pickle.loads(pickle.dumps(cache))
        assert type(twin) is kind
        assert (twin.save(), repr(twin)) == (cache.save(), repr(cache))
        twin.reset()
        assert len(cache) > 1
    named = Named("mine")
    named.on_decode_step(1, [0.5])
    twin = pickle.loads(pickle.dumps(named))
    assert (twin.name, twin.save()) == ("mine", named.save())


def test_a_stack_saves_its_peak_and_its_pickle_keeps_its_plan() -> None:
    planned = plan(3, 8, minimum=3)
    stack = PyramidStack(3, plan=planned, **SMALL)
    for pos in range(1, 12):
        stack.on_decode_step(pos, [np.full(len(layer), 0.5, np.float32) for layer in stack.layers])
        stack.evict()
    saved = stack.save()
    other = PyramidStack(3, plan=planned.budgets, **SMALL)
    other.load(saved)
    assert (other.resident, other.peak_resident) == (stack.resident, stack.peak_resident)
    twin = pickle.loads(pickle.dumps(stack))
    assert (twin.save(), twin.plan, twin.budgets.tolist()) == (saved, planned, planned.budgets.tolist())
    shares = PyramidStack(3, 8, **SMALL)
    assert pickle.loads(pickle.dumps(shares)).save() == shares.save()
    with pytest.raises(ValueError, match="other parameters than <PyramidStack"):
        shares.load(saved)
    named = NamedStack("mine")
    assert pickle.loads(pickle.dumps(named)).name == copy.deepcopy(named).name == "mine"


def test_a_full_cache_has_no_state_of_its_own() -> None:
    with pytest.raises(TypeError, match="FullCache has no saved state"):
        FullCache().save()
    with pytest.raises(TypeError, match="FullCache has no saved state"):
        FullCache().load(b"")
