"""Vectors of kinds ``select`` (attention of a window, what each KV head keeps) and ``compact`` (rows moved)."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from .. import reference_select as reference

F = np.float32


def number(value: float) -> float | str:
    """Return a float as JSON holds it."""
    value = float(value)
    if math.isnan(value):
        return "nan"
    return ("inf" if value > 0 else "-inf") if math.isinf(value) else value


def case(name: str, attn: Any, budgets: list[int], status: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return a case of kind ``select``, with its answers where no status says that there are none."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "logits": False,
        "scale": 1.0,
        "kv_heads": len(budgets),
        "reduce": "mean",
        "pooling": "max",
        "kernel": 3,
        "edge": "count",
        "nan": "raise",
        **changes,
    }
    attn = np.array(attn)
    if options["dtype"] == "float32":
        attn = attn.astype(F)
        written: Any = [[[number(x) for x in row] for row in head] for head in attn]
    else:  # bits
        written = attn.tolist()
        bits = attn.astype(np.uint16)
        attn = bits.view(np.float16).astype(F) if options["dtype"] == "float16" else as_bfloat(bits)
    answer: dict[str, Any] = {"status": status} if status else answers(attn, budgets, options)
    return {"name": name, **options, "budgets": budgets, "attn": written, **answer}


def as_bfloat(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(F)


def answers(attn: Any, budgets: list[int], options: dict[str, Any]) -> dict[str, Any]:
    lowest = options["nan"] == "lowest"
    scores = reference.exact_scores(
        attn,
        options["kv_heads"],
        options["reduce"],
        options["logits"],
        options["scale"],
        lowest,
        options.get("protect"),
    )
    weights = options.get("weights")
    kept = reference.select_from_scores(
        scores,
        budgets,
        options.get("protect", attn.shape[1]),
        options["kernel"],
        options["pooling"],
        options["edge"],
        exact=True,
        sinks=options.get("sinks", 0),
        weights=None if weights is None else np.array(weights, F),
    )
    return {"scores": [[number(x) for x in row] for row in scores], "kept": kept}


def by_hand() -> list[dict[str, Any]]:
    """Cases whose answers follow from the rules by a few additions."""
    ramp = [[[0.5, 0.25, 0.125, 0.0625, 0.0, 0.0, 0.0625, 0.0]]]
    cases = [
        case("the best stay and the window", ramp, [4], kernel=1),
        case("a budget of the window keeps the window", ramp, [1]),
        case("a budget of everything keeps everything", ramp, [8]),
        case("a larger budget keeps everything too", ramp, [4294967295]),
        case("equal scores: the lower positions", [[[0.25] * 9] * 2], [5]),
        case("zeros: the lower positions, and never the window for them", [[[0.0] * 9] * 2], [5]),
        case("zero and minus zero tie", [[[-0.0, 0.0, -0.0, 0.0, 0.5]]], [3], kernel=1),
        case("a maximum is spread to its neighbours", [[[0, 0, 0, 0, 1, 0, 0, 0, 0.5, 0.5, 0]]], [4]),
        case("a kernel wider than everything ties everything", [[[0, 1, 0, 0, 0, 0]]], [3], kernel=31),
        case("an average divides by the neighbours there are", [[[3, 0, 0, 2.25, 1.5, 0, 1]]], [4], pooling="avg"),
        case(
            "an average divides by the kernel",
            [[[3, 0, 0, 2.25, 1.5, 0, 1]]],
            [4],
            pooling="avg",
            edge="kernel",
        ),
        case("a maximum has no edge", [[[3, 0, 0, 2.25, 1.5, 0, 1]]], [4], edge="kernel"),
        case(
            "a kernel wider than everything, with zeros",
            [[[0, 1, 0, 0, 0]]],
            [3],
            pooling="avg",
            kernel=9,
            edge="kernel",
        ),
        case(
            "what is left out is no zero",
            [[["nan", 3, 1.5, 4, 0.5, 0]]],
            [3],
            pooling="avg",
            edge="kernel",
            nan="lowest",
        ),
        case("the mean of a group", [[[1, 0, 0.5, 0]], [[0, 0.75, 0.5, 0]]], [2], kernel=1),
        case("the maximum of a group", [[[1, 0, 0.5, 0]], [[0, 0.75, 0.5, 0]]], [2], kernel=1, reduce="max"),
        case("the sum of a group", [[[1, 0, 0.5, 0]], [[0, 1.25, 0.5, 0]]], [2], kernel=1, reduce="sum"),
        case("groups are consecutive heads", [[[i == h for i in range(6)]] for h in range(4)], [2, 3], kernel=1),
        case("what the window gives itself is not read", [[[0.25, 0.5, "nan", -1], [0.5, 0.25, 9, 9]]], [3], kernel=1),
        case("equal logits: later queries see more", [[[2.0] * 7] * 3], [5], logits=True, kernel=1),
        case("a query does not see what follows it", [[[0, 1, 2, "nan"], [0, 1, 2, 3]]], [3], logits=True, kernel=1),
        case("a position masked for every query", [[[1, "-inf", 2, 0]]], [3], logits=True, kernel=1),
        case("logits far apart", [[[3e38, -3e38, 3e38, 0.0]]], [2], logits=True, kernel=1),
        case("float16", [[[0x3C00, 0x0001, 0x3800, 0x3801, 0x03FF, 0x0400]]], [3], dtype="float16", kernel=1),
        case("bfloat16", [[[0x3F80, 0x0001, 0x3F00, 0x3F01, 0x0000, 0x0080]]], [3], dtype="bfloat16", kernel=1),
    ]
    for values, logits in (([0.5, "nan", 0.25, 1], False), ([0.5, "inf", 0.25, 1], False), ([0, "nan", 5, 1], True)):
        text = f"{values[1]} among {'logits' if logits else 'probabilities'}"
        status = "logit" if logits else "attn_value"
        cases.append(case(f"{text}, refused", [[values]], [2], status, logits=logits))
        cases.append(case(f"{text}, lowest", [[values]], [3], logits=logits, nan="lowest"))
    cases += [
        case("+inf among logits, lowest", [[[1, 2, "inf", 3, 4, 5]]], [5], logits=True, nan="lowest"),
        case("a negative probability", [[[0.5, -0.25, 0, 0]]], [2], "attn_value"),
        case("a negative probability is no NaN", [[[0.5, -0.25, 0, 0]]], [2], "attn_value", nan="lowest"),
        case("minus infinity is no probability", [[[0.5, "-inf", 0, 0]]], [2], "attn_value", nan="lowest"),
        case("float16 that overflowed", [[[0x3C00, 0x7C00, 0, 0]]], [2], "logit", dtype="float16", logits=True),
        case("a logit that overflows when scaled", [[[0, 1e38, 0, 0]]], [2], "logit", logits=True, scale=100.0),
        case("a query that sees nothing", [[["-inf"] * 4]], [2], "masked", logits=True),
        case(
            "a query that sees nothing, lowest",
            [[["-inf"] * 4, [1, 2, 3, 4]]],
            [3],
            logits=True,
            nan="lowest",
            kernel=1,
        ),
        case("sums that overflow", [[[3e38, 1, 1, 1], [3e38, 1, 1, 1]]], [3], "score"),
        case("a budget below the window", [[[0.5] * 5] * 3], [2], "budget_window"),
        case("a window of everything", [[[0.5] * 3] * 3], [3], "protect"),
        case("a window beyond everything", [[[0.5] * 3] * 4], [4], "window"),
        case("an even kernel", ramp, [3], "pool_kernel", kernel=2),
        case("a kernel of 0", ramp, [3], "pool_kernel", kernel=0),
        case("heads that do not divide", [[[0.5] * 5]] * 3, [2, 2], "heads"),
        case("a scale of 0", ramp, [3], "scale", logits=True, scale=0.0),
    ]
    return cases


def always_kept() -> list[dict[str, Any]]:
    """Cases of what is always kept and of weights, whose answers follow from the rules by a few additions."""
    # Query w of three sees 4 + w of the 6 positions; the last one sees itself most.
    inside = [[[0.5, 0, 0.25, 0.25, "nan", -1], [0.25, 0, 0, 0.25, 0.5, 9], [0, 0.125, 0, 0, 0.125, 0.75]]]
    ramp = [[[0.125, 0.5, 0.25, 0.0625, 0, 0.75, 0, 0.25]]]
    two = [[[0.125, 0.25, 0.5, 0.25, 0]], [[0.5, 0.25, 0.125, 0, 0]]]
    return [
        case("the window's positions compete: divided by the whole window", inside, [3], kernel=1, protect=1),
        case("the window's positions, the best of two query heads", inside * 2, [3], kernel=1, protect=1, reduce="max"),
        case("more is protected than the window", ramp, [4], kernel=1, protect=3),
        case("nothing but what is protected", ramp, [3], kernel=1, protect=3),
        case("a window of everything, of which one is protected", [[[1, 9], [0.25, 0.75]]], [1], kernel=1, protect=1),
        case("the logits of the window's positions", [[[0.0] * 6] * 3], [4], logits=True, kernel=1, protect=1),
        case("a NaN that a query of the window sees", [[[0.5, 0, "nan", 0]] * 2], [2], "attn_value", protect=1),
        case("sinks stay, whatever their score", ramp, [5], kernel=1, sinks=2),
        case("sinks pool into the others", [[[4, 0, 0, 1, 0, 2, 0, 0]]], [4], kernel=3, sinks=1),
        case(
            "an average over sinks and the edge", [[[4, 0, 0, 3, 0, 0, 0]]], [3], pooling="avg", edge="kernel", sinks=1
        ),
        case("sinks up to what is protected", ramp, [8], sinks=7),
        case("weights turn the order round", ramp, [3], kernel=1, weights=[[8, 0.5, 2, 1, 1, 0.25, 1, 1]]),
        case("weights of 0: the lower positions", ramp, [4], kernel=1, weights=[[0] * 8]),
        case("weights before the pools", ramp, [4], weights=[[0.25, 1, 1, 1, 1, 0.5, 8, 1]]),
        case("weights before an average", ramp, [4], pooling="avg", weights=[[1, 0.25, 2, 16, 1, 0.5, 1, 1]]),
        case("each KV head has its own", two, [2, 2], kernel=1, weights=[[4, 1, 1, 1, 1], [0, 1, 8, 1, 1]]),
        case("all of it", inside, [4], kernel=1, protect=1, sinks=1, weights=[[1, 1, 3, 1, 0.5, 1]]),
        case("nothing protected", ramp, [4], "protect", protect=0),
        case("everything protected", ramp, [8], "protect", protect=8),
        case("a budget below what is protected", ramp, [2], "budget_window", protect=3),
        case("a budget below protected and sinks", ramp, [4], "budget_window", protect=3, sinks=2),
        case("a negative weight", ramp, [4], "select_weight", weights=[[1, -0.5, 1, 1, 1, 1, 1, 1]]),
        case("an infinite weight", ramp, [4], "select_weight", weights=[[1, 1, 1, "inf", 1, 1, 1, 1]]),
        case("a NaN among weights", ramp, [4], "select_weight", weights=[[1, 1, 1, "nan", 1, 1, 1, 1]]),
        case("the weight of what is protected is not read", ramp, [4], weights=[[1, 1, 1, 1, 1, 1, 1, -1]]),
        case("weights of a head that keeps everything are not read", ramp, [8], weights=[[-1] * 8]),
        case("a product that overflows", [[[3e38, 1, 1, 1]]], [2], "score", weights=[[2, 1, 1, 1]]),
    ]


def at_random() -> list[dict[str, Any]]:
    rng = random.Random(3)
    cases = []
    for index in range(40):
        kv_heads, group, window = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4)
        n = window + rng.randint(2, 30)
        logits = index % 2 == 0
        levels = rng.choice([3, 1000])
        # What is always kept and the weights are drawn apart, from numbers of their own.
        extra: dict[str, Any] = {}
        if index >= 24:
            extra = {"protect": rng.randint(1, window), "sinks": rng.randint(0, 2)}
            if index % 4 < 2:
                extra["weights"] = [[rng.randint(0, 64) / 16 for _ in range(n)] for _ in range(kv_heads)]
        always = extra.get("protect", window) + extra.get("sinks", 0)
        attn = [
            [
                [(rng.randint(-levels, levels) if logits else rng.randint(0, levels)) / 64 for _ in range(n)]
                for _ in range(window)
            ]
            for _ in range(kv_heads * group)
        ]
        cases.append(
            case(
                f"at random {index}",
                attn,
                [rng.randint(always, n + 1) for _ in range(kv_heads)],
                logits=logits,
                scale=rng.choice([1.0, 0.125, 2.5]),
                reduce=rng.choice(["mean", "max", "sum"]),
                pooling=rng.choice(["max", "avg"]),
                kernel=rng.choice([1, 3, 5, 7, 99]),
                edge="kernel" if index % 3 == 2 else "count",
                **extra,
            )
        )
    return cases


def select() -> dict[str, Any]:
    return {
        "kind": "select",
        "about": "Prefill selection: window scores to the bit, and the positions that each KV head keeps.",
        "cases": by_hand() + always_kept() + at_random(),
    }


def compaction(
    name: str, heads: int, n: int, indices: list[list[int]], status: str | None = None, row: int = 2
) -> dict[str, Any]:
    """Return a case of kind ``compact``: byte b of row i of head h is (31 h + 7 i + b) modulo 256."""
    front = [[[(31 * h + 7 * i + b) % 256 for b in range(row)] for i in kept] for h, kept in enumerate(indices)]
    answer: dict[str, Any] = {"status": status} if status else {"front": front}
    return {"name": name, "heads": heads, "n": n, "row_bytes": row, "indices": indices, **answer}


def compact() -> dict[str, Any]:
    return {
        "kind": "compact",
        "about": "Rows of keys or values moved to the front of each head, in place.",
        "cases": [
            compaction("single rows and runs", 2, 9, [[1, 2, 3, 7, 8], [0, 1, 4, 5, 8]]),
            compaction("everything", 1, 5, [[0, 1, 2, 3, 4]]),
            compaction("the last row", 2, 6, [[5], [5]], row=5),
            compaction("ragged heads, one of them empty", 3, 6, [[0, 2, 4], [], [1, 3, 4, 5]], row=3),
            compaction("an index that is not below n", 2, 4, [[0, 1], [2, 4]], "index"),
            compaction("indices that do not ascend", 2, 4, [[0, 1], [2, 1]], "index"),
            compaction("an index twice", 2, 4, [[0, 1], [2, 2]], "index"),
        ],
    }


FILES = {"select.json": select, "compact.json": compact}
