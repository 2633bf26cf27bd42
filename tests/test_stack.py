"""Stacks: what the rules say of a whole model, and against independent caches driven by hand."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import (
    CacheFullError,
    HeadPlan,
    PyramidKV,
    PyramidStack,
    SnapKV,
    StackLayer,
    plan,
    pyramid_budgets,
    save_plan,
)

from .conftest import ROOT, Run

SMALL: dict[str, int] = {"budget": 4, "pyramid_ratio": 3, "recent_window": 1, "obs_window": 2, "pool_kernel": 1}


def small(**changes: Any) -> PyramidStack:
    """Three layers that evict to 6, 4 and 2."""
    return PyramidStack(**({"num_layers": 3} | SMALL | changes))


def even(stack: PyramidStack) -> list[np.ndarray]:
    return [np.full(len(layer), 1 / max(len(layer), 1), np.float32) for layer in stack.layers]


def state(stack: PyramidStack) -> Any:
    scores = [[layer.window_score(pos) for pos in layer.kept] for layer in stack.layers]
    return [kept.tolist() for kept in stack.kept], scores, stack.resident, stack.peak_resident


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stack_equals_independent_caches_driven_by_hand(data):
    num_layers = data.draw(st.integers(1, 5))
    budget = data.draw(st.integers(1, 9))
    rest = {
        "recent_window": data.draw(st.integers(0, budget - 1)),
        "obs_window": data.draw(st.integers(1, 4)),
        "pool_kernel": data.draw(st.sampled_from([1, 3, 5, 9])),
        "spare": data.draw(st.integers(0, 3)),
    }
    if data.draw(st.booleans()):
        ratio = data.draw(st.integers(1, 9))
        stack = PyramidStack(num_layers, budget, ratio, **rest)
        caches: list[Any] = [
            PyramidKV(budget=budget, layer=layer, num_layers=num_layers, pyramid_ratio=ratio, **rest)
            for layer in range(num_layers)
        ]
    else:
        window = rest["recent_window"]
        plan = data.draw(st.lists(st.integers(window + 1, window + 9), min_size=num_layers, max_size=num_layers))
        stack = PyramidStack(num_layers, plan=plan, **rest)
        caches = [SnapKV(budget=share, **rest) for share in plan]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pos = 0
    peak = num_layers
    for _ in range(data.draw(st.integers(1, 20))):
        kind = data.draw(st.sampled_from(["step"] * 4 + ["evict"] * 3 + ["null", "seed", "reset", "copy"]))
        if kind in ("step", "null"):
            pos += data.draw(st.integers(1, 2))
            # Few values, so that ties are common.
            rows = [(rng.integers(0, 4, len(cache)) / 4).astype(np.float32) for cache in caches]
            attn: Any = [row if kind == "step" and rng.random() < 0.9 else None for row in rows]
            if any(len(cache) == cache.capacity for cache in caches):
                before = state(stack)
                with pytest.raises(CacheFullError, match="evict first"):
                    stack.on_decode_step(pos, attn)
                assert state(stack) == before
                continue
            stack.on_decode_step(pos, attn if any(row is not None for row in attn) else None)
            for cache, row in zip(caches, attn, strict=True):
                cache.on_decode_step(pos, row)
        elif kind == "evict":
            expected = [cache.evict().tolist() for cache in caches]
            assert stack.evict_count() == sum(map(len, expected))
            assert [victims.tolist() for victims in stack.evict()] == expected
        elif kind == "seed":
            layer = data.draw(st.integers(0, num_layers - 1))
            held = sorted(data.draw(st.sets(st.integers(0, pos), max_size=caches[layer].capacity)))
            prompt = rng.random((data.draw(st.integers(0, 3)), len(held)), np.float32)
            stack.seed(layer, held, prompt)
            caches[layer].seed(held, prompt)
        elif kind == "reset":
            stack.reset()
            for cache in caches:
                cache.reset()
            peak = 0
        else:
            stack = copy.copy(stack)
        resident = sum(map(len, caches))
        peak = max(peak, resident)
        assert state(stack) == (
            [cache.kept.tolist() for cache in caches],
            [[cache.window_score(kept) for kept in cache.kept] for cache in caches],
            resident,
            peak,
        )
    assert stack.budgets.tolist() == [cache.effective_budget for cache in caches]


def test_a_stack_of_one_layer_is_snapkv():
    stack, cache = PyramidStack(1, budget=48), SnapKV(budget=48)
    rng = np.random.default_rng(1)
    for pos in range(1, 200):
        row = rng.random(len(cache), np.float32)
        stack.on_decode_step(pos, [row])
        cache.on_decode_step(pos, row)
        (victims,) = stack.evict()
        assert victims.tolist() == cache.evict().tolist()
    (layer,) = stack.layers
    assert [layer.window_score(pos) for pos in layer.kept] == [cache.window_score(pos) for pos in cache.kept]
    assert (stack.budgets.tolist(), layer.capacity) == ([48], 49)


def test_budgets_are_the_pyramids_and_the_peak_is_one_step_above_them():
    stack = PyramidStack(32, budget=64)
    assert stack.budgets.tolist() == np.maximum(pyramid_budgets(64, 32), 33).tolist()
    for pos in range(1, 150):
        stack.on_decode_step(pos, even(stack))
        stack.evict()
    assert stack.resident == stack.budgets.sum()
    assert stack.peak_resident == stack.resident + 32


def test_a_plan_gives_the_budgets_exactly():
    layers = plan(3, 50, ratio=4, minimum=33)
    assert PyramidStack(3, plan=layers).budgets.tolist() == layers.budgets.tolist()
    assert sum(layers.budgets) == 150
    for planned in ([40, 33, 50], np.array([40, 33, 50]), SimpleNamespace(budgets=np.array([40, 33, 50], np.uint32))):
        stack = PyramidStack(3, plan=planned)
        assert stack.budgets.tolist() == [40, 33, 50]
        assert stack.plan is planned
        assert (stack.budget, stack.pyramid_ratio, stack.recent_window) == (None, None, 32)
        assert copy.copy(stack).plan is planned


def test_a_head_plan_makes_a_cache_for_every_head(tmp_path):
    heads = HeadPlan([[40, 35], [33, 60], [50, 34]])
    save_plan(tmp_path / "heads.json", heads)
    for stack in (PyramidStack(plan=heads), PyramidStack(6, plan=tmp_path / "heads.json")):
        assert stack.budgets.tolist() == [40, 35, 33, 60, 50, 34]
        caches = [SnapKV(int(budget)) for budget in stack.budgets]
        for pos in range(1, 90):
            for cache in caches:
                cache.on_decode_step(pos, np.full(len(cache), 1 / len(cache), np.float32))
            stack.on_decode_step(pos, even(stack))
            assert [row.tolist() for row in stack.evict()] == [cache.evict().tolist() for cache in caches]
        assert len(stack.head(1, 1)) == 60
        assert stack.head(2, 0).kept.tolist() == caches[4].kept.tolist()
        assert stack.resident == heads.total
        assert stack.memory_bytes >= sum(cache.memory_bytes for cache in caches)
        for twin in (stack.copy(), pickle.loads(pickle.dumps(stack))):
            assert twin.head(2, 1).kept.tolist() == stack.head(2, 1).kept.tolist()
    with pytest.raises(ValueError, match="layer = 3: must be smaller than 3"):
        stack.head(3, 0)
    with pytest.raises(ValueError, match="head = 2: must be smaller than 2"):
        stack.head(0, 2)
    with pytest.raises(
        ValueError, match=r"plan: has 6 budgets \(3 layers of 2 heads\), must have one for each of the 3"
    ):
        PyramidStack(3, plan=heads)
    with pytest.raises(ValueError, match="plan: layer 1 has a budget of 32, must be greater than recent_window = 32"):
        PyramidStack(plan=HeadPlan([[40, 32]]))
    with pytest.raises(TypeError, match="num_layers: is needed where there is no plan"):
        PyramidStack()


def test_flat_victims_are_those_of_each_layer():
    stacks = [PyramidStack(4, budget=8, recent_window=2, obs_window=2, spare=3) for _ in range(2)]
    for pos in range(1, 30):
        for stack in stacks:
            stack.on_decode_step(pos, even(stack))
        if pos % 3:  # sometimes one each, sometimes several, sometimes of some layers only
            continue
        split = stacks[0].evict()
        victims, offsets = stacks[1].evict_flat()
        assert victims.tolist() == [pos for row in split for pos in row]
        assert offsets.tolist() == [0, *np.cumsum([len(row) for row in split])]
        assert (victims.dtype, offsets.dtype) == (np.uint32, np.uint64)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([4, 5, 1], "plan: layer 2 has a budget of 1, must be greater than recent_window = 1"),
        ([4, 0, 4], "plan: layer 1 has a budget of 0, must be greater than 0"),
        ([4, 4, 2**32 - 1], "plan: layer 2 has a budget of 4294967295: .* does not fit"),
        ([4, 4, 2**32], r"plan\[2\] = 4294967296: must be between 0 and 4294967295"),
        ([4, -4, 4], r"plan\[1\] = -4: must be between"),
        ([4, 4], "plan: has 2 budgets, must have one for each of the 3 layers"),
        ([[4], [4], [4]], "plan: must have 1 dimension"),
    ],
)
def test_a_plan_that_a_stack_cannot_keep_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        small(plan=plan)


@pytest.mark.parametrize("plan", [[4.0, 4.0, 4.0], b"four", ["4", "4", "4"], np.ma.array([4, 4, 4], mask=[0, 1, 0])])
def test_a_plan_of_anything_but_integers_is_refused(plan):
    with pytest.raises(TypeError, match=r"plan: must be .*integers"):
        small(plan=plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0: must be greater than 0"),
        ({"num_layers": 65537}, "num_layers = 65537: must be at most 65536"),
        ({"num_layers": 2**32}, "num_layers = 4294967296: must be between"),
        ({"budget": 0}, "budget = 0: must be greater than 0"),
        ({"recent_window": 4}, "recent_window = 4: must be smaller than budget = 4"),
        ({"obs_window": 0}, "obs_window = 0: must be greater than 0"),
        ({"pool_kernel": 4}, "pool_kernel = 4: must be odd"),
        ({"pyramid_ratio": 0}, "pyramid_ratio = 0: must be greater than 0"),
        ({"budget": 3000000000}, "budget = 3000000000: .* does not fit"),
    ],
)
def test_refused_parameters_name_the_parameter_the_value_and_the_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_a_size_that_only_memory_can_refuse_is_a_memory_error():
    with pytest.raises(MemoryError, match="num_layers=65536"):
        PyramidStack(65536, budget=2**31, pyramid_ratio=1, obs_window=1000)


class SaysThree(list):
    """A sequence that is not as long as it says."""

    def __len__(self) -> int:
        return 3


BAD_STEPS = [
    (1, [[1.0]] * 3, ValueError, "pos = 1: must be greater than every kept .* the last of which is 1 in layer 0"),
    (-1, None, ValueError, "pos = -1: must be between"),
    (2.5, None, TypeError, "pos = 2.5: must be an integer"),
    (2, [[0.5, 0.5]] * 2, ValueError, "attn: has 2 vectors, must have one for each of 3 layers"),
    (2, [], ValueError, "attn: has 0 vectors"),
    (2, 0.5, TypeError, "attn = 0.5: must be a sequence of one vector per layer"),
    (2, np.ones(3, np.float32), ValueError, "attn: must have 2 dimensions"),
    (2, np.ones((3, 1), np.float32), ValueError, r"attn\[0\]: has 1 weights, must have one for each of the 2"),
    (2, [[0.5, 0.5], [0.5, 0.5], [0.5]], ValueError, r"attn\[2\]: has 1 weights, .* that layer 2 keeps"),
    (2, [[0.5, 0.5], [0.5, np.nan], [0.5, 0.5]], ValueError, r"attn\[1\]\[1\] = nan: every weight must be finite"),
    (2, [None, None, [-0.5, 0.5]], ValueError, r"attn\[2\]\[0\] = -0.5"),
    (2, [None, [[0.5, 0.5]], None], ValueError, r"attn\[1\]: must have 1 dimension"),
    (2, [None, ["x", "y"], None], TypeError, r"attn\[1\]: must be an array of real numbers"),
    (2, [None, [1e300, 0.5], None], ValueError, r"attn\[1\]: 1e\+300 is too large for float32"),
    (2, np.full((3, 2), np.inf), ValueError, r"attn\[0\]\[0\] = inf"),
    (2, {0: None, 1: None, 2: None}, ValueError, r"attn\[0\]: must have 1 dimension"),
    (2, SaysThree([None, None]), ValueError, "attn: gave 2 vectors, must give one for each of 3 layers"),
    (2, SaysThree([None] * 4), ValueError, "attn: gave 4 vectors"),
    (2, memoryview(b"abc"), ValueError, "attn: must have 2 dimensions"),
]


@pytest.mark.parametrize(("pos", "attn", "error", "message"), BAD_STEPS)
def test_a_refused_step_changes_no_layer(pos, attn, error, message):
    stack = small()
    stack.on_decode_step(1, even(stack))
    before = state(stack)
    with pytest.raises(error, match=message):
        stack.on_decode_step(pos, attn)
    assert state(stack) == before


def test_a_layer_without_room_names_itself_and_changes_none():
    stack = small(plan=[4, 2, 4])
    stack.on_decode_step(1, None)
    stack.on_decode_step(2, even(stack))
    before = state(stack)
    for attn in (None, even(stack)):
        with pytest.raises(CacheFullError, match="pos = 3: layer 1 holds its capacity of 3 positions; evict first"):
            stack.on_decode_step(3, attn)
    assert state(stack) == before


@pytest.mark.parametrize(
    "dress",
    [
        lambda rows: rows,
        lambda rows: tuple(rows),
        lambda rows: np.array(rows),
        lambda rows: memoryview(np.array(rows)),
        lambda rows: np.array(rows, np.float64),
        lambda rows: np.array(rows, np.float16),
        lambda rows: np.array(rows, ">f4"),
        lambda rows: np.asfortranarray(np.array(rows)),
        lambda rows: boxed(rows),
        lambda rows: [row.tolist() for row in rows],
        lambda rows: [row.astype(np.float64) for row in rows],
        lambda rows: [row.astype(">f4") for row in rows],
        lambda rows: [np.repeat(row, 2)[::2] for row in rows],
        lambda rows: [np.frombuffer(b"x" + row.tobytes(), np.uint8)[1:].view(np.float32) for row in rows],
        lambda rows: [readonly(row) for row in rows],
        lambda rows: [row.view(np.recarray) for row in rows],
    ],
)
def test_the_same_weights_in_any_dress_are_the_same_step(dress):
    stack, plain = small(), small()
    rng = np.random.default_rng(5)
    for pos in range(1, 4):
        rows = [(rng.integers(0, 16, pos) / 16).astype(np.float32) for _ in range(3)]
        stack.on_decode_step(pos, dress(rows))
        plain.on_decode_step(pos, rows)
    assert state(stack) == state(plain)


def boxed(rows: list[np.ndarray]) -> np.ndarray:
    box = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        box[number] = row
    return box


def readonly(row: np.ndarray) -> np.ndarray:
    row = row.copy()
    row.flags.writeable = False
    return row


def test_positions_of_any_integer_type_are_the_same_step():
    stack = small()
    for pos in (np.int64(1), np.uint8(2)):
        stack.on_decode_step(pos, None)
    assert stack.kept[0].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="must be an integer, not a bool"):
        stack.on_decode_step(True, None)


def test_a_layer_is_read_and_not_changed():
    stack = small()
    stack.on_decode_step(1, [[1.0], [0.5], [0.25]])
    layer = stack.layers[2]
    assert isinstance(layer, StackLayer)
    assert (layer.kept.tolist(), len(layer), 1 in layer, 2 in layer) == ([0, 1], 2, True, False)
    assert (layer.window_score(0), layer.effective_budget, layer.capacity) == (0.25, 2, 5)
    assert repr(layer) == "<StackLayer: 2 kept, evicts to 2>"
    with pytest.raises(KeyError, match="pos = 9"):
        layer.window_score(9)
    for name in ("on_decode_step", "evict", "seed", "reset"):
        assert not hasattr(layer, name)
    layer.kept[0] = 99  # a copy
    assert layer.kept.tolist() == [0, 1]
    with pytest.raises(IndexError):
        stack.layers[3]


def test_a_layer_outlives_its_stack():
    layer = small().layers[1]
    gc.collect()
    assert layer.kept.tolist() == [0]


def test_memory_is_one_block_of_all_layers():
    stack = PyramidStack(32, budget=512)
    layers = sum(layer.memory_bytes for layer in stack.layers)
    alone = sum(PyramidKV(budget=512, layer=layer, num_layers=32).memory_bytes for layer in range(32))
    assert layers == alone
    assert layers < stack.memory_bytes <= layers + 32 * 8 + 32 * 8 + 128  # pointers, alignment, the head


def test_seeding_a_layer_that_does_not_exist_or_a_bad_prompt_changes_nothing():
    stack = small()
    before = state(stack)
    for layer, positions, attn, error, message in [
        (3, [1], None, ValueError, "layer = 3: must be smaller than num_layers = 3"),
        (-1, [1], None, ValueError, "layer = -1: must be between"),
        ("0", [1], None, TypeError, "layer = '0': must be an integer"),
        (0, [2, 1], None, ValueError, r"positions\[1\] = 1: must be greater"),
        (2, range(6), None, CacheFullError, "positions: 6 of them, must be at most the capacity of 5"),
        (0, [1, 2], [[0.5]], ValueError, "attn: has shape"),
        (0, [1, 2], [[0.5, -1.0]], ValueError, r"attn\[0, 1\] = -1.0"),
    ]:
        with pytest.raises(error, match=message):
            stack.seed(layer, positions, attn)
    assert state(stack) == before


def test_a_copy_goes_its_own_way():
    stack = small()
    for pos in (1, 2, 3):
        stack.on_decode_step(pos, even(stack))
    twin = copy.deepcopy(stack)
    assert state(twin) == state(stack)
    assert [victims.tolist() for victims in twin.evict()] == [victims.tolist() for victims in stack.evict()]
    stack.on_decode_step(4, None)
    assert 4 not in twin.layers[0]


class Named(PyramidStack):
    """A stack of the user's, made from something else than the parameters."""

    def __init__(self, name: list[str]) -> None:
        super().__init__(2, plan=[40, 50])
        self.name = name


