"""SnapKV and PyramidKV through Python: against the reference, and with arguments in every dress."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache
from pb_kvcache import CacheFullError, Policy, PyramidKV, SnapKV
from pb_kvcache._checks import uint32_array

from . import reference

LARGEST = 2**32 - 1

snapkv_params = st.integers(1, 12).flatmap(
    lambda budget: st.fixed_dictionaries(
        {
            "budget": st.just(budget),
            "recent_window": st.integers(0, budget - 1),
            "obs_window": st.integers(1, 5),
            "pool_kernel": st.integers(0, 9).map(lambda half: 2 * half + 1),
            "spare": st.integers(0, 3),
        }
    )
)
pyramidkv_params = st.integers(1, 6).flatmap(
    lambda layers: st.tuples(
        snapkv_params,
        st.fixed_dictionaries(
            {"layer": st.integers(0, layers - 1), "num_layers": st.just(layers), "pyramid_ratio": st.integers(1, 9)}
        ),
    ).map(lambda both: both[0] | both[1])
)
any_policy = st.one_of(
    st.tuples(st.just((SnapKV, reference.SnapKV)), snapkv_params),
    st.tuples(st.just((PyramidKV, reference.PyramidKV)), pyramidkv_params),
)
#: Few values, so that ties are common, and some that do not add up exactly.
weights = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 0.1, 0.2, 1e-30, 1e30])


@settings(deadline=None)
@given(policy=any_policy, data=st.data())
def test_module_does_what_the_reference_does(policy: tuple[Any, dict[str, int]], data: st.DataObject) -> None:
    (native, slow), params = policy
    cache, expected = native(**params), slow(**params)
    assert cache.effective_budget == expected.effective
    assert cache.capacity == expected.capacity
    assert {name: getattr(cache, name) for name in params} == params
    pos = 0
    for _ in range(data.draw(st.integers(1, 25))):
        call = data.draw(st.sampled_from(["step"] * 6 + ["evict"] * 3 + ["seed", "reset", "copy"]))
        if call == "step":
            pos += data.draw(st.integers(1, 3))
            row = data.draw(st.none() | st.lists(weights, min_size=len(cache), max_size=len(cache)))
            if len(cache) == cache.capacity:
                with pytest.raises(CacheFullError, match=f"pos = {pos}: .*capacity of {cache.capacity}"):
                    cache.on_decode_step(pos, row)
            else:
                cache.on_decode_step(pos, row)
                expected.step(pos, row)
        elif call == "evict":
            budget = data.draw(st.none() | st.integers(0, 30))
            assert cache.evict(budget).tolist() == expected.evict(budget)
        elif call == "seed":
            positions = sorted(data.draw(st.sets(st.integers(0, 40), max_size=cache.capacity)))
            rows = data.draw(
                st.none() | st.lists(st.lists(weights, min_size=len(positions), max_size=len(positions)), max_size=7)
            )
            cache.seed(positions, None if rows is None else np.array(rows).reshape(len(rows), len(positions)))
            expected.seed(positions, rows)
            pos = max(positions, default=0)
        elif call == "reset":
            cache.reset()
            expected.reset()
            pos = 0
        else:
            cache = cache.copy()
        assert cache.kept.tolist() == expected.kept
        assert len(cache) == len(expected.kept)
        assert [cache.window_score(kept) for kept in expected.kept] == [expected.score(kept) for kept in expected.kept]


@settings(deadline=None)
@given(params=snapkv_params, steps=st.lists(st.integers(0, 2**32 - 1), max_size=40), ratio=st.integers(1, 5))
def test_one_layer_and_ratio_one_are_snapkv_bit_for_bit(params: dict[str, int], steps: list[int], ratio: int) -> None:
    caches: list[Policy] = [
        SnapKV(**params),
        PyramidKV(**params, pyramid_ratio=ratio),
        PyramidKV(**params, layer=2, num_layers=5, pyramid_ratio=1),
    ]
    for pos, seed in enumerate(steps, start=1):
        row = np.random.default_rng(seed).integers(0, 4, len(caches[0])).astype(np.float32) / 3
        victims = []
        for cache in caches:
            cache.on_decode_step(pos, row)
            victims.append(cache.evict().tolist())
        assert victims[0] == victims[1] == victims[2]


def test_new_cache_holds_position_zero() -> None:
    cache = SnapKV()
    assert cache.kept.tolist() == [0]
    assert cache.kept.dtype == np.uint32
    assert 0 in cache
    assert np.uint32(0) in cache
    assert 1 not in cache
    assert -1 not in cache
    assert 2**40 not in cache
    assert "0" not in cache
    assert (cache.budget, cache.recent_window, cache.obs_window, cache.pool_kernel) == (512, 32, 16, 7)
    assert cache.memory_bytes > 513 * (16 + 1) * 4


def test_kept_is_a_copy() -> None:
    cache = SnapKV()
    cache.kept[0] = 99
    assert cache.kept.tolist() == [0]


def _stepped(attn: Any) -> SnapKV:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, [1.0])
    cache.on_decode_step(2, attn)
    return cache


@pytest.mark.parametrize(
    "attn",
    [
        np.array([0.5, 0.25], np.float32),
        np.array([0.5, 0.25], ">f4"),
        np.array([0.5, 0.25], "<f8"),
        np.array([0.5, 0.25], ">f8"),
        np.array([0.5, 0.25], np.float16),
        np.array([0.5, 0.25], ml_dtypes.bfloat16),
        np.array([0.5, 9, 0.25, 9], np.float32)[::2],
        np.array([0.25, 0.5], np.float32)[::-1],
        np.frombuffer(b"x" + np.array([0.5, 0.25], np.float32).tobytes(), np.float32, offset=1),
        [0.5, 0.25],
        (np.float32(0.5), 0.25),
        memoryview(np.array([0.5, 0.25], np.float32)),
        np.array([0.5, 0.25], np.float32).view(type("Sub", (np.ndarray,), {})),
    ],
)
def test_every_dress_of_the_same_weights_reads_the_same(attn: Any) -> None:
    cache = _stepped(attn)
    assert [cache.window_score(pos) for pos in (0, 1, 2)] == [1.5, 0.25, 0.0]


class _LongerThanItIs(np.ndarray):
    """An array whose length is another than its memory's."""

    def __len__(self) -> int:
        return 2


