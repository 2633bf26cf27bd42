"""The prefill selection: its chain, padding, layouts, threads, and bad input."""

from __future__ import annotations

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb

from . import reference_select as reference
from .attention import as_kind, dyadic_of, logits_of, shapes


@settings(max_examples=60, deadline=None)
@given(
    shapes(),
    st.sampled_from([1, 3, 7, 31]),
    st.sampled_from(["max", "avg"]),
    st.sampled_from(["mean", "max", "sum"]),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.floats(0, 1.1),
)
def test_the_chain_keeps_what_its_parts_keep_and_exact_input_what_the_reference_keeps(
    shape, kernel, pooling, reduce, seed, threads, share
):
    kv_heads, group, window, n = shape
    weights = dyadic_of(shape, seed)
    budget = window + int(share * (n - window))
    options = {"num_kv_heads": kv_heads, "window": window, "kernel": kernel, "pooling": pooling, "reduce": reduce}
    got = pb.select(weights, budget, threads=threads, **options)
    pooled = pb.pool_scores(pb.window_scores(weights, num_kv_heads=kv_heads, reduce=reduce), kernel, pooling)
    tail = list(range(n - window, n))
    parts = [[*row, *tail] for row in pb.select_top(pooled, max(0, min(budget, n) - window)).tolist()]
    assert got.tolist() == parts
    if pooling == "max" and kernel < 31 and group & (group - 1) == 0 and window & (window - 1) == 0:
        want = reference.select(weights, budget, kv_heads, window, kernel, reduce=reduce)
        assert got.tolist() == want
    added = pb.select(weights, max(0, budget - window), window_in_budget=False, **options)
    assert added.tolist() == got.tolist()


def test_32_query_heads_over_8_kv_heads_give_8_lists():
    weights = dyadic_of((8, 4, 4, 60), 3)
    kept = pb.select(weights, 16, num_kv_heads=8, window=4)
    assert kept.shape == (8, 16)
    alone = [pb.select(weights[4 * h : 4 * h + 4], 16, num_kv_heads=1, window=4)[0] for h in range(8)]
    np.testing.assert_array_equal(kept, alone)


def test_equal_scores_keep_the_window_and_the_lowest_positions():
    for value in (0.0, 0.25):
        weights = np.full((2, 3, 20), value, np.float32)
        assert pb.select(weights, 8, num_kv_heads=1, window=3).tolist() == [[0, 1, 2, 3, 4, 17, 18, 19]]


def test_a_budget_of_the_window_keeps_the_window_and_one_of_n_everything():
    weights = dyadic_of((2, 1, 3, 20), 0)
    assert pb.select(weights, 3, num_kv_heads=2, window=3).tolist() == [[17, 18, 19]] * 2
    weights[:] = np.nan  # is not even read
    for budget in (20, 21, 2**40):
        assert pb.select(weights, budget, num_kv_heads=2, window=3).tolist() == [list(range(20))] * 2


def test_one_budget_per_head():
    weights = dyadic_of((3, 2, 4, 50), 5)
    kept = pb.select(weights, [4, 17, 99], num_kv_heads=3, window=4)
    assert [row.tolist() for row in kept] == [
        pb.select(weights, budget, num_kv_heads=3, window=4)[head].tolist() for head, budget in enumerate([4, 17, 99])
    ]
    assert all(row.dtype == np.uint32 for row in kept)
    same = pb.select(weights, np.array([9, 9, 9]), num_kv_heads=3, window=4)
    assert isinstance(same, list)


