"""The prefill selection on torch tensors: read in place on the CPU, sent to torch's own path on another device."""

from __future__ import annotations

import numpy as np
import pytest

import pb_kvcache as pb
from pb_kvcache import _tensor, _torch_path

torch = pytest.importorskip("torch")


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


OPTIONS = {"num_kv_heads": 2, "from_logits": True, "scale": 0.5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_tensor_gives_what_the_array_gives(dtype, batch):
    attn = logits_of(*batch, 4, 5, 90).to(dtype)
    before = attn.clone()
    array = attn.float().numpy()
    scores = pb.window_scores(attn, **OPTIONS)
    assert scores.dtype == torch.float32
    np.testing.assert_array_equal(scores.numpy(), pb.window_scores(array, **OPTIONS))
    kept = pb.select(attn, 30, window=5, **OPTIONS)
    assert kept.dtype == torch.int64
    np.testing.assert_array_equal(kept.numpy(), pb.select(array, 30, window=5, **OPTIONS))
    pooled = pb.pool_scores(scores, 5, "avg")
    np.testing.assert_array_equal(pooled.numpy(), pb.pool_scores(scores.numpy(), 5, "avg"))
    np.testing.assert_array_equal(pb.select_top(pooled, 9).numpy(), pb.select_top(pooled.numpy(), 9))
    assert torch.equal(attn, before)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("budget", [30, [9, 40], 95])
def test_scores_in_a_tensor_keep_what_those_of_the_array_keep(batch, budget):
    scores = torch.rand(*batch, 2, 85, generator=torch.Generator().manual_seed(1))
    kept = pb.select_from_scores(scores, budget, 5, pooling="avg")
    want = pb.select_from_scores(scores.numpy(), budget, 5, pooling="avg")
    while isinstance(kept, list):
        kept, want = kept[-1], want[-1]
    assert kept.dtype == torch.int64
    np.testing.assert_array_equal(kept.numpy(), want)


def test_tensors_are_read_in_place_whatever_their_strides(monkeypatch):
    whole = logits_of(5, 8, 100)
    views = [whole[1:, 3:, 5:95], whole.transpose(0, 1)[:4, :5, :90], whole[:1, :5, :90].expand(4, 5, 90)]
    plain = [view.contiguous().clone() for view in views]
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("copied"))
    for view, same in zip(views, plain, strict=True):
        assert torch.equal(pb.select(view, 20, window=5, **OPTIONS), pb.select(same, 20, window=5, **OPTIONS))
    monkeypatch.undo()
    last_axis = whole[..., ::2][:4, :5]
    assert torch.equal(
        pb.select(last_axis, 20, window=5, **OPTIONS), pb.select(last_axis.clone(), 20, window=5, **OPTIONS)
    )


def test_per_head_budgets_and_padding_with_tensors():
    attn = logits_of(2, 4, 5, 60)
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[1, :25] = False
    kept = pb.select(attn, [9, 40], window=5, valid=valid, **OPTIONS)
    assert all(row.dtype == torch.int64 for one in kept for row in one)
    alone = pb.select(attn[1, :, :, 25:], [9, 40], window=5, **OPTIONS)
    assert [row.tolist() for row in kept[1]] == [(row + 25).tolist() for row in alone]


def test_tensors_in_a_graph_are_read_and_the_result_is_not_in_it():
    attn = logits_of(4, 5, 60).requires_grad_()
    assert not pb.window_scores(attn, **OPTIONS).requires_grad
    q, k = logits_of(4, 5, 8).requires_grad_(), logits_of(2, 60, 8).requires_grad_()
    assert not pb.scores_from_qk(q, k).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_from_queries_and_keys_are_those_of_the_arrays(dtype):
    q, k = logits_of(2, 4, 5, 32).to(dtype), logits_of(2, 2, 5000, 32, seed=1).to(dtype)
    got = pb.scores_from_qk(q, k, threads=2)
    want = pb.scores_from_qk(q.float().numpy(), k.float().numpy())
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=1e-12)
    assert torch.equal(pb.scores_from_qk(q[0], k[0]), got[0])


