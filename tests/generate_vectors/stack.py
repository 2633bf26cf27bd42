"""Vectors of kinds ``stack`` and ``stack_refusal``."""

from __future__ import annotations

import copy
import random
from typing import Any

from .. import reference
from ..reference_stack import Stack
from ..reference_state import framed, of_cache, stack_state
from .policies import LARGEST

NAN = float("nan")


def _written(row: list[float] | None) -> list[Any] | None:
    return None if row is None else [repr(w) if w - w != 0 else w for w in row]


class Script:
    """A stack of the reference, and a record of every call with its answer. ``check=`` is worked out by hand."""

    def __init__(self, name: str, plan: list[int] | None = None, **params: int):
        self.stack = Stack(**params, plan=plan)
        self.case: dict[str, Any] = {
            "name": name,
            "params": params,
            "plan": plan,
            "budgets": [layer.effective for layer in self.stack.layers],
            "capacities": [layer.capacity for layer in self.stack.layers],
            "calls": [],
        }

    def _check(self, what: str, got: Any, check: Any) -> None:
        assert got == check, f"{self.case['name']}: {what} answers {got}, not {check}"

    def step(
        self, pos: int, attn: list[list[float] | None] | None, status: str | None = None, layer: int | None = None
    ) -> None:
        call: dict[str, Any] = {"call": "step", "pos": pos}
        call["attn"] = None if attn is None else [_written(row) for row in attn]
        try:
            self.stack.step(pos, attn)
        except reference.Refused as refused:
            call["status"], call["layer"] = refused.args
        self._check("step", (call.get("status"), call.get("layer")), (status, layer))
        self.case["calls"].append(call)

    def even(self, pos: int) -> None:
        """Take a step in which every layer attends evenly."""
        self.step(pos, [[1.0] * len(layer.kept) for layer in self.stack.layers])

    def evict(self, check: list[list[int]] | None = None) -> None:
        victims = self.stack.evict()
        self.case["calls"].append({"call": "evict", "victims": victims})
        if check is not None:
            self._check("evict", victims, check)

    def evict_rows(
        self, multiple_of: int, which: str, check: tuple[list[list[int]], list[list[int]]] | None = None
    ) -> None:
        before = [list(layer.kept) for layer in self.stack.layers]
        victims = self.stack.evict(multiple_of)
        rows = [reference.rows_of(*both, which) for both in zip(before, victims, strict=True)]
        call = {"call": "evict_rows", "multiple_of": multiple_of, "which": which, "victims": victims, "rows": rows}
        self.case["calls"].append(call)
        if check is not None:
            self._check("evict_rows", (victims, rows), check)

    def kept(self, check: list[list[int]] | None = None) -> None:
        kept = [list(layer.kept) for layer in self.stack.layers]
        self.case["calls"].append({"call": "kept", "positions": kept})
        if check is not None:
            self._check("kept", kept, check)

    def count(self, resident: int | None = None, peak: int | None = None) -> None:
        call = {"call": "count", "resident": self.stack.resident, "peak_resident": self.stack.peak}
        self.case["calls"].append(call)
        if resident is not None:
            self._check("count", (self.stack.resident, self.stack.peak), (resident, peak))

    def score(self, layer: int, pos: int, check: float | None = None) -> None:
        score = self.stack.layers[layer].score(pos)
        self.case["calls"].append({"call": "score", "layer": layer, "pos": pos, "score": score})
        if check is not None:
            self._check("score", score, check)

    def seed(
        self, layer: int, positions: list[int], attn: list[list[float]] | None = None, status: str | None = None
    ) -> None:
        call: dict[str, Any] = {"call": "seed", "layer": layer, "positions": positions}
        call["attn"] = None if attn is None else [_written(row) for row in attn]
        try:
            self.stack.seed(layer, positions, attn)
        except reference.Refused as refused:
            call["status"] = str(refused)
        self._check("seed", call.get("status"), status)
        self.case["calls"].append(call)

    def rollback(self, count: int, most: int, status: str | None = None) -> None:
        """Take steps back, of which `most` can be."""
        assert self.stack.most == most, f"{self.case['name']}: {self.stack.most} steps can be taken back"
        call: dict[str, Any] = {"call": "rollback", "count": count, "most": most}
        try:
            self.stack.rollback(count)
        except reference.Refused as refused:
            call["status"] = str(refused)
        assert call.get("status") == status, f"{self.case['name']}: rollback answers {call.get('status')}"
        self.case["calls"].append(call)

    def save(self) -> bytes:
        saved = stack_state(self.stack)
        self.case["calls"].append({"call": "save", "state": saved.hex()})
        return saved

    def load(self, saved: bytes, status: str | None = None, stack: Any = None) -> None:
        """Load bytes. Where they are taken, `stack` is the reference's stack that they were saved from."""
        call: dict[str, Any] = {"call": "load", "state": saved.hex()}
        if status is None:
            assert stack_state(stack) == saved
            self.stack = copy.deepcopy(stack)
            for layer in self.stack.layers:
                layer.forget_steps()
        self.case["calls"].append(call if status is None else call | {"status": status})

    def reset(self) -> None:
        self.stack.reset()
        self.case["calls"].append({"call": "reset"})


