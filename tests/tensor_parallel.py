"""One rank of a tensor-parallel model, or the whole model: what a compressed cache keeps and answers, as JSON.

Usage: tensor_parallel.py MODEL_FOLDER OUTPUT. The ranks and their meeting point come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

from pb_kvcache.transformers import BudgetedCache, use
from pb_kvcache.transformers._generation import CACHE_NAME

folder, output = sys.argv[1:]
torch.set_num_threads(1)
options = {}
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
    options["tp_plan"] = "auto"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer releases have another name for tp_plan
    model = use(AutoModelForCausalLM.from_pretrained(folder, **options).eval())
ids = torch.randint(2, 100, (1, 60), generator=torch.Generator().manual_seed(1))
# 30 positions in each of 4 layers with 2 KV heads of 16 floats, over all ranks together.
cache = BudgetedCache(model.config, memory=4 * 30 * 2 * 16 * 4 * 2, window=4, kernel=3)
with torch.no_grad():
    logits = [
        model(part, use_cache=True, **{CACHE_NAME: cache}).logits[0, -1] for part in (ids, *ids[:, :3].split(1, dim=1))
    ]
result = {
    "ranks": getattr(model, "tp_size", None),
    "lengths": cache.lengths.tolist(),
    "positions": [cache.positions(layer).tolist() for layer in range(4)],
    "logits": [row.tolist() for row in logits],
}
Path(output).write_text(json.dumps(result))
if "WORLD_SIZE" in os.environ:
    torch.distributed.destroy_process_group()
