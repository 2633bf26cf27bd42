"""Vectors of kind ``policy`` for what engines need of a policy: room, rows, blocks, states, steps taken back."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

from .. import reference, reference_baselines
from ..reference_state import framed, state
from .policies import LARGEST, Script

POLICIES = reference.POLICIES | reference_baselines.POLICIES


def new(name: str, policy: str, **params: int) -> Script:
    return Script(f"{policy}: {name}", policy, POLICIES, **params)


def ring(name: str, **changes: int) -> Script:
    """SnapKV that evicts to 3, without pooling, unless changed."""
    params = {"budget": 3, "recent_window": 1, "obs_window": 2, "pool_kernel": 1}
    return new(name, "snapkv", **(params | changes))


def spare() -> list[Script]:
    scripts = []

    s = ring("three steps more than one fit, and one eviction drops four", spare=3)
    s.steps(1, [1.0], [0.5, 0.5], None, None, None)
    s.step(6, [8.0, 0.0, 0.0, 0.0, 2.0, 0.0])
    s.step(7, None, "full")
    # In the last two observed steps 0 has 8.5, 1 has 0.5, 2 and 3 nothing, 4 has 2, and 5 nothing. 6 is recent.
    s.evict(None, [1, 2, 3, 5])
    s.kept([0, 4, 6])
    s.evict(None, [])
    scripts.append(s)

    s = ring("the scores are those of the eviction's time", spare=2)
    s.steps(1, [1.0], [0.0, 1.0], [0.5, 0.25, 0.125], [0.0, 0.5, 0.5, 0.0])
    # Slots hold steps 3 and 4: 0.5, 0.75, 0.625, 0. One eviction a step would have dropped 0 or 1 before.
    s.evict(None, [0, 3])
    scripts.append(s)

    for policy, params, victims in (
        ("sliding_window", {}, [0, 1, 2]),
        ("streaming_llm", {"sinks": 1}, [1, 2, 3]),
        ("h2o", {"recent_window": 0}, [3, 4, 5]),
        ("tova", {}, [2, 3, 4]),
        ("scissorhands", {"recent_window": 1}, [0, 3, 4]),
    ):
        s = new("room for two steps more", policy, budget=3, spare=2, **params)
        s.steps(1, [1.0], [0.5, 0.5], None, None, [0.5, 0.375, 0.25, 0.0, 0.0])
        s.step(6, None, "full")
        s.evict(None, victims)
        scripts.append(s)

    s = new(
        "a shallow layer has room above its share",
        "pyramidkv",
        budget=4,
        layer=0,
        num_layers=3,
        pyramid_ratio=3,
        recent_window=1,
        obs_window=2,
        pool_kernel=1,
        spare=1,
    )
    s.steps(1, *[None] * 7)
    s.step(8, None, "full")
    s.evict(None, [0, 1])
    scripts.append(s)
    return scripts


def rows() -> list[Script]:
    scripts = []

    for which, told in (("kept", [0, 3, 5]), ("victims", [1, 2, 4])):
        s = ring(f"the rows of {which}", spare=2)
        s.seed([2, 5, 6, 9, 11, 20], [[4.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
        s.evict_rows(None, 1, which, ([5, 6, 11], told))
        s.kept([2, 9, 20])
        scripts.append(s)

    s = ring("all rows stay where nothing is dropped")
    s.steps(1, None, None)
    s.evict_rows(None, 1, "kept", ([], [0, 1, 2]))
    s.evict_rows(None, 1, "victims", ([], []))
    s.seed([])
    s.evict_rows(0, 1, "kept", ([], []))
    scripts.append(s)

    s = ring("nothing stays", recent_window=0)
    s.steps(1, None, None)
    s.evict_rows(0, 1, "kept", ([0, 1, 2], []))
    s.kept([])
    scripts.append(s)

    s = ring("a block of no rows is none")
    s.steps(1, None, None, None)
    s.evict_rows(None, 0, "kept", status="plan_multiple")
    s.kept([0, 1, 2, 3])
    scripts.append(s)

    # What is left of 0 .. kept - 1 with only null steps, where the oldest go: budget, recent window, block, kept, left.
    for budget, recent, multiple_of, kept, left in (
        (8, 0, 4, 9, 8),
        (8, 0, 4, 8, 8),
        (8, 0, 4, 6, 6),  # below the target: the open block goes on filling
        (7, 0, 4, 9, 4),  # two blocks would be one too many
        (7, 0, 4, 7, 4),  # at the budget, and not whole blocks
        (7, 0, 4, 4, 4),
        (7, 5, 4, 12, 8),  # five are safe, which needs two blocks
        (7, 5, 4, 8, 8),
        (7, 5, 4, 7, 7),  # two blocks hold it as it is
        (3, 0, 4, 9, 4),  # less than a block is one block, not nothing
        (3, 0, 4, 4, 4),
        (3, 0, 16, 9, 9),
        (3, 2, LARGEST, 9, 9),
        (6, 0, 1, 9, 6),
        (6, 0, 3, 9, 6),
        (6, 0, 6, 9, 6),
    ):
        s = ring(
            f"{budget} of {kept} in blocks of {multiple_of}, {recent} safe",
            budget=budget,
            recent_window=recent,
            spare=8,
        )
        s.steps(1, *[None] * (kept - 1))
        dropped = list(range(kept - left))
        s.evict_rows(None, multiple_of, "victims", (dropped, dropped))
        scripts.append(s)

    s = ring("asked for nothing: no block, but for what is safe", budget=4, recent_window=0, spare=8)
    s.steps(1, *[None] * 9)
    s.evict_rows(5, 3, "kept", (list(range(7)), [7, 8, 9]))
    s.evict_rows(0, 3, "kept", ([7, 8, 9], []))
    scripts.append(s)

    s = new("sinks are safe in a block of their own", "streaming_llm", budget=4, sinks=3, spare=8)
    s.steps(1, *[None] * 9)
    s.evict_rows(1, 2, "kept", ([3, 4, 5, 6, 7, 8], [0, 1, 2, 9]))
    scripts.append(s)

    s = new("what no step has weighed is safe", "tova", budget=4, spare=4)
    s.steps(1, [1.0], [0.75, 0.25], [0.5, 0.25, 0.25], None, None, None)
    s.evict_rows(1, 5, "victims", ([1, 2], [1, 2]))  # 3 to 6 are safe, and fill a block of five with one more
    scripts.append(s)
    return scripts


def saved() -> list[Script]:
    scripts = []

    s = ring("a new cache, byte for byte")
    # The frame: letters, version 1, one cache, 100 bytes, no peak. Then kind 1, evicts to 3, room for 4, one recent, no
    # sinks, two slots, kernel 1. Slot 0 is next, one position is kept: 0. Two empty slots.
    words = [1, 1, 100, 0, 0, 0, 1, 0, 1, 3, 4, 1, 0, 2, 1, 0, 1, 0, 0, 0, 0]
    assert s.save()[:-8] == b"pbkvstat" + struct.pack("<21I", *words)
    scripts.append(s)

    for policy, params in (
        ("snapkv", {"recent_window": 1, "obs_window": 2, "pool_kernel": 1}),
        ("sliding_window", {}),
        ("streaming_llm", {"sinks": 1}),
        ("h2o", {"recent_window": 1}),
        ("tova", {}),
        ("scissorhands", {"recent_window": 1}),
    ):
        s = new("goes on from where it was", policy, budget=3, spare=1, **params)
        s.steps(1, [1.0], [0.25, 0.75], [0.5, 0.125, 0.25], None)
        before, held = s.save(), copy.deepcopy(s.cache)
        s.evict()
        s.step(9, [0.125] * 3)
        after = copy.deepcopy(s.cache)
        s.load(before, cache=held)
        s.kept([0, 1, 2, 3, 4])
        s.evict()
        s.step(9, [0.125] * 3)
        assert state(after) == s.save()
        s.load(before[:-8], "state")
        s.reset()
        s.load(before, cache=held)
        s.save()
        scripts.append(s)

    s = ring("a weight of minus zero is one of zero, and keeps its sign", obs_window=1)
    s.steps(1, [-0.0], [-0.0, 0.5])
    held, before = s.save(), copy.deepcopy(s.cache)
    s.step(3, [1.0, 1.0, 1.0])
    s.load(held, cache=before)
    s.score(0, 0.0)
    s.save()
    scripts.append(s)

    s = ring("whatever is no state is refused", budget=3, spare=1)
    s.steps(1, [1.0], [0.25, 0.75], [0.5, 0.125, 0.25])
    good = s.save()
    s.step(4, [0.0] * 4)
    body = list(struct.unpack(f"<{(len(good) - 48) // 4}I", good[40:-8]))
    # Words: 7 of the shape, cursor, kept count, unobserved, four positions, two lengths, then five weights.
    for status, changes in (
        ("mismatch", {0: 2}),
        ("mismatch", {0: 0}),
        ("mismatch", {1: 2}),
        ("mismatch", {2: 6}),
        ("mismatch", {3: 0}),
        ("mismatch", {4: 1}),
        ("mismatch", {5: 3}),
        ("mismatch", {6: 3}),
        ("state", {7: 2}),
        ("state", {8: 5}),
        ("state", {8: 6}),
        ("state", {8: 2}),
        ("state", {8: LARGEST}),
        ("state", {9: 1}),
        ("state", {10: 1}),
        ("state", {13: 2}),
        ("state", {13: 0}),
        ("state", {14: 2, 15: 3}),  # slot 1 holds the older step: it has no more columns than slot 0
        ("state", {14: 5, 15: 0}),
        ("state", {14: LARGEST}),
        ("state", {14: 2}),
        ("state", {16: 0x7F800000}),
        ("state", {17: 0x7FC00000}),
        ("state", {18: 0x80000001}),
        ("state", {20: 0xBF800000}),
    ):
        changed = [changes.get(index, word) for index, word in enumerate(body)]
        s.load(framed(struct.pack(f"<{len(body)}I", *changed)), status)
    data = good[40:-8]
    for status, bad in (
        ("state", b""),
        ("state", good[:47]),
        ("state", good[:-4]),
        ("state", good + bytes(4)),
        ("state", b"P" + good[1:]),
        ("state", good[:60] + bytes([good[60] ^ 0x10]) + good[61:]),
        ("state", framed(b"")),
        ("state", framed(data[:36])),
        ("state", framed(data[:-4])),
        ("state", framed(data + bytes(4))),
        ("state", framed(data + bytes(2))[:-8] + bytes(8)),
        ("state", framed(data, peak=1)),
        ("state_version", framed(data, version=2)),
        ("state_version", framed(data, version=0)[:-8] + bytes(8)),
        ("mismatch", framed(data, kind=2)),
        ("mismatch", framed(data * 2, caches=2)),
        ("state", framed(data * 2)),
    ):
        s.load(bad, status)
    s.kept([0, 1, 2, 3, 4])
    scripts.append(s)

    for status, unobserved, scores in (
        (None, 1, [0.5, -0.0, 0.0]),
        (None, 3, [0.0, 0.0, 0.0]),
        ("state", 4, [0.0, 0.0, 0.0]),
        ("state", 1, [0.5, 0.25, 0.125]),
        ("state", 1, [0.5, 0.25, -0.0]),
        ("state", 0, [0.5, -0.25, 0.125]),
        ("state", 0, [0.5, float("inf"), 0.125]),
        ("state", 0, [float("nan"), 0.0, 0.125]),
    ):
        s = new(f"scores of {scores}, {unobserved} of them not weighed", "tova", budget=3)
        words = [4, 3, 4, 0, 0, 0, 0, 0, 3, unobserved, 2, 3, 7]
        bytes_ = framed(struct.pack("<13I3d", *words, *scores))
        if status is None:
            s.cache.kept = [2, 3, 7]
            weighed = 3 - unobserved
            pairs = zip([2, 3, 7], scores, strict=True)
            s.cache.received = {p: [(w, 3)] if i < weighed else [] for i, (p, w) in enumerate(pairs)}
            s.load(bytes_, cache=s.cache)
            s.evict(1)
            s.save()
        else:
            s.load(bytes_, status)
            s.kept([0])
        scripts.append(s)
    return scripts


def taken_back() -> list[Script]:
    scripts = []

    s = ring("a ring that has gone round twice is as it was", budget=6, obs_window=2, max_rollback=3)
    s.steps(1, [1.0], [0.5, 0.25])
    s.score(0, 1.5)
    s.steps(3, [0.125, 0.0, 0.0], None, [2.0, 0.0, 0.0, 0.0, 0.5])
    s.score(0, 2.125)
    s.rollback(4, 3, "rollback")
    s.rollback(1, 3)
    s.kept([0, 1, 2, 3, 4])
    s.score(0, 0.625)
    s.score(1, 0.25)
    s.rollback(2, 2)
    s.kept([0, 1, 2])
    s.score(0, 1.5)
    s.score(1, 0.25)
    s.rollback(1, 0, "rollback")
    s.rollback(0, 0)
    s.step(3, [4.0, 0.0, 0.0])
    s.score(0, 4.5)
    s.rollback(1, 1)
    s.score(0, 1.5)
    scripts.append(s)

    s = ring("only the last steps can be taken back", budget=9, max_rollback=2)
    s.steps(1, [1.0], [1.0] * 2, [1.0] * 3, [1.0] * 4)
    s.rollback(3, 2, "rollback")
    s.rollback(2, 2)
    s.kept([0, 1, 2])
    scripts.append(s)

    s = ring("without a promise nothing can")
    s.step(1, [1.0])
    s.rollback(1, 0, "rollback")
    s.kept([0, 1])
    scripts.append(s)

    s = ring("evictions that drop something, seeds, resets and loads are the end of it", spare=4, max_rollback=4)
    s.steps(1, [1.0], [0.5, 0.5])
    s.evict(None, [])
    s.rollback(1, 2)
    saved, held = s.save(), copy.deepcopy(s.cache)
    s.steps(2, [0.5, 0.5], None)
    s.evict(None, [2])
    s.rollback(1, 0, "rollback")
    s.step(4, None)
    s.seed([1, 2], [[0.5, 0.5]])
    s.rollback(1, 0, "rollback")
    s.step(4, None)
    s.reset()
    s.rollback(1, 0, "rollback")
    s.step(4, None)
    s.load(saved, cache=held)
    s.rollback(1, 0, "rollback")
    s.step(4, None)
    s.step(4, None, "position")
    s.rollback(1, 1)
    s.kept([0, 1])
    scripts.append(s)

    for policy, params in (
        ("sliding_window", {}),
        ("streaming_llm", {"sinks": 1}),
        ("h2o", {"recent_window": 1}),
        ("tova", {}),
        ("scissorhands", {"recent_window": 1}),
        (
            "pyramidkv",
            {"layer": 0, "num_layers": 1, "pyramid_ratio": 1, "recent_window": 1, "obs_window": 2, "pool_kernel": 1},
        ),
    ):
        s = new("as before, to the bit", policy, budget=4, spare=3, max_rollback=4, **params)
        s.steps(1, [0.1], None)
        before = s.save()
        s.steps(3, [reference.float32(0.7)] * 3, None, [0.5, 0.0, 0.25, 0.0, 0.0], None)
        s.rollback(4, 4)
        assert s.save() == before
        s.steps(3, [0.5, 0.25, 0.25], [0.25] * 4)
        s.rollback(1, 2)
        s.evict(2)
        s.kept()
        scripts.append(s)

    for number in range(28):
        draw = random.Random(4000 + number)
        s = drawn(f"seeded run of steps taken back {number}", draw, number, max_rollback=draw.randint(1, 6))
        for _ in range(draw.randint(30, 60)):
            pos = max(s.cache.kept, default=0) + draw.choice([1, 1, 1, 5])
            full = len(s.cache.kept) == s.cache.capacity
            if full or draw.random() < 0.1:
                s.evict(draw.choice([None, None, draw.randint(0, 12)]))
            elif draw.random() < 0.3:
                most = len(s.cache.past)
                count = draw.randint(0, most + 1)
                s.rollback(count, most, "rollback" if count > most else None)
                if draw.random() < 0.3:
                    s.save()
            else:
                row = [reference.float32(draw.choice([0.0, 0.25, 0.25, 0.5, 0.1, 7.7])) for _ in s.cache.kept]
                s.step(pos, None if draw.random() < 0.15 else row)
        s.save()
        scripts.append(s)
    return scripts


def drawn(name: str, draw: random.Random, number: int, **more: int) -> Script:
    """Return a script of any policy with any parameters."""
    policy = [*POLICIES][number % len(POLICIES)]
    budget = draw.randint(2, 12)
    params = {"budget": budget, "spare": draw.randint(0, 9)}
    if policy in reference_baselines.SECOND:
        params[reference_baselines.SECOND[policy]] = draw.randint(0, budget - 1)
    if policy in reference.POLICIES:
        params |= {"recent_window": draw.randint(0, budget - 1), "obs_window": draw.choice([1, 2, 3])}
        params["pool_kernel"] = draw.choice([1, 3, 7])
    if policy == "pyramidkv":
        layers = draw.choice([1, 2, 3])
        params |= {"layer": draw.randrange(layers), "num_layers": layers, "pyramid_ratio": draw.choice([1, 4])}
    return new(name, policy, **params, **more)


def seeded() -> list[Script]:
    """Longer runs of all policies: the reference's word alone."""
    scripts = []
    for number in range(28):
        draw = random.Random(3000 + number)
        s = drawn(f"seeded run {number}", draw, number)
        pos = 0
        for _ in range(draw.randint(20, 40)):
            pos += draw.choice([1, 1, 1, 5])
            full = len(s.cache.kept) == s.cache.capacity
            row = [reference.float32(draw.choice([0.0, 0.25, 0.25, 0.5, 0.1, 7.7])) for _ in s.cache.kept]
            s.step(pos, None if draw.random() < 0.15 else row, "full" if full else None)
            if full or draw.random() < 0.2:
                asked = draw.choice([None, None, draw.randint(0, 24)])
                s.evict_rows(asked, draw.choice([1, 1, 2, 3, 4, 16]), draw.choice(["kept", "victims"]))
                if draw.random() < 0.3:
                    s.save()
        for kept in list(s.cache.kept):
            s.score(kept)
        s.kept()
        scripts.append(s)
    return scripts


def _file(about: str, *makers: Any) -> Any:
    return lambda: {"kind": "policy", "about": about, "cases": [s.case for make in makers for s in make()]}


FILES = {
    "spare.json": _file("Room for steps that pass without an eviction.", spare),
    "state.json": _file("States as bytes, and what is refused as one.", saved),
    "rollback.json": _file("Steps taken back.", taken_back),
    "rows.json": _file("Evictions that tell rows and leave whole blocks.", rows, seeded),
}
