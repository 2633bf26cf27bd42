"""The torch path of the prefill selection answers what the native one does: run on the CPU, where both can."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pb_kvcache  # noqa: E402
from pb_kvcache import _tensor, _torch_path  # noqa: E402

from . import reference_select as reference  # noqa: E402

Q_HEADS, KV_HEADS, W = 6, 3, 5


def attention(n, seed=0, batch=(), dtype=torch.float32, logits=False, levels=0):
    """Return random attention of a window. With `levels` it has only so many different values, that is, many ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*batch, Q_HEADS, W, n, generator=generator)
    if levels:
        values = (values * levels).round() / levels
    if not logits:
        values = (values + torch.triu(torch.full((W, n), -torch.inf), 1 + n - W)).softmax(-1)
    return values.to(dtype)


@pytest.mark.parametrize("n", [W + 1, 9, 40, 200])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("logits", [False, True])
def test_window_scores_agree_with_the_native_ones(n, reduce, dtype, logits):
    attn = attention(n, batch=(2,), dtype=dtype, logits=logits)
    before = attn.clone()
    options = {"num_kv_heads": KV_HEADS, "reduce": reduce, "from_logits": logits}
    if logits:
        options["scale"] = 0.37
    got = _torch_path.window_scores(attn, **options)
    torch.testing.assert_close(got, pb_kvcache.window_scores(attn, **options), atol=1e-7, rtol=2e-6)
    expected = reference.window_scores(attn[0].double().numpy(), KV_HEADS, reduce, logits, options.get("scale", 1.0))
    assert np.allclose(got[0].numpy(), expected, atol=1e-7, rtol=1e-5)
    assert torch.equal(attn, before)


@pytest.mark.parametrize("n", [1, 2, 7, 50])
@pytest.mark.parametrize("kernel", [1, 3, 7, 101])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("edge", ["count", "kernel"])
@pytest.mark.parametrize("bad", [False, True])
def test_pooled_scores_agree_with_the_native_ones(n, kernel, pooling, edge, bad):
    scores = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
    nan = "raise"
    if bad:
        scores[0, 1, n // 2] = torch.nan
        scores[1, 2, n - 1] = torch.inf
        nan = "lowest"
    got = _torch_path.pool_scores(scores, kernel, pooling, edge=edge, nan=nan)
    want = pb_kvcache.pool_scores(scores, kernel, pooling, edge=edge, nan=nan)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 17, 99, 100, 1000])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_the_best_are_the_native_best_whatever_the_ties(k, levels):
    scores = (torch.rand(4, 100, generator=torch.Generator().manual_seed(levels)) * levels).round()
    scores[0] = 0.0
    scores[1, ::2] = -0.0
    assert torch.equal(_torch_path.select_top(scores, k), pb_kvcache.select_top(scores, k))
    scores[2, 10:60] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, 1.0]).repeat(10)
    assert torch.equal(_torch_path.select_top(scores, k, nan="lowest"), pb_kvcache.select_top(scores, k, nan="lowest"))


@pytest.mark.parametrize("n", [W + 1, 12, 60])
@pytest.mark.parametrize("budget", [W, W + 1, 11, 60, [W, 8, 60]])
@pytest.mark.parametrize(("pooling", "edge"), [("max", "count"), ("avg", "count"), ("avg", "kernel")])
@pytest.mark.parametrize("window_in_budget", [True, False])
def test_the_selection_is_the_native_one(n, budget, pooling, edge, window_in_budget):
    attn = attention(n, seed=3, logits=True)
    options = {
        "num_kv_heads": KV_HEADS,
        "window": W,
        "kernel": 3,
        "pooling": pooling,
        "edge": edge,
        "from_logits": True,
        "scale": 0.5,
        "window_in_budget": window_in_budget,
    }
    got = _torch_path.select(attn, budget, **options)
    expected = pb_kvcache.select(attn, budget, **options)
    assert type(got) is type(expected)
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("budget", [W, 11, 60, [W, 8, 60]])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("window_in_budget", [True, False])
@pytest.mark.parametrize("batch", [(), (2,), (2, 2)])
@pytest.mark.parametrize("nan", ["raise", "lowest"])
def test_the_selection_from_scores_is_the_native_one(budget, pooling, window_in_budget, batch, nan):
    scores = (torch.rand(*batch, KV_HEADS, 50, generator=torch.Generator().manual_seed(4)) * 9).round()
    if nan == "lowest":
        scores[..., 1, 7], scores[..., 2, 30] = torch.nan, -torch.inf
    options = {"kernel": 3, "pooling": pooling, "window_in_budget": window_in_budget, "nan": nan}
    got = _torch_path.select_from_scores(scores, budget, W, **options)
    want = pb_kvcache.select_from_scores(scores, budget, W, **options)
    assert type(got) is type(want)
    while isinstance(got, list):
        assert len(got) == len(want)
        got, want = got[-1], want[-1]
    assert torch.equal(got, want)


