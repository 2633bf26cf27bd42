"""The table of policies: complete, and read the same way by all that read it."""

from __future__ import annotations

import json

import pytest

import pb_kvcache
from pb_kvcache import Policy, PyramidStack, _policies

from .conftest import ROOT


def test_every_policy_of_the_package_has_a_row() -> None:
    classes = {kind for kind in vars(pb_kvcache).values() if isinstance(kind, type) and issubclass(kind, Policy)}
    assert {row.kind for row in _policies.ROWS.values()} - {None} == classes - {Policy}


def test_every_policy_of_the_vectors_has_a_row() -> None:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "vectors").glob("*.json")]
    named = {case["policy"] for file in files if file["kind"] in ("policy", "refusal") for case in file["cases"]}
    assert named == set(_policies.CLASSES)


def test_a_row_makes_its_own_class_at_the_budget_it_is_given() -> None:
    setting = _policies.Setting(num_layers=3, length=99, budget=20, obs_window=4, pool_kernel=1)
    for row in _policies.ROWS.values():
        if row.argument:
            ratio = _policies.ratio_of("pyramidkv:2") if row.argument == "RATIO" else pb_kvcache.plan(3, 20, minimum=9)
            made = row.make(setting, ratio)
            assert isinstance(made, PyramidStack)
            assert sum(made.budgets) == 60
        else:
            made = row.make(setting, None)
            assert callable(made)
            assert type(made(0)) is row.kind
            assert made(0).effective_budget == (20 if row.bounded else 2**32 - 1)


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        ("tova", "TOVA"),
        ("pyramidkv:3/2", "PyramidKV 3/2"),
        ("pyramidkv:2/4", "PyramidKV 2/4 (inverted)"),
        ("plan:folder/mine.json", "SnapKV, mine.json"),
        ("plan:folder/\x1b[31mred\n.json", r"SnapKV, \x1b[31mred\n.json"),
    ],
)
def test_labels_are_names_as_people_write_them(policy: str, label: str) -> None:
    assert _policies.label(policy) == label


@pytest.mark.parametrize("policy", ["lru", "", "tova:", "tova:1", "plan", "pyramidkv", "pyramid:4"])
def test_a_name_that_is_none_is_refused_with_the_known_ones(policy: str) -> None:
    with pytest.raises(ValueError, match=r"no such policy; known: full, .*, snapkv, pyramidkv:RATIO, plan:FILE(;|$)"):
        _policies.find(policy)


@pytest.mark.parametrize("ratio", ["", "0", "-1", "1/0", "0/3", "x", "1/2/3", "nan", "1e3", "٣"])
def test_a_ratio_that_is_none_is_refused_with_its_rule(ratio: str) -> None:
    with pytest.raises(ValueError, match=r"^policy = 'pyramidkv:.*': the ratio must be a number or a fraction above 0"):
        _policies.find(f"pyramidkv:{ratio}")


@pytest.mark.parametrize(
    ("policy", "meant"),
    [("snapvk", "snapkv"), ("TOVA", "tova"), ("pyramid:4", "pyramidkv:4"), ("pyramidkv", "pyramidkv:RATIO")],
)
def test_the_nearest_name_is_suggested(policy: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
        _policies.find(policy)


def test_a_ratio_is_a_number_or_a_fraction() -> None:
    assert _policies.ratio_of("pyramidkv:0.25") == _policies.ratio_of("pyramidkv:1/4")
    assert _policies.label("pyramidkv:0.25") == "PyramidKV 0.25 (inverted)"


def test_no_two_policies_of_a_plot_have_the_same_colour() -> None:
    plain = [name for name, row in _policies.ROWS.items() if not row.argument]
    shown = [*plain, "pyramidkv:1", "pyramidkv:2", "pyramidkv:4", "plan:a.json", "pyramidkv:1/4", "pyramidkv:1/2"]
    assert len({_policies.colour(policy, shown) for policy in shown}) == len(shown)
