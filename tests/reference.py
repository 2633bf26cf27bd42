"""The rules of the core, stated a second time: slow, obvious, and sharing no code with the library.

Plain Python numbers and dictionaries. What the library does with rings of rows, doubling windows and radix passes is
here a dictionary per slot, ``max`` over a slice and ``sorted``.
"""

from __future__ import annotations

import copy
import itertools
import math
import struct
from fractions import Fraction
from typing import Any


def share(budget: int, layer: int, num_layers: int, ratio: int) -> int:
    """One layer's share, from the two ends of the arithmetic sequence rather than from the single division.

    The first layer gets 2*budget*r/(r+1), the last 2*budget/(r+1), the others lie evenly between them.
    """
    if num_layers == 1:
        return budget
    first = Fraction(2 * budget * ratio, ratio + 1)
    last = Fraction(2 * budget, ratio + 1)
    return math.floor(first + (last - first) * Fraction(layer, num_layers - 1))


def float32(weight: float) -> float:
    """Return the weight as float32 holds it."""
    return struct.unpack("<f", struct.pack("<f", weight))[0]


class Refused(Exception):  # noqa: N818 - a rule's word, not a fault
    """A call that the rules refuse; the argument is the status's name."""


def dropped(kept: int, protected: int, effective: int, budget: int | None, multiple_of: int) -> int:
    """How many go: the first of the counts 0, 1, 2, ... that leaves what is asked for, or no more than can go."""
    target = effective if budget is None else min(budget, effective)
    most = max((blocks for blocks in range(0, target + 1, multiple_of)), default=0)
    if most < protected or (most == 0 and target > 0):
        most = next(rows for rows in itertools.count(0, multiple_of) if rows >= max(protected, 1))
    return max(0, kept - most)


def rows_of(before: list[int], victims: list[int], which: str) -> list[int]:
    """Rows of an eviction: places in what was kept before it."""
    return [row for row, pos in enumerate(before) if (pos in victims) == (which == "victims")]


class Undoable:
    """What takes steps back: whole copies of what the cache was before each of the last `max_rollback` steps."""

    max_rollback = 0

    def forget_steps(self) -> None:
        self.past: list[dict[str, Any]] = []

    def remember(self) -> None:
        now = copy.deepcopy({name: value for name, value in vars(self).items() if name != "past"})
        self.past = [*self.past, now][-self.max_rollback :] if self.max_rollback else []

    def rollback(self, count: int) -> None:
        if count > len(self.past):
            raise Refused("rollback")
        if count:
            vars(self).update(copy.deepcopy(self.past[-count]))
            self.past = self.past[:-count]


class SnapKV(Undoable):
    """A decode-time cache that evicts by pooled recent attention."""

    def __init__(
        self,
        budget: int,
        recent_window: int,
        obs_window: int,
        pool_kernel: int,
        spare: int = 0,
        max_rollback: int = 0,
        effective: int | None = None,
    ):
        self.max_rollback = max_rollback
        self.recent_window, self.obs_window, self.pool_kernel = recent_window, obs_window, pool_kernel
        self.effective = budget if effective is None else effective
        self.capacity = max(self.effective, budget) + 1 + spare
        self.reset()

    def reset(self) -> None:
        self.kept = [0]
        self.forget_steps()
        self.slots: list[dict[int, float]] = [{} for _ in range(self.obs_window)]
        self.observed = 0

    def observe(self, attn: list[float]) -> None:
        weights = dict(zip(self.kept, map(float32, attn), strict=True))
        self.slots[self.observed % self.obs_window] = weights
        self.observed += 1

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

    def score(self, pos: int) -> float:
        if pos not in self.kept:
            raise Refused("not_kept")
        total = 0.0
        for slot in self.slots:
            total += slot.get(pos, 0.0)
        return total

    def evict(self, budget: int | None, multiple_of: int = 1) -> list[int]:
        protected = min(self.recent_window, len(self.kept))
        count = dropped(len(self.kept), protected, self.effective, budget, multiple_of)
        if count == 0:
            return []
        self.forget_steps()
        scores = [self.score(pos) for pos in self.kept]
        half = (self.pool_kernel - 1) // 2
        pooled = {pos: max(scores[max(0, index - half) : index + half + 1]) for index, pos in enumerate(self.kept)}
        open_to_eviction = self.kept[: len(self.kept) - protected]
        victims = sorted(sorted(open_to_eviction, key=lambda pos: (pooled[pos], pos))[:count])
        self.kept = [pos for pos in self.kept if pos not in victims]
        for slot in self.slots:
            for pos in victims:
                slot.pop(pos, None)
        return victims

    def seed(self, positions: list[int], attn: list[list[float]] | None) -> None:
        if len(positions) > self.capacity:
            raise Refused("full")
        if any(b <= a for a, b in itertools.pairwise(positions)):
            raise Refused("position")
        if any(not (math.isfinite(weight) and weight >= 0) for row in attn or [] for weight in row):
            raise Refused("attn_value")
        self.reset()
        self.kept = list(positions)
        if positions:
            for row in attn or []:
                self.observe(row)


class PyramidKV(SnapKV):
    """SnapKV at a layer's share."""

    def __init__(
        self,
        budget: int,
        layer: int,
        num_layers: int,
        pyramid_ratio: int,
        recent_window: int,
        obs_window: int,
        pool_kernel: int,
        spare: int = 0,
        max_rollback: int = 0,
    ):
        effective = max(share(budget, layer, num_layers, pyramid_ratio), recent_window + 1)
        super().__init__(budget, recent_window, obs_window, pool_kernel, spare, max_rollback, effective)


POLICIES = {"snapkv": SnapKV, "pyramidkv": PyramidKV}
