"""Merging: against plain loops, and what it promises."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_kvcache import _merge, _tensor, merge
from pb_kvcache._errors import status_text
from pb_kvcache._native import ffi, lib

from . import reference_merge

METHODS = ["nearest", "fitted", "macro"]


def layer(seed=0, heads=2, n=40, head_dim=8, kept=12, queries=6, spread=1.0):
    """Return keys, values, kept positions and queries of a layer."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.normal(size=(heads, n, head_dim)).astype(np.float32) for _ in range(2))
    rows = np.sort(np.stack([rng.permutation(n)[:kept] for _ in range(heads)]), axis=1)
    return spread * keys, values, rows, spread * rng.normal(size=(heads, queries, head_dim)).astype(np.float32)


def by_reference(method, keys, values, kept, queries, protect, lse=None, **options):
    """Return what the plain loops make of every head."""
    heads = [
        getattr(reference_merge, method)(
            keys[h].tolist(),
            values[h].tolist(),
            np.asarray(kept[h]).tolist(),
            queries[h].tolist(),
            protect,
            lse=None if lse is None else lse[h].tolist(),
            **options,
        )
        for h in range(len(keys))
    ]
    return tuple(zip(*heads, strict=True))


def assert_close(found, expected, tolerance=1e-5):
    for name, one, other in zip(("keys", "values", "bias"), found, expected, strict=True):
        for head, (row, right) in enumerate(zip(one, other, strict=True)):
            np.testing.assert_allclose(row, right, rtol=tolerance, atol=tolerance, err_msg=f"{name}, head {head}")


def turn(keys, positions):
    """Turn keys by positions as a rotary embedding does, in NumPy or torch."""
    half = keys.shape[-1] // 2
    library = np if isinstance(keys, np.ndarray) else pytest.importorskip("torch")
    steps = library.asarray([100.0 ** (-i / half) for i in range(half)], dtype=keys.dtype)
    angles = positions[..., None] * steps
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = library.cos(angles), library.sin(angles)
    return library.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def turn_one(key, position):
    return turn(np.array([key]), np.array([float(position)]))[0].tolist()


def attention(queries, keys, values, bias, scale):
    logits = scale * queries @ keys.T + bias
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ values