@pytest.mark.parametrize("seed", range(20))
def test_one_head_keeps_what_the_decode_policy_keeps(seed):
    """With the window as both observation and recent window, SnapKV started from the prompt holds the same positions.

    On a tie the policy drops the lower position where the selection keeps it, so the tied case is mirrored.
    """
    rng = np.random.default_rng(seed)
    window, n = int(rng.integers(1, 9)), int(rng.integers(20, 90))
    past = n - window
    budget, kernel = int(rng.integers(window + 1, n)), int(rng.integers(0, 5)) * 2 + 1
    mirror = np.concatenate([np.arange(past)[::-1], np.arange(past, n)])

    def kept_by_policy(weights, kernel):
        policy = pb.SnapKV(budget=n, recent_window=window, obs_window=window, pool_kernel=kernel)
        policy.seed(np.arange(n), weights)
        policy.evict(budget)
        return policy.kept.tolist()

    distinct = np.zeros((1, window, n), np.float32)
    distinct[..., :past] = rng.permutation(past * window).reshape(window, past) / 2**14
    distinct[0, 0, :past] += rng.permutation(past)
    alone = pb.select(distinct, budget, num_kv_heads=1, window=window, kernel=1)
    assert alone[0].tolist() == kept_by_policy(distinct[0], 1)

    weights = dyadic_of((1, 1, window, n), seed, levels=int(rng.integers(2, 20)))
    # The policy pools over the window's columns too: nobody looked at them, so they add nothing to their neighbours.
    weights[..., past:] = 0
    mirrored = np.ascontiguousarray(weights[..., mirror])
    kept = pb.select(mirrored, budget, num_kv_heads=1, window=window, kernel=kernel)
    assert sorted(mirror[kept[0]].tolist()) == kept_by_policy(weights[0], kernel)


def prompt_of_kvpress(n, seed):
    """Return what 64 queries of 8 heads gave to n positions: causal probabilities, `(8, 64, n)`."""
    logits = np.random.default_rng(seed).normal(scale=2, size=(8, 64, n)).astype(np.float32)
    return np.array([reference.probabilities(head) for head in logits], np.float32)


@pytest.mark.parametrize("n", [70, 200, 400])
def test_edge_kernel_keeps_what_kvpress_keeps(n):
    kvpress = pytest.importorskip("kvpress", reason="needs kvpress, which needs transformers below 5.3")
    torch = pytest.importorskip("torch", reason="needs torch")
    attn = prompt_of_kvpress(n, seed=n)
    press = kvpress.SnapKVPress()
    module = torch.nn.Module()
    module.config = types.SimpleNamespace(num_attention_heads=8)
    keys = torch.zeros(1, 2, n, 4)
    scores = press.score(module, torch.zeros(1, n, 4), keys, keys, torch.from_numpy(attn)[None], {})[0]
    chosen = {"num_kv_heads": 2, "window": press.window_size, "kernel": press.kernel_size, "pooling": "avg"}
    for budget in range(64, n):
        want = scores.topk(budget, dim=-1).indices.sort(dim=-1).values
        np.testing.assert_array_equal(pb.select(attn, budget, edge="kernel", **chosen), want)


@pytest.mark.parametrize("n", [70, 200, 400])
def test_edge_kernel_keeps_the_best_of_torchs_avg_pool1d(n):
    torch = pytest.importorskip("torch", reason="needs torch")
    attn = prompt_of_kvpress(n, seed=n)
    means = torch.from_numpy(attn[..., : n - 64]).double().mean(dim=1)  # over the window, by query head
    pooled = torch.nn.functional.avg_pool1d(means, 5, stride=1, padding=2).view(2, 4, -1).mean(dim=1)
    chosen = {"num_kv_heads": 2, "window": 64, "kernel": 5, "pooling": "avg"}
    differs = False
    for budget in range(64, n):
        best = pooled.topk(budget - 64, dim=-1).indices.sort(dim=-1).values.numpy()
        kept = pb.select(attn, budget, edge="kernel", **chosen)
        np.testing.assert_array_equal(kept[:, : budget - 64], best)
        np.testing.assert_array_equal(kept[:, budget - 64 :], [range(n - 64, n)] * 2)
        differs = differs or not np.array_equal(pb.select(attn, budget, **chosen), kept)
    assert differs  # by the neighbours that there are, the first and last positions rank higher