def test_copies_of_a_subclass_are_of_the_subclass_and_keep_its_attributes():
    stack = Named(["mine"])
    stack.on_decode_step(1, even(stack))
    for twin, same in ((stack.copy(), True), (copy.copy(stack), True), (copy.deepcopy(stack), False)):
        assert type(twin) is Named
        assert (state(twin), twin.name) == (state(stack), ["mine"])
        assert (twin.name is stack.name) is same


def test_parameters_are_attributes_and_repr_is_honest():
    stack = small()
    assert [getattr(stack, name) for name in ("num_layers", *SMALL)] == [3, 4, 3, 1, 2, 1]
    assert set(SMALL) < set(dir(stack))
    with pytest.raises(AttributeError):
        stack.num_layers = 100
    with pytest.raises(AttributeError, match="no attribute 'sinks'"):
        stack.sinks  # noqa: B018
    assert repr(stack) == (
        "<PyramidStack(num_layers=3, budget=4, pyramid_ratio=3, recent_window=1, obs_window=2, pool_kernel=1, "
        "spare=0, max_rollback=0): 3 kept, evicts to 12>"
    )
    assert "recent_window=1, obs_window=2, pool_kernel=1, spare=0, max_rollback=0, plan=<list>" in repr(
        small(plan=[4, 4, 4])
    )
    assert "budget" not in repr(small(plan=[4, 4, 4]))