RULES = [
    {"protect": 2},
    {"protect": 1, "sinks": 3, "kernel": 1},
    {"protect": W + 2, "sinks": 1, "pooling": "avg", "edge": "kernel", "kernel": 3},
]


def weights_of(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("n", [W, 40])
def test_scores_of_the_window_agree_with_the_native_ones(rule, logits, reduce, n):
    attn = attention(n, batch=(2,), logits=logits)
    options = {"num_kv_heads": KV_HEADS, "protect": min(rule["protect"], n - 1), "reduce": reduce}
    got = _torch_path.window_scores(attn, from_logits=logits, **options)
    torch.testing.assert_close(got, pb_kvcache.window_scores(attn, from_logits=logits, **options), atol=1e-7, rtol=2e-6)
    if not logits:
        attn[0, 3, 2, n - 1] = torch.nan  # query 2 of the window does not see the last position
        again = _torch_path.window_scores(attn, **options)
        assert torch.equal(again, got)
        attn[0, 3, 2, 0] = torch.nan
        for path in (_torch_path, pb_kvcache):
            with pytest.raises(ValueError, match="every probability must be finite and >= 0"):
                path.window_scores(attn, **options)
        want = pb_kvcache.window_scores(attn, nan="lowest", **options)
        torch.testing.assert_close(_torch_path.window_scores(attn, nan="lowest", **options), want, atol=1e-7, rtol=2e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weighing", ["none", "n", "scored"])
@pytest.mark.parametrize("budget", [11, [8, 60, 17]])
@pytest.mark.parametrize("window_in_budget", [True, False])
def test_what_is_always_kept_and_weights_are_the_native_ones(rule, weighing, budget, window_in_budget):
    attn = attention(60, seed=3, logits=True)
    weights = None if weighing == "none" else weights_of(KV_HEADS, 60 if weighing == "n" else 60 - rule["protect"])
    options = {"num_kv_heads": KV_HEADS, "window": W, "from_logits": True, "window_in_budget": window_in_budget, **rule}
    got = _torch_path.select(attn, budget, weights=weights, **options)
    expected = pb_kvcache.select(attn, budget, weights=weights, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    scores = pb_kvcache.window_scores(attn, num_kv_heads=KV_HEADS, from_logits=True, protect=rule["protect"])
    parts = _torch_path.select_from_scores(scores, budget, weights=weights, window_in_budget=window_in_budget, **rule)
    assert all(torch.equal(one, other) for one, other in zip(parts, expected, strict=True))
    whole = pb_kvcache.Selection(window=W, **rule)
    ruled = _torch_path.select(
        attn,
        budget,
        selection=whole,
        weights=weights,
        num_kv_heads=KV_HEADS,
        from_logits=True,
        window_in_budget=window_in_budget,
    )
    assert all(torch.equal(one, other) for one, other in zip(ruled, expected, strict=True))


@pytest.mark.parametrize("rule", [{"protect": 2}, {"protect": 1, "sinks": 1, "kernel": 1}])
@pytest.mark.parametrize("weighing", [False, True])
def test_a_padded_batch_with_a_sequence_shorter_than_the_window_is_the_native_one(rule, weighing):
    attn = attention(40, seed=6, batch=(3,), logits=True)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, 4:], mask[2, :30], mask[2, 32:36:2] = False, False, False
    weights = weights_of(3, KV_HEADS, 40) if weighing else None
    options = {"num_kv_heads": KV_HEADS, "window": W, "from_logits": True, "valid": mask, "weights": weights, **rule}
    got, expected = _torch_path.select(attn, 3, **options), pb_kvcache.select(attn, 3, **options)
    assert torch.equal(got, expected)
    assert mask.unsqueeze(1).expand(-1, KV_HEADS, -1).gather(-1, got).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": torch.ones(3, 40, dtype=torch.float64)}, TypeError, "weights: must be .* float32"),
        ({"weights": torch.ones(3, 39)}, ValueError, r"weights: has shape \(3, 39\), must be \(3, 35\) or \(3, 40\)"),
        ({"weights": -torch.ones(3, 40)}, ValueError, r"weights\[0, 0\] = -1.0: every weight must be finite and >= 0"),
        ({"weights": torch.full((3, 40), torch.inf)}, ValueError, r"weights\[0, 0\] = inf: every weight"),
        ({"weights": torch.full((3, 40), 3e38)}, ValueError, "is too large for float32"),
        ({"selection": "snapkv", "window": None}, ValueError, "selection: has a window of 32, must be .* 5"),
        ({"selection": "output"}, ValueError, "selection and window: a selection says all of its rule"),
        ({"protect": 0}, ValueError, "protect = 0: must be at least 1"),
        ({"sinks": 7}, ValueError, "budget = 10: must be at least what is always kept, 12: protect 5 and sinks 7"),
    ],
)
def test_bad_weights_and_rules_are_named_by_both_paths(change, error, message):
    attn = attention(40) if "too large" not in message else torch.full((Q_HEADS, W, 40), 2.0)
    for path in (_torch_path, pb_kvcache):
        options = {"num_kv_heads": KV_HEADS, "window": W, **change}
        with pytest.raises(error, match=message):
            path.select(attn, 10, **options)