def test_a_kernel_wider_than_everything_is_the_whole():
    weights = dyadic_of((2, 2, 4, 40), 0)
    for kernel in (71, 73, 2**33 + 1, 2**70 + 1):
        np.testing.assert_array_equal(
            pb.select(weights, 12, num_kv_heads=2, window=4, kernel=kernel, pooling="avg"),
            pb.select(weights, 12, num_kv_heads=2, window=4, kernel=71, pooling="avg"),
        )


# ---- Padding ----


@settings(max_examples=40, deadline=None)
@given(shapes(), st.booleans(), st.integers(0, 2**32), st.integers(1, 3), st.sampled_from(["left", "right", "holes"]))
def test_a_padded_batch_keeps_what_each_sequence_keeps_alone(shape, from_logits, seed, threads, side):
    kv_heads, _, window, n = shape
    rng = np.random.default_rng(seed)
    batch = 3
    make = logits_of if from_logits else dyadic_of
    attn = np.stack([make(shape, seed + b) for b in range(batch)])
    lengths = rng.integers(1, n + 1, size=batch)
    budget = int(rng.integers(window, n + 1))
    masks = np.zeros((batch, n), bool)
    for b, length in enumerate(lengths):
        if side == "holes":
            masks[b, rng.permutation(n)[:length]] = True
        else:
            masks[b, : length if side == "right" else None] = True
            masks[b, : n - length if side == "left" else 0] = False
    for b in range(batch):
        attn[b][..., ~masks[b]] = rng.choice([np.nan, np.inf, -1.0, 1e30])  # padding is not read
    options = {"num_kv_heads": kv_heads, "window": window, "from_logits": from_logits}
    kept = pb.select(attn, budget, valid=masks, threads=threads, **options)
    for b, length in enumerate(lengths):
        columns = np.flatnonzero(masks[b])
        if length <= budget:
            alone = np.tile(columns, (kv_heads, 1))
        else:
            alone = columns[pb.select(np.ascontiguousarray(attn[b][..., columns]), budget, **options)]
        np.testing.assert_array_equal(kept[b], alone)
    if side == "right":
        by_length = pb.select(attn, budget, valid=lengths, **options)
        assert all(np.array_equal(x, y) for x, y in zip(by_length, kept, strict=True))


def test_a_batch_is_its_sequences():
    attn = np.stack([dyadic_of((2, 2, 4, 40), b) for b in range(3)])
    options = {"num_kv_heads": 2, "window": 4}
    np.testing.assert_array_equal(pb.select(attn, 12, **options), [pb.select(one, 12, **options) for one in attn])
    np.testing.assert_array_equal(
        pb.window_scores(attn, num_kv_heads=2), [pb.window_scores(one, num_kv_heads=2) for one in attn]
    )
    ragged = pb.select(attn, [5, 12], **options)
    assert [[len(head) for head in one] for one in ragged] == [[5, 12]] * 3


# ---- NaN and infinities ----


