"""Traces: the registry's, bit for bit; synthetic ones of a known sign; files, whole and broken."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache.lab import traces
from pb_kvcache.lab.traces import PackedTrace, Trace


@pytest.fixture(scope="module")
def decode() -> PackedTrace:
    return traces.decode_4096()


def small_trace(num_layers: int = 3, length: int = 20, seed: int = 0) -> PackedTrace:
    rng = np.random.default_rng(seed)
    attention = np.tril(rng.random((num_layers, length, length)) ** 4)
    attention /= attention.sum(axis=2, keepdims=True)
    metadata = {"num_kv_heads": 2, "head_dim": 4, "kv_dtype": "float16", "text": {"licence": "none"}}
    return traces.pack("small", attention.astype(np.float16), metadata)


def same(one: Trace, other: Trace) -> bool:
    return (one.num_layers, one.length) == (other.num_layers, other.length) and all(
        np.array_equal(one.rows(step), other.rows(step)) for step in range(1, one.length)
    )


# --- decode-4096


def test_decode_4096_is_the_registrys_trace_bit_for_bit(decode: PackedTrace) -> None:
    digest = 2166136261
    for byte in decode.weights.astype("<f4").tobytes():
        digest = ((digest ^ byte) * 16777619) & 0xFFFFFFFF
    assert digest == 3136039440


def test_decode_4096_gives_rows_of_one_layer(decode: PackedTrace) -> None:
    assert (decode.num_layers, decode.length, decode.steps) == (1, 4096, 4095)
    for step in (1, 2, 127, 128, 4095):
        rows = decode.rows(step)
        assert rows.shape == (1, step)
        assert rows.dtype == np.float32
        assert rows.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    for step in (0, 4096):
        with pytest.raises(IndexError, match=f"step = {step}: must be between 1 and 4095"):
            decode.rows(step)


# --- funnel


def test_funnel_is_the_same_at_every_call_and_another_with_another_seed() -> None:
    assert same(traces.funnel(4, 200), traces.funnel(4, 200))
    assert not same(traces.funnel(4, 200), traces.funnel(4, 200, seed=2))


def test_funnel_layers_narrow_as_the_widths_say() -> None:
    trace = traces.funnel(5, 600, widths=(9, 1), local_mass=0.0)
    assert trace.metadata["widths"] == [9, 7, 5, 3, 1]
    rows = trace.rows(599)
    assert [int((row > 0).sum()) // 16 for row in rows] == [9, 7, 5, 3, 1]
    np.testing.assert_allclose(rows.sum(axis=1, dtype=np.float64), 1, rtol=1e-5)


def test_funnel_attends_to_positions_before_the_step_alone() -> None:
    trace = traces.funnel(2, 100, widths=(3, 1), local_mass=0.5)
    for step in range(1, 100):
        rows = trace.rows(step)
        assert rows.shape == (2, step)
        np.testing.assert_allclose(rows.sum(axis=1, dtype=np.float64), 1, rtol=1e-5)


def test_funnel_heavy_phrases_never_come_back() -> None:
    trace = traces.funnel(3, 400, widths=(4, 1), local_mass=0.0)
    for layer in range(3):
        weights = np.zeros((400, 400))
        for step in range(1, 400):
            weights[step, :step] = trace.rows(step)[layer]
        for pos in range(399):
            heavy = weights[pos + 1 :, pos] > 0
            assert not np.any(heavy[1:] & ~heavy[:-1]), pos


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"num_layers": 2**32 - 1}, "num_layers = 4294967295: must be greater than 0 and at most 65536"),
        ({"length": 1}, "length = 1"),
        ({"widths": (3, 0)}, r"widths\[1\] = 0"),
        ({"num_layers": 4, "widths": (3, 2, 1)}, "widths: has 3 values, must have 2, or one for each of the 4 layers"),
        ({"local_mass": 1.5}, r"local_mass = 1.5"),
        ({"local_mass": float("nan")}, r"local_mass = nan"),
        ({"seed": 2**32}, "seed = 4294967296"),
    ],
)
def test_funnel_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        traces.funnel(**{"num_layers": 2, "length": 50, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_mass": "0.5"}, "local_mass = '0.5': must be a real number, not str"),
        ({"local_mass": None}, "local_mass = None: must be a real number"),
        ({"local_mass": np.complex64(0.5)}, "local_mass = .*: must be a real number, not complex64"),
        ({"widths": 5}, "widths: must be a sequence of integers: "),
        ({"widths": (3.0, 1)}, r"widths: must be a sequence of integers: widths\[0\] = 3.0"),
    ],
)
def test_funnel_refuses_what_is_no_number(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        traces.funnel(2, 50, **arguments)  # type: ignore[arg-type]


# --- traces


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_top_takes_the_largest_and_the_lower_position_on_a_tie(step: int, seed: int, levels: int) -> None:
    weights = np.random.default_rng(seed).integers(0, levels, (1, step + 1, step + 1)) / (levels * (step + 1))
    weights[weights == 0] *= -1.0  # minus zero ties with zero
    trace = traces.pack("ties", weights.astype(np.float32))
    row = trace.rows(step)[0]
    wanted = sorted(range(step), key=lambda pos: (-row[pos], pos))[: traces.TOP]
    assert sorted(trace.top(step)[0].tolist()) == sorted(wanted)


def test_pack_averages_heads_and_keeps_what_is_below_the_diagonal() -> None:
    attention = np.full((1, 2, 3, 3), 0.25)
    attention[0, 1] = 0.125
    attention[0, :, 0, 1] = 9.0  # above the diagonal: of no account
    trace = traces.pack("heads", attention)
    assert trace.rows(2).tolist() == [[0.1875, 0.1875]]


@pytest.mark.parametrize(
    ("attention", "error", "message"),
    [
        (np.zeros((2, 3)), ValueError, r"has shape \(2, 3\), must be \(num_layers\[, heads\], length, length\)"),
        (np.zeros((2, 3, 4)), ValueError, r"has shape \(2, 3, 4\)"),
        (np.zeros((0, 3, 3)), ValueError, "num_layers = 0"),
        (np.zeros((2, 1, 1)), ValueError, "length = 1"),
        (np.zeros((2, 0, 3, 3)), ValueError, r"has shape \(2, 0, 3, 3\)"),
        (np.zeros((1, 3, 3), complex), TypeError, "must be real numbers"),
        (np.ma.zeros((1, 3, 3)), TypeError, "attention: must be .* not a masked one"),
        ([[[0.0], [0.0, 0.0]]], TypeError, "attention: must be an array of real numbers: "),
        (np.full((1, 3, 3), 1e300), ValueError, "step 1, layer 0, position 0: weight inf must be finite"),
        (np.array([[[0, 0, 0], [0.5, 0, 0], [np.inf, -np.inf, 0]]]), ValueError, "step 2, layer 0, position 0: weight"),
        (np.full((1, 2, 3, 3), [[[np.inf]], [[-np.inf]]]), ValueError, "step 1, layer 0, position 0: weight nan must"),
        (np.full((1, 3, 3), np.nan), ValueError, "step 1, layer 0, position 0: weight nan must be finite"),
        (np.full((1, 3, 3), -0.5), ValueError, "step 1, layer 0, position 0: weight -0.5 must be finite and >= 0"),
        (np.full((1, 3, 3), 0.6), ValueError, "step 2, layer 0: weights that sum to 1.2, must sum to at most 1"),
        (np.full((1, 3, 3), np.inf), ValueError, "weight inf must be finite"),
    ],
)
def test_pack_refuses(attention: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        traces.pack("bad", attention)


def test_packed_trace_refuses_another_size_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"has shape \(5,\), must be \(6,\) for 2 layers and 3 positions"):
        PackedTrace("bad", 2, 3, np.zeros(5, np.float32))
    with pytest.raises(TypeError, match="float16 or float32"):
        PackedTrace("bad", 2, 3, np.zeros(6))


def test_a_layer_is_its_rows_one_after_the_other() -> None:
    for trace in (small_trace(), traces.funnel(3, 20, widths=(1, 1))):
        for layer in range(3):
            wanted = np.concatenate([trace.rows(step)[layer] for step in range(1, 20)])
            assert np.array_equal(trace.layer(layer), wanted)
        for layer in (-1, 3):
            with pytest.raises(IndexError, match=f"layer = {layer}: must be between 0 and 2"):
                trace.layer(layer)


def test_what_a_trace_hands_out_cannot_be_changed() -> None:
    weights = np.full(3, 0.25, np.float32)
    trace = PackedTrace("mine", 1, 3, weights)
    with pytest.raises(ValueError, match="read-only"):
        trace.rows(2)[0, 0] = 1
    weights[0] = 0.5  # the caller's own array can


def test_bytes_per_position_counts_keys_and_values_of_one_layer() -> None:
    assert small_trace().bytes_per_position == 2 * 2 * 4 * 2
    assert traces.funnel(1, 10).bytes_per_position is None
    for elements, expected in ((24, 48), ([24, 64], None)):
        metadata = {"kv_elements": elements, "kv_dtype": "float16"}
        assert traces.pack("t", np.zeros((2, 1, 3, 3), np.float32), metadata=metadata).bytes_per_position == expected
    with pytest.raises(ValueError, match="kv_dtype = 'int3': must be one of float64, float32"):
        traces.pack("bad", np.zeros((1, 2, 2)), {"num_kv_heads": 1, "head_dim": 1, "kv_dtype": "int3"})
    with pytest.raises(ValueError, match="kv_elements = 0"):
        traces.pack("bad", np.zeros((1, 2, 2)), {"kv_elements": [8, 0], "kv_dtype": "int8"})
    with pytest.raises(ValueError, match="head_dim = 0"):
        traces.pack("bad", np.zeros((1, 2, 2)), {"num_kv_heads": 1, "head_dim": 0, "kv_dtype": "int8"})


def test_a_trace_can_be_sent_to_another_process() -> None:
    trace = small_trace()
    trace.top(5)
    assert same(pickle.loads(pickle.dumps(trace)), trace)


def test_named_lists_the_known_names() -> None:
    assert traces.named("funnel").num_layers == 16
    with pytest.raises(ValueError, match="no such trace; known: smollm2-135m, decode-4096, funnel"):
        traces.named("funel")
    with pytest.raises(ValueError, match="no such recording; known: smollm2-135m"):
        traces.recorded("gpt")


# --- files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    traces.save(path, small_trace())
    return path.read_bytes()


def test_a_saved_trace_loads_as_it_was(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(saved)
    trace = traces.load(path)
    original = small_trace()
    assert same(trace, original)
    assert trace.name == "small"
    assert trace.metadata == original.metadata
    assert same(traces.named(path), original)


def test_saving_again_gives_the_same_bytes(tmp_path: Path, saved: bytes) -> None:
    (tmp_path / "one.npz").write_bytes(saved)
    traces.save(tmp_path / "two.npz", traces.load(tmp_path / "one.npz"))
    assert (tmp_path / "two.npz").read_bytes() == saved


def test_a_trace_file_is_a_plain_npz(tmp_path: Path, saved: bytes) -> None:
    with np.load(io.BytesIO(saved), allow_pickle=False) as members:
        assert sorted(members.files) == ["layer_000", "layer_001", "layer_002", "metadata"]
        planes = members["layer_001"]
    # As the module documents it: position by position, high bytes and then low ones.
    weights = iter((planes[0].astype(np.uint16) << 8 | planes[1]).view(np.float16))
    original = small_trace()
    for pos in range(19):
        for step in range(pos + 1, 20):
            assert next(weights) == original.rows(step)[1, pos]


def test_save_streams_a_trace_that_is_not_packed(tmp_path: Path) -> None:
    trace = traces.funnel(2, 60, widths=(2, 1))
    traces.save(tmp_path / "f.npz", trace)
    loaded = traces.load(tmp_path / "f.npz")
    for step in range(1, 60):
        assert np.array_equal(loaded.rows(step), trace.rows(step).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("weight", [np.nan, -0.1, 1e9])
def test_what_load_would_refuse_is_not_saved(tmp_path: Path, weight: float) -> None:
    class Odd(Trace):
        def rows(self, step: int) -> np.ndarray:
            return np.full((2, step), weight if step == 3 else 0, np.float32)

    with pytest.raises(ValueError, match="odd: layer 0 has weights that are not between 0 and 1"):
        traces.save(tmp_path / "odd.npz", Odd("odd", 2, 5))
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_load_would_refuse_are_not_saved(tmp_path: Path) -> None:
    for metadata, message in (
        ({"note": float("nan")}, "not JSON compliant"),
        ({"token_ids": [0] * 400_000}, "metadata: [0-9]+ bytes of JSON, must be at most 1048576"),
    ):
        with pytest.raises(ValueError, match=message):
            traces.save(tmp_path / "t.npz", traces.pack("t", np.zeros((1, 3, 3)), metadata))
    assert not list(tmp_path.iterdir())


def test_top_of_rows_in_another_precision_is_the_same() -> None:
    class Doubles(Trace):
        def rows(self, step: int) -> np.ndarray:
            return np.arange(step, dtype=np.float64)[None] / 10**4

    assert sorted(Doubles("mine", 1, 60).top(50)[0].tolist()) == list(range(18, 50))


def test_a_save_touches_no_other_file_and_two_at_once_are_both_whole(tmp_path: Path) -> None:
    class Meanwhile(Trace):
        """A trace that is saved a second time while it is being saved."""

        def layer(self, layer: int) -> np.ndarray:
            if self.name == "first":
                traces.save(tmp_path / "t.npz", Meanwhile("second", 1, 5))
            return super().layer(layer)

        def rows(self, step: int) -> np.ndarray:
            return np.full((1, step), 0.125, np.float32)

    (tmp_path / "t.npz.part").write_text("mine")
    traces.save(tmp_path / "t.npz", Meanwhile("first", 1, 9))
    assert traces.load(tmp_path / "t.npz").length == 9
    assert (tmp_path / "t.npz.part").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    class Broken(Trace):
        def rows(self, step: int) -> np.ndarray:
            if step == 3:
                raise OSError("no more")
            return np.zeros((1, step), np.float32)

    path = tmp_path / "t.npz"
    path.write_bytes(b"precious")
    with pytest.raises(OSError, match="no more"):
        traces.save(path, Broken("broken", 1, 5))
    assert path.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_or_changed_file_is_refused_or_unharmed(
    tmp_path_factory: pytest.TempPathFactory, saved: bytes, data: st.DataObject
) -> None:
    content = bytearray(saved)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    try:
        trace = traces.load(path)
    except ValueError as error:
        message = str(error)
    else:  # a byte that nothing depends on, such as a date
        message = "damaged.npz"
        assert same(trace, small_trace())
    assert "damaged.npz" in message


def rewritten(saved: bytes, changes: dict[str, bytes | None], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as old, zipfile.ZipFile(out, "w", method) as new:
        members = {name: old.read(name) for name in old.namelist()} | changes
        for name, content in members.items():
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=array.dtype == object)
    return out.getvalue()


def with_metadata(saved: bytes, **changes: object) -> bytes:
    with np.load(io.BytesIO(saved)) as members:
        metadata = json.loads(members["metadata"].tobytes()) | changes
    return rewritten(saved, {"metadata.npy": npy(np.frombuffer(json.dumps(metadata).encode(), np.uint8))})


def twice(saved: bytes, name: str) -> bytes:
    out = io.BytesIO(saved)
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(name, archive.read(name))
    return out.getvalue()


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


NEGATIVE = b"{'descr': '|u1', 'fortran_order': False, 'shape': (-5,), }"


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n"


def layer(weight: float | list[float], count: int = 190) -> bytes:
    bits = np.full(count, weight, np.float16).view(np.uint16)
    return npy(np.stack([(bits >> 8).astype(np.uint8), (bits & 255).astype(np.uint8)]))


def broken_files() -> list[tuple[str, object, str]]:
    return [
        ("empty", lambda s: b"", "not a trace file"),
        ("text", lambda s: b"hello", "not a trace file"),
        ("foreign npz", lambda s: rewritten(s, {"metadata.npy": None}), "it has no member metadata.npy"),
        ("no json", lambda s: rewritten(s, {"metadata.npy": npy(np.zeros(9, np.uint8))}), "metadata: not JSON"),
        (
            "deep json",
            lambda s: rewritten(s, {"metadata.npy": npy(np.full(10**5, 91, np.uint8))}),
            "metadata: not JSON",
        ),
        ("other json", lambda s: rewritten(s, {"metadata.npy": npy(np.frombuffer(b"[1]", np.uint8))}), "not a pb_kv"),
        ("other format", lambda s: with_metadata(s, format="x"), "not a pb_kvcache trace"),
        ("later version", lambda s: with_metadata(s, format_version=2), "format_version = 2: this version reads 1"),
        (
            "missing layer",
            lambda s: rewritten(s, {"layer_001.npy": None}),
            "3 layers are announced, and layer_001.npy is mis",
        ),
        ("extra layer", lambda s: with_metadata(s, num_layers=2), "layer_002.npy does not belong there"),
        ("fewer layers", lambda s: with_metadata(s, num_layers=4), "layer_003.npy is missing"),
        ("no layers", lambda s: with_metadata(s, num_layers=0), "0 layers"),
        ("layers no number", lambda s: with_metadata(s, num_layers="3"), "num_layers = '3': must be an integer"),
        ("length a bool", lambda s: with_metadata(s, length=True), "length = True: must be an integer"),
        ("negative length", lambda s: with_metadata(s, length=-3), "length = -3"),
        ("length 1", lambda s: with_metadata(s, length=1), "1 positions: must be at least 1 and 2"),
        (
            "another length",
            lambda s: with_metadata(s, length=21),
            r"has shape \(2, 190\) and dtype uint8, must be \(2, 210\)",
        ),
        ("huge length", lambda s: with_metadata(s, length=2**32 - 1), "cannot come out of a file of"),
        ("many layers", lambda s: with_metadata(s, num_layers=2**32 - 1), "4294967295 layers are announced"),
        ("bad kv", lambda s: with_metadata(s, head_dim="a"), "head_dim = 'a': must be an integer"),
        (
            "float16 layer",
            lambda s: rewritten(s, {"layer_000.npy": npy(np.zeros((2, 190), np.float16))}),
            "dtype float16",
        ),
        (
            "fortran",
            lambda s: rewritten(s, {"layer_000.npy": npy(np.zeros((2, 190), np.uint8, order="F"))}),
            "layer_000",
        ),
        (
            "pickle",
            lambda s: rewritten(s, {"layer_000.npy": npy(np.array([{}, 1], object))}),
            "layer_000.npy: has shape",
        ),
        ("no npy", lambda s: rewritten(s, {"layer_000.npy": b"12345678901234567890"}), "layer_000.npy"),
        ("short", lambda s: rewritten(s, {"layer_000.npy": layer(0)[:-1]}), r"holds 379 bytes or more, must be 380"),
        ("long", lambda s: rewritten(s, {"layer_000.npy": layer(0) + b"x"}), r"holds 381 bytes or more, must be 380"),
        (
            "nan",
            lambda s: rewritten(s, {"layer_002.npy": layer(np.nan)}),
            "step 1, layer 2, position 0: weight nan must",
        ),
        (
            "infinite",
            lambda s: rewritten(s, {"layer_002.npy": layer(np.inf)}),
            "step 1, layer 2, position 0: weight inf",
        ),
        (
            "both infinities",
            lambda s: rewritten(s, {"layer_002.npy": layer([np.inf, -np.inf] * 95)}),
            "weight inf must",
        ),
        ("two of a name", lambda s: twice(s, "layer_001.npy"), "holds a member twice"),
        ("nan in json", lambda s: with_metadata(s, note=float("nan")), "metadata: not JSON: NaN"),
        (
            "kv no name",
            lambda s: with_metadata(s, num_kv_heads=1, head_dim=1, kv_dtype=[]),
            r"kv_dtype = \[\]: must be",
        ),
        ("endless header", lambda s: rewritten(s, {"layer_000.npy": header(b"(" * 5000)}), "bad.npz: .*"),
        ("deep header", lambda s: rewritten(s, {"layer_000.npy": header(b"-" * 5000 + b"1")}), "bad.npz: .*"),
        ("less than none", lambda s: rewritten(s, {"metadata.npy": header(NEGATIVE)}), "metadata.npy: has shape"),
        ("damaged lzma", lambda s: flipped(rewritten(s, {}, zipfile.ZIP_LZMA), 80), "a damaged one"),
        ("damaged bzip2", lambda s: flipped(rewritten(s, {}, zipfile.ZIP_BZIP2), 80), "a damaged one"),
        ("negative", lambda s: rewritten(s, {"layer_002.npy": layer(-1)}), "step 1, layer 2, position 0: weight -1.0"),
        ("logits", lambda s: rewritten(s, {"layer_002.npy": layer(1)}), "step 2, layer 2: weights that sum to 2"),
    ]


@pytest.mark.parametrize(("what", "make", "message"), broken_files(), ids=[case[0] for case in broken_files()])
def test_load_refuses_and_says_why(tmp_path: Path, saved: bytes, what: str, make: object, message: str) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(make(saved))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as caught:
        traces.load(path)
    assert "bad.npz" in str(caught.value)


def test_load_reads_no_more_than_was_announced(tmp_path: Path, saved: bytes) -> None:
    # 256 MiB of zeros deflate to 260 KB; a header may claim anything.
    bomb = rewritten(saved, {"layer_000.npy": layer(0) + bytes(1 << 28), "metadata.npy": None})
    with np.load(io.BytesIO(saved)) as members:
        metadata = npy(members["metadata"])
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 9999999999999), }".ljust(117) + b"\n"
    claim = rewritten(saved, {"layer_000.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header})
    for content in (rewritten(bomb, {"metadata.npy": metadata}), claim):
        path = tmp_path / "bomb.npz"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=r"layer_000\.npy"):
                traces.load(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_numpy_s_error_settings_of_the_caller_change_nothing(tmp_path: Path) -> None:
    def work() -> list[list[float]]:
        trace = traces.pack("t", np.full((1, 3, 3), 1e-42))
        traces.save(tmp_path / "t.npz", trace)
        made = traces.funnel(1, 4, local_mass=1e-310)
        return [t.rows(2).tolist() for t in (trace, traces.load(tmp_path / "t.npz"), made)]

    usual = work()
    with np.errstate(all="raise"):
        assert work() == usual


def test_load_says_that_a_file_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere\.npz"):
        traces.load(tmp_path / "nowhere.npz")
