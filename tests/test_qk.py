"""Window scores from queries and keys against float64."""

from __future__ import annotations

import numpy as np
import pytest

import pb_kvcache as pb

from . import reference_select as reference
from .attention import as_kind


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_scores_from_queries_and_keys(kind):
    rng = np.random.default_rng(4)
    q = as_kind(rng.normal(size=(2, 6, 5, 16)).astype(np.float32), kind)
    k = as_kind(rng.normal(size=(2, 2, 70, 16)).astype(np.float32), kind)
    got = pb.scores_from_qk(q, k, threads=2)
    assert got.shape == (2, 2, 65)
    for b in range(2):
        wide_q, wide_k = q[b].astype(np.float64), np.repeat(k[b].astype(np.float64), 3, axis=0)
        logits = np.einsum("hwd,hnd->hwn", wide_q, wide_k)
        np.testing.assert_allclose(got[b], reference.window_scores(logits, 2, "mean", True, 0.25), rtol=2e-5)
        np.testing.assert_array_equal(pb.scores_from_qk(q[b], k[b]), got[b])


def test_keys_that_are_nan_are_refused_or_rank_lowest():
    q, k = np.ones((2, 3, 8), np.float32), np.ones((2, 20, 8), np.float32)
    k[1, 7, 2] = np.nan
    with pytest.raises(ValueError, match=r"q and k: in the products of KV head 1, attn\[0, 0, 7\] = nan"):
        pb.scores_from_qk(q, k)
    scores = pb.scores_from_qk(q, k, nan="lowest")
    assert np.flatnonzero(scores == -np.inf).tolist() == [17 + 7]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "options", "message"),
    [
        ((2, 3, 8), (2, 20, 7), {}, r"k: has shape .*must agree with q"),
        ((1, 2, 3, 8), (2, 2, 20, 8), {}, r"k: has shape .*must agree with q"),
        ((3, 3, 8), (2, 20, 8), {}, "k: has 2 heads, must divide the 3 of q"),
        ((2, 21, 8), (2, 20, 8), {}, "q: has 21 queries, must have at least 1 and no more than the 20"),
        ((2, 20, 8), (2, 20, 8), {}, "window = 20: must be greater than 0 and smaller than n = 20"),
        ((2, 3, 8), (2, 20, 8), {"protect": 20}, "protect = 20: must be greater than 0 and smaller than n = 20"),
        ((2, 0, 8), (2, 20, 8), {}, "q: has 0 queries"),
        ((2, 3, 0), (2, 20, 0), {}, "q: has head_dim = 0"),
        ((3, 8), (20, 8), {}, "q and k: must have shapes"),
        ((2, 3, 8), (2, 20, 8), {"scale": 0.0}, "scale = 0.0"),
        ((2, 3, 8), (2, 20, 8), {"reduce": "min"}, "reduce = 'min'"),
        ((2, 3, 8), (2, 20, 8), {"nan": "no"}, "nan = 'no'"),
        ((2, 3, 8), (2, 20, 8), {"threads": 0}, "threads = 0"),
    ],
)
def test_bad_queries_and_keys_are_named(q_shape, k_shape, options, message):
    with pytest.raises(ValueError, match=message):
        pb.scores_from_qk(np.ones(q_shape, np.float32), np.ones(k_shape, np.float32), **options)