def test_an_array_is_as_long_as_its_memory_whatever_a_subclass_says() -> None:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, [1.0])
    with pytest.raises(ValueError, match="attn: has 1 weights, must have one for each of the 2 kept positions"):
        cache.on_decode_step(2, np.ones(1, np.float32).view(_LongerThanItIs))
    assert cache.kept.tolist() == [0, 1]


def test_numpy_s_error_settings_of_the_caller_change_nothing() -> None:
    with np.errstate(all="raise"):
        assert _stepped([1e-60, 0.25]).window_score(0) == 1.0
        with pytest.raises(ValueError, match=r"attn\[0\] = nan"):
            _stepped([float("nan"), 0.25])
        with pytest.raises(ValueError, match=r"attn: 1e\+300 is too large for float32"):
            _stepped([1e300, 0.25])


def test_integers_are_numbers_and_read_only_is_read() -> None:
    assert _stepped([1, 2]).window_score(1) == 2.0
    row = np.array([0.5, 0.25], np.float32)
    row.flags.writeable = False
    assert _stepped(row).window_score(1) == 0.25


@pytest.mark.parametrize(
    ("attn", "error", "message"),
    [
        ([1.0], ValueError, "attn: has 1 weights, must have one for each of the 2 kept positions"),
        ([], ValueError, "attn: has 0 weights"),
        ([[0.5, 0.25]], ValueError, r"attn: must have 1 dimension, not shape \(1, 2\)"),
        (0.5, ValueError, r"attn: must have 1 dimension, not shape \(\)"),
        ([0.5, float("nan")], ValueError, r"attn\[1\] = nan: every weight must be finite and >= 0"),
        ([float("inf"), 0.5], ValueError, r"attn\[0\] = inf: every weight must be finite"),
        ([0.5, -0.25], ValueError, r"attn\[1\] = -0.25: every weight must be finite and >= 0"),
        ([0.5, 1e39], ValueError, "attn: 1e\\+39 is too large for float32"),
        (["0.5", "0.25"], TypeError, "attn: must be an array of real numbers, not of dtype <U4"),
        ([0.5, None], TypeError, "attn: must be an array of real numbers, not of dtype object"),
        ([0.5, 1j], TypeError, "attn: must be an array of real numbers, not of dtype complex128"),
        ([True, False], TypeError, "attn: must be an array of real numbers, not of dtype bool"),
        ([[0.5], [0.25, 0.125]], TypeError, "attn: must be an array of real numbers"),
        (np.ma.masked_array([0.5, 0.25], [True, False], np.float32), TypeError, "attn: must be .* not a masked one"),
        (b"\x00\x00\x00\x3f\x00\x00\x80\x3e", TypeError, "attn: must be an array of real numbers"),
    ],
)
def test_bad_weights_are_named_and_change_nothing(attn: Any, error: type[Exception], message: str) -> None:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, [1.0])
    with pytest.raises(error, match=message):
        cache.on_decode_step(2, attn)
    assert cache.kept.tolist() == [0, 1]
    assert cache.window_score(0) == 1.0
    cache.on_decode_step(2, [0.5, 0.5])
    assert cache.window_score(0) == 1.5  # the ring slot was still free


