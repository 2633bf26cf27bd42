"""Vectors of kinds ``policy`` and ``refusal``: calls on SnapKV and PyramidKV caches, and parameters that are refused.

A script records what the reference answers. ``check=`` holds the answer that was worked out by hand, and must agree.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from .. import reference
from ..reference_state import state

LARGEST = 2**32 - 1


class Script:
    """A cache of the reference, and a record of every call with its answer."""

    def __init__(self, name: str, policy: str, policies: dict[str, Any] = reference.POLICIES, **params: int):
        self.cache = policies[policy](**params)
        self.case: dict[str, Any] = {
            "name": name,
            "policy": policy,
            "params": params,
            "effective_budget": self.cache.effective,
            "capacity": self.cache.capacity,
            "calls": [],
        }

    def _record(self, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        try:
            answer = run()
        except reference.Refused as refused:
            call["status"] = str(refused)
            answer = None
        self.case["calls"].append(call)
        return answer

    def step(self, pos: int, attn: list[float] | None, check: str | None = None) -> None:
        written = None if attn is None else [repr(w) if w - w != 0 else w for w in attn]  # "nan", "inf" as strings
        call = {"call": "step", "pos": pos, "attn": written}
        self._record(call, lambda: self.cache.step(pos, attn))
        assert call.get("status") == check, f"{self.case['name']}: step answers {call.get('status')}"

    def steps(self, first: int, *rows: list[float] | None) -> None:
        for pos, row in enumerate(rows, start=first):
            self.step(pos, row)

    def evict(self, budget: int | None = None, check: list[int] | None = None) -> None:
        call: dict[str, Any] = {"call": "evict", "budget": budget}
        call["victims"] = self._record(call, lambda: self.cache.evict(budget))
        assert check is None or call["victims"] == check, f"{self.case['name']}: drops {call['victims']}, not {check}"

    def evict_rows(
        self,
        budget: int | None,
        multiple_of: int,
        which: str,
        check: tuple[list[int], list[int]] | None = None,
        status: str | None = None,
    ) -> None:
        call: dict[str, Any] = {"call": "evict_rows", "budget": budget, "multiple_of": multiple_of, "which": which}
        if status is not None:
            self.case["calls"].append(call | {"status": status})
            return
        before = list(self.cache.kept)
        victims = self.cache.evict(budget, multiple_of)
        rows = reference.rows_of(before, victims, which)
        self.case["calls"].append(call | {"victims": victims, "rows": rows})
        assert check in (None, (victims, rows)), f"{self.case['name']}: drops {victims}, tells {rows}, not {check}"

    def kept(self, check: list[int] | None = None) -> None:
        positions = list(self.cache.kept)
        self.case["calls"].append({"call": "kept", "positions": positions})
        assert check is None or positions == check, f"{self.case['name']}: keeps {positions}, not {check}"

    def score(self, pos: int, check: float | None = None) -> None:
        call: dict[str, Any] = {"call": "score", "pos": pos}
        score = self._record(call, lambda: self.cache.score(pos))
        if score is not None:
            call["score"] = score
        assert check is None or score == check, f"{self.case['name']}: score {score}, not {check}"

    def seed(self, positions: list[int], attn: list[list[float]] | None = None, check: str | None = None) -> None:
        written = None if attn is None else [[repr(w) if w - w != 0 else w for w in row] for row in attn]
        call = {"call": "seed", "positions": positions, "attn": written}
        self._record(call, lambda: self.cache.seed(positions, attn))
        assert call.get("status") == check, f"{self.case['name']}: seed answers {call.get('status')}"

    def rollback(self, count: int, most: int, status: str | None = None) -> None:
        """Take steps back, of which `most` can be."""
        assert len(self.cache.past) == most, f"{self.case['name']}: {len(self.cache.past)} steps can be taken back"
        call: dict[str, Any] = {"call": "rollback", "count": count, "most": most}
        try:
            self.cache.rollback(count)
        except reference.Refused as refused:
            call["status"] = str(refused)
        assert call.get("status") == status, f"{self.case['name']}: rollback answers {call.get('status')}"
        self.case["calls"].append(call)

    def save(self) -> bytes:
        saved = state(self.cache)
        self.case["calls"].append({"call": "save", "state": saved.hex()})
        return saved

    def load(self, saved: bytes, status: str | None = None, cache: Any = None) -> None:
        """Load bytes. Where they are taken, `cache` is the reference's cache that they were saved from."""
        call: dict[str, Any] = {"call": "load", "state": saved.hex()}
        if status is None:
            assert state(cache) == saved
            self.cache = copy.deepcopy(cache)
            self.cache.forget_steps()
        self.case["calls"].append(call if status is None else call | {"status": status})

    def reset(self) -> None:
        self.cache.reset()
        self.case["calls"].append({"call": "reset"})


