"""Vectors of kinds ``policy`` and ``refusal`` for the baselines."""

from __future__ import annotations

import random
from typing import Any

from .. import reference
from ..reference_baselines import NAMES, POLICIES, SECOND
from .policies import LARGEST, Script


def new(name: str, policy: str, **params: int) -> Script:
    return Script(f"{policy}: {name}", policy, POLICIES, **params)


def by_hand() -> list[Script]:
    """Cases whose answers follow from the rules by a few additions."""
    scripts = []

    s = new("the oldest goes, whatever attention says", "sliding_window", budget=3)
    s.kept([0])
    s.steps(1, [1.0], [0.75, 0.25], [0.5, 0.0, 0.5])
    s.evict(None, [0])
    s.evict(None, [])
    s.score(1)
    s.score(0)
    s.kept([1, 2, 3])
    scripts.append(s)

    s = new("foreign budgets", "sliding_window", budget=3)
    s.steps(1, None, None, None)
    s.evict(LARGEST, [0])
    s.evict(1, [1, 2])
    s.evict(0, [3])
    s.kept([])
    s.step(3, [])
    s.kept([3])
    scripts.append(s)

    s = new("a budget of one", "sliding_window", budget=1)
    s.step(1, [1.0])
    s.step(2, None, "full")
    s.evict(None, [0])
    s.step(2, [0.5])
    s.evict(None, [1])
    scripts.append(s)

    s = new("the sinks stay and the oldest of the rest goes", "streaming_llm", budget=4, sinks=2)
    s.steps(1, [1.0], None, [0.0, 0.0, 1.0], None)
    s.evict(None, [2])
    s.kept([0, 1, 3, 4])
    s.step(5, None)
    s.evict(None, [3])
    s.evict(1, [4, 5])
    s.evict(0, [])
    s.kept([0, 1])
    scripts.append(s)

    s = new("sinks are positions, not places", "streaming_llm", budget=4, sinks=3)
    s.seed([2, 3, 10, 11, 12])
    s.evict(2, [3, 10, 11])
    s.evict(0, [12])
    s.kept([2])
    scripts.append(s)

    s = new("more sinks than have been decoded", "streaming_llm", budget=4, sinks=3)
    s.step(1, None)
    s.evict(1, [])
    s.kept([0, 1])
    scripts.append(s)

    s = new("no sinks is a sliding window", "streaming_llm", budget=2, sinks=0)
    s.steps(1, None, None)
    s.evict(None, [0])
    scripts.append(s)

    s = new("the lowest sum since it joined goes", "h2o", budget=4, recent_window=1)
    s.steps(1, [1.0], [0.25, 0.75], [0.0, 0.75, 0.25], [0.0, 0.25, 0.25, 0.5])
    for pos, score in enumerate([1.25, 1.75, 0.5, 0.5, 0.0]):
        s.score(pos, score)
    s.evict(None, [2])  # 2 and 3 tie: the lower
    s.kept([0, 1, 3, 4])
    s.step(5, [0.0, 0.0, 0.0, 1.0])
    s.evict(None, [3])
    s.score(4, 1.0)
    scripts.append(s)

    s = new("a sum in double keeps what float32 would lose", "h2o", budget=3, recent_window=0)
    s.steps(1, [1.0], [2.0**-30, 0.0])
    s.score(0, 1.0 + 2.0**-30)
    scripts.append(s)

    s = new("a null step adds nothing", "h2o", budget=3, recent_window=1)
    s.steps(1, [0.5], None, None)
    for pos, score in enumerate([0.5, 0.0, 0.0, 0.0]):
        s.score(pos, score)
    s.evict(None, [1])
    scripts.append(s)

    s = new("the recent window outranks the budget", "h2o", budget=3, recent_window=2)
    s.steps(1, [1.0], [1.0, 0.0], [1.0, 0.0, 0.0])
    s.evict(0, [0, 1])
    s.evict(0, [])
    s.kept([2, 3])
    scripts.append(s)
    s = new("without a recent window the newest goes first", "h2o", budget=2, recent_window=0)
    s.steps(1, [1.0], [0.5, 0.5])
    s.evict(None, [2])
    s.evict(0, [0, 1])
    scripts.append(s)

    s = new("seeded rows count as decoded", "h2o", budget=3, recent_window=1)
    s.seed([1, 4, 5, 9], [[0.5, 0.25, 0.25, 0.0], [0.0, 0.25, 0.5, 0.25]])
    for pos, score in ((1, 0.5), (4, 0.5), (5, 0.75), (9, 0.25)):
        s.score(pos, score)
    s.evict(None, [1])
    s.reset()
    s.kept([0])
    s.score(0, 0.0)
    scripts.append(s)

    s = new("the latest step alone ranks", "tova", budget=3)
    s.steps(1, [1.0], [0.125, 0.875], [0.75, 0.125, 0.125])
    s.score(1, 0.125)
    s.evict(None, [1])  # 1 and 2 tie: the lower
    s.kept([0, 2, 3])
    scripts.append(s)

    s = new("what no step has weighed is no candidate", "tova", budget=4)
    s.steps(1, [1.0], [0.5, 0.5], None, None)
    s.score(3, 0.0)
    s.evict(3, [0, 1])
    s.kept([2, 3, 4])
    s.evict(0, [])  # three more would have to go, and none may
    s.step(5, [0.5, 0.25, 0.25])
    s.evict(None, [])
    s.evict(2, [3, 4])
    s.kept([2, 5])
    scripts.append(s)

    s = new("null steps keep the latest weights", "tova", budget=3)
    s.steps(1, [1.0], [0.75, 0.25], None)
    s.score(0, 0.75)
    s.evict(None, [1])
    s.step(4, None)
    s.evict(None, [0])
    s.kept([2, 3, 4])
    s.step(5, None)
    s.evict(None, [])  # none of the four has been weighed
    s.step(6, None, "full")
    s.seed([2, 3, 4, 5], [[0.25, 0.5, 0.0, 0.25]])
    s.evict(None, [4])
    scripts.append(s)

    s = new("a new cache has nothing to drop", "tova", budget=1)
    s.evict(0, [])
    s.step(1, [1.0])
    s.evict(0, [0])
    s.kept([1])
    scripts.append(s)

    s = new("a seed without attention is unobserved, one with attention is not", "tova", budget=3)
    s.seed([3, 4, 5], None)
    s.evict(1, [])
    s.seed([3, 4, 5], [[0.0, 0.5, 0.5], [0.5, 0.25, 0.25]])
    s.score(3, 0.5)
    s.evict(2, [4])
    scripts.append(s)

    s = new("a refused step is not observed", "tova", budget=3)
    s.steps(1, [1.0], [0.25, 0.75])
    s.step(3, [0.0, 1.0, float("nan")], "attn_value")
    s.step(3, [0.0, 1.0], "attn_len")
    s.step(2, [0.0, 1.0, 0.0], "position")
    s.score(0, 0.25)
    s.evict(0, [0, 1])
    scripts.append(s)

    s = new("a vote is strictly more than an even share", "scissorhands", budget=4, recent_window=0)
    third = reference.float32(1 / 3)  # 0.3333333432674408 in double: above 1/3
    below = third - 2.0**-25  # the float32 before it
    s.steps(1, [1.0], [0.5, 0.5], [third, below, 0.5])
    for pos, score in enumerate([1.0, 0.0, 1.0, 0.0]):
        s.score(pos, score)
    s.evict(2, [1, 3])
    scripts.append(s)

    s = new("the fewest votes go, ties to the lower", "scissorhands", budget=4, recent_window=1)
    s.steps(1, [2.0], [0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0])
    for pos, score in enumerate([2.0, 2.0, 1.0, 0.0, 0.0]):
        s.score(pos, score)
    s.evict(None, [3])
    s.evict(2, [0, 2])
    s.kept([1, 4])
    scripts.append(s)

    s = new("a null step gives no vote", "scissorhands", budget=3, recent_window=1)
    s.steps(1, [2.0], None, None)
    s.score(0, 1.0)
    s.score(1, 0.0)
    s.evict(None, [1])
    scripts.append(s)

    s = new("the recent window outranks the votes", "scissorhands", budget=4, recent_window=3)
    s.steps(1, *[[2.0] + [0.0] * count for count in range(4)])
    s.evict(None, [1])
    s.evict(0, [0])
    s.kept([2, 3, 4])
    scripts.append(s)

    for policy in NAMES:
        s = new("contract errors change nothing", policy, budget=2, **({SECOND[policy]: 1} if policy in SECOND else {}))
        s.step(1, [1.0])
        s.step(1, [1.0, 1.0], "position")
        s.step(2, [1.0], "attn_len")
        for bad in (float("nan"), float("inf"), -1.0, -1e-45):
            s.step(2, [1.0, bad], "attn_value")
        s.step(2, [-0.0, 0.25])
        s.step(3, [0.5, 0.25, 0.25], "full")
        s.step(3, None, "full")
        s.kept([0, 1, 2])
        for pos in (0, 1, 2, 3):
            s.score(pos)
        s.seed([1, 1], None, "position")
        s.seed([1, 2, 3, 4], None, "full")
        s.seed([1, 2], [[1.0, float("nan")]], "attn_value")
        s.kept([0, 1, 2])
        s.seed([], None)
        s.step(LARGEST, [])
        s.step(LARGEST, None, "position")
        s.kept([LARGEST])
        s.reset()
        s.kept([0])
        scripts.append(s)
    return scripts