def new(name: str, plan: list[int] | None = None, **changes: int) -> Script:
    """Three layers of 6, 4 and 2 unless changed."""
    params = {
        "num_layers": 3,
        "budget": 4,
        "pyramid_ratio": 3,
        "recent_window": 1,
        "obs_window": 2,
        "pool_kernel": 1,
    }
    return Script(name, plan, **(params | changes))


def by_hand() -> list[Script]:
    """Cases whose answers follow from the rules by a few additions."""
    scripts = []

    s = new("each layer evicts at its own budget, and the peak is counted before that")
    s.kept([[0], [0], [0]])
    s.count(3, 3)
    s.step(1, [[1.0], [1.0], [1.0]])
    s.evict([[], [], []])
    s.count(6, 6)
    s.step(2, [[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]])
    s.count(9, 9)
    s.evict([[], [], [1]])  # 0 has 1.25, 1 has 0.75
    s.count(8, 9)
    s.step(3, [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.25, 0.75]])
    s.count(11, 11)
    s.evict([[], [], [0]])  # the ring holds two steps: 0.5 against 0.75
    s.step(4, [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.5]])
    s.count(13, 13)
    s.evict([[], [2], [3]])
    s.kept([[0, 1, 2, 3, 4], [0, 1, 3, 4], [2, 4]])
    s.count(11, 13)
    scripts.append(s)

    s = new("one layer is SnapKV", num_layers=1, budget=3, obs_window=4)
    s.step(1, [[1.0]])
    s.step(2, [[0.75, 0.25]])
    s.step(3, [[0.5, 0.125, 0.375]])
    s.score(0, 0, 2.25)
    s.evict([[1]])
    scripts.append(s)

    s = new("a plan's budgets are the layers' budgets", plan=[2, 5, 3])
    for pos in (1, 2, 3, 4):
        s.even(pos)
        s.evict()
    s.count(10, 12)
    # Of the last two even steps an old position has both, the one that joined between them one: it goes.
    s.kept([[0, 4], [0, 1, 2, 3, 4], [0, 1, 4]])
    scripts.append(s)

    s = new("the share of a deep layer is raised to the recent window plus one", budget=4, recent_window=3)
    s.count(3, 3)
    for pos in (1, 2, 3, 4):
        s.step(pos, None)
    s.evict([[], [0], [0]])
    s.count(13, 15)
    scripts.append(s)

    s = new("a layer that is not observed keeps its history")
    s.step(1, [[1.0], None, [0.5]])
    s.score(0, 0, 1.0)
    s.score(1, 0, 0.0)
    s.score(2, 0, 0.5)
    s.step(2, None)
    s.step(3, [None, [0.5, 0.25, 0.25], None])
    s.score(0, 0, 1.0)
    s.score(1, 0, 0.5)
    s.evict([[], [], [1, 2]])
    scripts.append(s)

    s = new("a step that one layer refuses changes none")
    s.step(1, [[1.0], [1.0], [1.0]])
    s.step(1, [[1.0, 1.0]] * 3, "position", 0)
    s.step(2, [[1.0, 1.0], [1.0, 1.0], [1.0]], "attn_len", 2)
    s.step(2, [[1.0, 1.0], [1.0], [1.0]], "attn_len", 1)
    s.step(2, [[1.0, 1.0], [1.0, NAN], [1.0, 1.0]], "attn_value", 1)
    s.step(2, [[1.0, 1.0], None, [-1.0, 1.0]], "attn_value", 2)
    s.step(2, [[1.0, 1.0], [1.0, 1.0], []], "attn_len", 2)
    s.count(6, 6)
    for layer in range(3):
        s.score(layer, 0, 1.0)
    s.seed(1, [0, 7])
    s.step(2, [[1.0, 1.0]] * 3, "position", 1)
    s.step(8, [[0.5, 1.0]] * 3)
    s.score(0, 0, 1.5)
    s.score(1, 0, 0.5)
    s.kept([[0, 1, 8], [0, 7, 8], [0, 1, 8]])
    scripts.append(s)

    s = new("a layer without room refuses for all", plan=[4, 2, 4])
    for pos in (1, 2):
        s.step(pos, None)
    s.step(3, None, "full", 1)
    s.kept([[0, 1, 2]] * 3)
    s.evict([[], [0], []])
    s.step(3, None)
    s.count(11, 11)
    scripts.append(s)

    s = new("seeding counts for the peak, resetting starts it anew")
    s.seed(0, [1, 2, 4, 6, 8, 9, 11], [[1.0] * 7])
    s.seed(1, [3], None)
    s.seed(2, [], None)
    s.seed(3, [1], None, "layer")
    s.seed(LARGEST, [1], None, "layer")
    s.seed(2, [2, 1], None, "position")
    s.seed(2, [1, 2, 3, 4, 5, 6], None, "full")
    s.seed(2, [1], [[-1.0]], "attn_value")
    s.count(8, 9)  # seven and two new layers, then seven and one and one
    s.score(0, 4, 1.0)
    s.evict([[1], [], []])
    s.step(12, [[0.5] * 6, [0.5], []])
    s.count(10, 10)
    s.reset()
    s.count(3, 3)
    s.kept([[0], [0], [0]])
    s.score(0, 0, 0.0)
    scripts.append(s)

    s = new("spare steps in every layer, and the rows of one late eviction", spare=2)
    for pos in range(1, 6):
        s.step(pos, None)
    s.evict_rows(1, "kept", ([[], [0, 1], [0, 1, 2, 3]], [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [4, 5]]))
    s.step(6, None)
    s.evict_rows(1, "victims", ([[0], [2], [4]], [[0], [0], [0]]))
    for pos in (7, 8, 9):
        s.step(pos, None)
    s.count(21, 21)
    s.step(10, None, "full", 0)
    s.evict_rows(1, "kept")
    s.count(12, 21)
    scripts.append(s)

    s = new("whole blocks in every layer", [5, 4, 3], spare=3)
    for pos in range(1, 7):
        s.step(pos, None)
    # 5, 4 and 3 of seven: one block of 4, one of 4, and less than one, which is one
    s.evict_rows(4, "kept", ([[0, 1, 2]] * 3, [[3, 4, 5, 6]] * 3))
    s.evict_rows(4, "victims", ([[]] * 3, [[]] * 3))
    s.evict_rows(1, "kept", ([[], [], [3]], [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]))
    scripts.append(s)

    s = new("saved, and taken back with its peak")
    s.save()
    s.step(1, [[0.5], [0.25], [1.0]])
    s.step(2, [[0.5, 0.25], None, [1.0, 0.0]])
    s.evict([[], [], [1]])
    saved, before = s.save(), copy.deepcopy(s.stack)
    s.step(3, None)
    s.count(11, 11)
    last = s.stack.layers[2]
    layers = [of_cache(layer) for layer in before.layers]
    for damaged, status in (
        (saved[:-1], "state"),
        (saved[:-4] + bytes([saved[-4] ^ 1]) + saved[-3:], "state"),
        (framed(b"".join(layers), 3, 2, 7), "state"),  # a peak below what is held
        (framed(b"".join(layers), 3, 2, 18), "state"),  # and above what can be: 7, 5 and 5
        (framed(b"".join(layers[:2]), 2, 2, 8), "mismatch"),
        (framed(b"".join([layers[1], layers[0], layers[2]]), 3, 2, 9), "mismatch"),
        (framed(layers[0], 1, 1), "mismatch"),
        (framed(b"".join(layers[:2]) + of_cache(last)[:-4], 3, 2, 9), "state"),
        (framed(b"".join(layers) + bytes(4), 3, 2, 9), "state"),
    ):
        s.load(damaged, status)
    s.count(11, 11)
    s.load(saved, stack=before)
    s.count(8, 9)
    s.score(0, 0, 1.0)
    s.kept([[0, 1, 2], [0, 1, 2], [0, 2]])
    s.even(3)
    s.evict()
    s.save()
    scripts.append(s)

    s = new("steps are taken back in all layers or in none, and the peak stays", max_rollback=3, spare=2)
    s.step(1, [[0.5], [0.25], [1.0]])
    s.save()
    s.step(2, [[0.5, 0.25], None, [1.0, 0.0]])
    s.step(3, None)
    s.step(4, [[0.25] * 4] * 3)
    s.count(15, 15)
    s.rollback(4, 3, "rollback")
    s.rollback(3, 3)
    s.count(6, 15)
    s.kept([[0, 1]] * 3)
    s.score(0, 0, 0.5)
    s.step(2, [[0.5, 0.25], None, [1.0, 0.0]])
    s.step(3, None)
    s.evict([[], [], [1, 2]])  # of three layers one drops something: it has nothing to take back
    s.rollback(1, 0, "rollback")
    s.step(4, None)
    s.step(5, None)
    s.seed(1, [1, 2], None)
    s.step(6, None)
    s.rollback(2, 1, "rollback")
    s.rollback(1, 1)
    s.save()
    s.reset()
    s.rollback(1, 0, "rollback")
    s.rollback(0, 0)
    scripts.append(s)
    return scripts


