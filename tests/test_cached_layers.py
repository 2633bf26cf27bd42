"""What a model caches, by family: as worked out by hand, as planned from its file, as recorded from a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import cli
from pb_kvcache._meta_run import cached_layers
from pb_kvcache._model_config import read_config
from pb_kvcache.lab import record, traces

from .small_families import FAMILIES, GEMMA4, B

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")

IDS = [(7 * i * i + 3 * i) % 60 + 3 for i in range(40)]


@pytest.fixture(autouse=True)
def _known_release() -> None:
    """Earlier releases have caches of their own for hybrids, and expand latent attention."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    if (major, minor) < (5, 24):
        pytest.skip("figures of transformers 5.24")


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, *arguments: object) -> dict[str, Any]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert cli.main(["plan", "--model", str(path), *map(str, arguments), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert isinstance(got, dict)
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_without_weights_shows_what_every_layer_caches(family: str) -> None:
    content, expected = FAMILIES[family]
    assert [(layer.elements, layer.window) for layer in cached_layers(content)[1]] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_that_caches_is_recorded_as_the_model_attends(
    family: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import torch

    content, expected = FAMILIES[family]
    config = transformers.AutoConfig.for_model(**content)
    torch.manual_seed(3)
    kind = transformers.AutoModelForImageTextToText if family == "mllama" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    layers = config.get_text_config(decoder=True).num_hidden_layers
    monkeypatch.setattr(record, "_PIECE_BYTES", 7 * 4 * layers * 4 * 40)  # seven tokens at a time
    trace = record.record_ids(model, IDS)

    holding = [layer for layer, (elements, _) in enumerate(expected) if elements]
    assert (trace.metadata["layers"], trace.metadata["model_layers"]) == (holding, len(expected))
    sizes = {expected[layer][0] for layer in holding}
    assert trace.bytes_per_position == (2 * sizes.pop() if len(sizes) == 1 else None)
    with torch.inference_mode():
        whole = model(torch.tensor([IDS]), output_attentions=True).attentions
    if len(whole) == len(expected):
        whole = [whole[layer] for layer in holding]
    rows = [attention[0].float().numpy() for attention in whole if attention is not None]
    wanted = traces.pack("whole", np.stack(rows))
    for step in range(1, 40):
        np.testing.assert_allclose(trace.rows(step), wanted.rows(step), atol=2e-3)


class TestPlan:
    def test_layers_without_keys_are_no_part_of_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        got = planned(tmp_path, capsys, FAMILIES["lfm2"][0], "--budget", 100, "--sequence", 1000)
        assert (got["planned_layers"], got["layers_without_cache"]) == ([1, 3], [0, 2])
        assert (got["positions"], got["full_positions"], got["saving"]) == (200, 2000, 0.9)
        assert got["full_nbytes"] == 2 * 1000 * 64 * 2
        assert cli.main(["plan", "--model", str(tmp_path), "--budget", "100"]) == 0
        out = capsys.readouterr().out
        assert "no keys and values of its own" in out
        assert "2 layers hold no keys and values of the prompt" in out

    def test_latent_attention_costs_what_it_caches(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = FAMILIES["deepseek_v3"][0]
        got = planned(tmp_path, capsys, content, "--memory", 4 * 100 * 24 * 2, "--dtype", "bfloat16")
        assert (got["total"], got["nbytes"]) == (400, 4 * 100 * 24 * 2)
        assert (got["num_kv_heads"], got["head_dim"], got["elements_per_position"]) == (None, None, [24] * 4)
        assert cli.main(["plan", "--model", str(tmp_path), "--budget", "9"]) == 0
        assert "24 float16 elements a position and layer" in capsys.readouterr().out

    def test_layers_of_two_sizes_are_counted_in_bytes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        got = planned(tmp_path, capsys, GEMMA4 | {"num_kv_shared_layers": 2}, "--budget", 50, "--sequence", 100)
        assert got["nbytes"] == (8 * 64 + 50 * 128) * 2
        assert got["full_nbytes"] == (8 * 64 + 100 * 128) * 2
        assert got["saving"] == 1 - got["nbytes"] / got["full_nbytes"]
        mimo = {"model_type": "mimo_v2_flash", "head_dim": 16, "v_head_dim": 16}
        assert len(planned(tmp_path, capsys, B | mimo, "--budget", 50)["planned_layers"]) == 1

    def test_heads_given_by_hand_overrule_every_layer_that_holds(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = FAMILIES["lfm2"][0]
        got = planned(tmp_path, capsys, content, "--budget", 10, "--kv-heads", 1, "--head-dim", 8)
        assert got["elements_per_position"] == [0, 16, 0, 16]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "nothing"}, "model_type = 'nothing': transformers .* has no such family"),
        (B | {"model_type": "falcon", "hidden_size": "many"}, "transformers .* refuses it: .*hidden_size"),
        (
            {"model_type": "falcon", "num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000: must be greater than 0",
        ),
        ({"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2}, "no layer of it holds keys and values"),
        (B | {"model_type": "deepseek_v4", "head_dim": 16}, "cannot run it without its weights: .*give --layers"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_extra_it_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "config.json").write_text(json.dumps(B | {"model_type": "falcon"}), encoding="utf-8")
    with pytest.raises(
        ImportError, match=rf"config.json: .*'falcon': is read with {missing}.*pb-kvcache\[transformers\]"
    ):
        read_config(tmp_path)
    nested = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    (tmp_path / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    assert len(read_config(tmp_path).layers) == 32  # a common family needs neither


def test_warnings_and_settings_are_as_they_were(recwarn: pytest.WarningsRecorder) -> None:
    import torch

    def settings() -> tuple[Any, ...]:
        return transformers.logging.get_verbosity(), torch.distributions.Distribution._validate_args, torch.autocast

    before = settings()
    with pytest.raises(ValueError, match="has no such family"):
        cached_layers({"model_type": "nothing"})
    cached_layers(FAMILIES["gemma3n"][0])
    assert settings() == before
    assert torch.empty(1).device.type == "cpu"
    assert not recwarn.list