def seeded() -> list[Script]:
    """Longer runs with ties, null steps and foreign budgets: the reference's word alone."""
    scripts = []
    for number in range(30):
        draw = random.Random(1000 + number)
        policy = NAMES[number % len(NAMES)]
        budget = draw.randint(2, 12)
        params = {"budget": budget}
        if policy in SECOND:
            params[SECOND[policy]] = draw.randint(0, budget - 1)
        s = new(f"seeded run {number}", policy, **params)
        pos = 0
        for _ in range(draw.randint(20, 40)):
            pos += draw.choice([1, 1, 1, 5])
            full = len(s.cache.kept) == s.cache.capacity
            values = [0.0, 0.25, 0.25, 0.5, 1.0] if draw.random() < 0.7 else [0.1, 0.2, 0.3, 1e-20, 7.7]
            row = [reference.float32(draw.choice(values)) for _ in s.cache.kept]
            s.step(pos, None if draw.random() < 0.15 else row, "full" if full else None)
            if draw.random() < 0.6:
                s.evict(draw.choice([None, None, budget, draw.randint(0, 2 * budget)]))
            if draw.random() < 0.03:
                held = sorted(draw.sample(range(pos + 1), min(budget, pos + 1)))
                rows = [[reference.float32(draw.choice(values)) for _ in held] for _ in range(draw.randint(0, 2))]
                s.seed(held, rows or None)
        for kept in list(s.cache.kept):
            s.score(kept)
        s.kept()
        scripts.append(s)
    return scripts


def _runs() -> dict[str, Any]:
    cases = [script.case for script in by_hand() + seeded()]
    return {"kind": "policy", "about": "Calls on the baselines' caches.", "cases": cases}


def _refusals() -> dict[str, Any]:
    cases = []
    for policy in NAMES:
        broken = [("budget", {"budget": 0}), ("too_large", {"budget": LARGEST}), ("too_large", {"spare": LARGEST - 8})]
        if policy in SECOND:
            name = SECOND[policy]
            broken += [
                ("budget", {"budget": 0, name: 5}),
                (name, {name: 8}),
                (name, {name: LARGEST}),
                (name, {"budget": LARGEST, name: LARGEST}),
                (name, {"budget": 1, name: 1}),
            ]
        for status, change in broken:
            params = {"budget": 8} | ({SECOND[policy]: 2} if policy in SECOND else {}) | change
            text = ", ".join(f"{key} {value}" for key, value in change.items())
            cases.append({"name": f"{policy} with {text}", "policy": policy, "params": params, "status": status})
    return {"kind": "refusal", "about": "Parameters that the baselines' creation refuses, and why.", "cases": cases}


FILES = {"baselines.json": _runs, "baselines_refusals.json": _refusals}
