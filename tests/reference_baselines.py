"""The baselines, stated a second time: slow, obvious, and sharing no code with the library.

A cache here remembers everything that it has ever seen of each kept position and works its answers out anew.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from .reference import Refused, Undoable, dropped, float32


class Baseline(Undoable):
    """One layer's cache under one of the baselines, by its C name."""

    def __init__(
        self,
        policy: str,
        budget: int,
        sinks: int = 0,
        recent_window: int = 0,
        spare: int = 0,
        max_rollback: int = 0,
    ):
        self.max_rollback = max_rollback
        self.policy = policy
        self.effective = budget
        self.capacity = budget + 1 + spare
        self.sinks = sinks
        self.recent_window = recent_window
        self.reset()

    def reset(self) -> None:
        self.forget_steps()
        self.kept = [0]
        #: By position: each weight it received, with the number of positions that shared it. Empty: never observed.
        self.received: dict[int, list[tuple[float, int]]] = {0: []}

    def observe(self, attn: list[float]) -> None:
        for pos, weight in zip(self.kept, attn, strict=True):
            self.received[pos].append((float32(weight), len(attn)))

    def step(self, pos: int, attn: list[float] | None) -> None:
        if self.kept and pos <= max(self.kept):
            raise Refused("position")
        if attn is not None and len(attn) != len(self.kept):
            raise Refused("attn_len")
        if attn is not None and not all(math.isfinite(weight) and weight >= 0 for weight in attn):
            raise Refused("attn_value")
        if len(self.kept) == self.capacity:
            raise Refused("full")
        self.remember()
        if attn is not None:
            self.observe(attn)
        self.kept.append(pos)
        self.received[pos] = []

    def score(self, pos: int) -> float:
        if self.policy in ("sliding_window", "streaming_llm"):
            raise Refused("unsupported")
        if pos not in self.kept:
            raise Refused("not_kept")
        received = self.received[pos]
        if self.policy == "h2o":
            return functools.reduce(float.__add__, (weight for weight, _ in received), 0.0)
        if self.policy == "tova":
            return received[-1][0] if received else 0.0
        return float(len([weight for weight, count in received if weight > 1.0 / count]))

    def evict(self, budget: int | None, multiple_of: int = 1) -> list[int]:
        protected = set(self.kept[len(self.kept) - min(self.recent_window, len(self.kept)) :])
        protected |= {pos for pos in self.kept if pos < self.sinks}
        if self.policy == "tova":
            protected |= {pos for pos in self.kept if not self.received[pos]}
        order = [pos for pos in self.kept if pos not in protected]
        if self.policy in ("h2o", "tova", "scissorhands"):
            order.sort(key=lambda pos: (self.score(pos), pos))
        count = dropped(len(self.kept), len(protected), self.effective, budget, multiple_of)
        victims = sorted(order[:count])
        if victims:
            self.forget_steps()
        self.kept = [pos for pos in self.kept if pos not in victims]
        for pos in victims:
            del self.received[pos]
        return victims

    def seed(self, positions: list[int], attn: list[list[float]] | None) -> None:
        if len(positions) > self.capacity:
            raise Refused("full")
        if any(b <= a for a, b in itertools.pairwise(positions)):
            raise Refused("position")
        if any(not (math.isfinite(weight) and weight >= 0) for row in attn or [] for weight in row):
            raise Refused("attn_value")
        self.forget_steps()
        self.kept = list(positions)
        self.received = {pos: [] for pos in positions}
        for row in attn or []:
            self.observe(row)


#: By name: the parameter that a policy has beside its budget.
SECOND = {"streaming_llm": "sinks", "h2o": "recent_window", "scissorhands": "recent_window"}
NAMES = ("sliding_window", "streaming_llm", "h2o", "tova", "scissorhands")
POLICIES: dict[str, Any] = {name: functools.partial(Baseline, name) for name in NAMES}