@pytest.mark.parametrize(
    ("pos", "error", "message"),
    [
        (1, ValueError, "pos = 1: must be greater than every kept position, the last of which is 1"),
        (0, ValueError, "pos = 0: must be greater"),
        (-1, ValueError, "pos = -1: must be between 0 and 4294967295"),
        (2**32, ValueError, "pos = 4294967296: must be between 0 and 4294967295"),
        (2.0, TypeError, "pos = 2.0: must be an integer, not float"),
        ("2", TypeError, "pos = '2': must be an integer"),
        (None, TypeError, "pos = None: must be an integer"),
        (True, TypeError, "pos = True: must be an integer, not a bool"),
    ],
)
def test_bad_positions_are_named_and_change_nothing(pos: Any, error: type[Exception], message: str) -> None:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, None)
    with pytest.raises(error, match=message):
        cache.on_decode_step(pos, [1.0, 1.0])
    assert cache.kept.tolist() == [0, 1]
    assert cache.window_score(0) == 0.0


REFUSALS = [
    ({"budget": 0}, "budget = 0: must be greater than 0"),
    ({"obs_window": 0}, "obs_window = 0: must be greater than 0"),
    ({"budget": 32}, "recent_window = 32: must be smaller than budget = 32"),
    ({"pool_kernel": 4}, "pool_kernel = 4: must be odd"),
    ({"pool_kernel": 0}, "pool_kernel = 0: must be odd"),
    ({"budget": -1}, "budget = -1: must be between 0 and 4294967295"),
    ({"budget": LARGEST}, "budget = 4294967295: with .* the capacity or the memory does not fit"),
    ({"obs_window": 2**32}, "obs_window = 4294967296: must be between"),
]