def test_nan_and_infinity_are_refused_where_they_are_seen():
    logits = logits_of((2, 2, 3, 30), 0)
    for bad in (np.nan, np.inf):
        logits[3, 1, 4] = bad
        with pytest.raises(ValueError, match=r"attn\[3, 1, 4\] = (nan|inf): no logit"):
            pb.select(logits, 10, num_kv_heads=2, window=3, from_logits=True)
        with pytest.raises(ValueError, match=r"attn\[1, 3, 1, 4\]"):
            pb.window_scores(np.stack([np.zeros_like(logits), logits]), num_kv_heads=2, from_logits=True)
    weights = dyadic_of((2, 2, 3, 30), 0)
    for bad in (np.nan, np.inf, -np.inf, -1e-30):
        weights[1, 2, 7] = bad
        with pytest.raises(ValueError, match=r"attn\[1, 2, 7\] = .*: every probability must be finite and >= 0"):
            pb.select(weights, 10, num_kv_heads=2, window=3)
    for bad in (-np.inf, -0.5):
        weights[1, 2, 7] = bad
        with pytest.raises(ValueError, match=r"attn\[1, 2, 7\]"):
            pb.select(weights, 10, num_kv_heads=2, window=3, nan="lowest")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_nan_lowest_ranks_below_everything_and_leaves_the_rest_alone(kind, reduce):
    logits = as_kind(logits_of((2, 2, 3, 40), 7), kind)
    bad = logits.copy()
    bad[0, 1, 4] = np.nan
    bad[1, 2, 9] = np.inf
    masked = logits.copy()  # what the softmax of the rest is
    masked[0, 1, 4] = -np.inf
    masked[1, 2, 9] = -np.inf
    options = {"num_kv_heads": 2, "from_logits": True, "reduce": reduce}
    got = pb.window_scores(bad, nan="lowest", **options)
    want = pb.window_scores(masked, **options)
    want[0, [4, 9]] = -np.inf
    np.testing.assert_array_equal(got, want)
    kept = pb.select(bad, 38, window=3, nan="lowest", **options)
    assert kept[0].tolist() == [i for i in range(40) if i not in (4, 9)]
    weights = as_kind(dyadic_of((2, 2, 3, 40), 7), kind)
    weights[0, 0, 3] = np.nan
    weights[3, 2, 0] = np.inf
    kept = pb.select(weights, 39, num_kv_heads=2, window=3, reduce=reduce, nan="lowest")
    assert kept.tolist() == [[i for i in range(40) if i != 3], list(range(1, 40))]


def test_float16_logits_that_overflow_are_refused_not_ranked_first():
    with np.errstate(over="ignore"):
        logits = (logits_of((1, 1, 2, 30), 0) * 3e4).astype(np.float16)
    assert np.isinf(logits).any()
    with pytest.raises(ValueError, match="no logit may be NaN or"):
        pb.select(logits, 10, num_kv_heads=1, window=2, from_logits=True)


# ---- Layouts and threads ----


def test_any_strides_are_read_in_place_and_a_last_axis_that_is_not_contiguous_is_copied():
    whole = dyadic_of((2, 2, 8, 60), 2)
    options = {"num_kv_heads": 2, "window": 4}
    plain = pb.select(whole[:, ::2].copy(), 20, **options)
    big = np.zeros((9, 5, 80), np.float32)
    big[1::2, 1:5, 10:70] = whole[:, ::2]
    for same in (
        whole[:, ::2],
        big[1::2, 1:5, 10:70],
        np.asfortranarray(whole[:, ::2]),
        whole[:, ::2].copy()[::-1].copy()[::-1],
        np.ascontiguousarray(whole[:, ::2].transpose(1, 0, 2)).transpose(1, 0, 2),
    ):
        np.testing.assert_array_equal(pb.select(same, 20, **options), plain)
    unaligned = np.frombuffer(b"x" + whole[:, ::2].tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 4, 60)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(pb.select(unaligned, 20, **options), plain)
    read_only = whole[:, ::2].copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(pb.select(read_only, 20, **options), plain)


def test_the_result_does_not_depend_on_the_number_of_threads():
    logits = np.stack([logits_of((5, 2, 4, 2000), b) for b in range(2)])
    options = {"num_kv_heads": 5, "from_logits": True}
    one = pb.window_scores(logits, **options)
    kept = pb.select(logits, 100, window=4, **options)
    for threads in (2, 3, 7, 64):
        np.testing.assert_array_equal(pb.window_scores(logits, threads=threads, **options), one)
        np.testing.assert_array_equal(pb.select(logits, 100, window=4, threads=threads, **options), kept)


# ---- What is always kept, and weights ----