def test_a_step_copies_no_weights():
    stack = PyramidStack(4, budget=20000, obs_window=1)
    rows = [np.zeros(20000, np.float32) for _ in range(4)]
    for layer in range(4):
        stack.seed(layer, range(20000))
    tracemalloc.start()
    stack.on_decode_step(20000, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20000


def test_the_benchmark_runs_and_fails_above_its_bound(run: Run) -> None:
    small = ("--layers", 2, "--kept", 40, "--repetitions", 1, "--steps", 1)
    program = (sys.executable, ROOT / "benchmarks" / "stack.py", *small)
    assert "PyramidStack, list of arrays" in run(*program).stdout
    assert "times the C calls" in run(*program, "--most", 0.5, status=1).stderr


@pytest.mark.parametrize(
    "convert",
    [
        lambda table: table,
        lambda table: table.astype(np.float64),
        lambda table: table.astype(">f4"),
        lambda table: np.asfortranarray(table),
        lambda table: np.repeat(table, 2, axis=1)[:, ::2],
    ],
)
def test_a_table_of_weights_is_its_rows(convert: Any) -> None:
    rows, table = (PyramidStack(5, 8, 1, 1, 3, 3) for _ in range(2))
    rng = np.random.default_rng(1)
    for pos in range(1, 30):
        weights = rng.integers(0, 5, (5, len(rows.layers[0]))).astype(np.float32)
        rows.on_decode_step(pos, list(weights))
        table.on_decode_step(pos, convert(weights))
        assert [victims.tolist() for victims in rows.evict()] == [victims.tolist() for victims in table.evict()]
    scores = [[stack.layers[2].window_score(pos) for pos in stack.layers[2].kept.tolist()] for stack in (rows, table)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((3, 1), -1.0, r"attn\[2\]\[0\] = -1.0: every weight must be finite and >= 0"),
        ((3, 2), 1.0, r"attn\[0\]: has 2 weights, must have one for each of the 1 positions"),
        ((3, 0), 1.0, r"attn\[0\]: has 0 weights"),
        ((2, 1), 1.0, "attn: has 2 vectors, must have one for each of 3 layers"),
    ],
)
def test_a_table_that_is_refused_is_named_and_changes_nothing(shape: Any, value: float, message: str) -> None:
    stack = small()
    table = np.ones(shape, np.float32)
    table[-1] = value
    with pytest.raises(ValueError, match=message):
        stack.on_decode_step(1, table)
    assert stack.resident == 3
