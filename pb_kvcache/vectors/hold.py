"""Kinds ``hold`` (caches in slots) and ``decode_weights`` (the attention of one new token to them)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._decode_weights import DecodeWeights
from .._hold import Hold
from ._expect import answers, equal
from .policy import _floats


def run(case: dict[str, Any]) -> None:
    """Run one case of kind ``hold``."""
    hold = Hold(case["budgets"], **case["params"])
    caches = range(len(case["budgets"]))
    for number, call in enumerate(case["calls"]):
        where = f"call {number}, {call['call']}"
        status = call.get("status")
        if call["call"] == "seed":
            answers(status, lambda: hold.seed(call["cache"], call["positions"], _floats(call["attn"])))  # noqa: B023
        elif call["call"] == "step":
            weights = _floats(call["weights"])
            moves = answers(status, lambda: hold.step(call["pos"], weights, call["joins"]))  # noqa: B023
            if status is None:
                equal(where, moves.tolist(), call["moves"])
        elif call["call"] == "kept":
            equal(where, [hold.kept(cache).tolist() for cache in caches], call["positions"])
            equal(where, [hold.slots(cache).tolist() for cache in caches], call["slots"])
        else:
            raise AssertionError(f"{where}: is no call")


def run_decode_weights(case: dict[str, Any]) -> None:
    """Run one case of kind ``decode_weights``."""
    queries, rows, counts = _floats(case["queries"]), _floats(case["rows"]), np.array(case["counts"], np.uint32)

    def weights() -> Any:
        weigh = DecodeWeights(
            np.array(case["offsets"], np.uint64),
            int(counts.max()),
            group=queries.shape[1],
            head_dim=queries.shape[2],
            dtype="float32",
            scale=case["scale"],
            softcap=case["softcap"],
            sinks=_floats(case["sinks"]),
            reduce=case["reduce"],
        )
        return weigh(queries.ctypes.data, rows.ctypes.data, rows.size, counts)

    got = answers(case.get("status"), weights)
    if case.get("status") is None:
        equal("weights", [row[:n].tolist() for row, n in zip(got, counts, strict=True)], case["weights"])