def snap(name: str, budget: int, recent_window: int, obs_window: int, pool_kernel: int) -> Script:
    return Script(
        name, "snapkv", budget=budget, recent_window=recent_window, obs_window=obs_window, pool_kernel=pool_kernel
    )


def pyramid(
    name: str, budget: int, layer: int, num_layers: int, ratio: int, recent_window: int, obs_window: int, kernel: int
) -> Script:
    return Script(
        name,
        "pyramidkv",
        budget=budget,
        layer=layer,
        num_layers=num_layers,
        pyramid_ratio=ratio,
        recent_window=recent_window,
        obs_window=obs_window,
        pool_kernel=kernel,
    )


def by_hand() -> list[Script]:
    """Cases whose answers follow from the rules by a few additions."""
    scripts = []

    s = snap("smoke: the least attended position goes", 3, 1, 4, 1)
    s.kept([0])
    s.steps(1, [1.0], [0.75, 0.25], [0.5, 0.125, 0.375])
    s.score(0, 2.25)
    s.score(1, 0.375)
    s.score(2, 0.375)
    s.score(3, 0.0)
    s.evict(None, [1])  # 1 and 2 tie at 0.375: the lower goes
    s.kept([0, 2, 3])
    s.evict(None, [])
    s.score(1)
    scripts.append(s)

    s = snap("a step is ageing out of the ring", 4, 1, 2, 1)
    s.steps(1, [8.0], [0.5, 1.0], [0.25, 1.0, 0.5], [0.125, 1.0, 0.5, 0.25])
    s.score(0, 0.375)  # only the last two of its four weights
    s.evict(None, [3])
    scripts.append(s)

    s = snap("position 0 is forgotten once its attention has left the ring", 3, 1, 2, 1)
    s.steps(1, [1.0], [0.0, 1.0], [0.0, 0.5, 0.5])
    s.evict(None, [0])
    scripts.append(s)

    s = snap("the ring wraps and slots are summed in slot order, not by age", 6, 1, 3, 1)
    # Slot 0 ends as 2**-53, slot 1 as 1.0, slot 2 as 2**-53: (2**-53 + 1.0) + 2**-53 is 1.0 in double, while the order
    # of age (1.0 + 2**-53) + 2**-53 is 1.0 as well, and (2**-53 + 2**-53) + 1.0 would be above it.
    s.steps(1, [0.5], [1.0, 0.0], [2.0**-53, 0.0, 0.0], [2.0**-53, 0.0, 0.0, 0.0])
    s.score(0, 1.0)
    scripts.append(s)

    s = snap("slot order decides the rounding", 6, 1, 3, 1)
    s.steps(1, [2.0**-53], [2.0**-53, 0.0], [1.0, 0.0, 0.0])
    s.score(0, 1.0 + 2.0**-52)
    scripts.append(s)

    s = snap("a null step leaves history and ring alone", 4, 1, 2, 1)
    s.steps(1, [1.0], [0.5, 0.25], None, None)
    s.score(0, 1.5)
    s.score(1, 0.25)
    s.score(3, 0.0)
    s.evict(None, [2])
    s.steps(5, [0.0, 0.5, 0.25, 0.0])
    s.score(0, 0.5)  # the first row is overwritten only now
    scripts.append(s)

    s = snap("only null steps: all scores are equal and the oldest go", 4, 2, 4, 3)
    s.steps(1, None, None, None, None)
    s.evict(2, [0, 1, 2])
    s.kept([3, 4])
    scripts.append(s)

    s = snap("the recent window outranks the score", 4, 3, 2, 1)
    s.steps(1, [9.0], [9.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0])
    s.evict(None, [1])
    s.evict(2, [0])  # asked for 2, but three are protected
    s.kept([2, 3, 4])
    s.evict(0, [])
    scripts.append(s)

    s = snap("no recent window: the newest position can go, and the last one", 2, 0, 2, 1)
    s.steps(1, [1.0], [1.0, 1.0])
    s.evict(None, [2])
    s.evict(0, [0, 1])
    s.kept([])
    s.evict(0, [])
    s.step(3, [])
    s.kept([3])
    s.step(4, [0.5])
    s.evict(1, [4])
    scripts.append(s)

    s = snap("a tie drops the lower position", 3, 0, 1, 1)
    s.steps(1, [0.5], [0.25, 0.25], [0.25, 0.25, 0.25])
    s.evict(3, [3])  # the newest has the lowest score, 0
    s.evict(2, [0])
    s.evict(1, [1])
    scripts.append(s)

    s = snap("a negative zero is a weight of zero", 3, 0, 1, 1)
    s.steps(1, [0.5], [0.5, -0.0], [-0.0, 0.0, 0.5])
    s.score(0, 0.0)
    s.evict(2, [0, 1])
    scripts.append(s)

    # Scores of positions 0..6; 7 is protected and unscored. Pooled over 3: 1 8 8 8 1 1 1; over 7: 8 8 8 8 8 8 1.
    row = [0.0, 1.0, 8.0, 0.0, 0.0, 1.0, 0.0]
    for kernel, victims in ((1, [0, 3, 4, 6]), (3, [0, 4, 5, 6]), (7, [0, 1, 2, 6])):
        s = snap(f"pooling with kernel {kernel}", 7, 1, 1, kernel)
        s.steps(1, None, None, None, None, None, None, row)
        s.evict(4, victims)
        scripts.append(s)

    for kernel in (9, 15, 17, 4097, LARGEST):
        s = snap(f"a kernel of {kernel} is wider than the cache: one plateau", 4, 1, 1, kernel)
        s.steps(1, None, None, None, [4.0, 3.0, 2.0, 1.0])
        s.evict(None, [0])
        s.evict(2, [1, 2])
        scripts.append(s)

    s = snap("protected neighbours pool into the open ones", 5, 2, 1, 3)
    s.steps(1, None, None, None, None, [0.5, 0.25, 0.25, 0.0, 4.0])
    # scores 0.5 .25 .25 0 4 -: pooled .5 .5 .25 4 | 4 4
    s.evict(None, [2])
    scripts.append(s)

    s = snap("all scores equal", 4, 1, 2, 3)
    s.steps(1, [0.25], [0.25, 0.25], [0.25] * 3, [0.25] * 4)
    s.evict(2, [0, 1, 2])
    scripts.append(s)

    s = snap("foreign budgets: above the effective one it is capped, below it is followed", 3, 1, 2, 1)
    s.steps(1, None, None, None)
    s.evict(LARGEST, [0])
    s.evict(3, [])
    s.evict(1, [1, 2])
    s.kept([3])
    scripts.append(s)

    s = snap("positions need not be neighbours", 3, 1, 2, 1)
    s.step(7, [1.0])
    s.step(1000, [0.5, 0.75])
    s.step(LARGEST, [0.5, 0.0, 0.25])
    s.evict(None, [1000])  # 1.0, 0.75 and 0.25 in the last two steps
    s.kept([0, 7, LARGEST])
    s.step(LARGEST, None, "position")
    s.evict(1, [0, 7])
    scripts.append(s)

    s = snap("contract errors change nothing", 2, 1, 2, 1)
    s.step(1, [1.0])
    s.step(1, [1.0, 1.0], "position")
    s.step(0, None, "position")
    s.step(2, [1.0], "attn_len")
    s.step(2, [1.0, 1.0, 1.0], "attn_len")
    s.step(2, [], "attn_len")
    for bad in (float("nan"), float("inf"), -float("inf"), -1.0, -1e-45):
        s.step(2, [1.0, bad], "attn_value")
        s.step(2, [bad, 1.0], "attn_value")
    s.score(0, 1.0)
    s.kept([0, 1])
    s.step(2, [0.5, 0.25])
    s.step(3, [0.5, 0.25, 0.25], "full")
    s.step(3, None, "full")
    s.score(0, 1.5)
    s.score(2, 0.0)
    s.kept([0, 1, 2])
    s.score(3)
    s.evict(None, [1])
    s.step(3, [0.5, 0.25])
    scripts.append(s)

    s = snap("reset is a new cache", 3, 1, 2, 1)
    s.steps(1, [1.0], [1.0, 1.0], [1.0, 1.0, 1.0])
    s.reset()
    s.kept([0])
    s.score(0, 0.0)
    s.steps(1, [0.5])
    s.score(0, 0.5)
    scripts.append(s)

    s = snap("seeded from a prompt", 4, 1, 2, 1)
    s.step(1, [1.0])
    s.seed([2, 5, 6, 9], [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.25, 0.0]])
    s.kept([2, 5, 6, 9])
    s.score(2, 1.0)
    s.score(6, 0.75)
    s.step(10, [0.0, 0.0, 0.5, 0.5])  # overwrites the older of the two rows
    s.score(2, 0.0)
    s.evict(None, [2])
    scripts.append(s)

    s = snap("seeded with more rows than the ring has slots", 4, 1, 2, 1)
    s.seed([1, 2], [[4.0, 4.0], [1.0, 2.0], [0.5, 0.25]])
    s.score(1, 1.5)
    s.step(3, [0.125, 0.125])
    s.score(1, 0.625)  # the row that went was the older, in slot 1
    scripts.append(s)

    s = snap("seeds that are refused change nothing", 3, 1, 2, 1)
    s.step(1, [1.0])
    s.seed([1, 1], None, "position")
    s.seed([5, 4], None, "position")
    s.seed([1, 2, 3, 4, 5], None, "full")
    s.seed([1, 2], [[1.0, float("nan")]], "attn_value")
    s.seed([1, 2], [[1.0, 0.0], [-1.0, 0.0]], "attn_value")
    s.kept([0, 1])
    s.score(0, 1.0)
    s.seed([], None)
    s.kept([])
    s.step(0, [])
    s.kept([0])
    s.seed([3, 4, 5, 6], None)
    s.step(7, None, "full")
    s.evict(None, [3])
    scripts.append(s)

    s = pyramid("one layer is SnapKV", 3, 0, 1, 4, 1, 4, 1)
    s.steps(1, [1.0], [0.75, 0.25], [0.5, 0.125, 0.375])
    s.evict(None, [1])
    scripts.append(s)

    for layer, victims in ((2, [0, 1, 2]), (0, [])):
        # Budget 4 over 3 layers, ratio 3: shares 6, 4, 2. Of five, layer 2 sheds three, where one layer sheds one.
        s = pyramid(f"layer {layer} of 3", 4, layer, 3, 3, 1, 2, 1)
        s.steps(1, None, None, None, None)
        s.evict(None, victims)
        scripts.append(s)
    s = pyramid("a single layer sheds one", 4, 0, 1, 3, 1, 2, 1)
    s.steps(1, None, None, None, None)
    s.evict(None, [0])
    scripts.append(s)

    s = pyramid("a shallow layer is capped by what it is offered", 4, 0, 3, 3, 1, 2, 1)
    s.steps(1, None, None, None, None)
    s.evict(4, [0])
    s.steps(5, None, None, None)
    s.step(8, None, "full")
    s.evict(None, [1])
    scripts.append(s)

    s = pyramid("the middle layer gets the average", 4, 1, 3, 3, 1, 2, 1)
    s.steps(1, None, None, None, None)
    s.evict(None, [0])
    scripts.append(s)

    s = pyramid("a share below the recent window is raised to it plus one", 8, 31, 32, 39, 5, 2, 1)
    s.steps(1, *[None] * 8)
    s.evict(None, [0, 1, 2])
    s.kept([3, 4, 5, 6, 7, 8])
    scripts.append(s)
    return scripts


