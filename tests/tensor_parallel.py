"""One rank of a tensor-parallel model, or the whole model: what a compressed cache keeps and answers, as JSON.

Usage: tensor_parallel.py MODEL_FOLDER OUTPUT. The ranks and their meeting point come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

from pb_kvcache import HeadPlan, Selection
from pb_kvcache.transformers import BudgetedCache, use
from pb_kvcache.transformers._generation import CACHE_NAME

folder, output = sys.argv[1:]
torch.set_num_threads(1)
placement = {}
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
    placement["tp_plan"] = "auto"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer releases have another name for tp_plan
    model = use(AutoModelForCausalLM.from_pretrained(folder, **placement).eval())
ids = torch.randint(2, 100, (1, 60), generator=torch.Generator().manual_seed(1))
# 30 positions in each of 4 layers with 2 KV heads of 16 floats, over all ranks together.
RULE = Selection(window=4, kernel=1, protect=2, value_weight=True)
plan = HeadPlan([[30, 12], [9, 40], [25, 25], [48, 5]])
cases: dict[str, dict[str, Any]] = {
    "memory": {"memory": 4 * 30 * 2 * 16 * 4 * 2},
    "heads": {"plan": plan},
    "heads held": {"plan": plan, "decode": "hold"},
    "adakv": {"budget": 30, "heads": "adakv"},
    "values": {"budget": 30, "selection": Selection(window=4, kernel=1, protect=2, score="mixed", value_weight=True)},
    "merged": {"budget": 30, "heads": "adakv", "selection": RULE, "merge": "fitted"},
}
result = {}
for name, options in cases.items():
    rule = {} if "selection" in options else {"window": 4, "kernel": 3}
    cache = BudgetedCache(model.config, **rule, **options)
    with torch.no_grad():
        logits = [
            model(part, use_cache=True, **{CACHE_NAME: cache}).logits[0, -1]
            for part in (ids, *ids[:, :3].split(1, dim=1))
        ]
    result[name] = {
        "ranks": getattr(model, "tp_size", None),
        "lengths": cache.head_lengths.tolist(),
        "positions": [cache.positions(layer)[0].tolist() for layer in range(4)],
        "logits": [row.tolist() for row in logits],
    }
Path(output).write_text(json.dumps(result))
if "WORLD_SIZE" in os.environ:
    torch.distributed.destroy_process_group()
