"""The planner: what holds for every plan, against exact fractions; what a plan tells; what is refused, and how."""

from __future__ import annotations

import copy
import doctest
import inspect
import itertools
import json
import math
import pickle
import sys
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pb_kvcache import LayerPlan, _plan, plan, pyramid_budgets

from . import reference_plan

UINT32_MAX = 2**32 - 1
MANY = settings(max_examples=150, deadline=None)
SOME = settings(max_examples=50, deadline=None)

#: Any double that can be a ratio or a weight, and more of the likely ones.
DOUBLES = st.one_of(
    st.integers(1, 50).map(float),
    st.floats(0.01, 100.0),
    st.floats(5e-324, sys.float_info.max, allow_subnormal=True),
    st.integers(-60, 60).map(lambda e: 2.0**e),
)


@st.composite
def requests(draw: st.DrawFn, layers: st.SearchStrategy[int] | None = None) -> dict[str, Any]:
    """Arguments of a plan that exists."""
    n = draw(st.integers(1, 24) if layers is None else layers)
    block = draw(st.sampled_from([1, 1, 2, 3, 16, 64]))
    shape = draw(st.sampled_from(["uniform", "pyramid", "geometric", "weights"]))
    arguments: dict[str, Any] = {"num_layers": n, "shape": shape, "multiple_of": block}
    if shape in ("pyramid", "geometric"):
        arguments["ratio"] = draw(DOUBLES)
    elif shape == "weights":
        few = draw(st.lists(DOUBLES, min_size=1, max_size=4))  # few, so that many layers are equal
        arguments["weights"] = draw(st.lists(st.one_of(st.sampled_from(few), DOUBLES), min_size=n, max_size=n))
    most = draw(st.sampled_from([3, 100, 8192, UINT32_MAX]))
    numbers = st.integers(0, most)
    kind = draw(st.sampled_from(["none", "both", "per layer", "minimum"]))
    if kind == "both":
        arguments["minimum"], arguments["maximum"] = sorted([draw(numbers), draw(numbers)])
    elif kind == "per layer":
        pairs = [sorted(pair) for pair in draw(st.lists(st.tuples(numbers, numbers), min_size=n, max_size=n))]
        arguments["minimum"], arguments["maximum"] = [list(bound) for bound in zip(*pairs, strict=True)]
    elif kind == "minimum":
        arguments["minimum"] = draw(numbers)
    low, high = reference_plan.bounds_of(arguments.get("minimum", 1), arguments.get("maximum"), n, block)
    assume(all(a <= b for a, b in zip(low, high, strict=True)))
    least, greatest = sum(low) // block, sum(high) // block
    near = draw(st.sampled_from([3 * n, 512 * n // block + 1, greatest]))
    arguments["total"] = block * min(greatest, draw(st.integers(least, least + near)))
    return arguments


def exact_targets(request: dict[str, Any]) -> tuple[list[Fraction], list[int], list[int]]:
    n, block = request["num_layers"], request["multiple_of"]
    low, high = reference_plan.bounds_of(request.get("minimum", 1), request.get("maximum"), n, block)
    weights = reference_plan.weights_of(request["shape"], n, request.get("ratio", 4.0), request.get("weights"))
    return reference_plan.targets_of(weights, request["total"], low, high), low, high


@MANY
@given(requests())
def test_every_promise_holds(request_: dict[str, Any]) -> None:
    budgets = plan(**request_).budgets.tolist()
    targets, low, high = exact_targets(request_)
    block = request_["multiple_of"]
    assert sum(budgets) == request_["total"]
    for budget, target, least, most in zip(budgets, targets, low, high, strict=True):
        assert budget % block == 0
        assert least <= budget <= most
        assert abs(budget - target) < block
    for i, j in itertools.combinations(range(len(budgets)), 2):
        if targets[i] > targets[j]:
            assert budgets[i] >= budgets[j]
        elif targets[i] < targets[j]:
            assert budgets[i] <= budgets[j]
        else:
            assert 0 <= budgets[i] - budgets[j] <= block


@MANY
@given(requests())
def test_plans_are_the_reference_s(request_: dict[str, Any]) -> None:
    got = plan(**request_)
    assert got.budgets.tolist() == reference_plan.plan(**request_)
    assert got.total == request_["total"] == got.requested


@SOME
@given(
    budget=st.integers(1, 10**5),
    layers=st.integers(1, 100),
    ratio=st.integers(1, 60),
)
@example(budget=512, layers=32, ratio=4)
def test_without_bounds_it_is_within_one_of_the_floor_rule(budget: int, layers: int, ratio: int) -> None:
    floored = pyramid_budgets(budget, layers, ratio).astype(np.int64)
    exact = plan(layers, budget, ratio=ratio, minimum=0)
    assert set((exact.budgets - floored).tolist()) <= {0, 1}
    assert exact.total == budget * layers


@SOME
@given(requests(), st.data())
def test_the_order_of_the_layers_decides_ties_alone(request_: dict[str, Any], data: st.DataObject) -> None:
    """In another order the targets move with their layers, and as many of every remainder are rounded up."""
    n, block = request_["num_layers"], request_["multiple_of"]
    request_ = {key: value for key, value in request_.items() if key not in ("shape", "ratio")}
    request_.setdefault("weights", [1.0] * n)
    order = data.draw(st.permutations(range(n)))
    permuted = dict(request_)
    for name in ("weights", "minimum", "maximum"):
        if isinstance(request_.get(name), list):
            permuted[name] = [request_[name][layer] for layer in order]
    targets, _, _ = exact_targets(request_ | {"shape": "weights"})
    before = plan(**request_).budgets.tolist()
    after = plan(**permuted).budgets.tolist()
    rounded = Counter((target % block, budget - target) for target, budget in zip(targets, before, strict=True))
    moved = [targets[layer] for layer in order]
    assert Counter((t % block, budget - t) for t, budget in zip(moved, after, strict=True)) == rounded


@SOME
@given(requests(), st.integers(-200, 200), st.integers(1, 1000))
def test_scaling_the_weights_changes_nothing(request_: dict[str, Any], exponent: int, factor: int) -> None:
    request_.pop("ratio", None)
    request_["shape"] = "weights"
    weights = [float(1 + (7919 * layer) % 1000) for layer in range(request_["num_layers"])]
    unscaled = plan(**request_ | {"weights": weights}).budgets.tolist()
    scaled = [math.ldexp(weight * factor, exponent) for weight in weights]
    assert plan(**request_ | {"weights": scaled}).budgets.tolist() == unscaled


@SOME
@given(st.integers(1, 40), st.integers(1, 4000), st.floats(0.75, 40.0))
def test_beta_is_the_ratio_of_the_paper(layers: int, budget: int, beta: float) -> None:
    assert plan(layers, budget, beta=beta) == plan(layers, budget, ratio=2 * beta - 1)


def test_the_paper_s_table() -> None:
    paper = plan(32, 2048, beta=20, maximum=7950)
    assert paper.budgets[0] in (3993, 3994)
    assert paper.budgets[-1] in (102, 103)
    assert paper.total == 65536
    assert (np.diff(paper.budgets.astype(np.int64)) < 0).all()


@pytest.mark.parametrize("layers", [1, 2, 26, 32, 80])
@pytest.mark.parametrize("beta", [1, 2.5, 20, 30])
@pytest.mark.parametrize("budget", [64, 128, 512])
@pytest.mark.parametrize("length", [64, 700, 7950])
def test_steep_plans_never_overspend(layers: int, beta: float, budget: int, length: int) -> None:
    """Published code overspends here by up to 27 %, or falls back to uniform between the average and twice it."""
    steep = plan(layers, budget, beta=beta, minimum=33, maximum=length)
    assert steep.total == min(budget, length) * layers
    assert steep.budgets.min() >= 33
    assert steep.budgets.max() <= length
    assert (np.diff(steep.budgets.astype(np.int64)) <= 0).all()
    if layers > 1 and beta > 1 and budget < length:
        assert steep.budgets[0] > steep.budgets[-1]


def test_a_layer_is_never_emptied() -> None:
    assert plan(32, 4, beta=30).budgets.min() == 1
    assert plan(32, 16, beta=30, multiple_of=16).budgets.tolist() == [16] * 32


def test_a_total_above_the_maximums_gives_every_layer_its_maximum() -> None:
    full = plan(4, 1000, maximum=[10, 20, 30, 41], multiple_of=2)
    assert full.budgets.tolist() == [10, 20, 30, 40]
    assert (full.total, full.requested) == (100, 4000)
    assert full.at_maximum.all()
    assert "requested 4000: more than the maximums hold" in str(full)


def test_a_minimum_is_rounded_up_to_a_block_and_a_maximum_down() -> None:
    got = plan(3, total=96, minimum=17, maximum=63, ratio=100, multiple_of=16)
    assert got.budgets.tolist() == [32, 32, 32]
    assert got.at_minimum.all()
    got = plan(3, total=112, minimum=17, maximum=63, ratio=100, multiple_of=16)
    assert got.budgets.tolist() == [48, 32, 32]


def test_a_large_model_is_planned_at_once() -> None:
    """Layers that meet their bounds one after the other: the rounds depend on the numbers, not on how many layers."""
    layers = 200_000
    index = np.arange(layers)
    weights = 2.0 ** -(index % 1000).astype(np.float64)
    got = plan(layers, 100, weights=weights, maximum=150, minimum=(index % 7).astype(np.uint32))
    assert got.total == 100 * layers
    assert got.budgets.max() == 150


class TestLayerPlan:
    def test_offsets_place_the_layers_in_one_arena(self) -> None:
        p = plan(5, 100)
        assert p.offsets.tolist() == [0, *itertools.accumulate(p.budgets.tolist())]
        assert p.offsets.dtype == np.uint64
        assert p.offsets[-1] == p.total
        wide = plan(3, total=3 * UINT32_MAX, shape="uniform")
        assert wide.offsets.tolist() == [0, UINT32_MAX, 2 * UINT32_MAX, 3 * UINT32_MAX]

    def test_budgets_are_read_only(self) -> None:
        p = plan(5, 100)
        assert p.budgets.dtype == np.uint32
        with pytest.raises(ValueError, match="read-only"):
            p.budgets[0] = 1

    def test_a_plan_keeps_its_own_copy_of_the_arguments(self) -> None:
        weights = np.array([1.0, 2.0])
        maximum = np.array([100, 200], np.uint32)
        p = plan(2, 50, weights=weights, maximum=maximum)
        weights[:] = 9.0
        maximum[:] = 1
        assert p.weights is not None
        assert p.weights.tolist() == [1.0, 2.0]
        assert p.to_dict()["maximum"] == [100, 200]

    @pytest.mark.parametrize(
        ("dtype", "size"),
        [
            ("float16", 2),
            ("bfloat16", 2),
            ("torch.float32", 4),
            (np.float64, 8),
            (np.dtype(">f4"), 4),
            ("int8", 1),
            ("float8", 1),
        ],
    )
    def test_bytes_are_of_keys_and_values(self, dtype: Any, size: int) -> None:
        assert plan(32, 512).nbytes(8, 128, dtype) == 2 * 512 * 32 * 8 * 128 * size

    def test_half_bytes_are_rounded_up(self) -> None:
        assert plan(1, 3, ratio=1).nbytes(1, 1, "int4") == 3

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((0, 128), ValueError, "num_kv_heads = 0: must be greater than 0"),
            ((8, 0), ValueError, "head_dim = 0: must be greater than 0"),
            ((8, 1.5), TypeError, "head_dim = 1.5: must be an integer"),
            ((8, 128, "float12"), ValueError, "dtype = 'float12': must be one of"),
            ((8, 128, np.complex64), ValueError, "dtype = 'complex64': must be one of"),
            ((8, 128, None), TypeError, "dtype = None"),
            ((8, 128, 7), TypeError, "dtype = 7"),
        ],
    )
    def test_bytes_of_what_is_no_cache_are_refused(
        self, arguments: tuple[Any, ...], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            plan(2, 8).nbytes(*arguments)

    def test_a_dict_is_json(self) -> None:
        p = plan(3, 100, weights=[1, 2, 3], minimum=[1, 2, 90])
        again = json.loads(json.dumps(p.to_dict()))
        assert again["budgets"] == p.budgets.tolist()
        assert (again["total"], again["num_layers"], again["shape"]) == (300, 3, "weights")
        assert again["weights"] == [1.0, 2.0, 3.0]
        assert (again["minimum"], again["maximum"], again["at_minimum"]) == ([1, 2, 90], None, 0)
        names = {"num_layers", "total", "shape", "ratio", "weights", "minimum", "maximum", "multiple_of"}
        assert plan(**{name: again[name] for name in names if name != "ratio"}) == p

    @SOME
    @given(
        layers=st.integers(1, 9),
        budget=st.integers(20, 400),
        shape=st.sampled_from(["uniform", "pyramid", "geometric", "weights"]),
        block=st.sampled_from([1, 4]),
        bounds=st.sampled_from([{}, {"maximum": 120}, {"minimum": 7, "maximum": 4000}]),
        ratio=st.floats(0.1, 60),
        listed=st.booleans(),
    )
    def test_a_dict_becomes_the_plan_again(
        self, layers: int, budget: int, shape: Any, block: int, bounds: dict[str, int], ratio: float, listed: bool
    ) -> None:
        options: dict[str, Any] = {name: [value] * layers if listed else value for name, value in bounds.items()}
        if shape == "weights":
            options["weights"] = [ratio + layer for layer in range(layers)]
        elif shape != "uniform":
            options["ratio"] = ratio
        p = plan(layers, budget * block, shape=shape, multiple_of=block, **options)
        again = LayerPlan.from_dict(json.loads(json.dumps(p.to_dict() | {"more": "is not looked at"})))
        assert again == p
        assert (again.total, again.requested) == (p.total, p.requested)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"budgets": [80, 81]}, ValueError, r"budgets\[1\] = 81: must be 80, which follows from"),
            ({"budgets": [80, True]}, ValueError, r"budgets\[1\] = True"),
            ({"budgets": [80, "80"]}, ValueError, r"budgets\[1\] = '80'"),
            ({"budgets": [160]}, ValueError, "budgets: must be a list of num_layers = 2 integers"),
            ({"budgets": None}, ValueError, "budgets: must be a list"),
            ({"num_layers": 2**32 - 1}, ValueError, "budgets: must be a list of num_layers = 4294967295"),
            ({"num_layers": "2"}, TypeError, "num_layers = '2'"),
            ({"requested": 161}, ValueError, r"budgets\[0\] = 80: must be 81"),
            ({"requested": None}, ValueError, "one of them must be given"),
            ({"shape": "round"}, ValueError, "shape = 'round'"),
            ({"shape": None}, TypeError, "shape = None: must be a string"),
            ({"ratio": 2}, ValueError, "ratio = 2: belongs to shapes"),
            ({"weights": [1, 2]}, ValueError, "weights: cannot be given"),
            ({"minimum": {}}, TypeError, "minimum"),
            ({"maximum": [1]}, ValueError, "maximum: has shape"),
            ({"multiple_of": 0}, ValueError, "multiple_of = 0"),
        ],
    )
    def test_a_dict_that_is_no_plan_is_refused(
        self, changes: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            LayerPlan.from_dict(plan(2, 80, shape="uniform").to_dict() | changes)

    def test_a_dict_with_a_member_missing_is_refused(self) -> None:
        fields = plan(2, 80, shape="uniform").to_dict()
        for name in set(fields) - {"total", "at_minimum", "at_maximum"}:
            with pytest.raises(ValueError, match=f"^{name}: is missing"):
                LayerPlan.from_dict({key: value for key, value in fields.items() if key != name})
        with pytest.raises(TypeError, match="must be a mapping"):
            LayerPlan.from_dict([1])  # type: ignore[arg-type]

    def test_equality_and_hash(self) -> None:
        assert plan(4, 100) == plan(4, total=400)
        assert hash(plan(4, 100)) == hash(plan(4, total=400))
        assert plan(4, 100) != plan(4, 100, minimum=2)
        assert plan(4, 100) != plan(4, 101)
        assert plan(4, 100) != "plan"

    def test_text_is_a_table(self) -> None:
        lines = str(plan(4, 10, shape="uniform", minimum=[1, 1, 20, 1], maximum=50)).splitlines()
        assert lines[0].split() == ["layers", "budget", "offset"]
        assert [line.split() for line in lines[1:-1]] == [["0-1", "7", "0"], ["2", "20", "14"], ["3", "6", "34"]]
        assert lines[-1] == "total 40 positions in 4 layers (uniform); 1 at their minimum, 0 at their maximum"
        assert repr(plan(2, 10)) == "<LayerPlan: 2 layers, pyramid of ratio 4, 16 .. 4, total 20>"

    def test_text_of_many_layers_is_cut(self) -> None:
        lines = str(plan(5000, 512)).splitlines()
        assert len(lines) == 1 + 400 + 1 + 1
        assert lines[201].split() == ["..."] * 3


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_layers": 0, "budget": 4}, ValueError, "num_layers = 0: must be greater than 0"),
    ({"num_layers": -1, "budget": 4}, ValueError, "num_layers = -1: must be between 0 and 4294967295"),
    ({"num_layers": 2.0, "budget": 4}, TypeError, "num_layers = 2.0: must be an integer, not float"),
    ({"num_layers": 2}, ValueError, "budget, total: one of them must be given"),
    ({"num_layers": 2, "budget": 4, "total": 8}, ValueError, "budget = 4, total = 8: only one of them can be given"),
    ({"num_layers": 2, "budget": -4}, ValueError, "budget = -4: must be between 0 and 4294967295"),
    ({"num_layers": 2, "budget": 4.5}, TypeError, "budget = 4.5: must be an integer"),
    ({"num_layers": 2, "budget": True}, TypeError, "budget = True: must be an integer, not a bool"),
    ({"num_layers": 2, "total": -8}, ValueError, "total = -8: must be 0 or more"),
    ({"num_layers": 2, "total": "8"}, TypeError, "total = '8': must be an integer"),
    ({"num_layers": 2, "total": 2**33}, ValueError, "total = 8589934592: must be at most 8589934590, what 2 layers"),
    ({"num_layers": 2, "total": 2**64}, ValueError, "total = 18446744073709551616: must be at most 18446744073709551"),
    ({"num_layers": 3, "total": 2}, ValueError, r"total = 2: must be at least 3, the sum of the 3 minimums"),
    ({"num_layers": 3, "total": 2}, ValueError, r"\(or minimum at most 0\)"),
    (
        {"num_layers": 3, "budget": 32, "minimum": 33, "multiple_of": 16},
        ValueError,
        r"total = 96: must be at least 144, the sum of the 3 minimums, each rounded up to a multiple of 16 \(or min",
    ),
    ({"num_layers": 3, "budget": 5, "multiple_of": 4}, ValueError, "total = 15: .* multiple_of = 4, such as 12 or 16"),
    ({"num_layers": 3, "budget": 4, "multiple_of": 0}, ValueError, "multiple_of = 0: must be greater than 0"),
    ({"num_layers": 3, "budget": 4, "multiple_of": -1}, ValueError, "multiple_of = -1: must be between"),
    ({"num_layers": 3, "budget": 4, "shape": "cone"}, ValueError, "shape = 'cone': must be one of uniform, pyramid"),
    ({"num_layers": 3, "budget": 4, "shape": 1}, TypeError, "shape = 1: must be a string"),
    ({"num_layers": 3, "budget": 4, "ratio": 0}, ValueError, "ratio = 0: must be finite and greater than 0"),
    ({"num_layers": 3, "budget": 4, "ratio": -2.0}, ValueError, "ratio = -2.0: must be finite and greater than 0"),
    ({"num_layers": 3, "budget": 4, "ratio": math.inf}, ValueError, "ratio = inf: must be finite"),
    ({"num_layers": 3, "budget": 4, "ratio": math.nan}, ValueError, "ratio = nan: must be finite"),
    ({"num_layers": 3, "budget": 4, "ratio": 10**400}, ValueError, "must fit a double"),
    ({"num_layers": 3, "budget": 4, "ratio": "4"}, TypeError, "ratio = '4': must be a real number, not str"),
    ({"num_layers": 3, "budget": 4, "ratio": 4 + 0j}, TypeError, "must be a real number, not complex"),
    ({"num_layers": 3, "budget": 4, "ratio": True}, TypeError, "ratio = True: must be a real number"),
    ({"num_layers": 3, "budget": 4, "ratio": np.complex128(4 + 1j)}, TypeError, "ratio = .*: must be a real number"),
    ({"num_layers": 3, "budget": 4, "beta": 0.5}, ValueError, "beta = 0.5: must be finite and greater than 0.5"),
    ({"num_layers": 3, "budget": 4, "beta": math.nan}, ValueError, "beta = nan: must be finite"),
    ({"num_layers": 3, "budget": 4, "beta": 1.7e308}, ValueError, "beta = 1.7e.308: must be finite"),
    ({"num_layers": 3, "budget": 4, "beta": "20"}, TypeError, "beta = '20': must be a real number"),
    ({"num_layers": 3, "budget": 4, "beta": 20, "ratio": 4}, ValueError, "ratio = 4, beta = 20: only one of them"),
    ({"num_layers": 3, "budget": 4, "beta": 20, "shape": "geometric"}, ValueError, "beta = 20: belongs to shape 'pyr"),
    ({"num_layers": 3, "budget": 4, "ratio": 4, "shape": "uniform"}, ValueError, "ratio = 4: belongs to shapes"),
    ({"num_layers": 3, "budget": 4, "ratio": 4, "weights": [1, 2, 3]}, ValueError, "ratio = 4, weights: only one of"),
    ({"num_layers": 3, "budget": 4, "beta": 4, "weights": [1, 2, 3]}, ValueError, "beta = 4, weights: only one of"),
    (
        {"num_layers": 3, "budget": 4, "shape": "weights", "ratio": 4, "weights": [1, 2, 3]},
        ValueError,
        "ratio = 4: belongs to shapes 'pyramid' and 'geometric', not to 'weights'",
    ),
    ({"num_layers": 3, "budget": 4, "shape": "weights"}, ValueError, "weights: must be given for shape 'weights'"),
    (
        {"num_layers": 3, "budget": 4, "shape": "pyramid", "weights": [1, 2, 3]},
        ValueError,
        "weights: cannot be given for shape 'pyramid'",
    ),
    ({"num_layers": 3, "budget": 4, "weights": [1, 2]}, ValueError, r"weights: has shape \(2,\), must be \(3,\)"),
    ({"num_layers": 3, "budget": 4, "weights": [[1, 2, 3]]}, ValueError, r"weights: has shape \(1, 3\)"),
    ({"num_layers": 3, "budget": 4, "weights": [1, 0, 2]}, ValueError, r"weights\[1\] = 0: must be finite and greater"),
    ({"num_layers": 3, "budget": 4, "weights": [1, 2, -2.0]}, ValueError, r"weights\[2\] = -2.0"),
    ({"num_layers": 3, "budget": 4, "weights": [math.nan, 1, 1]}, ValueError, r"weights\[0\] = nan"),
    ({"num_layers": 3, "budget": 4, "weights": [1, math.inf, 1]}, ValueError, r"weights\[1\] = inf"),
    ({"num_layers": 3, "budget": 4, "weights": ["a", "b", "c"]}, TypeError, "weights: must be an array of real"),
    ({"num_layers": 3, "budget": 4, "weights": [1, [2], 3]}, TypeError, "weights: must be an array of real"),
    ({"num_layers": 3, "budget": 4, "weights": [True] * 3}, TypeError, "not of dtype bool"),
    ({"num_layers": 1, "budget": 4, "weights": np.ma.array([1.0], mask=[True])}, TypeError, "weights: .* masked"),
    ({"num_layers": 1, "budget": 4, "minimum": np.ma.array([1], mask=[True])}, TypeError, "minimum: .* masked"),
    ({"num_layers": 3, "total": 10**5000}, ValueError, "total = <int of too many digits>: must be at most"),
    ({"num_layers": 3, "budget": 4, "ratio": 10**5000}, ValueError, "ratio = <int of too many digits>: must fit"),
    ({"num_layers": 3, "budget": 4, "minimum": -1}, ValueError, "minimum = -1: must be between 0 and 4294967295"),
    ({"num_layers": 3, "budget": 4, "maximum": -1}, ValueError, "maximum = -1: must be between 0 and 4294967295"),
    ({"num_layers": 3, "budget": 4, "maximum": 2.5}, TypeError, "maximum = 2.5: must be an integer"),
    ({"num_layers": 3, "budget": 4, "maximum": "5"}, TypeError, "maximum = '5': must be an integer"),
    ({"num_layers": 3, "budget": 4, "minimum": None}, TypeError, "minimum = None: must be an integer"),
    ({"num_layers": 3, "budget": 4, "minimum": [1, 2]}, ValueError, r"minimum: has shape \(2,\), must be \(3,\)"),
    ({"num_layers": 3, "budget": 4, "minimum": [1, 2, -3]}, ValueError, r"minimum\[2\] = -3: must be between 0 and"),
    ({"num_layers": 3, "budget": 4, "maximum": [1, 2, 2**80]}, ValueError, r"maximum\[2\] = 12089258196146291747"),
    ({"num_layers": 3, "budget": 4, "maximum": [1.0, 2.0, 3.0]}, TypeError, "maximum: must be integers, not of dtype"),
    ({"num_layers": 3, "budget": 4, "minimum": 5, "maximum": 4}, ValueError, "minimum = 5: .* exceed maximum = 4"),
    ({"num_layers": 2, "budget": 4, "minimum": [1, 5], "maximum": 4}, ValueError, r"minimum\[1\] = 5: .* maximum = 4"),
    (
        {"num_layers": 2, "total": 16, "minimum": 5, "maximum": [16, 7], "multiple_of": 4},
        ValueError,
        r"minimum = 5, maximum\[1\] = 7: a multiple of multiple_of = 4 must lie between them; the nearest are 4 and 8",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"maximum": np.array([100, 100, 100], ">u4")},
        {"maximum": (100, 100, 100)},
        {"maximum": np.array([100, 0, 100, 0, 100], np.int64)[::2]},
        {"maximum": np.int16(100)},
        {"maximum": np.array(100)},
        {"weights": np.array([4, 2.5, 1], ">f8")},
        {"weights": np.array([4, 9, 2.5, 9, 1], np.float32)[::2]},
        {"weights": [4, 2.5, 1]},
        {"ratio": np.float32(4)},
        {"ratio": Fraction(4)},
        {"beta": 2.5},
        {"shape": "pyramid", "maximum": [100] * 3},
    ],
)
def test_every_dress_of_the_same_numbers(arguments: dict[str, Any]) -> None:
    assert plan(3, 10, **arguments).budgets.tolist() == [16, 10, 4]