def test_weights_of_another_kind_than_the_scores_are_named():
    with pytest.raises(
        TypeError, match=r"weights: must be a torch tensor of float32 on cpu, as the scores, not ndarray"
    ):
        _torch_path.select_from_scores(torch.rand(2, 30), 12, 4, weights=np.ones((2, 30), np.float32))
    with pytest.raises(TypeError, match=r"weights: must be a torch tensor of float32 on cpu"):
        _torch_path.select(attention(40), 12, num_kv_heads=KV_HEADS, weights=[[1.0] * 40] * 3)
    scores, weights = torch.rand(2, 30), torch.ones(2, 34)
    scores[0, 3], weights[1] = torch.nan, -1
    for path in (_torch_path, pb_kvcache):  # a head that keeps everything, and what is left out
        kept = path.select_from_scores(scores, [12, 34], 4, weights=weights, nan="lowest")
        assert 3 not in kept[0].tolist()
        assert kept[1].tolist() == list(range(34))


def test_scores_of_a_head_that_keeps_everything_are_not_looked_at():
    scores = torch.rand(2, 3, 20)
    scores[1, 1, 4] = torch.nan
    for path in (_torch_path, pb_kvcache):
        kept = path.select_from_scores(scores, [8, 25, 8], W)
        assert kept[1][1].tolist() == list(range(25))
        assert path.select_from_scores(scores, 25, W).tolist() == [[list(range(25))] * 3] * 2
        with pytest.raises(ValueError, match=r"scores\[1, 1, 4\] = nan: every score must be finite"):
            path.select_from_scores(scores, [8, 24, 25], W)


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_plateaus_and_exact_ties_go_to_the_lower_position(pooling):
    weights = torch.zeros(2, 1, 40)
    weights[:, :, 20] = 0.5
    got = _torch_path.select(weights, 6, num_kv_heads=2, window=1, kernel=7, pooling=pooling)
    assert got.tolist() == [[17, 18, 19, 20, 21, 39]] * 2
    assert _torch_path.select(weights * 0, 4, num_kv_heads=1, window=1).tolist() == [[0, 1, 2, 39]]