def test_compaction_of_tensors():
    values = torch.arange(2 * 3 * 20 * 4).reshape(2, 3, 20, 4).to(torch.bfloat16)
    indices = torch.stack([torch.tensor([[1, 4, 19], [0, 1, 2], [7, 8, 9]]), torch.tensor([[0, 5, 6]] * 3)])
    kv = values.clone()
    front = pb.compact(kv, indices, threads=2)
    assert front.data_ptr() == kv.data_ptr()
    assert torch.equal(front, values.gather(2, indices[..., None].expand(-1, -1, -1, 4)))
    outermost = values.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    assert torch.equal(pb.compact(outermost, indices), front)
    with pytest.raises(ValueError, match="gradient"):
        pb.compact(torch.zeros(1, 4, 2, requires_grad=True), [[0]])
    with pytest.raises(ValueError, match="overlap"):
        pb.compact(torch.zeros(1, 1, 2).expand(1, 4, 2), [[0]])
    with pytest.raises(ValueError, match="overlap"):
        pb.compact(torch.zeros(1, 2, 4, 2).expand(3, 2, 4, 2), [[[0], [1]]] * 3)
    with pytest.raises(TypeError, match="meta"):
        pb.compact(torch.zeros(1, 4, 2, device="meta"), [[0]])


def test_block_selection_with_tensors():
    scores = torch.rand(2, 70, generator=torch.Generator().manual_seed(0))
    blocks = pb.block_select(scores, 40, block_size=8, window=10)
    assert blocks.dtype == torch.int64
    assert blocks.tolist() == pb.block_select(scores.numpy(), 40, block_size=8, window=10).tolist()


def test_what_is_no_dense_tensor_of_the_kinds_is_refused():
    with pytest.raises(TypeError, match="not float64"):
        pb.window_scores(torch.zeros(4, 5, 60, dtype=torch.float64), num_kv_heads=2)
    with pytest.raises(TypeError, match="sparse"):
        pb.window_scores(torch.zeros(4, 5, 60).to_sparse(), num_kv_heads=2)
    with pytest.raises(TypeError, match="same kind"):
        pb.scores_from_qk(torch.zeros(4, 5, 8), torch.zeros(2, 60, 8, dtype=torch.float16))
    with pytest.raises(TypeError, match="same kind"):
        pb.scores_from_qk(torch.zeros(4, 5, 8), np.zeros((2, 60, 8), np.float32))


def test_a_tensor_on_another_device_takes_the_path_in_torch(monkeypatch):
    """Every function asks one place whether the tensor is elsewhere. Here it says so of a tensor on the CPU."""
    attn = logits_of(3, 4, 5, 60)
    attn[0, 1, 2, 3] = torch.nan
    valid = torch.ones(3, 60, dtype=torch.bool)
    valid[2, 50:] = False

    def answers():
        scores = pb.window_scores(attn, nan="lowest", **OPTIONS)
        pooled = pb.pool_scores(scores, 5, "avg", nan="lowest")
        return [
            scores,
            pooled,
            pb.select_top(pooled, 9, nan="lowest"),
            pb.select_from_scores(scores, 20, 5, nan="lowest"),
            *pb.select_from_scores(scores[1], [8, 60], 5),
            pb.select(attn[1:], 20, window=5, **OPTIONS),
            *pb.select(attn, 55, window=5, valid=valid, nan="lowest", **OPTIONS),
            pb.scores_from_qk(logits_of(4, 5, 8), logits_of(2, 60, 8)),
            pb.block_select(scores, 24, block_size=8, window=5, nan="lowest"),
        ]

    native = answers()
    called = set()

    def noted(name, function):
        def call(*arguments, **options):
            called.add(name)
            return function(*arguments, **options)

        return call

    names = ("window_scores", "pool_scores", "select_top", "select", "select_from_scores")
    for name in names:
        monkeypatch.setattr(_torch_path, name, noted(name, getattr(_torch_path, name)))
    monkeypatch.setattr(_tensor, "NATIVE_DEVICES", frozenset())
    for ours, theirs in zip(native, answers(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2e-6, atol=1e-9)
    assert called == set(names)
    kv = torch.arange(3 * 20 * 4).reshape(3, 20, 4)
    before = kv.clone()
    fronts = pb.compact(kv, [[1, 4], [0, 1, 19], []])
    assert [front.tolist() for front in fronts] == [
        before[0, [1, 4]].tolist(),
        before[1, [0, 1, 19]].tolist(),
        [],
    ]
    with pytest.raises(ValueError, match="overlap"):
        pb.compact(torch.zeros(1, 1, 2).expand(1, 4, 2), [[0]])