def test_what_is_not_stated_has_a_default_and_a_stated_default_counts_as_stated() -> None:
    bare = plan(3, 10)
    assert (bare.shape, bare.ratio) == ("pyramid", 4)
    assert plan(3, 10, shape=None, ratio=None, beta=None, weights=None) == bare
    assert plan(3, 10, shape="pyramid", ratio=4) == bare
    assert plan(3, 10, shape="geometric").ratio == 4
    assert plan(3, 10, weights=[4, 2.5, 1]).shape == "weights"
    signature = inspect.signature(plan)
    assert all(signature.parameters[name].default is None for name in ("shape", "ratio", "beta", "weights"))


def test_any_total_above_the_maximums_gives_the_maximums() -> None:
    for total in (48, 2**64, 2**64 * 16, 10**30):
        p = plan(3, total=total, maximum=17, multiple_of=16)
        assert (p.budgets.tolist(), p.requested) == ([16, 16, 16], total)
    assert LayerPlan.from_memory(10**30, 1, 1, "int8", 3, maximum=17).total == 51
    with pytest.raises(ValueError, match="total = 18446744073709551617: must be"):
        plan(3, total=2**64 + 1, maximum=17, multiple_of=16)


def test_a_refusal_survives_the_way_out_of_a_worker_process() -> None:
    with pytest.raises(ValueError, match="sum of the 4 minimums") as refusal:
        plan(4, 10, minimum=20)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


def test_copies_and_pickles_of_a_plan_are_as_read_only_as_the_plan() -> None:
    p = plan(3, 10, weights=[4, 2.5, 1], maximum=[30, 20, 10])
    for twin in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert (twin, hash(twin)) == (p, hash(p))
        for array in (twin.budgets, twin.weights, twin.maximum):
            assert not array.flags.writeable


def test_documentation_s_examples() -> None:
    result = doctest.testmod(_plan)
    assert result.attempted > 4
    assert result.failed == 0