@pytest.mark.parametrize("valid", [[60, 31, 4], "mask", "holes", None])
@pytest.mark.parametrize("budget", [12, [6, 12, 60]])
def test_a_padded_batch_is_each_sequence_alone(valid, budget):
    attn = attention(60, seed=5, batch=(3,), logits=True)
    mask = torch.ones(3, 60, dtype=torch.bool)
    if valid == "mask":
        mask[1, :29], mask[2, :50] = False, False
        valid = mask
    elif valid == "holes":
        mask[0, 3:20:2], mask[1, 55:] = False, False
        valid = mask
    elif valid is not None:
        mask = torch.arange(60) < torch.tensor(valid)[:, None]
    options = {"num_kv_heads": KV_HEADS, "window": W, "from_logits": True}
    got = _torch_path.select(attn, budget, valid=valid, **options)
    expected = pb_kvcache.select(attn, budget, valid=valid, **options)
    for row in range(3):
        for head in range(KV_HEADS):
            assert torch.equal(got[row][head], expected[row][head])
        columns = mask[row].nonzero().squeeze(-1)
        if len(columns) > W:
            alone = _torch_path.select(attn[row][..., columns], budget, **options)
            assert all(torch.equal(got[row][head], columns[alone[head]]) for head in range(KV_HEADS))


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_refused_or_ranks_lowest_as_in_the_native_path(logits, value):
    attn = attention(40, seed=7, logits=logits)
    attn[1, 2, 9] = value
    options = {"num_kv_heads": KV_HEADS, "window": W, "kernel": 3, "from_logits": logits}
    for path in (_torch_path, pb_kvcache):
        with pytest.raises(ValueError, match="attn"):
            path.select(attn, 10, **options)
    got = _torch_path.select(attn, 39, nan="lowest", **options)
    assert torch.equal(got, pb_kvcache.select(attn, 39, nan="lowest", **options))
    assert 9 not in got[0].tolist()
    assert 9 in got[1].tolist()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_kv_heads": 4}, ValueError, "num_kv_heads = 4: must divide the 6"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"window": 4}, ValueError, "window = 4: must be the number of queries"),
        ({"window": 5.0}, TypeError, "window"),
        ({"kernel": 2}, ValueError, "kernel = 2: must be odd"),
        ({"pooling": "mean"}, ValueError, "pooling = 'mean'"),
        ({"reduce": "min"}, ValueError, "reduce = 'min'"),
        ({"nan": "ignore"}, ValueError, "nan = 'ignore'"),
        ({"budget": 4}, ValueError, "budget = 4: must be at least what is always kept, 5"),
        ({"budget": [8, 8]}, ValueError, "budget: has 2 numbers"),
        ({"budget": True}, TypeError, "budget"),
        ({"scale": 0.0, "from_logits": True}, ValueError, "scale = 0"),
        ({"valid": [3]}, ValueError, "valid: is for a batch"),
        ({"attn": torch.zeros(6, 5, 40, dtype=torch.int32)}, TypeError, "attn: must be a torch tensor of float32"),
        ({"attn": torch.zeros(5, 40)}, ValueError, "attn: must have shape"),
        ({"attn": torch.zeros(6, 5, 5)}, ValueError, "window = 5: must be greater than 0 and smaller than n = 5"),
        ({"attn": torch.full((6, 5, 40), -0.1)}, ValueError, "every probability must be finite and >= 0"),
        ({"attn": torch.full((6, 5, 40), -torch.inf), "from_logits": True}, ValueError, "every query must see"),
    ],
)
def test_bad_input_is_named(change, error, message):
    options = {"num_kv_heads": KV_HEADS, "window": W, "attn": attention(40), "budget": 10, **change}
    with pytest.raises(error, match=message):
        _torch_path.select(options.pop("attn"), options.pop("budget"), **options)
    if "valid" not in change:
        options = {"num_kv_heads": KV_HEADS, "window": W, "attn": attention(40), "budget": 10, **change}
        with pytest.raises(error):  # the native path refuses it too
            pb_kvcache.select(options.pop("attn"), options.pop("budget"), **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(30)}, ValueError, "scores: must have at least 2 dimensions"),
        ({"scores": torch.zeros(2, 0)}, ValueError, r"scores: has shape \(2, 0\), must hold at least one"),
        ({"scores": torch.zeros(2, 30, dtype=torch.float64)}, TypeError, "scores: must be a torch tensor of float32"),
        ({"protect": 0}, ValueError, "protect = 0: must be at least 1"),
        ({"budget": 3}, ValueError, "budget = 3: must be at least what is always kept, 4"),
        ({"budget": [12]}, ValueError, "budget: has 1 numbers"),
        ({"kernel": 4}, ValueError, "kernel = 4: must be odd"),
        ({"pooling": "median"}, ValueError, "pooling = 'median'"),
        ({"nan": "ignore"}, ValueError, "nan = 'ignore'"),
    ],
)
def test_bad_input_of_the_selection_from_scores_is_named(change, error, message):
    with pytest.raises(error, match=message):
        _torch_path.select_from_scores(**{"scores": torch.zeros(2, 30), "budget": 12, "protect": 4, **change})


def test_a_tensor_on_another_device_is_sent_to_the_torch_path(monkeypatch):
    seen = []

    def record(attn, *args, **kwargs):
        seen.append((attn.device.type, args, kwargs))
        return "from torch"

    for name in ("select", "select_from_scores", "window_scores", "pool_scores", "select_top"):
        monkeypatch.setattr(_torch_path, name, record)
    monkeypatch.setattr(_tensor, "NATIVE_DEVICES", frozenset())
    far = torch.zeros(6, 5, 40)
    assert pb_kvcache.select(far, 10, num_kv_heads=3, window=5) == "from torch"
    assert pb_kvcache.select_from_scores(far, 10, 5) == "from torch"
    assert pb_kvcache.window_scores(far, num_kv_heads=3) == "from torch"
    assert pb_kvcache.window_scores(far, num_kv_heads=3, protect=2, selection=None) == "from torch"
    assert seen.pop()[2]["protect"] == 2
    assert pb_kvcache.pool_scores(far) == "from torch"
    assert pb_kvcache.select_top(far, 3) == "from torch"
    assert [device for device, _, _ in seen] == ["cpu"] * 5
