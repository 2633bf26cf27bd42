"""``pb-kvcache plan``: one command from a model and its memory to every layer's budget; model files of every family."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import CurveSet, LayerPlan, cli, load_plan, plan
from pb_kvcache._meta_run import cached_layers
from pb_kvcache._model_config import FAMILIES, read_config
from pb_kvcache.cli.plan import format_size, parse_size

Capture = pytest.CaptureFixture[str]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
}


def config(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def answer(capsys: Capture, *arguments: object) -> dict[str, Any]:
    assert cli.main(["plan", *(str(argument) for argument in arguments), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


def refusal(capsys: Capture, *arguments: object) -> str:
    """Return the one line on standard error; nothing was printed."""
    assert cli.main(["plan", *(str(argument) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


SIZED = ("--layers", 32, "--budget", 512, "--ratio", 4, "--max", 8192, "--block", 16)
HEADS = ("--kv-heads", 8, "--head-dim", 128, "--dtype", "float16")


def test_a_plan_in_one_command(capsys: Capture) -> None:
    got = answer(capsys, *SIZED, *HEADS)
    expected = plan(32, 512, ratio=4, maximum=8192, multiple_of=16)
    assert got["budgets"] == expected.budgets.tolist()
    assert got["offsets"] == expected.offsets.tolist()
    assert got["total"] == 16384
    assert got["nbytes"] == expected.nbytes(8, 128, "float16") == 64 * 2**20
    assert got["full_nbytes"] == 2**30
    assert got["saving"] == 1 - 16384 / (32 * 8192)


def test_the_table_states_budget_bytes_and_saving(capsys: Capture) -> None:
    assert cli.main(["plan", *map(str, (*SIZED, *HEADS)), "--groups", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "budget", "bytes"]
    assert lines[1].split()[:4] == ["0", "816", "3.188", "MiB"]
    assert lines[32].split()[:4] == ["31", "208", "832", "KiB"]
    assert len(lines[1].split()[4]) > len(lines[32].split()[4]) > 0
    assert lines[33].startswith("total 16384 positions in 32 layers (pyramid of ratio 4), in multiples of 16")
    assert lines[34] == "64 MiB for 8 key-value heads of 128 float16 elements"
    assert lines[35] == "saves 93.8% of the full cache at 8192 tokens (262144 positions, 1 GiB)"
    assert lines[36] == "group: layers 0 to 7, 752 positions each"
    assert lines[40] == "groups hold 16384 positions, 0 fewer than the plan"


def test_without_heads_there_are_no_bytes(capsys: Capture) -> None:
    got = answer(capsys, "--layers", 4, "--total", 100)
    assert got["nbytes"] is got["dtype"] is got["saving"] is None
    assert got["budgets"] == plan(4, total=100).budgets.tolist()
    assert cli.main(["plan", "--layers", "4", "--total", "100"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["layer", "budget"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--budget", 100, "--shape", "uniform"), plan(4, 100, shape="uniform")),
        (("--budget", 100, "--shape", "geometric", "--ratio", 9), plan(4, 100, shape="geometric", ratio=9)),
        (("--budget", 100, "--beta", 20), plan(4, 100, beta=20)),
        (("--budget", 100, "--weights", "4,3,2.5,1"), plan(4, 100, weights=[4, 3, 2.5, 1])),
        (("--budget", 100, "--min", 60), plan(4, 100, minimum=60)),
        (("--fraction", 0.125, "--sequence", 4096), LayerPlan.from_ratio(0.125, 4096, 4)),
        (("--budget", 900, "--sequence", 1000), plan(4, 900, maximum=1000)),
        (("--budget", 900, "--sequence", 2000, "--max", 1000), plan(4, 900, maximum=1000)),
        (
            ("--memory", "1MiB", *HEADS, "--block", 8),
            LayerPlan.from_memory(2**20, 8, 128, "float16", 4, multiple_of=8),
        ),
    ],
)
def test_every_option_means_what_python_s_does(
    capsys: Capture, arguments: tuple[Any, ...], expected: LayerPlan
) -> None:
    got = answer(capsys, "--layers", 4, *arguments)
    assert {key: got[key] for key in expected.to_dict()} == expected.to_dict()


def test_weights_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text("[4, 3, 2.5, 1]", encoding="utf-8")
    assert answer(capsys, "--layers", 4, "--budget", 100, "--weights", path)["weights"] == [4, 3, 2.5, 1]
    path.write_text("[4, 3, 2.5", encoding="utf-8")
    assert "not JSON" in refusal(capsys, "--layers", 4, "--budget", 100, "--weights", path)
    path.write_text('{"a": 1}', encoding="utf-8")
    assert "must hold a JSON array" in refusal(capsys, "--layers", 4, "--budget", 100, "--weights", path)


def test_a_plan_that_fills_the_maximums_says_so(capsys: Capture) -> None:
    assert cli.main(["plan", "--layers", "2", "--budget", "100", "--max", "50"]) == 0
    assert "requested 200: more than the maximums hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", 0, "--budget", 5), "--layers 0: must be a whole number of 1 or more"),
        (("--layers", -3, "--budget", 5), "--layers -3: must be a whole number of 1 or more"),
        (("--layers", 3, "--total", 2), "total = 2: must be at least 3"),
        (("--layers", 3, "--budget", 5, "--block", 16), "total = 15: must be a multiple of multiple_of = 16"),
        (("--layers", 3, "--budget", 5, "--min", 6, "--max", 5), "minimum = 6: must not exceed maximum = 5"),
        (("--layers", 3, "--budget", 5, "--max", 0), "--max 0: must be a whole number of 1 or more"),
        (("--layers", 3, "--budget", 5, "--sequence", -1), "--sequence -1: must be a whole number of 1 or more"),
        (("--layers", 3, "--budget", 5, "--ratio", 0), "--ratio 0: must be a number or a fraction above 0"),
        (("--layers", 3, "--budget", 5, "--ratio", "nan"), "--ratio nan: must be a number or a fraction above 0"),
        (("--layers", 3, "--budget", 5, "--ratio", 4, "--beta", 20), "ratio = 4.0, beta = 20.0: only one of them"),
        (("--layers", 3, "--budget", 5, "--ratio", 4, "--weights", "3,2,1"), "ratio = 4.0, weights: only one of them"),
        (("--layers", 3, "--budget", 5, "--weights", "1,2"), "weights: has shape (2,), must be (3,)"),
        (("--layers", 3, "--budget", 5, "--weights", "1,x,2"), "--weights 1,x,2: must be numbers with commas"),
        (("--layers", 3, "--budget", 5, "--kv-heads", 8), "--kv-heads, --head-dim: both must be given"),
        (
            ("--layers", 3, "--budget", 5, "--kv-heads", 0, "--head-dim", 8),
            "--kv-heads 0: must be a whole number of 1 or more",
        ),
        (("--layers", 3, "--budget", 5, *HEADS[:4], "--dtype", "float12"), "dtype = 'float12': must be one of"),
        (("--layers", 3, "--budget", 5, "--groups", 0), "--groups 0: must be a whole number of 1 or more"),
        (("--layers", 3, "--memory", "1GiB"), "--memory: needs --kv-heads and --head-dim, or --model"),
        (("--layers", 3, "--memory", "lots", *HEADS), "--memory lots: must be a number and a unit"),
        (("--layers", 3, "--memory", "100", *HEADS), "nbytes = 100: holds 0 positions of 4096 bytes"),
        (("--layers", 3, "--fraction", 0.5), "--fraction: needs --sequence"),
        (
            ("--layers", 3, "--fraction", 2, "--sequence", 9),
            "--fraction 2: must be a percentage above 0% and at most 100%",
        ),
        (("--model", "/nonexistent/config.json", "--budget", 5), "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys: Capture, arguments: tuple[Any, ...], message: str) -> None:
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget", 5),
        ("--layers", 3),
        ("--layers", 3, "--budget", 5, "--total", 15),
        ("--layers", 3, "--model", "x", "--budget", 5),
        ("--layers", 3, "--budget", 5, "--shape", "cone"),
    ],
)
def test_contradictions_have_status_2(capsys: Capture, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", *map(str, arguments)])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 kib", 1536), ("1T", 10**12), ("0.3kB", 300)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XB", "1e9", "i", "1ib", "nan", "1..5", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number and a unit"):
        parse_size(text)


def test_sizes_are_shown_in_a_unit_that_reads() -> None:
    shown = [format_size(n) for n in (0, 1023, 1024, 3 * 2**19, 2**30, 5 * 2**50)]
    assert shown == ["0 B", "1023 B", "1 KiB", "1.5 MiB", "1 GiB", "5120 TiB"]


class TestPlot:
    def test_the_budgets_are_drawn(self, tmp_path: Path, capsys: Capture) -> None:
        pytest.importorskip("matplotlib", reason="needs the plot extra")
        path = tmp_path / "plan.png"
        assert cli.main(["plan", *map(str, SIZED), "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install 'pb-kvcache[plot]'" in refusal(capsys, *SIZED, "--plot", "plan.png")


class TestModel:
    def test_a_model_gives_layers_heads_and_dtype(self, capsys: Capture, tmp_path: Path) -> None:
        got = answer(capsys, "--model", config(tmp_path, LLAMA), "--memory", "64MiB", "--block", 16, "--max", 8192)
        assert got["budgets"] == plan(32, 512, maximum=8192, multiple_of=16).budgets.tolist()
        assert (got["num_kv_heads"], got["head_dim"], got["dtype"], got["family"]) == (8, 128, "bfloat16", "llama")
        assert got["nbytes"] == 64 * 2**20

    def test_a_folder_is_the_file_in_it(self, capsys: Capture, tmp_path: Path) -> None:
        config(tmp_path, LLAMA)
        assert answer(capsys, "--model", tmp_path, "--budget", 512)["num_layers"] == 32

    def test_arguments_overrule_the_file(self, capsys: Capture, tmp_path: Path) -> None:
        got = answer(capsys, "--model", config(tmp_path, LLAMA), "--budget", 512, "--dtype", "int8", "--kv-heads", 4)
        assert (got["num_kv_heads"], got["head_dim"], got["dtype"]) == (4, 128, "int8")

    def test_float8_is_a_dtype_of_the_file_and_of_the_command(self, capsys: Capture, tmp_path: Path) -> None:
        path = config(tmp_path, LLAMA | {"torch_dtype": "float8"})
        one_byte = 2 * 8 * 128 * 512 * 32
        assert answer(capsys, "--model", path, "--budget", 512)["nbytes"] == one_byte
        for name in ("float8", "float8_e4m3fn", "torch.float8_e5m2"):
            assert answer(capsys, "--model", path, "--budget", 512, "--dtype", name)["nbytes"] == one_byte

    def test_sliding_layers_are_left_out(self, capsys: Capture, tmp_path: Path) -> None:
        arguments = ("--model", config(tmp_path, GEMMA3), "--budget", 512, "--sequence", 32768)
        got = answer(capsys, *arguments)
        assert got["planned_layers"] == [5, 11, 17, 23, 29]
        assert got["budgets"] == plan(5, 512, maximum=32768).budgets.tolist()
        assert got["positions"] == 5 * 512 + 29 * 1024
        assert got["full_positions"] == 5 * 32768 + 29 * 1024
        assert got["nbytes"] == got["positions"] * 2 * 4 * 256 * 2
        assert cli.main(["plan", *map(str, arguments)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].split() == ["0", "1024", "4", "MiB", "sliding", "window,", "not", "planned"]
        assert lines[6].split()[:2] == ["5", "819"]
        assert f"with the sliding windows {got['positions']} positions in 34 layers" in lines

    def test_a_window_longer_than_the_sequence_holds_the_sequence(self, capsys: Capture, tmp_path: Path) -> None:
        got = answer(capsys, "--model", config(tmp_path, GEMMA3), "--budget", 100, "--sequence", 600)
        assert got["positions"] == 5 * 100 + 29 * 600

    def test_sliding_layers_come_out_of_the_memory_first(self, capsys: Capture, tmp_path: Path) -> None:
        path = config(tmp_path, GEMMA3)
        windows = 29 * 1024 * 4096
        got = answer(capsys, "--model", path, "--memory", windows + 5 * 512 * 4096, "--sequence", 32768)
        assert got["total"] == 5 * 512
        assert "a sliding window take" in refusal(capsys, "--model", path, "--memory", windows - 1)

    def test_a_model_that_slides_everywhere_is_bounded_by_its_window(self, capsys: Capture, tmp_path: Path) -> None:
        path = config(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": 600})
        got = answer(capsys, "--model", path, "--budget", 512, "--sequence", 8192)
        assert got["budgets"] == plan(32, 512, maximum=600).budgets.tolist()
        assert cli.main(["plan", "--model", str(path), "--budget", "512"]) == 0
        assert "every layer slides over 600 positions" in capsys.readouterr().out

    def test_the_baseline_is_what_the_model_itself_would_hold(self, capsys: Capture, tmp_path: Path) -> None:
        path = config(tmp_path, {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096})
        arguments = ("--model", path, "--budget", 2048, "--sequence", 32768)
        got = answer(capsys, *arguments)
        assert got["full_positions"] == 32 * 4096
        assert got["full_nbytes"] == 32 * 4096 * 2 * 8 * 128 * 2
        assert got["saving"] == 0.5
        assert got["windows"] == [4096] * 32
        assert cli.main(["plan", *map(str, arguments)]) == 0
        assert "saves 50.0% of what the model itself would hold at 32768 tokens" in capsys.readouterr().out
        assert answer(capsys, "--model", path, "--budget", 512, "--sequence", 1024)["saving"] == 0.5


@pytest.mark.parametrize(
    ("content", "shape", "slides"),
    [
        (LLAMA, (32, 8, 128), []),
        (LLAMA | {"head_dim": 64}, (32, 8, 64), []),
        (LLAMA | {"head_dim": None, "num_key_value_heads": None}, (32, 32, 128), []),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, (32, 8, 128), []),
        (LLAMA | {"model_type": "mixtral", "sliding_window": None}, (32, 8, 128), []),
        (LLAMA | {"model_type": "phi"}, (32, 8, 128), []),
        (LLAMA | {"model_type": "phi3", "sliding_window": 2047}, (32, 8, 128), list(range(32))),
        (LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (32, 8, 128), []),
        (
            LLAMA | {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 30},
            (32, 8, 128),
            [30, 31],
        ),
        (LLAMA | {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}, (32, 8, 128), []),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64), []),
        (
            {"model_type": "gemma2", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4},
            (6, 4, 256),
            [0, 2, 4],
        ),
        (GEMMA3, (34, 4, 256), [layer for layer in range(34) if layer % 6 != 5]),
        (
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 7, "head_dim": 32}},
            (7, 4, 32),
            [0, 1, 2, 3, 4, 6],
        ),
        (
            {"model_type": "llava", "text_config": LLAMA | {"layer_types": ["full_attention"] * 32}},
            (32, 8, 128),
            [],
        ),
        (
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (3, 4, 256),
            [0],
        ),
    ],
)
def test_every_family_is_read(content: Any, shape: tuple[int, int, int], slides: list[int], tmp_path: Path) -> None:
    read = read_config(config(tmp_path, content))
    assert (len(read.layers), read.num_kv_heads, read.head_dim) == shape
    assert [layer for layer, cache in enumerate(read.layers) if cache.window is not None] == slides
    assert {cache.elements for cache in read.layers} == {2 * shape[1] * shape[2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (LLAMA | {"rope_theta": float("inf")}, "not JSON"),
        ("[1, 2]", "must be a JSON object, not a list"),
        ({}, "model_type = None: must be a string"),
        ({"model_type": ["llama"]}, "model_type = .* must be a string"),
        ({"model_type": "llava", "text_config": 5}, "text_config: must be an object"),
        ({"model_type": "llama", "num_hidden_layers": None}, "num_hidden_layers = null: must be an integer"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers = 0: must be greater than 0"),
        (LLAMA | {"num_hidden_layers": -2}, "num_hidden_layers = -2: must be between"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers = '32': must be an integer"),
        (LLAMA | {"num_hidden_layers": 32.0}, "num_hidden_layers = 32.0: must be an integer"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers = True: must be an integer"),
        (LLAMA | {"hidden_size": 4097}, "hidden_size = 4097: must be a multiple of num_attention_heads = 32"),
        (LLAMA | {"torch_dtype": "float12"}, "dtype = 'float12': must be one of"),
        (LLAMA | {"torch_dtype": 16}, "dtype = 16: must be a string"),
        (LLAMA | {"layer_types": ["full_attention"]}, "layer_types: must be a list of 32 strings"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, r"layer_types\[0\] = 'linear_attention': must be full"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window: must be given"),
        (
            {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window_pattern": 0},
            "sliding_window_pattern = 0: must be greater",
        ),
    ],
)
def test_foreign_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_config(config(tmp_path, content))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("missing", [(), ("head_dim",), ("num_key_value_heads", "layer_types"), ("sliding_window",)])
def test_known_families_hold_what_transformers_makes_them_hold(
    family: str, missing: tuple[str, ...], tmp_path: Path
) -> None:
    """What the family's own classes cache, with their defaults, is what is known of it without them."""
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    stated = transformers.AutoConfig.for_model(family).to_dict()
    content = {key: value for key, value in stated.items() if key not in missing} | {"model_type": family}
    content = json.loads(json.dumps(content, default=str))
    assert read_config(config(tmp_path, content)).layers == cached_layers(content)[1]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_known_families_have_their_class_s_defaults_for_every_member(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the transformers extra")
    content = {"model_type": family, "vocab_size": 32064}
    assert read_config(config(tmp_path, content)).layers == cached_layers(content)[1]
    if family != "gemma3_text":  # which its own parts alone contain
        nested = {"model_type": "llava", "text_config": content}
        assert read_config(config(tmp_path, nested)).layers == cached_layers(nested)[1]


# ---- curves of heads ----


@pytest.fixture
def curves(tmp_path: Path) -> CurveSet:
    """Write two layers of three heads: the first head of layer 1 wants the most."""
    losses = np.array(
        [[[0.4, 0.2, 0.1], [0.2, 0.1, 0.1], [0.1, 0.1, 0.1]], [[9, 4, 0.5], [0.3, 0.2, 0], [1, 0.5, 0.1]]]
    )
    made = CurveSet([16, 64, 256], losses)
    made.save(tmp_path / "curves.npz")
    made.save(tmp_path / "curves.npy")
    return made


def test_curves_make_a_plan_of_the_heads_at_any_total(curves: CurveSet, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "curves.npz"
    by_budget = answer(capsys, "--curves", file, "--budget", 64)
    assert by_budget["budgets"] == curves.plan(64).budgets.tolist()
    assert by_budget["total"] == 6 * 64
    # 6 heads: 1 MiB is 4096 positions of 64 float16 elements for keys and values, all heads at their most is 1536.
    CurveSet(curves.grid, curves.losses, {"head_dim": 64}).save(tmp_path / "sized.npz")
    sized = answer(capsys, "--curves", tmp_path / "sized.npz", "--memory", "100KiB")
    whole = answer(capsys, "--curves", file, "--memory", "100KiB", "--head-dim", 64)
    assert sized == whole
    whole = answer(capsys, "--curves", file, "--memory", "1MiB", "--head-dim", 64)
    assert whole["budgets"] == [[256] * 3] * 2
    assert whole["nbytes"] == 1536 * 256
    part = answer(capsys, "--curves", file, "--memory", "100KiB", "--head-dim", 64, "--block", 16)
    assert part["total"] == 400
    assert np.array(part["budgets"]).max() == part["budgets"][1][0]
    assert not (np.array(part["budgets"]) % 16).any()
    assert answer(capsys, "--curves", file, "--fraction", 0.25, "--sequence", 200)["total"] == 300
    assert np.max(answer(capsys, "--curves", file, "--budget", 64, "--max", 100)["budgets"]) <= 100
    plain = answer(capsys, "--curves", tmp_path / "curves.npy", "--grid", "16,64,256", "--total", 384)
    assert plain["budgets"] == by_budget["budgets"]


def test_a_plan_of_heads_is_shown_written_and_drawn(curves: CurveSet, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "plan.json", tmp_path / "heads.png"
    arguments = ["--curves", tmp_path / "curves.npz", "--budget", 64, "--head-dim", 64, "--sequence", 1024]
    assert cli.main(["plan", *map(str, arguments), "-o", str(output), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out.splitlines()
    heads = curves.plan(64)
    assert load_plan(output) == heads
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert shown[:5] == heads.picture().splitlines()
    assert shown[5:] == [
        "total 384 positions in 2 layers of 3 KV heads, 64.0 each",
        "96 KiB for heads of 64 float16 elements",
        "saves 93.8% of the full cache at 1024 tokens",
    ]
    assert cli.main(["plan", "--layers", "4", "--budget", "64", "-o", str(output)]) == 0
    assert load_plan(output) == plan(4, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", 64, "--ratio", 2], "--curves and --ratio: the curves already say"),
        (["--budget", 64, "--kv-heads", 2], "--curves and --kv-heads"),
        (["--memory", "1MiB"], "--memory: needs --head-dim"),
        (["--fraction", 0.5], "--fraction: needs --sequence"),
        (
            ["--budget", 8],
            "budget = 8: in 6 heads it is 48 in all, and must be at least 96, the sum of the 6 minimums, ",
        ),
        (
            ["--fraction", 0.01, "--sequence", 800],
            "in 6 heads it is 48 in all, and must be at least 96, the sum of the 6 minimums, that is",
        ),
        (
            ["--memory", "1KiB", "--head-dim", 8],
            "holds 32 positions of 32 bytes, and must be at least 96, the sum of the 6 minimums, that is 3072 bytes",
        ),
        (["--budget", 64, "--grid", "1,2"], "not a plain array"),
        (["--budget", 64, "--grid", "1,x"], "--grid 1,x: must be integers"),
    ],
)
def test_what_does_not_go_with_curves_is_refused(
    curves: CurveSet, arguments: list[object], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert message in refusal(capsys, "--curves", tmp_path / "curves.npz", *arguments)


def test_a_grid_without_curves_is_refused(capsys: Capture) -> None:
    assert "--grid: is of curves" in refusal(capsys, "--layers", 4, "--budget", 8, "--grid", "1,2")