def seeded() -> list[Script]:
    """Longer runs with ties, unobserved layers and late evictions: the reference's word alone."""
    scripts = []
    for number in range(24):
        draw = random.Random(2000 + number)
        layers = draw.choice([1, 2, 3, 5])
        budget = draw.randint(2, 8)
        recent = draw.randint(0, budget - 1)
        plan = [draw.randint(recent + 1, recent + 6) for _ in range(layers)] if number % 2 else None
        s = new(
            f"seeded run {number}",
            plan,
            num_layers=layers,
            budget=budget,
            pyramid_ratio=draw.choice([1, 2, 4, 9]),
            recent_window=recent,
            obs_window=draw.choice([1, 2, 3]),
            pool_kernel=draw.choice([1, 3, 7]),
            **({} if number < 16 else {"spare": draw.randint(1, 4)}),
        )
        pos = 0
        for _ in range(draw.randint(12, 24)):
            pos += draw.choice([1, 1, 1, 5])
            values = [0.0, 0.25, 0.25, 0.5, 1.0] if draw.random() < 0.7 else [0.1, 0.2, 0.3, 1e-20, 7.7]
            rows: list[list[float] | None] = [
                None if draw.random() < 0.1 else [reference.float32(draw.choice(values)) for _ in layer.kept]
                for layer in s.stack.layers
            ]
            full = [n for n, layer in enumerate(s.stack.layers) if len(layer.kept) == layer.capacity]
            if full:
                s.step(pos, rows, "full", full[0])
            else:
                s.step(pos, rows if draw.random() < 0.9 else None)
            if full or draw.random() < (0.8 if number < 16 else 0.3):
                if number < 16:
                    s.evict()
                else:
                    s.evict_rows(draw.choice([1, 1, 2, 3]), draw.choice(["kept", "victims"]))
                    s.save()
        s.kept()
        s.count()
        scripts.append(s)
    return scripts