@pytest.mark.parametrize(("params", "message"), REFUSALS)
@pytest.mark.parametrize("policy", [SnapKV, PyramidKV])
def test_refused_parameters_are_named(policy: type[Policy], params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0: must be greater than 0"),
        ({"layer": 4, "num_layers": 4}, "layer = 4: must be smaller than num_layers = 4"),
        ({"pyramid_ratio": 0}, "pyramid_ratio = 0: must be greater than 0"),
        ({"budget": 2863311530, "num_layers": 2, "pyramid_ratio": 3}, "budget = 2863311530: with .* does not fit"),
    ],
)
def test_refused_pyramids_are_named(params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidKV(**params)


@pytest.mark.parametrize("value", [1.5, "16", None, True, [16]])
@pytest.mark.parametrize("name", ["budget", "recent_window", "obs_window", "pool_kernel"])
def test_parameters_that_are_no_integers_are_type_errors(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} = .*: must be an integer"):
        SnapKV(**{name: value})


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="SnapKV"):
        SnapKV(budget=LARGEST - 1, obs_window=2**24)  # 288 PB: fits 64 bits, and no machine


def test_evict_takes_any_budget_and_refuses_what_is_none() -> None:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    for pos in range(1, 5):
        cache.on_decode_step(pos, None)
    assert cache.evict(2**70).tolist() == [0]
    assert cache.evict().tolist() == []
    assert cache.evict().dtype == np.uint32
    for bad, error in ((-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match="budget = "):
            cache.evict(bad)  # type: ignore[arg-type]
    assert cache.kept.tolist() == [1, 2, 3, 4]


def test_score_of_a_position_that_is_not_kept_is_a_key_error() -> None:
    cache = SnapKV()
    for pos in (1, -1, 2**32):
        with pytest.raises(KeyError, match=f"pos = {pos}: is not kept"):
            cache.window_score(pos)
    with pytest.raises(TypeError, match=r"pos = 0\.0: must be an integer"):
        cache.window_score(0.0)  # type: ignore[arg-type]


def test_integers_of_too_many_digits_to_print_are_refused_like_others() -> None:
    cache = SnapKV()
    huge = 10**5000
    assert huge not in cache
    assert cache.evict(huge).tolist() == []
    with pytest.raises(KeyError, match="pos = <int of too many digits>: is not kept"):
        cache.window_score(huge)
    with pytest.raises(ValueError, match="pos = <int of too many digits>: must be between 0 and 4294967295"):
        cache.on_decode_step(huge, None)
    with pytest.raises(ValueError, match="budget = <int of too many digits>: must be 0 or more"):
        cache.evict(-huge)
    with pytest.raises(ValueError, match="budget = <int of too many digits>: must be between"):
        SnapKV(huge)


@pytest.mark.parametrize(
    ("positions", "attn", "error", "message"),
    [
        ([3, 3], None, ValueError, r"positions\[1\] = 3: must be greater than the one before it, 3"),
        ([0, 4, 2], None, ValueError, r"positions\[2\] = 2: must be greater than the one before it, 4"),
        ([0, -1], None, ValueError, r"positions\[1\] = -1: must be between 0 and 4294967295"),
        ([0, 2**32], None, ValueError, r"positions\[1\] = 4294967296: must be between"),
        ([0, 2**70], None, ValueError, r"positions\[1\] = 1180591620717411303424: must be between"),
        ([2**63, -1], None, ValueError, r"positions\[0\] = 9223372036854775808: must be between"),
        ([0.0, 1.0], None, TypeError, "positions: must be integers, not of dtype float64"),
        ([0, True, 2**70], None, TypeError, "positions: must be integers, not of dtype object"),
        ([[0], [1, 2]], None, TypeError, "positions: must be an array of integers: "),
        (np.ma.array([0, 1], mask=[False, True]), None, TypeError, "positions: must be .* not a masked one"),
        ([[0, 1]], None, ValueError, r"positions: must have 1 dimension, not shape \(1, 2\)"),
        (range(6), None, CacheFullError, "positions: 6 of them, must be at most the capacity of 5"),
        ([0, 1], [[1.0]], ValueError, r"attn: has shape \(1, 1\), must be \(rows, 2\)"),
        ([0, 1], [1.0, 1.0], ValueError, r"attn: must have 2 dimensions, not shape \(2,\)"),
        ([0, 1], [[1.0, 0.0], [0.0, -1.0]], ValueError, r"attn\[1, 1\] = -1.0: every weight"),
    ],
)
def test_bad_seeds_are_named_and_change_nothing(
    positions: Any, attn: Any, error: type[Exception], message: str
) -> None:
    cache = SnapKV(budget=4, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, [1.0])
    with pytest.raises(error, match=message):
        cache.seed(positions, attn)
    assert cache.kept.tolist() == [0, 1]
    assert cache.window_score(0) == 1.0


def test_positions_in_every_dress_are_the_same() -> None:
    unaligned = np.frombuffer(b"x" + np.array([2, 7], np.uint32).tobytes(), np.uint32, offset=1)
    assert uint32_array("positions", unaligned, 1).flags.aligned
    for positions in (unaligned, (2, 7), range(2, 8, 5), np.array([2, 7], ">u4"), np.array([2, 0, 7], np.int8)[::2]):
        cache = SnapKV(budget=4, recent_window=1)
        cache.seed(positions)
        assert cache.kept.tolist() == [2, 7]


class _ForLayer(SnapKV):
    """A policy of the user's, made from something else than the parameters."""

    def __init__(self, layer: int, notes: list[str]) -> None:
        super().__init__(budget=8 * (layer + 1), recent_window=1)
        self.notes = notes


def test_copies_of_a_subclass_are_of_the_subclass_and_keep_its_attributes() -> None:
    cache = _ForLayer(3, ["mine"])
    cache.on_decode_step(1, [0.5])
    for twin, same in ((cache.copy(), True), (copy.copy(cache), True), (copy.deepcopy([cache, cache])[1], False)):
        assert type(twin) is _ForLayer
        assert (twin.budget, twin.kept.tolist(), twin.window_score(0), twin.notes) == (32, [0, 1], 0.5, ["mine"])
        assert (twin.notes is cache.notes) is same
    first, second = copy.deepcopy([cache, cache])
    assert first is second


def test_copies_are_independent() -> None:
    cache = PyramidKV(budget=4, layer=1, num_layers=3, recent_window=1, obs_window=2, pool_kernel=1)
    cache.on_decode_step(1, [0.5])
    for twin in (cache.copy(), copy.copy(cache), copy.deepcopy(cache)):
        assert type(twin) is PyramidKV
        twin.on_decode_step(2, [0.25, 0.125])
        assert (twin.kept.tolist(), twin.window_score(0)) == ([0, 1, 2], 0.75)
    assert (cache.kept.tolist(), cache.window_score(0)) == ([0, 1], 0.5)


def test_repr_tells_parameters_and_state() -> None:
    cache = PyramidKV(layer=31, num_layers=32)
    text = repr(cache)
    assert "PyramidKV(budget=512, layer=31, num_layers=32, pyramid_ratio=4" in text
    assert "1 kept, evicts to 204" in text


def test_parameters_are_read_only_attributes() -> None:
    cache = SnapKV()
    with pytest.raises(AttributeError):
        cache.budget = 3
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cache.nonsense
    assert "obs_window" in dir(cache)


def test_the_base_class_is_not_made() -> None:
    with pytest.raises(TypeError, match="Policy is the base of all policies"):
        Policy()


def test_instances_on_separate_threads_do_not_disturb_each_other() -> None:
    def decode(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        cache = SnapKV(budget=64, recent_window=8, obs_window=4)
        dropped: list[int] = []
        for pos in range(1, 600):
            cache.on_decode_step(pos, rng.integers(0, 9, len(cache)).astype(np.float32))
            dropped += cache.evict().tolist()
        return dropped

    alone = [decode(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(decode, range(8))) == alone


def test_native_memory_goes_with_the_object() -> None:
    cache = SnapKV()
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_public_names_exist_and_are_documented() -> None:
    for name in pb_kvcache.__all__:
        assert getattr(pb_kvcache, name).__doc__, name