@settings(max_examples=80, deadline=None)
@given(
    shapes(),
    st.sampled_from([1, 3, 7, 31]),
    st.sampled_from(["max", "avg"]),
    st.sampled_from(["count", "kernel"]),
    st.sampled_from(["mean", "max", "sum"]),
    st.booleans(),
    st.integers(0, 2**32),
    st.data(),
)
def test_protect_sinks_and_weights_keep_what_the_reference_keeps(
    shape, kernel, pooling, edge, reduce, from_logits, seed, data
):
    kv_heads, _, window, n = shape
    attn = logits_of(shape, seed) if from_logits else dyadic_of(shape, seed)
    if window > 1 and data.draw(st.booleans()):  # a prompt of the window alone
        attn, n = np.ascontiguousarray(attn[..., :window]), window
    protect = data.draw(st.integers(1, min(window + 2, n - 1)))
    sinks = data.draw(st.integers(0, min(3, n - protect)))
    weights = None
    if data.draw(st.booleans()):
        width = data.draw(st.sampled_from([n, n - protect]))
        weights = np.random.default_rng(seed).integers(0, 9, size=(kv_heads, width)).astype(np.float32) / 4
    budgets = data.draw(st.lists(st.integers(protect + sinks, n + 2), min_size=kv_heads, max_size=kv_heads))
    choosing = {"kernel": kernel, "pooling": pooling, "edge": edge, "sinks": sinks, "weights": weights}
    options = {"num_kv_heads": kv_heads, "reduce": reduce, "from_logits": from_logits, "protect": protect}
    got = pb.select(attn, budgets, window=window, threads=data.draw(st.integers(1, 3)), **choosing, **options)
    scores = reference.exact_scores(attn, kv_heads, reduce, from_logits, protect=protect)
    want = reference.select_from_scores(scores, budgets, protect, exact=True, **choosing)
    assert [row.tolist() for row in got] == want
    parts = pb.select_from_scores(pb.window_scores(attn, **options), budgets, protect, **choosing)
    assert [row.tolist() for row in parts] == want
    free = [max(0, budget - protect - sinks) for budget in budgets]
    added = pb.select(attn, free, window_in_budget=False, **choosing, **options)
    assert [row.tolist() for row in added] == want


def test_a_padded_batch_shorter_than_its_window_has_as_many_queries_as_tokens():
    """Its rows are the last ones of the window, whichever side is padded and whatever stands in the others."""
    attn = logits_of((2, 2, 9, 40), 4)
    batch = np.stack([attn] * 4)
    weights = np.random.default_rng(1).random((4, 2, 40), np.float32)
    mask = np.zeros((4, 40), bool)
    mask[0, 34:], mask[1, :6], mask[2, 3:21:3], mask[3] = True, True, True, True  # 6 tokens, and 40
    batch[:3, :, :3] = np.nan  # what would be queries before the first token
    options = {"num_kv_heads": 2, "from_logits": True, "kernel": 1, "protect": 2, "sinks": 1}
    for rows in (None, weights):
        kept = pb.select(batch, 4, window=9, valid=mask, weights=rows, **options)
        assert kept.shape == (4, 2, 4)
        for b in range(4):
            columns = np.flatnonzero(mask[b])
            alone = np.ascontiguousarray(batch[b][..., columns][:, -min(9, len(columns)) :])
            own = None if rows is None else rows[b][:, columns]
            np.testing.assert_array_equal(kept[b], columns[pb.select(alone, 4, weights=own, **options)])
    cut = pb.select(batch, 4, window=9, valid=mask, weights=weights[..., :38], **options)
    np.testing.assert_array_equal(cut, kept)
    batch[1, 3, 7, 4] = np.inf
    with pytest.raises(ValueError, match=r"attn\[1, 3, 7, 4\] = inf: no logit may be NaN or \+inf"):
        pb.select(batch, 4, window=9, valid=mask, **options)
    batch[1, 3, 7, 4] = 0
    weights[2, 1, 6] = -2
    with pytest.raises(ValueError, match=r"weights\[2, 1, 6\] = -2.0: every weight must be finite and >= 0"):
        pb.select(batch, 4, window=9, valid=mask, weights=weights, **options)


