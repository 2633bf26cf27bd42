"""Scores that do not come from the window: against plain loops in float64, and what they promise."""

from __future__ import annotations

import doctest
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pb_kvcache as pb
from pb_kvcache import _query_moments, _scores

from . import reference_scores as reference
from .attention import as_kind

KINDS = ["float32", "float16", "bfloat16"]


@st.composite
def shapes(draw):
    """Shapes ``(kv_heads, group, n, head_dim)``, head_dim even."""
    return draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12)), 2 * draw(st.integers(1, 4))


def rotary(positions, dim, base=100.0):
    """Return cos and sin ``(positions, dim)`` in the layout of rotate_half."""
    angles = np.asarray(positions)[:, None] * base ** (-np.arange(dim // 2) / (dim // 2))
    angles = np.concatenate((angles, angles), axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def case(shape, seed, spread=1.0, rotary_dim=None):
    """Return keys, mean, covariance, cos and sin of some random prompt."""
    kv_heads, group, n, dim = shape
    rng = np.random.default_rng(seed)
    keys = (rng.normal(size=(kv_heads, n, dim)) * spread).astype(np.float32)
    mean, covariance = pb.query_moments((rng.normal(size=(kv_heads * group, 20, dim)) * spread).astype(np.float32))
    return keys, mean, covariance, *rotary(range(n, n + 5), rotary_dim or dim)


# Expected attention


@given(shapes(), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, 0.3, 1.5]), st.data())
def test_expected_attention_is_that_of_plain_loops(shape, seed, partial, scale, data):
    dim = shape[3]
    arguments = case(shape, seed, 2.0, 2 * data.draw(st.integers(1, dim // 2)) if partial else dim)
    found = pb.expected_scores(*arguments, scale=scale)
    assert found.dtype == np.float32
    wanted = reference.expected_scores(
        *(a.astype(np.float64) for a in arguments), dim**-0.5 if scale is None else scale
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-7)  # float32 has steps of 3e-5 at logits of 500
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


def test_many_positions_are_computed_by_tiles():
    arguments = case((2, 2, 2 * _scores._TILE + 7, 4), 1)
    wanted = reference.expected_scores(*(a.astype(np.float64) for a in arguments), 0.5)
    np.testing.assert_allclose(pb.expected_scores(*arguments), wanted, rtol=1e-4)


def test_expected_attention_is_the_mean_of_gaussian_queries():
    """The logit is the log of the mean of exp(scale * k . q) over queries of those moments."""
    rng = np.random.default_rng(5)
    dim, n = 4, 9
    mix = rng.normal(size=(dim, dim)) * 0.5
    mean, covariance = rng.normal(size=dim), mix @ mix.T
    keys = rng.normal(size=(1, n, dim))
    queries = rng.multivariate_normal(mean, covariance, size=400_000)
    weights = np.exp(queries @ keys[0].T * 0.5).mean(0)
    found = pb.expected_scores(
        keys.astype(np.float32),
        mean[None].astype(np.float32),
        covariance[None].astype(np.float32),
        np.ones((1, dim), np.float32),
        np.zeros((1, dim), np.float32),
    )
    np.testing.assert_allclose(found[0], weights / weights.sum(), rtol=0.01)  # 0.002 off with these samples


def test_the_rotation_of_one_position_is_the_models_own():
    """Without spread and at one position the logits are those of the turned query: rotate_half, worked out by hand."""
    keys = np.eye(4, dtype=np.float32)[None]
    mean = np.array([[1, 2, 3, 4]], np.float32)
    cos = np.array([[0, 1, 0, 1]], np.float32)  # a quarter turn of elements 0 and 2
    sin = np.array([[1, 0, 1, 0]], np.float32)
    found = pb.expected_scores(keys, mean, np.zeros((1, 4, 4), np.float32), cos, sin, scale=1.0)
    turned = np.exp([-3.0, 2.0, 1.0, 4.0])
    np.testing.assert_allclose(found[0], turned / turned.sum(), rtol=1e-6)


def test_rotations_are_averaged_before_the_moments_are_turned():
    """Half a turn and none cancel: what is turned has no part in the logits, what is not turned has."""
    keys, mean = np.array([[[1, 0, 0], [0, 0, 1]]], np.float32), np.array([[5, 5, 2]], np.float32)
    covariance = np.diag([7, 7, 2]).astype(np.float32)[None]
    cos, sin = np.array([[1, 1], [-1, -1]], np.float32), np.zeros((2, 2), np.float32)
    found = pb.expected_scores(keys, mean, covariance, cos, sin, scale=1.0)
    np.testing.assert_allclose(found[0], [1 / (1 + np.exp(3)), 1 / (1 + np.exp(-3))], rtol=1e-6)


def test_large_logits_do_not_overflow():
    keys = np.array([[[100], [98], [-100]]], np.float32).repeat(2, axis=2)
    mean, nothing = np.full((1, 2), 50, np.float32), np.zeros((1, 2), np.float32)
    found = pb.expected_scores(keys, mean, np.zeros((1, 2, 2), np.float32), nothing + 1, nothing, scale=1.0)
    assert found.tolist() == [[1, 0, 0]]
    with pytest.raises(ValueError, match="keys: the logits of KV head 0 are too large for float32"):
        pb.expected_scores(keys, mean, np.full((1, 2, 2), 1e38, np.float32), nothing + 1, nothing)


# Moments


@given(shapes(), st.integers(0, 2**32 - 1))
def test_moments_are_those_of_plain_loops(shape, seed):
    kv_heads, _, n, dim = shape
    queries = (np.random.default_rng(seed).normal(size=(kv_heads, n, dim)) + 3).astype(np.float32)
    mean, covariance = pb.query_moments(queries)
    assert mean.dtype == covariance.dtype == np.float32
    for head in range(kv_heads):
        wanted_mean, wanted_covariance = reference.moments(queries[head])
        np.testing.assert_allclose(mean[head], wanted_mean, rtol=1e-6)
        np.testing.assert_allclose(covariance[head], wanted_covariance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[2500], [1, 0, 2499], [700] * 3 + [400], [1024, 1024, 452]])
def test_moments_of_chunks_are_those_of_the_whole(lengths, kind):
    queries = as_kind(np.random.default_rng(3).normal(size=(2, 2500, 6)).astype(np.float32) * [1, 2, 3, 4, 5, 6], kind)
    wide = queries.astype(np.float64)
    moments, other = pb.QueryMoments(), pb.QueryMoments()
    ends = np.cumsum(lengths)
    for index, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        (other if index == 1 else moments).add(queries[:, start:end])
    moments.merge(other)
    assert (moments.count, repr(moments)) == (2500, "QueryMoments(count=2500, q_heads=2, head_dim=6)")
    np.testing.assert_allclose(moments.mean, wide.mean(1), atol=1e-6)
    for head in range(2):
        np.testing.assert_allclose(moments.covariance[head], np.cov(wide[head].T, bias=True), rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_cost_the_covariance_its_digits():
    """Sums of squares in float32 would lose a variance of 4 beside a mean of 4096."""
    queries = np.random.default_rng(4).integers(-3, 4, size=(1, 4096, 3)).astype(np.float32)
    queries[:, :2048] += 4096
    wanted = np.cov(queries[0].astype(np.float64).T, bias=True)
    moments = pb.QueryMoments()
    for start in range(0, 4096, 512):
        moments.add(queries[:, start : start + 512])
    np.testing.assert_allclose(moments.covariance[0], wanted, rtol=1e-6)
    alone = pb.query_moments(queries[:, :2048])[1][0]
    np.testing.assert_allclose(alone, np.cov(queries[0, :2048].astype(np.float64).T, bias=True), rtol=1e-5, atol=1e-5)


def test_refused_queries_leave_the_moments_as_they_were():
    moments = pb.QueryMoments()
    assert repr(moments) == "QueryMoments(count=0)"
    for name in ("mean", "covariance"):
        with pytest.raises(ValueError, match="count = 0: add queries"):
            getattr(moments, name)
    queries = np.ones((2, 3, 4), np.float32)
    moments.add(queries)
    before = moments.mean.tolist(), moments.covariance.tolist()
    bad = queries.copy()
    bad[1, 2, 3] = np.nan
    for wrong, message in [
        (bad, r"queries\[1, 2, 3\] = nan: every value must be finite"),
        (queries * np.array([[1e38], [-1e38], [0]], np.float32), "queries: products of their values are too large"),
        (queries[:1], r"queries: has shape \(1, 3, 4\), must be \(2, 3, 4\) to agree with the queries before"),
        (queries[0], r"queries: has shape \(3, 4\), must be \(q_heads, n, head_dim\)"),
        (queries[..., :0], r"queries: has shape \(2, 3, 0\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            moments.add(wrong)
    with pytest.raises(TypeError, match="other: must be a QueryMoments, not int"):
        moments.merge(3)
    other = pb.QueryMoments()
    moments.merge(other)
    other.add(queries[:1])
    with pytest.raises(ValueError, match=r"other: has shape \(1, 4\), must be \(2, 4\)"):
        moments.merge(other)
    assert (moments.mean.tolist(), moments.covariance.tolist(), moments.count) == (*before, 3)


# KeyDiff


@given(shapes(), st.integers(0, 2**32 - 1), st.sampled_from([1e-25, 1.0, 1e25]))
def test_keydiff_is_that_of_plain_loops(shape, seed, size):
    kv_heads, _, n, dim = shape
    rng = np.random.default_rng(seed)
    keys = (rng.normal(size=(kv_heads, n, dim)) * size + rng.normal(size=dim) * size).astype(np.float32)
    found = pb.keydiff_scores(keys)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference.keydiff_scores(keys), rtol=1e-4, atol=1e-5)


def test_keydiff_of_keys_without_a_direction_is_0():
    keys = np.array([[[1, 0], [0, 0], [1, 0]], [[1, 0], [-1, 0], [0, 0]]], np.float32)
    assert pb.keydiff_scores(keys).tolist() == [[-1, 0, -1], [0, 0, 0]]


def test_keydiff_keeps_the_keys_that_differ():
    keys = np.ones((1, 2 * _scores._TILE + 9, 4), np.float32)
    keys[0, [5, 1030, 2000]] = [1, -1, 1, -1]
    scores = pb.keydiff_scores(keys)
    assert (scores < 0.01).all()
    assert pb.select_from_scores(scores, 5, 2, kernel=1).tolist() == [[5, 1030, 2000, keys.shape[1], keys.shape[1] + 1]]


# Repetition


@given(shapes(), st.integers(1, 6), st.integers(0, 3), st.booleans(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_repetition_is_that_of_plain_loops(shape, count, more, alone, block, seed):
    kv_heads, group, n, dim = shape
    own = 0 if alone else count + more
    rng = np.random.default_rng(seed)
    queries = (rng.normal(size=(kv_heads * group, count, dim)) * 2).astype(np.float32)
    keys = rng.normal(size=(kv_heads, n + own, dim)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scores, "_BLOCK", block)  # blocks of one or a few queries
        found = pb.repeat_scores(queries, keys, own=own, scale=0.5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference.repeat_scores(queries, keys, own, 0.5), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(pb.repeat_scores(queries, keys, own=own, scale=0.5), found, rtol=1e-5, atol=1e-8)


def test_blocks_of_the_repetition_are_combined_by_their_maxima():
    rng = np.random.default_rng(8)
    queries, keys = rng.normal(size=(4, 10, 8)).astype(np.float32), rng.normal(size=(2, 30, 8)).astype(np.float32)
    whole = pb.repeat_scores(queries, keys, own=10)
    scores = np.zeros((2, 20), np.float32)
    for start, end in [(0, 3), (3, 4), (4, 10)]:
        assert pb.repeat_scores(queries[:, start:end], keys[:, : 20 + end], own=end, out=scores) is scores
    np.testing.assert_allclose(scores, whole, rtol=1e-5)
    larger = whole + np.float32(0.5)
    assert (pb.repeat_scores(queries, keys, own=10, out=larger.copy()) == larger).all()


def test_no_more_than_a_block_of_logits_is_held(monkeypatch):
    monkeypatch.setattr(_scores, "_BLOCK", 1 << 16)
    rng = np.random.default_rng(9)
    queries, keys = rng.normal(size=(2, 800, 8)).astype(np.float32), rng.normal(size=(1, 4800, 8)).astype(np.float32)
    pb.repeat_scores(queries[:, :2], keys)
    tracemalloc.start()
    pb.repeat_scores(queries, keys, own=800)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < 4 * 1600 * 4800  # a block takes 256 KiB, all logits 31 MB


# Mixed


def test_mixed_scores_are_the_sum_of_both():
    window = np.array([[0.5, 0.25], [0, 0.125]], np.float32)
    expected = np.array([[0.25, 0.5, 0.25], [1, 0, 0]], np.float32)
    assert pb.mixed_scores(window, expected).tolist() == [[0.75, 0.75], [1, 0.125]]
    assert pb.mixed_scores(window, expected[:, :2]).tolist() == [[0.75, 0.75], [1, 0.125]]


# Kinds of array


@pytest.mark.parametrize("kind", KINDS[1:])
def test_16_bits_are_read_as_their_values(kind):
    keys, mean, covariance, cos, sin = case((2, 2, 40, 8), 2)
    narrow, turn = as_kind(keys, kind), (as_kind(cos, kind), as_kind(sin, kind))
    wide, wide_turn = narrow.astype(np.float32), [part.astype(np.float32) for part in turn]
    found = pb.expected_scores(narrow, mean, covariance, *turn)
    np.testing.assert_array_equal(found, pb.expected_scores(wide, mean, covariance, *wide_turn))
    np.testing.assert_array_equal(pb.keydiff_scores(narrow), pb.keydiff_scores(wide))
    queries = as_kind(np.random.default_rng(1).normal(size=(4, 5, 8)).astype(np.float32), kind)
    np.testing.assert_array_equal(
        pb.repeat_scores(queries, narrow, own=6), pb.repeat_scores(queries.astype(np.float32), wide, own=6)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_give_what_arrays_give(kind):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, kind)
    arguments = [torch.from_numpy(a) for a in case((2, 3, 2100, 8), 6)]
    keys = arguments[0] = arguments[0].to(dtype).requires_grad_()
    queries = torch.randn(6, 11, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    array_keys, array_queries = keys.detach().float().numpy(), queries.float().numpy()
    arrays = [array_keys, *(a.numpy() for a in arguments[1:])]

    def same(found, wanted):
        assert (found.dtype, found.requires_grad) == (torch.float32, False)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-6)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = pb.expected_scores(*arguments)
        same(expected, pb.expected_scores(*arrays))
        same(pb.keydiff_scores(keys), pb.keydiff_scores(array_keys))
        scores = torch.zeros(2, 2088)
        assert pb.repeat_scores(queries, keys, own=12, out=scores) is scores
        same(scores, pb.repeat_scores(array_queries, array_keys, own=12))
        same(pb.mixed_scores(scores, expected), pb.mixed_scores(scores.numpy(), expected.numpy()[:, :2088]))
        moments = pb.QueryMoments()
        moments.add(queries[:, :4])
        moments.add(queries[:, 4:])
    for found, wanted in zip((moments.mean, moments.covariance), pb.query_moments(array_queries), strict=True):
        same(found, wanted)
    with pytest.raises(TypeError, match=r"queries: must be an array where the queries before is one, or a tensor"):
        moments.add(array_queries)
    with pytest.raises(TypeError, match=r"keys: must be an array where queries is one, or a tensor on its device"):
        pb.repeat_scores(queries, array_keys)


def test_torchs_negative_bit_is_read():
    torch = pytest.importorskip("torch")
    keys = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(pb.keydiff_scores(torch._neg_view(keys)), pb.keydiff_scores(-keys))
    with pytest.raises(TypeError, match="keys: must be a torch tensor with memory of its own, not a meta tensor"):
        pb.keydiff_scores(keys.to("meta"))


def test_other_devices_of_tensors_are_computed_on(monkeypatch):
    """What a tensor elsewhere takes: the same code, without the native kernels' view of it."""
    torch = pytest.importorskip("torch")
    arguments = [torch.from_numpy(a) for a in case((2, 2, 30, 4), 6)]
    wanted = pb.expected_scores(*arguments)
    monkeypatch.setattr("pb_kvcache._tensor.NATIVE_DEVICES", frozenset())
    monkeypatch.setattr("pb_kvcache._arrays.View", lambda *_: pytest.fail("read by the kernels"))
    assert torch.equal(pb.expected_scores(*arguments), wanted)
    with pytest.raises(TypeError, match=r"keys: must be a torch tensor of float32, float16, bfloat16, not torch.int64"):
        pb.keydiff_scores(torch.ones(1, 2, 2, dtype=torch.int64))


# Refusals

GOOD = dict(zip(("keys", "mean", "covariance", "cos", "sin"), case((2, 2, 6, 4), 0), strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": GOOD["keys"][0]}, r"keys: has shape \(6, 4\), must be \(kv_heads, n, head_dim\) with one or more"),
        ({"keys": GOOD["keys"][:, :0]}, r"keys: has shape \(2, 0, 4\)"),
        ({"keys": GOOD["keys"][:, :, :3]}, r"mean: has shape \(4, 4\), must be \(4, 3\) to agree with keys"),
        ({"mean": GOOD["mean"][:3]}, "keys: has 2 heads, must divide the 3 of mean"),
        ({"covariance": GOOD["covariance"][:2]}, r"covariance: has shape \(2, 4, 4\), must be \(4, 4, 4\) to agree"),
        ({"sin": GOOD["sin"][:2]}, r"sin: has shape \(2, 4\), must be \(5, 4\) to agree with cos"),
        ({"cos": GOOD["cos"][:, :3], "sin": GOOD["sin"][:, :3]}, "cos: has rotary_dim = 3, must be even and at most"),
        (dict(zip(("cos", "sin"), rotary(range(3), 6), strict=True)), "cos: has rotary_dim = 6, must be even and at"),
        ({"scale": 0}, "scale = 0: must be finite and greater than 0"),
        ({"scale": np.nan}, "scale = nan"),
    ],
)
def test_bad_arguments_of_expected_attention_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        pb.expected_scores(**{**GOOD, **changed})


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_its_place(name, value):
    bad = GOOD[name].copy()
    last = tuple(size - 1 for size in bad.shape)
    bad[last] = value
    with pytest.raises(
        ValueError, match=rf"{name}\[{', '.join(map(str, last))}\] = {value}: every value must be finite"
    ):
        pb.expected_scores(**{**GOOD, name: bad})
    with pytest.raises(
        TypeError, match=f"{name}: must be a NumPy array or torch tensor of float32, float16 or bfloat16"
    ):
        pb.expected_scores(**{**GOOD, name: bad.astype(np.float64)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"own": 2}, "own = 2: must be 0 or at least the 3 queries, and less than the 8 rows of keys"),
        ({"own": 8}, "own = 8: must be 0 or at least"),
        ({"own": -1}, "own = -1: must be at least 0"),
        ({"keys": np.ones((2, 8, 5), np.float32)}, r"keys: has shape \(2, 8, 5\), must be \(2, 8, 4\) to agree with"),
        ({"keys": np.ones((3, 8, 4), np.float32)}, "keys: has 3 heads, must divide the 4 of queries"),
        ({"keys": np.full((2, 8, 4), np.nan, np.float32)}, r"keys\[0, 0, 0\] = nan"),
        ({"queries": np.full((4, 3, 4), np.inf, np.float32)}, r"queries\[0, 0, 0\] = inf"),
        ({"queries": np.ones((4, 3), np.float32)}, r"queries: has shape \(4, 3\), must be \(q_heads, Q, head_dim\)"),
        ({"queries": np.full((4, 3, 4), 1e38, np.float32)}, "queries: their products with KV head 0 of keys are too"),
        ({"scale": -1.0}, "scale = -1.0"),
        ({"out": np.zeros((2, 5), np.float32)}, r"out: has shape \(2, 5\), must be \(2, 8\) to agree with keys"),
        ({"out": np.full((2, 8), np.nan, np.float32)}, r"out\[0, 0\] = nan"),
        ({"out": np.broadcast_to(np.float32(0), (2, 8))}, "out: is read-only, must be writable"),
    ],
)
def test_bad_arguments_of_the_repetition_are_named(changed, message):
    good = {"queries": np.ones((4, 3, 4), np.float32), "keys": np.full((2, 8, 4), 2, np.float32)}
    out = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        pb.repeat_scores(**{**good, "out": out, "scale": 1.0, **changed})
    assert not out.any()
    for name, wrong in [("out", out.astype(np.float16)), ("own", 3.0), ("queries", [[[1.0]]])]:
        with pytest.raises(TypeError, match=f"^{name}"):
            pb.repeat_scores(**{**good, name: wrong})


@pytest.mark.parametrize(
    ("window", "expected", "message"),
    [
        ((2, 3), (1, 3), r"expected: has shape \(1, 3\), must have the 2 heads of window and at least its 3 positions"),
        ((2, 3), (2, 2), r"expected: has shape \(2, 2\)"),
        ((3,), (2, 2), r"window: has shape \(3,\), must be \(kv_heads, m\)"),
    ],
)
def test_scores_that_do_not_agree_are_not_mixed(window, expected, message):
    with pytest.raises(ValueError, match=message):
        pb.mixed_scores(np.ones(window, np.float32), np.ones(expected, np.float32))


def test_scores_that_are_not_finite_are_not_mixed():
    good, bad = np.ones((1, 2), np.float32), np.array([[1, np.inf]], np.float32)
    for arguments, name in [((bad, good), "window"), ((good, bad), "expected")]:
        with pytest.raises(ValueError, match=rf"{name}\[0, 1\] = inf"):
            pb.mixed_scores(*arguments)


@pytest.mark.parametrize("module", [_scores, _query_moments])
def test_the_examples_are_right(module):
    failed, tried = doctest.testmod(module, extraglobs={"np": np})
    assert (failed, tried > 0) == (0, True)
