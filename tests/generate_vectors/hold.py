"""Vectors of kinds ``hold`` and ``decode_weights``: caches in slots, and the attention that they are shown."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from .. import reference
from ..reference_hold import Hold, decode_weights


class Script:
    """Caches of the reference, and a record of every call with its answer. ``check=`` is worked out by hand."""

    def __init__(
        self, name: str, budgets: list[int], recent_window: int = 1, obs_window: int = 2, pool_kernel: int = 1
    ):
        params = {"recent_window": recent_window, "obs_window": obs_window, "pool_kernel": pool_kernel}
        self.hold = Hold(budgets, **params)
        self.case: dict[str, Any] = {"name": name, "budgets": budgets, "params": params, "calls": []}

    def seed(
        self, cache: int, positions: list[int], attn: list[list[float]] | None = None, status: str | None = None
    ) -> None:
        call: dict[str, Any] = {"call": "seed", "cache": cache, "positions": positions, "attn": attn}
        try:
            self.hold.seed(cache, positions, attn)
        except reference.Refused as refused:
            call["status"] = str(refused)
        assert call.get("status") == status, f"{self.case['name']}: seed answers {call.get('status')}"
        self.case["calls"].append(call)

    def step(
        self,
        pos: list[int],
        weights: list[list[float]] | None,
        joins: list[bool] | None = None,
        status: str | None = None,
        cache: int | None = None,
        check: list[list[int]] | None = None,
    ) -> None:
        call: dict[str, Any] = {"call": "step", "pos": pos, "joins": joins, "weights": weights}
        try:
            call["moves"] = [list(move) for move in self.hold.step(pos, joins, weights)]
        except reference.Refused as refused:
            call["status"], call["cache"] = refused.args
        assert (call.get("status"), call.get("cache")) == (status, cache), f"{self.case['name']}: {call}"
        assert check is None or call["moves"] == check, f"{self.case['name']}: {call['moves']}, not {check}"
        self.case["calls"].append(call)

    def kept(self) -> None:
        kept = [list(cache.kept) for cache in self.hold.caches]
        slots = [[at[pos] for pos in row] for at, row in zip(self.hold.slots, kept, strict=True)]
        self.case["calls"].append({"call": "kept", "positions": kept, "slots": slots})


def by_hand() -> list[Script]:
    scripts = []
    s = Script("the newest row goes to the slot that its victim leaves, each cache at its own budget", [3, 2])
    s.seed(0, [0, 1, 2])
    s.seed(1, [0, 1])
    s.step([3, 3], [[0.5, 0.125, 0.25], [0.25, 0.75, 0.0]], check=[[0, 3, 1], [1, 2, 0]])
    s.kept()
    # Position 3 is in slots 1 and 0. Cache 0: 0 has 1.0, 2 has .5, 3 has .25. Cache 1: 1 has 1.25, 3 has .5.
    s.step([4, 4], [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], check=[[0, 3, 1], [1, 2, 0]])
    s.kept()
    scripts.append(s)

    s = Script("caches fill up before they evict, and one that the token does not join stays", [3, 3])
    s.step([1, 1], [[1.0], [1.0]], check=[])
    s.step([2, 2], [[0.5, 0.25], [9.0, 9.0]], joins=[True, False], check=[])
    s.step([3, 2], [[0.5, 0.25, 0.0], [0.5, 0.25, 0.0]], check=[[0, 3, 2]])  # 2 was not seen before: 0
    s.kept()
    s.step([4, 3], None, check=[[0, 3, 2], [1, 3, 2]])
    s.kept()
    scripts.append(s)

    s = Script("a step that one cache refuses changes none", [2, 2])
    s.seed(0, [4, 7], [[0.5, 0.25]])
    s.seed(1, [1])
    s.seed(2, [1], None, "cache")
    s.seed(1, [1, 2, 3], None, "full")
    s.seed(1, [2, 2], None, "position")
    s.seed(1, [2], [[-1.0]], "attn_value")
    s.step([8, 1], [[1.0, 1.0], [1.0, 1.0]], None, "position", 1)
    s.step([8, 2], [[1.0, -1.0], [1.0, 1.0]], None, "attn_value", 0)
    s.kept()
    s.step([8, 2], [[1.0, 1.0], [1.0, 1.0]], check=[[0, 2, 1]])
    s.kept()
    scripts.append(s)

    s = Script("without a recent window the token itself may leave: nothing moves", [2], recent_window=0)
    s.step([1], [[1.0]], check=[])
    s.step([2], [[1.0, 0.5]], check=[])
    s.kept()
    scripts.append(s)
    return scripts


def seeded() -> list[Script]:
    scripts = []
    rng = random.Random(11)
    for index in range(8):
        budgets = [rng.randint(2, 9) for _ in range(rng.randint(1, 5))]
        s = Script(f"at random {index}", budgets, rng.randint(0, 1), rng.randint(1, 4), rng.choice([1, 3, 5]))
        for cache, budget in enumerate(budgets):
            positions = sorted(rng.sample(range(20), rng.randint(0, budget)))
            rows = [[rng.randint(0, 8) / 8 for _ in positions] for _ in range(rng.randint(0, 3))]
            s.seed(cache, positions, rows or None)
        width = max(budgets) + 1
        for token in range(20, 50):
            weights = [[rng.randint(0, 8) / 8 for _ in range(width)] for _ in budgets]
            joins = [rng.random() < 0.8 for _ in budgets] if rng.random() < 0.5 else None
            s.step([token] * len(budgets), weights if rng.random() < 0.9 else None, joins)
        s.kept()
        scripts.append(s)
    return scripts


def hold() -> dict[str, Any]:
    return {
        "kind": "hold",
        "about": "Caches whose rows lie in slots, held at their budgets: which row moves where.",
        "cases": [script.case for script in by_hand() + seeded()],
    }


def attention(
    name: str, queries: Any, rows: Any, offsets: list[int], counts: list[int], status: str | None = None, **options: Any
) -> dict[str, Any]:
    queries, rows = np.array(queries, np.float32), np.array(rows, np.float32)
    given = {"scale": 1.0, "softcap": 0.0, "sinks": None, "reduce": "mean", **options}
    case = {
        "name": name,
        "queries": [[[repr(x) if x - x else x for x in head] for head in cache] for cache in queries.tolist()],
        "rows": [[repr(x) if x - x else x for x in row] for row in rows.tolist()],
        "offsets": offsets,
        "counts": counts,
        **given,
    }
    if status:
        return {**case, "status": status}
    weights = decode_weights(queries, rows, offsets, counts, **given)
    return {**case, "weights": [[float(x) for x in row] for row in weights]}


def attentions() -> list[dict[str, Any]]:
    one = [[[1.0, 0.0]]]
    cases = [
        attention("two slots alike share evenly", one, [[0.5, 9.0], [0.5, -3.0]], [0], [2]),
        attention("what lies beyond the count is not seen", one, [[0.5, 9.0], [0.5, -3.0], [np.nan, 1.0]], [0], [2]),
        attention("the mean over a group", [[[1.0, 0.0], [0.0, 100.0]]], [[0.0, 1.0], [0.0, -1.0]], [0], [2]),
        attention("a cache without slots", [*one, *one], [[1.0, 0.0]], [0, 0], [0, 1]),
        attention("a sink takes its part", one, [[0.0, 0.0]], [0], [1], sinks=[0.0]),
        attention("a sink above all logits", one, [[0.0, 0.0], [1.0, 0.0]], [0], [2], sinks=[100.0]),
        attention("a NaN", one, [[np.nan, 0.0]], [0], [1], "logit"),
        attention("an infinity", one, [[-np.inf, 0.0]], [0], [1], "logit"),
        attention("too large after scaling", one, [[2e38, 0.0]], [0], [1], "logit", scale=4.0),
        attention("a sink that is no number", one, [[1.0, 0.0]], [0], [1], "logit", sinks=["nan"]),
        attention("no scale", one, [[1.0, 0.0]], [0], [1], "scale", scale=0.0),
        attention("rows beyond the keys", one, [[1.0, 0.0]], [0], [2], "capacity"),
        attention("an offset beyond the keys", one, [[1.0, 0.0]], [2], [1], "capacity"),
    ]
    rng = np.random.default_rng(12)
    for index in range(9):
        caches, group, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), [1, 3, 16, 20, 40][index % 5]
        counts = rng.integers(1, 12 if index else 90, caches).tolist()
        offsets = [sum(counts[c + 1 :]) for c in range(caches)]  # the last cache comes first
        cases.append(
            attention(
                f"at random {index}",
                rng.standard_normal((caches, group, dim)),
                rng.standard_normal((sum(counts), dim)),
                offsets,
                counts,
                scale=0.5,
                softcap=[0.0, 1.5][index % 2],
                sinks=rng.integers(-8, 9, caches * group).astype(float).tolist() if index % 3 == 0 else None,
                reduce=["mean", "max", "sum"][index % 3],
            )
        )
    return cases


def attention_file() -> dict[str, Any]:
    return {
        "kind": "decode_weights",
        "about": "The attention of one new token to the slots of its caches, to the bit.",
        "cases": attentions(),
    }


FILES = {"hold.json": hold, "decode_weights.json": attention_file}
