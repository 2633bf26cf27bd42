"""Nothing is imported inside a call: after a ``fork`` the child could wait for ever for a thread's import to end."""

from __future__ import annotations

import sys

import pytest

CALLS = """
import sys
TORCH
import numpy as np
import numpy.random
import pb_kvcache as pb
from pb_kvcache._model_config import read_config

before = set(sys.modules)
scores = np.linspace(0, 1, 80, dtype=np.float32).reshape(2, 40)
attn = np.full((4, 3, 40), 0.025, np.float32)
kv = np.arange(2 * 40 * 4.0, dtype=np.float32).reshape(2, 40, 4)
TENSORS
for options in ({}, {"threads": 2}):
    pb.window_scores(attn, num_kv_heads=2, **options)
    kept = pb.select(attn, 9, num_kv_heads=2, window=3, **options)
    pb.select(attn[None], [9, 12], num_kv_heads=2, window=3, valid=[30], **options)
    pb.scores_from_qk(kv[:, :3], kv, **options)
    pb.compact(kv, kept, **options)
pb.select_from_scores(scores, 9, 3)
pb.expected_scores(kv, *pb.query_moments(kv), kv[0], kv[1]), pb.mixed_scores(scores, scores)
pb.keydiff_scores(kv), pb.repeat_scores(kv, kv)
pb.select_top(pb.pool_scores(scores, 3, "avg"), 5)
pb.block_select(scores, 16, block_size=8, window=4)
pb.block_moves([0, 3], [5, 6], 2)
pb.to_blocks(kept, 4), pb.to_mask(kept, 40), pb.to_ranges(kept)
pb.plan(4, total=400, ratio=4)
pb.divide([1, 4], [[0.0, 1.0], [0.0, 2.0]], 5)
pb.pyramid_budgets(512, 4)
for make in (pb.SnapKV, pb.H2O, pb.TOVA, pb.Scissorhands, pb.StreamingLLM, pb.SlidingWindow, pb.FullCache):
    cache = make()
    cache.on_decode_step(1, [1.0])
    cache.on_decode_step(2, scores[0, :2])
    cache.seed([0, 5], [[0.5, 0.5]])
    cache.evict(1), cache.kept, len(cache), 5 in cache, repr(cache), cache.copy(), cache.reset()
stack = pb.PyramidStack(2, 64)
stack.on_decode_step(1, [[1.0], None])
stack.seed(1, [0, 5], [[0.5, 0.5]])
stack.evict(), stack.kept, stack.copy(), repr(stack), stack.layers[1].kept
refused = (
    lambda: stack.on_decode_step(9, [[np.nan], None]),
    lambda: pb.select_top(scores * np.nan, 3),
    lambda: pb.SnapKV(0),
)
for wrong in refused:
    try:
        wrong()
        raise SystemExit("not refused")
    except ValueError:
        pass
added = {name for name in set(sys.modules) - before if not name.startswith("torch")}
assert not added, sorted(added)
"""


@pytest.mark.parametrize("torch", [False, True])
def test_no_call_imports_a_module(torch, run):
    if torch:
        pytest.importorskip("torch")
    tensors = "import torch; scores, attn, kv = map(torch.from_numpy, (scores, attn, kv))" if torch else ""
    script = CALLS.replace("TORCH", "import torch" if torch else "").replace("TENSORS", tensors)
    run(sys.executable, "-c", script)