@given(st.sampled_from(["nearest", "fitted"]), st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 9), st.data())
def test_rows_are_those_of_plain_loops(method, seed, n, queries, data):
    kept = data.draw(st.integers(1, n))
    protect = data.draw(st.integers(0, kept))
    scale = data.draw(st.sampled_from([None, 0.2]))
    keys, values, rows, asked = layer(seed, 2, n, 4, kept, queries)
    before = keys.copy(), values.copy(), asked.copy()
    lse = None
    if data.draw(st.booleans()):  # of queries that see more than these keys
        logits = (0.5 if scale is None else scale) * asked @ keys.swapaxes(1, 2)
        lse = (np.log(np.exp(logits).sum(axis=2)) + 0.5).astype(np.float32)
    found = merge(keys, values, rows, asked, protect=protect, method=method, scale=scale, lse=lse)
    assert [one.dtype for one in found] == [np.float32] * 3
    expected = by_reference(method, keys, values, rows, asked, protect, lse, scale=scale)
    assert_close(found, expected, 1e-4 if method == "nearest" else 2e-3)
    assert all((one == other).all() for one, other in zip(before, (keys, values, asked), strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("queries", [5, 40])
def test_a_larger_head_is_that_of_plain_loops(method, queries):
    given = layer(1, 2, 200, 16, 30, queries)
    expected = by_reference(method, *given, 6, **({"rows": 4} if method == "macro" else {}))
    assert_close(merge(*given, protect=6, method=method), expected, 1e-4)


@pytest.mark.parametrize("rows", [1, 3, 5, 50])
@pytest.mark.parametrize("rotary", [None, turn])
def test_macro_rows_are_those_of_plain_loops(rows, rotary):
    given = layer(2, 2, 60, 8, 12, 6)
    expected = by_reference("macro", *given, 4, rows=rows, rotary=rotary and turn_one)
    found = merge(*given, protect=4, method="macro", rows=rows, rotary=rotary)
    assert_close(found, expected, 1e-4)
    changed = (found[2] != 0).sum(axis=1)
    assert changed.max() <= min(rows, 8)


def test_macro_clusters_of_equal_keys_are_never_empty():
    keys, values, rows, queries = layer(3, 1, 40, 4, 10, 5)
    keys[:] = [1, 2, 3, 4]
    found = merge(keys, values, rows, queries, protect=2, method="macro", rows=6)
    assert (found[0] == keys[:, :10]).all()
    assert np.isfinite(found[1]).all()
    # 30 evicted positions and 6 freed ones make 6 clusters, all but one of a single position.
    assert sorted(np.exp(found[2][0]).round().astype(int)) == [1] * 9 + [31]
    assert_close(found, by_reference("macro", keys, values, rows, queries, 2, rows=6), 1e-4)


def test_example_by_hand():
    # All logits are 0, so every share is 1/4: rows 1 and 2 are nearest to row 0 alone, since row 3 is protected.
    keys = np.array([[[1, 0], [2, 0], [0, 1], [0, 1]]], np.float32)
    values = np.array([[[1, 1], [3, 3], [5, 5], [7, 7]]], np.float32)
    found = merge(keys, values, np.array([[0, 3]]), np.zeros((1, 1, 2), np.float32), protect=1)
    assert_close(found, ([[[1, 1 / 3], [0, 1]]], [[[3, 3], [7, 7]]], [[math.log(3), 0]]))


def test_equal_cosines_go_to_the_lower_row():
    keys = np.array([[[2, 0], [1, 0], [3, 0], [0, 0]]], np.float32)
    values = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    for dtype in (np.float32, np.float16):
        found = merge(keys.astype(dtype), values.astype(dtype), [[0, 1]], np.zeros((1, 1, 2), np.float32), protect=0)
        # Row 2 has the cosine 1 with both, row 3 has 0 with both.
        assert found[2][0].round(5).tolist() == [np.float32(math.log(3)).round(5), 0]
        assert found[1][0].tolist() == [[pytest.approx(10 / 3, abs=2e-3), pytest.approx(13 / 3, abs=2e-3)], [2, 3]]


@pytest.mark.parametrize("method", ["nearest", "fitted"])
def test_merged_identical_keys_attend_as_the_whole_prompt(method):
    rng = np.random.default_rng(4)
    centres = rng.normal(size=(2, 6, 8)).astype(np.float32)
    members = np.r_[np.arange(6), rng.integers(0, 6, 60)]
    keys, values = centres[:, members], rng.normal(size=(2, 66, 8)).astype(np.float32)
    queries = rng.normal(size=(2, 200, 8)).astype(np.float32)
    found = merge(keys, values, [range(6)] * 2, queries, protect=0, method=method)
    for head in range(2):
        exact = attention(queries[head], keys[head], values[head], 0, 8**-0.5)
        merged = attention(queries[head], *(one[head] for one in found), 8**-0.5)
        # The values of a row are means weighted by the shares, which all keys of a cluster have alike.
        assert np.abs(merged - exact).max() < (1e-5 if method == "nearest" else 0.02)


def test_fitted_rows_attend_nearer_to_the_whole_prompt_than_nearest_ones():
    keys, values, rows, queries = layer(5, 2, 300, 16, 40, 128)
    errors = {}
    for method in ("nearest", "fitted"):
        found = merge(keys, values, rows, queries, protect=8, method=method)
        errors[method] = sum(
            np.square(
                attention(queries[h], *(one[h] for one in found), 0.25)
                - attention(queries[h], keys[h], values[h], 0, 0.25)
            ).mean()
            for h in range(2)
        )
    assert errors["fitted"] < 0.5 * errors["nearest"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_stay_bit_for_bit_where_nothing_is_to_merge(method, dtype):
    keys, values, rows, queries = layer(6)
    keys[0, 3] = -0.0
    keys, values, queries = (one.astype(dtype) for one in (keys, values, queries))
    everything = np.tile(np.arange(40), (2, 1))
    for kept, protect in [(everything, 0), (everything, 5), (rows, 12), (rows, 100), (rows, [12, 13])]:
        found = merge(keys, values, kept, queries, protect=protect, method=method)
        for one, other in zip(found, (keys, values), strict=False):
            right = np.take_along_axis(other, kept[..., None], 1)
            assert one.dtype == dtype
            assert one.tobytes() == right.tobytes()
        assert found[2].dtype == np.float32
        assert found[2].tobytes() == bytes(4 * found[2].size)


@pytest.mark.parametrize("method", METHODS)
def test_protected_rows_stay_bit_for_bit(method):
    keys, values, rows, queries = layer(7)
    found = merge(keys, values, rows, queries, protect=[5, 12], method=method)
    for one, other in zip(found, (keys, values, np.zeros((2, 40))), strict=True):
        for head, free in enumerate((7, 0)):
            assert (one[head, free:] == other[head][rows[head, free:]]).all()
    assert found[2][0, :7].any()
    alone = merge(keys[:1], values[:1], rows[:1], queries[:1], protect=5, method=method)
    assert all((one[0] == other[0]).all() for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_one_kept_row_takes_everything(method):
    keys, values, _, queries = layer(8)
    found = merge(keys, values, [[4], [39]], queries, protect=0, method=method)
    assert [one.shape for one in found] == [(2, 1, 8), (2, 1, 8), (2, 1)]
    assert all(np.isfinite(one).all() for one in found)
    assert_close(
        found,
        by_reference(method, keys, values, [[4], [39]], queries, 0, **({"rows": 4} if method == "macro" else {})),
        1e-3,
    )
    assert found[2].min() > 1


@pytest.mark.parametrize("method", METHODS)
def test_ragged_heads_give_lists(method):
    keys, values, _, queries = layer(9, heads=3)
    kept = [np.arange(0, 40, 4), np.arange(40), np.array([], np.int64)]
    found = merge(keys, values, kept, queries, protect=[3, 0, 1], method=method)
    assert [type(one) for one in found] == [list] * 3
    assert [len(row) for row in found[0]] == [10, 40, 0]
    for head, last in enumerate((3, 0, 1)):
        alone = merge(keys[[head]], values[[head]], [kept[head]], queries[[head]], protect=last, method=method)
        assert all((one[head] == other[0]).all() for one, other in zip(found, alone, strict=True))
    whole = merge(keys, values, [[1, 5, 9]] * 3, queries, protect=1, method=method)
    assert [one.shape for one in whole] == [(3, 3, 8), (3, 3, 8), (3, 3)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spread", [5.0, 30.0, 1000.0])
def test_shares_that_underflow_give_no_nan(method, spread):
    given = layer(10, 2, 60, 8, 20, 4, spread)
    found = merge(*given, protect=4, method=method)
    assert all(np.isfinite(one).all() for one in found)
    if spread == 1000.0:  # hardly a share is above 0
        assert (found[2] == 0).sum() >= 20 or method != "nearest"


def test_a_bias_whose_exponential_underflows_is_the_exact_one():
    # Each query sees one of two opposite keys. Their mean is 0, of which both see exp(-450).
    keys = np.array([[[30, 0], [-30, 0.1]]], np.float32)
    queries = np.array([[[15, 0], [-15, 0]]], np.float32)
    found = merge(keys, keys, [[0]], queries, protect=0, scale=1)
    assert found[2][0, 0] == pytest.approx(450, rel=1e-5)
    fitted = merge(keys, keys, [[0]], queries, protect=0, scale=1, method="fitted")
    assert all(np.isfinite(one).all() for one in fitted)


def test_a_row_that_takes_in_nothing_that_counts_stays():
    # The first head's evicted key has the share exp(-100), the second's exp(-2).
    keys = np.array([[[100, 0], [0, 1]], [[2, 0], [0, 1]]], np.float32)
    found = merge(keys, keys, [[0], [0]], np.array([[[1, 0]], [[1, 0]]], np.float32), protect=0, scale=1)
    assert found[0][0].tolist() == [[100, 0]]
    assert found[2][0].tolist() == [0]
    assert found[0][1, 0, 1] == pytest.approx(math.exp(-2) / (1 + math.exp(-2)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_give_the_rounded_rows(method, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    keys, values, rows, queries = layer(11)
    half = [one.astype(dtype) for one in (keys, values, queries)]
    single = [one.astype(np.float32) for one in half]
    found = merge(half[0], half[1], rows, half[2], protect=3, method=method)
    right = merge(single[0], single[1], rows, single[2], protect=3, method=method)
    assert [one.dtype for one in found] == [dtype, dtype, np.float32]
    assert (found[0] == right[0].astype(dtype)).all()
    step = 2.0**-8 if dtype != "float16" else 2.0**-11
    np.testing.assert_allclose(found[1].astype(np.float32), right[1], atol=40 * step)
    np.testing.assert_allclose(found[2], right[2], atol=40 * step)


@pytest.mark.parametrize("method", METHODS)
def test_tensors_give_what_arrays_give(method):
    torch = pytest.importorskip("torch")
    given = layer(12, 3, 300, 16, 50, 20)
    lse = np.full((3, 20), 7, np.float32)
    options = {"protect": 7, "method": method, "rotary": turn}
    for normaliser in (None, lse):
        expected = merge(*given, **options, lse=normaliser)
        tensors = [torch.from_numpy(one) for one in given]
        found = merge(*tensors, **options, lse=None if normaliser is None else torch.from_numpy(lse))
        assert all(isinstance(one, torch.Tensor) for one in found)
        assert_close([one.numpy() for one in found], expected, 1e-4)
    ragged = merge(*tensors[:2], [[1, 2, 60], [3, 9], [5]], tensors[3], protect=0, method=method)
    assert [[tuple(row.shape) for row in one] for one in ragged[1:]] == [
        [(3, 16), (2, 16), (1, 16)],
        [(3,), (2,), (1,)],
    ]
    for dtype in (torch.float16, torch.bfloat16):
        keys, values = (one.to(dtype).requires_grad_() for one in tensors[:2])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = merge(keys, values, given[2], tensors[3], protect=7, method=method)
        assert [one.dtype for one in low] == [dtype, dtype, torch.float32]
        assert not any(one.requires_grad for one in low)
        high = merge(keys.float(), values.float(), given[2], tensors[3], protect=7, method=method)
        assert (low[0] == high[0].to(dtype)).all()
        assert (low[2] - high[2]).abs().max() < 0.1
    views = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in tensors[:2]]
    again = merge(*views, given[2], tensors[3], protect=7, method=method)
    assert_close([one.numpy() for one in again], merge(*given, protect=7, method=method), 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_call_gives_the_same_bits(method):
    given = layer(13, 2, 3000, 16, 100, 20)
    first = [one.tobytes() for one in merge(*given, protect=10, method=method)]
    assert all([one.tobytes() for one in merge(*given, protect=10, method=method)] == first for _ in range(3))
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(one) for one in given]
    first = [one.numpy().tobytes() for one in merge(*tensors, protect=10, method=method)]
    assert all([one.numpy().tobytes() for one in merge(*tensors, protect=10, method=method)] == first for _ in range(3))


@pytest.mark.parametrize("method", ["nearest", "fitted"])
def test_no_matrix_of_all_evicted_rows_is_held(method):
    keys, values, _, queries = layer(14, 1, 20_000, 8, 1, 8)
    kept = np.arange(0, 20_000, 10)[None]
    merge(keys, values, kept, queries, protect=8, method=method)
    tracemalloc.start()
    merge(keys, values, kept, queries, protect=8, method=method)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 2,000 rows by 18,000 evicted ones would be 144 MB. Keys and values are 1.3 MB.
    assert peak < 6_000_000


@pytest.mark.parametrize("name", ["keys", "values", "queries", "lse"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_is_not_finite_is_refused_by_name(name, value, library):
    keys, values, rows, queries = layer(15)
    given = {"keys": keys, "values": values, "queries": queries, "lse": np.zeros((2, 6), np.float32)}
    given[name][(1, 4, 2)[: given[name].ndim]] = value
    if library == "torch":
        given = {key: pytest.importorskip("torch").from_numpy(one) for key, one in given.items()}
    where = "1, 4" if name == "lse" else "1, 4, 2"
    with pytest.raises(ValueError, match=rf"^{name}\[{where}\] = {value}: every element must be finite"):
        merge(kept=rows, protect=2, **given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"keys": np.zeros((2, 40))}, TypeError, "keys: must be a NumPy array or torch tensor of .* not float64"),
        ({"keys": np.zeros((2, 40), np.float32)}, ValueError, r"keys: has shape \(2, 40\)"),
        ({"keys": np.zeros((2, 0, 8), np.float32)}, ValueError, r"keys: has shape \(2, 0, 8\)"),
        ({"values": np.zeros((2, 40, 8), np.float16)}, TypeError, "values: must be of the same kind as keys"),
        ({"values": np.zeros((2, 41, 8), np.float32)}, ValueError, r"values: has shape \(2, 41, 8\), must be that of"),
        (
            {"queries": np.zeros((2, 0, 8), np.float32)},
            ValueError,
            r"queries: has shape \(2, 0, 8\), must be \(2, N, 8",
        ),
        ({"queries": np.zeros((6, 3, 8), np.float32)}, ValueError, r"queries: has shape \(6, 3, 8\)"),
        ({"queries": [[1.0]]}, TypeError, "queries: must be a NumPy array"),
        ({"kept": 3}, TypeError, "kept: must be rows of positions, not int"),
        ({"kept": [[1]]}, ValueError, "kept: has 1 heads, must have one row per KV head, 2"),
        ({"kept": [[1, 2], [2, 1]]}, ValueError, r"kept\[1\]\[1\] = 1: must be greater"),
        ({"kept": [[1, 2], [2, 40]]}, ValueError, r"kept\[1\]\[1\] = 40: must be smaller than 40"),
        ({"protect": -1}, ValueError, "protect = -1: must be at least 0"),
        ({"protect": [1]}, ValueError, "protect: has 1 numbers, must have one per KV head, 2"),
        ({"protect": [1, 0.5]}, TypeError, r"protect\[1\] = 0.5: must be an integer"),
        ({"method": "mean"}, ValueError, "method = 'mean': must be one of nearest, fitted, macro"),
        ({"scale": 0}, ValueError, "scale = 0: must be finite and greater than 0"),
        ({"lse": np.zeros((2, 5), np.float32)}, ValueError, r"lse: has shape \(2, 5\), must be one number a query"),
        ({"lse": np.full((2, 6), -200, np.float32)}, ValueError, "keys, queries and lse: .* of KV head 0 is too large"),
        ({"rows": 0}, ValueError, "rows = 0: must be at least 1"),
        (
            {"method": "macro", "rotary": lambda keys, at: keys[:1]},
            ValueError,
            r"rotary: returned ndarray of shape \(1",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused(changes, error, message):
    keys, values, rows, queries = layer(16)
    given = {"keys": keys, "values": values, "kept": rows, "queries": queries, "protect": 2, **changes}
    with pytest.raises(error, match=f"^{message}"):
        merge(**given)


def test_products_beyond_float32_are_refused():
    keys, values, rows, queries = layer(17)
    for method in METHODS:
        with pytest.raises(ValueError, match=r"^keys and queries: a product or share of KV head 0 is too large"):
            merge(keys * np.float32(1e25), values, rows, queries * np.float32(1e25), protect=2, method=method)


def test_arrays_and_tensors_are_not_mixed():
    torch = pytest.importorskip("torch")
    keys, values, rows, queries = layer(18)
    with pytest.raises(TypeError, match=r"^queries: must be in the same library as keys"):
        merge(keys, values, rows, torch.from_numpy(queries), protect=2)
    with pytest.raises(TypeError, match=r"^values: must be of the same kind as keys"):
        merge(torch.from_numpy(keys), values, rows, torch.from_numpy(queries), protect=2)


@pytest.mark.parametrize("method", METHODS)
def test_another_device_gives_the_same_without_addresses(method, monkeypatch):
    torch = pytest.importorskip("torch")
    given = layer(19, 2, 300, 16, 50, 20)
    tensors = [torch.from_numpy(one) for one in given]
    expected = merge(*given, protect=7, method=method)
    for module in (_merge, _tensor):
        monkeypatch.setattr(module, "NATIVE_DEVICES", frozenset())
    found = merge(*tensors, protect=7, method=method)
    assert_close([one.numpy() for one in found], expected, 1e-4)
    with pytest.raises(TypeError, match=r"^values: must be a torch tensor of float32, .* not torch.float64"):
        merge(tensors[0], tensors[1].double(), *tensors[2:], protect=7, method=method)


def by_c(keys, values, kept, queries, protect, lse=None, window=0):
    """Return what the C function makes of one head of float32 rows, whose rows need not lie side by side."""
    n, head_dim = keys.shape
    kept = np.ascontiguousarray(kept, np.uint32)
    merged, outputs = np.empty((2, len(kept), head_dim), np.float32)
    bias = np.empty(len(kept), np.float32)

    def floats(array):
        return ffi.NULL if array is None else ffi.cast("float *", array.ctypes.data)

    head = {
        "keys": floats(keys),
        "values": floats(values),
        "row_stride": keys.strides[0] // 4,
        "n": n,
        "head_dim": head_dim,
        "kept": ffi.cast("uint32_t *", kept.ctypes.data),
        "num_kept": len(kept),
        "protect": protect,
        "queries": floats(queries),
        "num_queries": len(queries),
        "lse": floats(lse),
        "window": window,
        "scale": head_dim**-0.5,
    }
    given, size = ffi.new("pb_kvcache_merge *", head), ffi.new("size_t *")
    assert lib.pb_kvcache_merge_workspace_size(given, size) == 0
    workspace = np.empty(size[0], np.uint8)
    status = lib.pb_kvcache_merge_nearest(
        given,
        ffi.cast("void *", workspace.ctypes.data),
        workspace.size,
        floats(merged),
        floats(outputs),
        head_dim,
        merged.size,
        floats(bias),
        bias.size,
    )
    assert status == 0, status_text(status)
    return merged, outputs, bias


@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 40), st.integers(1, 9), st.data())
def test_c_gives_what_arrays_give(seed, n, head_dim, queries, data):
    kept = data.draw(st.integers(1, n))
    protect = data.draw(st.integers(0, kept))
    keys, values, rows, asked = layer(seed, 1, n, head_dim, kept, queries)
    lse = np.full((1, queries), 6, np.float32) if data.draw(st.booleans()) else None
    expected = merge(keys, values, rows, asked, protect=protect, lse=lse)
    apart = np.zeros((2, n, head_dim + 3), np.float32)
    apart[0, :, :head_dim], apart[1, :, :head_dim] = keys[0], values[0]
    found = by_c(
        apart[0, :, :head_dim], apart[1, :, :head_dim], rows[0], asked[0], protect, None if lse is None else lse[0]
    )
    assert_close([one[None] for one in found], expected)


def test_c_gives_what_arrays_give_of_a_whole_layer():
    keys, values, rows, queries = layer(20, 2, 3000, 64, 400, 96)
    expected = merge(keys, values, rows, queries, protect=32)
    found = [by_c(keys[h], values[h], rows[h], queries[h], 32) for h in range(2)]
    assert_close(tuple(zip(*found, strict=True)), expected)


@pytest.mark.parametrize("n", [12, 66, 130, 300])
def test_c_lets_no_query_of_the_window_see_what_follows_it(n):
    keys, values, rows, queries = layer(21, 1, n, 16, 10, 24, spread=2.0)
    window = 12
    lse = np.empty((1, 24), np.float32)
    for q, query in enumerate(queries[0].tolist()):  # two heads of 12
        seen = keys[0, : n - 11 + q % window].tolist()
        lse[0, q] = math.log(sum(math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / 4) for key in seen))
    expected = merge(keys, values, rows, queries, protect=2, lse=lse)
    found = by_c(keys[0], values[0], rows[0], queries[0], 2, window=window)
    assert_close([one[None] for one in found], expected, 1e-4)