def seeded() -> list[Script]:
    """Longer runs with many ties, null steps and foreign budgets: the reference's word alone."""
    scripts = []
    for number in range(24):
        draw = random.Random(number)
        budget = draw.randint(2, 12)
        recent = draw.randint(0, budget - 1)
        obs = draw.choice([1, 2, 3, 5])
        kernel = draw.choice([1, 3, 5, 7, 31])
        if number % 2:
            s = snap(f"seeded run {number}", budget, recent, obs, kernel)
        else:
            layers = draw.choice([1, 2, 3, 5])
            ratio = draw.choice([1, 2, 4, 9])
            s = pyramid(f"seeded run {number}", budget, draw.randrange(layers), layers, ratio, recent, obs, kernel)
        pos = 0
        for _ in range(draw.randint(20, 40)):
            while len(s.cache.kept) == s.cache.capacity:
                s.evict(draw.choice([None, None, budget, draw.randint(0, 2 * budget)]))
                if len(s.cache.kept) == s.cache.capacity:
                    s.evict()
            pos += draw.choice([1, 1, 1, 5])
            # A few values, so that ties are common, and sometimes ones that do not add up exactly.
            values = [0.0, 0.25, 0.25, 0.5, 1.0] if draw.random() < 0.7 else [0.1, 0.2, 0.3, 1e-20, 7.7]
            row = [reference.float32(draw.choice(values)) for _ in s.cache.kept]
            s.step(pos, None if draw.random() < 0.15 else row)
            if draw.random() < 0.5:
                s.evict(draw.choice([None, None, budget, draw.randint(0, 2 * budget)]))
        for kept in list(s.cache.kept):
            s.score(kept)
        s.kept()
        scripts.append(s)
    return scripts