def _runs() -> dict[str, Any]:
    cases = [script.case for script in by_hand() + seeded()]
    return {"kind": "stack", "about": "Calls on stacks of caches.", "cases": cases}


def _refusals() -> dict[str, Any]:
    good = new("").case["params"]
    broken: list[tuple[str, int, list[int] | None, dict[str, int]]] = [
        ("num_layers", 0, None, {"num_layers": 0}),
        ("budget", 0, None, {"budget": 0}),
        ("obs_window", 0, None, {"obs_window": 0}),
        ("recent_window", 0, None, {"recent_window": 4}),
        ("pool_kernel", 0, None, {"pool_kernel": 2}),
        ("pyramid_ratio", 0, None, {"pyramid_ratio": 0}),
        ("too_large", 0, None, {"num_layers": 65537}),
        ("too_large", 0, None, {"num_layers": LARGEST}),
        ("too_large", 0, None, {"budget": 3000000000}),
        ("too_large", 0, None, {"budget": LARGEST}),
        ("too_large", 0, None, {"spare": LARGEST}),
        ("too_large", 0, [4, 4, 4], {"spare": LARGEST - 4}),
        ("too_large", 0, None, {"budget": 2**30, "max_rollback": LARGEST}),
        ("budget", 1, [4, 0, 4], {}),
        ("recent_window", 2, [2, 3, 1], {}),
        ("recent_window", 0, [4, 4, 4], {"recent_window": 4}),
        ("obs_window", 0, [4, 4, 4], {"obs_window": 0}),
        ("pool_kernel", 0, [4, 4, 4], {"pool_kernel": 0}),
        ("too_large", 1, [4, LARGEST, 4], {}),
        ("num_layers", 0, [], {"num_layers": 0}),
    ]
    cases = []
    for status, layer, plan, change in broken:
        text = ", ".join(f"{key} {value}" for key, value in change.items()) or "a budget of the plan"
        name = f"{text}{'' if plan is None else f', plan {plan}'}"
        cases.append({"name": name, "params": good | change, "plan": plan, "status": status, "layer": layer})
    return {"kind": "stack_refusal", "about": "Stacks that creation refuses, and why.", "cases": cases}


FILES = {"stack.json": _runs, "stack_refusals.json": _refusals}
