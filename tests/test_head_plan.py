"""``HeadPlan``: a budget for every layer and KV head, in memory and in files."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from pb_kvcache import HeadPlan, load_plan, plan, save_plan


def test_what_a_head_plan_says_of_itself() -> None:
    made = HeadPlan([[40, 8], [24, 24], [10, 14]])
    assert (made.num_layers, made.num_kv_heads, made.total) == (3, 2, 120)
    assert made.offsets.tolist() == [0, 40, 48, 72, 96, 106, 120]
    assert made.nbytes(64, "float16") == 120 * 2 * 64 * 2
    assert made.layer_plan().budgets.tolist() == [24, 24, 12]
    assert HeadPlan([[3, 4]]).layer_plan().total == 3
    assert repr(made) == "<HeadPlan: 3 layers of 2 KV heads, 8 .. 40, total 120>"
    assert str(made).splitlines()[0].split() == ["layer", "head", "0", "head", "1", "mean"]
    assert str(made).splitlines()[1].split() == ["0", "40", "8", "24.0"]
    assert str(made).splitlines()[-1] == "total 120 positions in 3 layers of 2 KV heads, 20.0 each"


def test_a_head_plan_cannot_be_changed() -> None:
    given = np.array([[40, 8]])
    made = HeadPlan(given)
    given[0, 0] = 1
    assert made.budgets[0, 0] == 40
    for twin in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin == made
        assert hash(twin) == hash(made)
        with pytest.raises(ValueError, match="read-only"):
            twin.budgets[0, 0] = 2
    assert made != HeadPlan([[40], [8]])
    assert made != "plan"


def test_a_head_plan_goes_through_a_file(tmp_path: Path) -> None:
    made = HeadPlan([[40, 8], [24, 24]])
    assert HeadPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    path = tmp_path / "plan.json"
    save_plan(path, made)
    assert load_plan(path) == made
    both = [HeadPlan([[10, 20]]), HeadPlan([[30, 30]]), plan(2, 64)]
    save_plan(path, both)
    assert load_plan(path, 15) == both[0]
    assert load_plan(path, 64) == both[2]


@pytest.mark.parametrize(
    ("budgets", "error", "message"),
    [
        ([], ValueError, r"budgets: has shape \(0,\)"),
        ([3, 4], ValueError, r"budgets: has shape \(2,\)"),
        ([[3, 0]], ValueError, r"budgets\[0, 1\] = 0: must be between 1 and"),
        ([[3, 2**32]], ValueError, r"budgets\[0, 1\] = 4294967296"),
        ([[3.5]], TypeError, "budgets: must be integers"),
        ([["a"]], TypeError, "budgets: must be integers"),
    ],
)
def test_what_is_no_head_plan_is_refused(budgets: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HeadPlan(budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total": 1}, "total = 1: must be 48"),
        ({"num_layers": True}, "num_layers = True: must be 1"),
        ({"budgets": [[40, 8], [1]]}, "budgets: must be a list of num_layers lists"),
        ({"budgets": [[40.0, 8]]}, "budgets: must be integers"),
        ({"budgets": None}, "budgets: must be a list"),
    ],
)
def test_a_file_that_was_changed_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadPlan.from_dict(HeadPlan([[40, 8]]).to_dict() | change)


def test_members_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="total: is missing"):
        HeadPlan.from_dict({"num_layers": 1, "num_kv_heads": 1, "budgets": [[1]]})
    with pytest.raises(TypeError, match="must be a mapping"):
        HeadPlan.from_dict([])  # type: ignore[arg-type]


def test_a_picture_has_a_line_a_head_and_a_character_a_layer():
    plan = HeadPlan([[8, 64], [16, 64], [32, 8], [64, 11]])
    assert plan.picture(".+#").splitlines() == [
        "layer  0",
        "head 0 .++#",
        "head 1 ##..",
        ". 8 .. # 64 positions",
    ]
    wide = HeadPlan(np.full((30, 1), 5))
    assert wide.picture("ab", width=20).splitlines()[:4] == [
        "layer  0         10",
        "head 0 aaaaaaaaaaaaa",
        "layer  13     20",
        "head 0 aaaaaaaaaaaaa",
    ]
    assert max(map(len, HeadPlan(np.arange(1, 1001).reshape(200, 5)).picture().splitlines())) <= 80
    with pytest.raises(ValueError, match="shades, width: must be two characters"):
        plan.picture("#")
