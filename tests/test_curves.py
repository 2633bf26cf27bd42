"""``CurveSet``: measured curves in memory and in files, and the plans that follow from them at any total."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pb_kvcache import CurveSet, divide, load_plan, plan, save_plan

GRID = [16, 64, 256]
LOSSES = np.array([[[0.8, 0.1, 0.0], [0.9, 0.8, 0.1]], [[0.3, 0.2, -0.0], [1e-300, 0.0, 0.0]]])
MEASURED = {"model": "a \ud800 model", "prompts": 24, "share": 0.1, "warm": True, "note": None}


@st.composite
def curve_sets(draw: st.DrawFn) -> CurveSet:
    grid = sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=6)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), len(grid))
    finite = st.floats(-1e6, 1e6)
    flat = draw(st.lists(finite, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return CurveSet(grid, np.array(flat).reshape(shape), draw(st.dictionaries(st.text(max_size=5), finite, max_size=2)))


def npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, content in members.items():
            written.writestr(name + ".npy", content)
    return file.getvalue()


def test_curves_cannot_be_changed() -> None:
    given_losses = LOSSES.copy()
    curves = CurveSet(GRID, given_losses, MEASURED)
    given_losses[:] = 5
    curves.measured["model"] = "another"
    assert curves.measured == MEASURED
    for twin in (curves, copy.deepcopy(curves), pickle.loads(pickle.dumps(curves))):
        assert twin == curves
        assert hash(twin) == hash(curves)
        assert np.array_equal(twin.losses, LOSSES)
        for array in (twin.grid, twin.losses):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    assert curves != CurveSet(GRID, LOSSES)
    assert curves != "curves"
    assert repr(curves) == "<CurveSet: 2 layers of 2 KV heads, 3 points, 16 .. 256>"


def test_a_plan_is_what_divide_makes_of_the_curves() -> None:
    curves = CurveSet(GRID, LOSSES)
    assert curves.plan(100) == curves.plan(total=400) == divide(GRID, LOSSES, 400)
    assert curves.plan(96, multiple_of=16, minimum=32) == divide(GRID, LOSSES, 384, multiple_of=16, minimum=32)
    assert curves.layer_curves().tolist() == [[0.8 + 0.9, 0.1 + 0.8, 0.0 + 0.1], [0.3 + 1e-300, 0.2, 0.0]]
    assert curves.layer_plan(100) == divide(GRID, curves.layer_curves(), 200)
    with pytest.raises(ValueError, match="budget, total: one of them must be given"):
        curves.plan()
    with pytest.raises(ValueError, match="budget = 3, total = 4: only one"):
        curves.plan(3, total=4)
    with pytest.raises(ValueError, match="budget = 10: in 4 heads it is 40 in all, and must be at least 64"):
        curves.plan(10)
    with pytest.raises(ValueError, match=r"losses.* = inf: must be finite"):
        CurveSet([1], np.full((1, 2, 1), 1e308)).layer_plan(1)


@settings(max_examples=100, deadline=None)
@given(curve_sets(), st.data())
def test_every_total_is_kept_and_more_takes_from_no_head(curves: CurveSet, data: st.DataObject) -> None:
    units, low, high = curves.num_layers * curves.num_kv_heads, int(curves.grid[0]), int(curves.grid[-1])
    total = data.draw(st.integers(units * low, units * high))
    more = data.draw(st.integers(total, units * high))
    first, second = curves.plan(total=total), curves.plan(total=more)
    assert (first.total, second.total) == (total, more)
    assert first.budgets.min() >= low
    assert second.budgets.max() <= high
    # A head's curve is bought from its cheapest end on, in one order for all totals, save within a tie.
    slopes = -np.diff(curves.losses, axis=2) / np.diff(curves.grid.astype(float))
    if len(np.unique(slopes)) == slopes.size and (np.diff(slopes, axis=2) < 0).all():
        assert (first.budgets <= second.budgets).all()


@settings(max_examples=30, deadline=None)
@given(curve_sets())
def test_files_bring_back_every_bit(curves: CurveSet) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, plain = Path(folder, "curves.npz"), Path(folder, "curves.npy")
        curves.save(whole)
        curves.save(plain)
        first = whole.read_bytes()
        for read in (CurveSet.load(whole), CurveSet.load(plain, curves.grid)):
            assert read.losses.tobytes() == curves.losses.tobytes()
            assert read.grid.tobytes() == curves.grid.tobytes()
        assert CurveSet.load(whole) == curves
        CurveSet.load(whole).save(whole)
        assert whole.read_bytes() == first
        points = np.load(plain, allow_pickle=False)
        assert points.shape == (len(curves.grid), curves.num_layers, curves.num_kv_heads)
        assert points[-1, 0, 0] == curves.losses[0, 0, -1]
        assert np.array_equal(np.load(whole, allow_pickle=False)["losses"], curves.losses)


def test_what_others_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "curves.npz"
    np.savez_compressed(path, grid=np.array(GRID), losses=np.asfortranarray(LOSSES, ">f8"))
    assert CurveSet.load(path) == CurveSet(GRID, LOSSES)
    plain = tmp_path / "curves"  # what it is shows in its bytes
    plain.write_bytes(npy(np.moveaxis(LOSSES, 2, 0).astype(np.float32)))
    assert CurveSet.load(plain, GRID) == CurveSet(GRID, LOSSES.astype(np.float32))
    with pytest.raises(ValueError, match=r"curves: a plain array has no budgets; give them with grid="):
        CurveSet.load(plain)
    with pytest.raises(ValueError, match=r"curves\.npz: not a plain array; .* leave it out"):
        CurveSet.load(path, GRID)
    with pytest.raises(ValueError, match=r"curves: .*losses: has shape \(2, 2, 3\), must be \(layers, heads, 2\)"):
        CurveSet.load(plain, GRID[:2])


_MAKERS = [pickle.dumps({"grid": 1}), b"", b"PK", b"\x93NUMPY", b"text", b"PK\x03\x04" + bytes(200)]
_GRID, _LOSSES = npy(np.array(GRID)), npy(LOSSES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "") for content in _MAKERS),
        (archive(losses=_LOSSES), "no member grid.npy"),
        (archive(grid=_GRID), "no member losses.npy"),
        (archive(grid=_GRID, losses=_LOSSES, other=_GRID), "'other.npy' does not belong there"),
        (archive(grid=_GRID, losses=npy(LOSSES[0])), r"has shape \(2, 3\), must be \(layers, heads, 3\)"),
        (archive(grid=npy(np.array([16, 16, 256])), losses=_LOSSES), r"grid\[1\] = 16: must be above 0 and above"),
        (archive(grid=npy(np.array([0, 16, 256])), losses=_LOSSES), r"grid\[0\] = 0"),
        (archive(grid=npy(np.array([1.0, 2, 3])), losses=_LOSSES), "grid: must be integers"),
        (archive(grid=_GRID, losses=npy(LOSSES * np.nan)), r"losses\[0, 0, 0\] = nan: must be finite"),
        (archive(grid=_GRID, losses=npy(LOSSES)[:-1]), "damaged"),
        (archive(grid=_GRID, losses=_LOSSES.replace(b"(2, 2, 3)", b"(2, 2,-3)")), "damaged"),
        (archive(grid=_GRID, losses=_LOSSES.replace(b"(2, 2, 3), }   ", b"(2, 2, 3000)}  ")), "damaged"),
        (archive(grid=_GRID, losses=npy(np.array([None]))), "dtype object"),
        (archive(grid=_GRID, losses=_LOSSES, measured=npy(np.frombuffer(b"[", np.uint8))), "not JSON"),
        (archive(grid=_GRID, losses=_LOSSES, measured=npy(np.frombuffer(b"[1]", np.uint8))), "must be a mapping"),
        (archive(grid=_GRID, losses=_LOSSES, measured=_LOSSES), "must be bytes of JSON"),
    ],
)
def test_what_is_no_curve_file_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"curves\.npz: .*{message}"):
        CurveSet.load(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pb_kvcache._curves._LIMIT", 5000)
    path = tmp_path / "curves.npz"
    path.write_bytes(bytes(5001))
    with pytest.raises(ValueError, match=r"curves\.npz: more than 5000 bytes"):
        CurveSet.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("grid.npy", _GRID)
        bomb.writestr("losses.npy", bytes(1 << 20))
    with pytest.raises(ValueError, match=r"curves\.npz: losses\.npy: more than 5000 bytes"):
        CurveSet.load(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"curves\.npz: 8000 bytes of losses"):
        CurveSet([1], np.zeros((10, 100, 1))).save(path)
    assert path.read_bytes() == before


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
@example(712, 60, False)  # lengths in the directory, which hide the last member
@example(1529, 1, False)
def test_damaged_bytes_are_refused_or_read_alike(place: int, byte: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "curves.npz")
        curves = CurveSet(GRID, LOSSES, {"model": "m"})
        curves.save(path)
        content = bytearray(path.read_bytes())
        place %= len(content)
        if cut:
            del content[place:]
        else:
            content[place] = byte
        path.write_bytes(content)
        refusal = ""
        try:
            read = CurveSet.load(path)
        except ValueError as error:
            refusal = str(error)
        # Members are checksummed: where it is read, what was hit means nothing.
        assert "curves.npz: " in refusal or (not cut and read == curves)


@pytest.mark.parametrize(
    ("measured", "error", "message"),
    [
        ([], TypeError, "measured: must be a mapping"),
        ({3: 4}, TypeError, "measured: names must be strings"),
        ({"a": [1]}, TypeError, r"measured\['a'\]: must be text, a number"),
        ({"a": float("nan")}, ValueError, r"measured\['a'\] = nan: must be finite"),
        ({"a": "x" * 70000}, ValueError, "bytes of JSON, must be at most 65536"),
    ],
)
def test_how_curves_were_measured_is_text_and_numbers(measured: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CurveSet(GRID, LOSSES, measured)


def test_names_and_shapes_are_checked(tmp_path: Path) -> None:
    curves = CurveSet(GRID, LOSSES)
    with pytest.raises(ValueError, match=r"must end in \.npz, or in \.npy"):
        curves.save(tmp_path / "curves.json")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        CurveSet.load(tmp_path / "nowhere.npz")
    with pytest.raises(ValueError, match=r"array: has shape \(3,\), must be \(points, layers, heads\)"):
        CurveSet.from_array([1, 2, 3], GRID)
    assert CurveSet.from_array(curves.to_array(), GRID) == curves
    with pytest.raises(ValueError, match=r"losses: has shape \(2, 3\), must be \(layers, heads, 3\)"):
        CurveSet(GRID, LOSSES[0])


def test_a_plan_of_the_curves_goes_through_a_file(tmp_path: Path) -> None:
    curves = CurveSet(GRID, LOSSES)
    path = tmp_path / "plans.json"
    plans = [curves.plan(20), curves.plan(100), plan(2, 64)]
    save_plan(path, plans)
    assert [load_plan(path, budget) for budget in (20, 100, 64)] == plans