def _runs() -> dict[str, Any]:
    cases = [script.case for script in by_hand() + seeded()]
    return {"kind": "policy", "about": "Calls on SnapKV and PyramidKV caches.", "cases": cases}


def _refusals() -> dict[str, Any]:
    good_snap = {"budget": 8, "recent_window": 2, "obs_window": 4, "pool_kernel": 3}
    good_pyramid = {"budget": 8, "layer": 1, "num_layers": 3, "pyramid_ratio": 4} | {
        key: good_snap[key] for key in ("recent_window", "obs_window", "pool_kernel")
    }
    broken = [
        ("budget", {"budget": 0}),
        ("budget", {"budget": 0, "recent_window": 0, "obs_window": 0, "pool_kernel": 0}),
        ("obs_window", {"obs_window": 0}),
        ("recent_window", {"recent_window": 8}),
        ("recent_window", {"recent_window": 9}),
        ("recent_window", {"recent_window": LARGEST}),
        ("recent_window", {"budget": LARGEST, "recent_window": LARGEST}),
        ("pool_kernel", {"pool_kernel": 0}),
        ("pool_kernel", {"pool_kernel": 2}),
        ("pool_kernel", {"pool_kernel": LARGEST - 1}),
        ("too_large", {"budget": LARGEST}),
        ("too_large", {"budget": LARGEST - 1, "obs_window": LARGEST}),
        ("too_large", {"spare": LARGEST}),
        ("too_large", {"spare": LARGEST - 8}),
        ("too_large", {"budget": LARGEST - 1, "max_rollback": LARGEST}),
    ]
    pyramid_only = [
        ("num_layers", {"num_layers": 0}),
        ("layer", {"layer": 3}),
        ("layer", {"layer": LARGEST}),
        ("pyramid_ratio", {"pyramid_ratio": 0}),
        ("too_large", {"budget": 3000000000, "layer": 0, "num_layers": 2, "pyramid_ratio": 4}),
        ("too_large", {"budget": 2863311530, "layer": 0, "num_layers": 2, "pyramid_ratio": 3}),
        (
            "too_large",
            {"budget": LARGEST, "layer": 1, "num_layers": 2, "pyramid_ratio": 4, "recent_window": LARGEST - 1},
        ),
    ]
    cases = []
    for policy, good, kinds in (("snapkv", good_snap, broken), ("pyramidkv", good_pyramid, broken + pyramid_only)):
        for status, change in kinds:
            text = ", ".join(f"{key} {value}" for key, value in change.items())
            cases.append({"name": f"{policy} with {text}", "policy": policy, "params": good | change, "status": status})
    return {"kind": "refusal", "about": "Parameters that creation refuses, and why.", "cases": cases}


FILES = {"policies.json": _runs, "refusals.json": _refusals}