def test_weights_of_what_is_not_scored_are_not_read():
    attn = dyadic_of((2, 1, 4, 40), 2)
    weights = np.ones((2, 40), np.float32)
    weights[:, 36:], weights[1] = np.nan, -1  # what is protected, and a head that keeps everything
    options = {"num_kv_heads": 2, "window": 4}
    kept = pb.select(attn, [9, 40], weights=weights, **options)
    np.testing.assert_array_equal(kept[0], pb.select(attn, 9, **options)[0])
    scores = pb.window_scores(attn, num_kv_heads=2)
    np.testing.assert_array_equal(pb.select_from_scores(scores, [9, 40], 4, weights=weights)[0], kept[0])
    attn[0, 2, 3] = np.nan
    attn[1, 2, 5] = np.nan  # of the first head that is looked at, the first that is none
    with pytest.raises(ValueError, match=r"attn\[1, 2, 5\] = nan"):
        pb.select(attn, [40, 9], **options)


def test_a_product_that_is_too_large_is_refused():
    attn = np.full((1, 2, 9), 2.0, np.float32)
    weights = np.ones((1, 9), np.float32)
    weights[0, 4] = 3e38
    with pytest.raises(ValueError, match="attn: a sum of probabilities, times its weight, is too large for float32"):
        pb.select(attn, 5, num_kv_heads=1, weights=weights)
    with pytest.raises(ValueError, match=r"scores\[0, 4\] = 2: is too large for float32 times its weight, 3e\+38"):
        pb.select_from_scores(pb.window_scores(attn, num_kv_heads=1), 5, 2, weights=weights)


# ---- Bad input ----


