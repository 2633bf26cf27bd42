"""Kinds ``policy`` (calls on one cache and what each must answer) and ``refusal`` (parameters that are refused)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._native import ffi, lib
from .._policies import CLASSES
from ._expect import answers, equal


def _floats(values: Any) -> Any:
    """Return weights as float32. JSON has no NaN or infinity, so those come as strings."""
    return None if values is None else np.array(values, dtype=object).astype(np.float32)


def run(case: dict[str, Any]) -> None:
    """Run one case of kind ``policy``."""
    cache = CLASSES[case["policy"]](**case["params"])
    equal("effective budget", cache.effective_budget, case["effective_budget"])
    equal("capacity", cache.capacity, case["capacity"])
    for number, call in enumerate(case["calls"]):
        where = f"call {number}, {call['call']}"
        status = call.get("status")
        if call["call"] == "step":
            answers(status, lambda: cache.on_decode_step(call["pos"], _floats(call.get("attn"))))  # noqa: B023
        elif call["call"] == "evict":
            equal(where, cache.evict(call.get("budget")).tolist(), call["victims"])
        elif call["call"] == "evict_rows":
            asked = call["budget"], call["multiple_of"], call["which"]
            count = answers(status, lambda: cache.evict_count(*asked[:2]))  # noqa: B023
            told = answers(status, lambda: cache.evict_rows(*asked))  # noqa: B023
            if status is None:
                equal(where, [array.tolist() for array in told], [call["victims"], call["rows"]])
                equal(where, count, len(call["victims"]))
        elif call["call"] == "kept":
            equal(where, cache.kept.tolist(), call["positions"])
        elif call["call"] == "score":
            score = answers(status, lambda: cache.window_score(call["pos"]))  # noqa: B023
            equal(where, score, float(call["score"]) if status in (None, "ok") else None)
        elif call["call"] == "seed":
            attn = _floats(call.get("attn"))
            answers(status, lambda: cache.seed(call["positions"], attn))  # noqa: B023
        elif call["call"] == "rollback":
            equal(where, cache.rollback_count(), call["most"])
            answers(status, lambda: cache.rollback(call["count"]))  # noqa: B023
        elif call["call"] == "save":
            equal(where, cache.save().hex(), call["state"])
        elif call["call"] == "load":
            answers(status, lambda: cache.load(bytes.fromhex(call["state"])))  # noqa: B023
        elif call["call"] == "reset":
            cache.reset()
        else:
            raise AssertionError(f"{where}: is no call")


def named(status: str, params: dict[str, int]) -> str:
    """Return the parameter that a refusal names. What is too large is the first of these that is above 0."""
    if status != "too_large":
        return status
    return next(name for name in ("max_rollback", "spare", "budget") if params.get(name))


def run_refusal(case: dict[str, Any]) -> None:
    """Run one case of kind ``refusal``: the status in C, ValueError that names the parameter in Python."""
    name, params, status = case["policy"], case["params"], case["status"]
    struct = ffi.new(f"pb_kvcache_{name}_params *", params)
    want = getattr(lib, f"PB_KVCACHE_ERROR_{status.upper()}")
    equal("status", getattr(lib, f"pb_kvcache_{name}_check")(struct), want)
    try:
        CLASSES[name](**params)
    except ValueError as error:
        if not str(error).startswith(named(status, params)):
            raise AssertionError(f"message {error}") from None
    else:
        raise AssertionError("was not refused")
