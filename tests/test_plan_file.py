"""Plans in files: what is written is read again, and what is no plan is refused by the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pb_kvcache import load_plan, plan, save_plan


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for wanted in (plan(4, 100, ratio=3), plan(8, total=512, shape="uniform", multiple_of=16, maximum=[64] * 8)):
        save_plan(path, wanted)
        assert load_plan(path) == wanted
        assert load_plan(str(path), wanted.total // wanted.num_layers) == wanted


def test_one_of_several_plans_is_found_by_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    plans = [plan(4, 64), plan(4, 128), plan(4, total=300)]
    save_plan(path, plans)
    assert load_plan(path, 128) == plans[1]
    assert load_plan(path, 75) == plans[2]
    with pytest.raises(ValueError, match=r"plans\.json: has plans for the budgets 64, 128, 75; say which"):
        load_plan(path)
    with pytest.raises(ValueError, match=r"plans\.json: has no plans for budget = 65"):
        load_plan(path, 65)
    save_plan(path, [plans[0], plans[0]])
    with pytest.raises(ValueError, match="has several plans for budget = 64"):
        load_plan(path, 64)


def test_what_is_no_plan_is_refused_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, plan(4, 64))
    before = path.read_bytes()
    for wrong, error in ((3, TypeError), ([3], TypeError), ([], ValueError), ("text", TypeError)):
        with pytest.raises(error, match="plan"):
            save_plan(path, wrong)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    for text in ("", "{}", "[]", "3", "[3]", '{"budgets": [1e400]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json: not a plan"):
            load_plan(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_plan(tmp_path / "nowhere.json")
    save_plan(path, plan(4, 64))
    with pytest.raises((TypeError, ValueError), match="budget"):
        load_plan(path, 0)


def test_what_the_command_prints_of_a_layer_plan_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan(4, 64)
    path.write_text(json.dumps(made.to_dict() | {"num_kv_heads": 8}))
    assert load_plan(path) == made
    for text in ("{}", "[]", "[[1]]", '{"num_kv_heads": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json: not a plan"):
            load_plan(path)
    path.write_text('{"num_layers": 2}')
    with pytest.raises(ValueError, match=r"plan\.json: not a plan: neither a layer plan nor a head plan"):
        load_plan(path)
