"""Kinds ``stack`` (calls on a stack of caches) and ``stack_refusal`` (parameters that are refused)."""

from __future__ import annotations

from typing import Any

from .._native import ffi, lib
from .._stack import PyramidStack
from ._expect import answers, equal
from .policy import _floats, named


def run(case: dict[str, Any]) -> None:
    """Run one case of kind ``stack``."""
    stack = PyramidStack(**case["params"], plan=case["plan"])
    equal("budgets", stack.budgets.tolist(), case["budgets"])
    equal("capacities", [layer.capacity for layer in stack.layers], case["capacities"])
    for number, call in enumerate(case["calls"]):
        where = f"call {number}, {call['call']}"
        status = call.get("status")
        if call["call"] == "step":
            attn = None if call["attn"] is None else [_floats(row) for row in call["attn"]]
            try:
                answers(status, lambda: stack.on_decode_step(call["pos"], attn))  # noqa: B023
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
        elif call["call"] == "evict":
            equal(where, [victims.tolist() for victims in stack.evict()], call["victims"])
        elif call["call"] == "evict_rows":
            equal(where, stack.evict_count(call["multiple_of"]), sum(map(len, call["victims"])))
            victims, rows = stack.evict_rows(call["multiple_of"], call["which"])
            equal(where, [array.tolist() for array in victims], call["victims"])
            equal(where, [array.tolist() for array in rows], call["rows"])
        elif call["call"] == "kept":
            equal(where, [kept.tolist() for kept in stack.kept], call["positions"])
            equal(where, [layer.kept.tolist() for layer in stack.layers], call["positions"])
        elif call["call"] == "count":
            equal(where, (stack.resident, stack.peak_resident), (call["resident"], call["peak_resident"]))
        elif call["call"] == "score":
            equal(where, stack.layers[call["layer"]].window_score(call["pos"]), float(call["score"]))
        elif call["call"] == "seed":
            answers(status, lambda: stack.seed(call["layer"], call["positions"], _floats(call["attn"])))  # noqa: B023
        elif call["call"] == "rollback":
            equal(where, stack.rollback_count(), call["most"])
            answers(status, lambda: stack.rollback(call["count"]))  # noqa: B023
        elif call["call"] == "save":
            equal(where, stack.save().hex(), call["state"])
        elif call["call"] == "load":
            answers(status, lambda: stack.load(bytes.fromhex(call["state"])))  # noqa: B023
        elif call["call"] == "reset":
            stack.reset()
        else:
            raise AssertionError(f"{where}: is no call")


def run_refusal(case: dict[str, Any]) -> None:
    """Run one case of kind ``stack_refusal``: status and layer in C, ValueError with the layer in Python."""
    params = ffi.new("pb_kvcache_stack_params *", case["params"])
    plan = ffi.NULL if case["plan"] is None else ffi.new("uint32_t[]", case["plan"])
    layer = ffi.new("uint32_t *", 99)
    status = lib.pb_kvcache_stack_check(params, plan, layer)
    equal("status", status, getattr(lib, f"PB_KVCACHE_ERROR_{case['status'].upper()}"))
    equal("layer", layer[0], case["layer"])
    try:
        PyramidStack(**case["params"], plan=case["plan"])
    except ValueError as error:
        if case["status"] == "too_large" and (case["params"].get("spare") or case["params"].get("max_rollback")):
            name = named("too_large", case["params"])
        elif case["plan"] and case["status"] in ("budget", "recent_window", "too_large"):
            name = f"plan: layer {case['layer']} has a budget of {case['plan'][case['layer']]}"
        elif case["status"] == "too_large":
            name = "num_layers" if case["params"]["num_layers"] > 65536 else "budget"
        else:
            name = case["status"]
        if not str(error).startswith(name):
            raise AssertionError(f"message {error}") from None
    else:
        raise AssertionError("was not refused")
