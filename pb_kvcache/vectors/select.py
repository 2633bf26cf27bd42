"""Kinds ``select`` (attention of a window, what each KV head keeps) and ``compact`` (rows moved to the front)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._compact import compact
from .._score import window_scores
from .._select import select, select_from_scores
from ._expect import answers, equal


def _attention(case: dict[str, Any]) -> npt.NDArray[Any]:
    """Return the attention. bfloat16, which NumPy lacks, becomes the same numbers in float32."""
    if case["dtype"] == "float32":
        return np.array(case["attn"], dtype=object).astype(np.float32)
    bits = np.array(case["attn"], np.uint16)
    if case["dtype"] == "float16":
        return bits.view(np.float16)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def run(case: dict[str, Any]) -> None:
    """Run one case of kind ``select``."""
    attn = _attention(case)
    window = attn.shape[1]
    protect = case.get("protect")
    choosing = {name: case[name] for name in ("kernel", "pooling", "edge", "nan")}
    choosing["sinks"] = case.get("sinks", 0)
    if "weights" in case:
        choosing["weights"] = np.array(case["weights"], dtype=object).astype(np.float32)
    scoring = {
        "num_kv_heads": case["kv_heads"],
        "reduce": case["reduce"],
        "protect": protect,
        "from_logits": case["logits"],
        "scale": case["scale"],
    }
    kept = answers(case.get("status"), lambda: select(attn, case["budgets"], window=window, **scoring, **choosing))
    if case.get("status") is None:
        equal("kept", [row.tolist() for row in kept], case["kept"])
        want = np.array(case["scores"], dtype=object).astype(np.float32)
        scores = window_scores(attn, nan=case["nan"], **scoring)
        equal("scores", scores.view(np.uint32).tolist(), want.view(np.uint32).tolist())
        kept = select_from_scores(want, case["budgets"], window if protect is None else protect, **choosing)
        equal("kept, from scores", [row.tolist() for row in kept], case["kept"])


def run_compact(case: dict[str, Any]) -> None:
    """Run one case of kind ``compact``."""
    heads, n, row = np.ogrid[: case["heads"], : case["n"], : case["row_bytes"]]
    kv = ((31 * heads + 7 * n + row) % 256).astype(np.uint8)
    before = kv.copy()
    front = answers(case.get("status"), lambda: compact(kv, case["indices"]))
    if case.get("status") is None:
        equal("front", [rows.tolist() for rows in front], case["front"])
    else:
        equal("rows", kv.tolist(), before.tolist())