def good_call(**changes):
    arguments = {"attn": dyadic_of((2, 2, 4, 40), 0), "budget": 12, "num_kv_heads": 2, "window": 4, **changes}
    return pb.select(arguments.pop("attn"), arguments.pop("budget"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": 3}, ValueError, "window = 3: must be the number of queries"),
        ({"window": 2.0}, TypeError, "window = 2.0: must be an integer"),
        ({"attn": np.zeros((4, 0, 40), np.float32), "window": 0}, ValueError, "window = 0: must be greater than 0"),
        ({"attn": np.zeros((4, 4, 4), np.float32)}, ValueError, "window = 4: .*smaller than n = 4"),
        ({"attn": np.zeros((4, 40), np.float32)}, ValueError, r"attn: must have shape"),
        ({"attn": np.zeros((4, 4, 40))}, TypeError, "attn: must be .* of float32, float16 or bfloat16, not float64"),
        ({"attn": np.zeros((4, 4, 40), ">f4")}, TypeError, "attn: .* foreign byte order"),
        ({"attn": np.zeros((4, 4, 40), np.int32)}, TypeError, "attn: .* not int32"),
        ({"attn": [[1.0]]}, TypeError, "attn: .* not list"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads = 3: must divide the 4 query heads"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"num_kv_heads": 8}, ValueError, "num_kv_heads = 8"),
        ({"num_kv_heads": -2}, ValueError, "num_kv_heads = -2"),
        ({"budget": 3}, ValueError, "budget = 3: must be at least what is always kept, 4"),
        ({"budget": -1, "window_in_budget": False}, ValueError, "budget = -1: must be 0 or more"),
        ({"budget": 7.5}, TypeError, "budget = 7.5: must be an integer"),
        ({"budget": [12]}, ValueError, "budget: has 1 numbers, must have one per KV head, 2"),
        ({"budget": [12, 3]}, ValueError, r"budget\[1\] = 3: must be at least what is always kept, 4"),
        ({"budget": [12, True]}, TypeError, r"budget\[1\] = True"),
        ({"kernel": 4}, ValueError, "kernel = 4: must be odd"),
        ({"kernel": 0}, ValueError, "kernel = 0: must be odd"),
        ({"kernel": -3}, ValueError, "kernel = -3: must be odd"),
        ({"pooling": "median"}, ValueError, "pooling = 'median': must be one of max, avg"),
        ({"pooling": None}, ValueError, "pooling = None: must be one of max, avg"),
        ({"attn": np.zeros((4, 5, 4), np.float32), "window": 5}, ValueError, "window = 5: .*at most n = 4"),
        ({"protect": 0}, ValueError, "protect = 0: must be at least 1"),
        ({"protect": 40, "budget": 40}, ValueError, "protect = 40: must be greater than 0 and smaller than n = 40"),
        ({"protect": 13}, ValueError, "budget = 12: must be at least what is always kept, 13"),
        ({"protect": 2.0}, TypeError, "protect = 2.0: must be an integer"),
        ({"sinks": -1}, ValueError, "sinks = -1: must be at least 0"),
        ({"sinks": 9}, ValueError, "budget = 12: must be at least what is always kept, 13: protect 4 and sinks 9"),
        ({"weights": [[1.0] * 40] * 2}, TypeError, "weights: must be .* of float32, not list"),
        ({"weights": np.ones((2, 40))}, TypeError, "weights: must be .* of float32, not float64"),
        (
            {"weights": np.ones((2, 39), np.float32)},
            ValueError,
            r"weights: has shape .*, must be \(2, 36\) or \(2, 40\)",
        ),
        ({"weights": np.ones((1, 40), np.float32)}, ValueError, r"weights: has shape \(1, 40\)"),
        ({"weights": np.ones((1, 2, 40), np.float32)}, ValueError, r"weights: has shape \(1, 2, 40\)"),
        ({"weights": np.array(1, np.float32)}, ValueError, r"weights: has shape \(\)"),
        ({"weights": np.full((2, 40), -1, np.float32)}, ValueError, r"weights\[0, 0\] = -1.0: every weight must be"),
        ({"weights": np.full((2, 40), np.inf, np.float32)}, ValueError, r"weights\[0, 0\] = inf: every weight must be"),
        ({"reduce": "min"}, ValueError, "reduce = 'min': must be one of mean, max, sum"),
        ({"nan": "ignore"}, ValueError, "nan = 'ignore': must be one of raise, lowest"),
        ({"from_logits": True, "scale": 0.0}, ValueError, "scale = 0.0: must be finite and greater than 0"),
        ({"from_logits": True, "scale": -1.0}, ValueError, "scale = -1.0"),
        ({"from_logits": True, "scale": float("nan")}, ValueError, "scale = nan"),
        ({"from_logits": True, "scale": 1e39}, ValueError, "scale = 1e.39"),
        ({"from_logits": True, "scale": 1e-50}, ValueError, "scale = 1e-50"),
        ({"from_logits": True, "scale": "1"}, TypeError, "scale = '1'"),
        ({"threads": 0}, ValueError, "threads = 0: must be at least 1"),
        ({"threads": 1.5}, TypeError, "threads = 1.5"),
        ({"valid": [40]}, ValueError, "valid: is for a batch"),
        ({"attn": np.ma.zeros((4, 4, 40), np.float32)}, TypeError, "attn: .*masked"),
        ({"kernel": 10**5000}, ValueError, "kernel = .*: must be odd"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        good_call(**changes)


@pytest.mark.parametrize(
    ("valid", "error", "message"),
    [
        ([40], ValueError, r"valid: has shape \(1,\), must have one length per sequence, \(2,\)"),
        ([40, 41], ValueError, r"valid\[1\] = 41: must be between 0 and n = 40"),
        ([-1, 4], ValueError, r"valid\[0\] = -1"),
        ([1.0, 4.0], TypeError, "valid: must be a boolean mask or integer lengths"),
        (np.ones((2, 39), bool), ValueError, r"valid: has shape \(2, 39\), must be \(batch, n\) = \(2, 40\)"),
    ],
)
def test_bad_valid_is_named(valid, error, message):
    attn = np.stack([dyadic_of((2, 2, 4, 40), b) for b in range(2)])
    with pytest.raises(error, match=message):
        pb.select(attn, 12, num_kv_heads=2, window=4, valid=valid)
