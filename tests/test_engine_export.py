"""Exports to engines: every layer once and in order, the plan's lengths and blocks, and what the curves say is lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_kvcache import (
    CurveSet,
    HeadPlan,
    LayerPlan,
    cli,
    divide,
    engine_export,
    plan,
    predicted_loss,
    save_engine_export,
    save_plan,
)

from .test_plan import SOME

ENGINES = ("vllm", "tensorrt-llm")
Capture = pytest.CaptureFixture[str]


def windows(export: dict[str, Any]) -> list[int]:
    """Return the window of every layer, as an engine that reads the JSON would find it."""
    read = json.loads(json.dumps(export))
    if "kv_cache_config" in read:
        found = read["kv_cache_config"]["max_attention_window"]
        assert isinstance(found, list)
        return found
    of_name = {
        name: group["kv_cache_spec"]["sliding_window"]
        for group in read["kv_cache_groups"]
        for name in group["layer_names"]
    }
    return [of_name.pop(f"model.layers.{layer}.self_attn.attn") for layer in range(len(of_name))]


@st.composite
def plans(draw: st.DrawFn) -> LayerPlan:
    layers = draw(st.integers(1, 40))
    block = draw(st.sampled_from((16, 32, 64)))
    weights = draw(st.lists(st.floats(0.1, 20), min_size=layers, max_size=layers))
    total = block * draw(st.integers(layers, 40 * layers))
    return plan(layers, total=total, weights=weights, minimum=block, multiple_of=block)


@SOME
@given(plans(), st.sampled_from(ENGINES), st.none() | st.integers(1, 8))
def test_every_layer_has_one_window_in_order_and_the_total_is_kept(p: LayerPlan, engine: str, n: int | None) -> None:
    export = engine_export(p, engine, groups=n)
    got = windows(export)
    assert len(got) == p.num_layers
    assert all(window > 0 and window % p.multiple_of == 0 for window in got)
    expected = p.budgets if n is None else p.groups(n).budgets
    assert got == expected.tolist()
    if n is None:
        assert sum(got) == p.total
    else:
        assert len(list(itertools.groupby(got))) <= n
        assert sum(got) == p.total - p.groups(n).rounding


@SOME
@given(plans(), st.none() | st.integers(1, 8))
def test_vllm_groups_hold_consecutive_layers_of_one_window(p: LayerPlan, n: int | None) -> None:
    export = engine_export(p, "vllm", groups=n, layer_name="decoder.{}.attn")
    names = [name for group in export["kv_cache_groups"] for name in group["layer_names"]]
    assert names == [f"decoder.{layer}.attn" for layer in range(p.num_layers)]
    specs = [group["kv_cache_spec"] for group in export["kv_cache_groups"]]
    assert {spec["type"] for spec in specs} == {"SlidingWindowSpec"}
    assert {spec["block_size"] for spec in specs} == {p.multiple_of}
    assert all(a["sliding_window"] != b["sliding_window"] for a, b in itertools.pairwise(specs)) or n is not None
    assert export["total"] + export["rounding"] == p.total


def test_tensorrt_llm_gets_no_member_that_it_does_not_know() -> None:
    export = engine_export(plan(3, 64, ratio=3, multiple_of=16), "tensorrt-llm")
    assert export == {"kv_cache_config": {"max_attention_window": [96, 64, 32], "tokens_per_block": 16}}


def test_a_file_holds_the_export_and_a_plan_may_be_a_file(tmp_path: Path) -> None:
    p = plan(8, 512, maximum=700, multiple_of=16)
    save_plan(tmp_path / "plan.json", p)
    for engine in ENGINES:
        target = tmp_path / f"{engine}.json"
        save_engine_export(target, tmp_path / "plan.json", engine, groups=3)
        assert json.loads(target.read_text()) == engine_export(p, engine, groups=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "tensorrt-llm.json", "vllm.json"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"engine": "sglang"}, ValueError, "engine = 'sglang': must be one of vllm, tensorrt-llm"),
        ({"groups": 0}, ValueError, "n = 0: must be greater than 0"),
        ({"groups": 2.5}, TypeError, "n = 2.5: must be an integer"),
        ({"plan": HeadPlan([[32, 64]])}, TypeError, "plan: a plan of heads"),
        ({"plan": [32, 64]}, TypeError, "plan: must be a LayerPlan"),
        ({"layer_name": "model.layers.attn"}, ValueError, "layer_name = 'model.layers.attn': must be text with {}"),
        ({"plan": plan(2, 24, multiple_of=24)}, ValueError, "multiple_of = 24: must be a multiple of 16"),
        ({"plan": plan(2, 64)}, ValueError, "multiple_of = 1: must be a multiple of 16"),
        (
            {"plan": plan(2, 48, multiple_of=48), "engine": "tensorrt-llm"},
            ValueError,
            "multiple_of = 48: must be a power of two above 1",
        ),
        ({"plan": plan(2, 64), "engine": "tensorrt-llm"}, ValueError, "multiple_of = 1: must be a power of two"),
        (
            {"plan": plan(2, total=16, weights=[1000, 1], minimum=0, multiple_of=16)},
            ValueError,
            "plan: layer 1 holds 0 positions",
        ),
    ],
)
def test_refusals_name_what_is_wrong_and_leave_the_file(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    target = tmp_path / "engine.json"
    target.write_text("before")
    arguments = {"plan": plan(4, 64, multiple_of=16), "engine": "vllm"} | changes
    with pytest.raises(error, match="^.*" + words.replace("{", r"\{").replace(".", r"\.")):
        save_engine_export(target, **arguments)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]


GRID = np.array([16, 32, 64, 128])


@st.composite
def convex_curves(draw: st.DrawFn) -> CurveSet:
    slopes = draw(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=6, max_size=6))
    drops = np.sort(np.array(slopes), axis=1)[:, ::-1] * np.diff(GRID)
    losses = np.concatenate([np.zeros((6, 1)), -np.cumsum(drops, axis=1)], axis=1)
    return CurveSet(GRID, losses.reshape(3, 2, 4))


@SOME
@given(convex_curves(), st.integers(32, 100))
def test_no_plan_of_a_total_loses_less_than_the_curves_own(curves: CurveSet, budget: int) -> None:
    heads, layers = curves.plan(budget), curves.layer_plan(budget)
    least, equal = predicted_loss(curves, heads), predicted_loss(curves, layers)
    assert least <= equal + 1e-9
    assert least <= predicted_loss(curves, heads.layer_plan()) + 1e-9
    assert equal <= predicted_loss(curves, plan(3, budget, shape="uniform")) + 1e-9
    for n in (1, 2):
        assert equal <= predicted_loss(curves, layers.groups(n)) + 1e-9


@SOME
@given(st.data())
def test_at_the_points_of_convex_curves_the_loss_is_their_sum(data: st.DataObject) -> None:
    drops = data.draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
    slopes = sorted(drops, reverse=True)
    curve = np.cumsum([200.0, *(-slope * 0.01 for slope in slopes)])
    curves = CurveSet([16, 32, 48, 64], np.stack([curve, 2 * curve]).reshape(1, 2, 4))
    for i, j in itertools.product(range(4), range(4)):
        heads = HeadPlan([[curves.grid[i], curves.grid[j]]])
        assert predicted_loss(curves, heads) == pytest.approx(curve[i] + 2 * curve[j])
    assert predicted_loss(curves, HeadPlan([[640, 64]])) == pytest.approx(3 * curve[3])


def test_a_point_above_the_line_between_its_neighbours_does_not_count() -> None:
    curves = CurveSet([10, 20, 30], [[[1.0, 0.9, 0.0]]])
    assert predicted_loss(curves, HeadPlan([[20]])) == pytest.approx(0.5)
    made = divide([10, 20, 30], [[1.0, 0.9, 0.0]], 20)
    assert isinstance(made, LayerPlan)
    assert predicted_loss(curves, made) == pytest.approx(0.5)


def test_losses_of_other_shapes_and_unknown_ones_are_refused() -> None:
    curves = CurveSet([16, 64], [[[1.0, 0.5], [1.0, 0.5]]])
    with pytest.raises(ValueError, match=r"plan: is of 2 layers and 2 heads, must be \(1, 2\)"):
        predicted_loss(curves, plan(2, 32))
    with pytest.raises(ValueError, match="plan: has a budget of 15, must be at least 16"):
        predicted_loss(curves, HeadPlan([[15, 20]]))
    with pytest.raises(TypeError, match="plan: must be a HeadPlan, a LayerPlan or groups"):
        predicted_loss(curves, [[32, 32]])  # type: ignore[arg-type]


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_writes_an_export_and_says_what_is_lost(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "vllm.json"
    shipped = ("--curves", "smollm2", "--budget", 64, "--block", 16, "--export", "vllm", "-o", target)
    code, out, _ = run(capsys, *shipped, "--groups", 4, "--json")
    assert code == 0
    said = json.loads(out)["export"]
    assert windows(json.loads(target.read_text())) == said["windows"]
    loss = said["predicted_loss"]
    assert loss["heads"] < loss["layers"] < loss["groups"] < loss["uniform"]

    code, out, _ = run(capsys, *shipped)
    assert code == 0
    assert "the engine keeps the newest positions of each layer and selects none" in out
    assert f"heads {loss['heads']:.4f}, layers {loss['layers']:.4f}, uniform {loss['uniform']:.4f}" in out
    assert sum(windows(json.loads(target.read_text()))) == 64 * 30


def test_the_command_exports_a_plan_without_curves(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "trt.yaml"
    sized = ("--layers", 32, "--budget", 512, "--max", 8192, "--block", 32)
    code, out, _ = run(capsys, *sized, "--groups", 4, "--export", "tensorrt-llm", "-o", target)
    assert code == 0
    assert "tensorrt-llm: 32 layers, 4 windows of" in out
    expected = plan(32, 512, maximum=8192, multiple_of=32).groups(4).budgets.tolist()
    assert windows(json.loads(target.read_text())) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", 4, "--budget", 64, "--block", 16, "--export", "vllm"), "--export vllm: needs -o FILE"),
        (("--layers", 4, "--budget", 64, "--export", "vllm", "-o", "out"), "multiple_of = 1: must be a multiple of 16"),
        (("--curves", "smollm2", "--budget", 64, "--groups", 4), "--curves and --groups"),
        (("--curves", "smollm2", "--budget", 64, "--export", "tensorrt-llm", "-o", "out"), "multiple_of = 1"),
        (
            ("--model", "config.json", "--budget", 512, "--block", 16, "--export", "vllm", "-o", "out"),
            "--export vllm: layer 0 of the model has a sliding window",
        ),
    ],
)
def test_the_command_refuses_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: tuple[object, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    gemma = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": gemma}))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
