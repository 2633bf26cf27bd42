"""Caches in slots and the attention of one token, a second time: lists of slots, one NumPy operation at a time."""

from __future__ import annotations

import copy

import numpy as np

from .reference import Refused, SnapKV
from .reference_select import F, exact_exp, exact_sum


class Hold:
    """A reference cache for each budget, and the slot of every position."""

    def __init__(self, budgets: list[int], recent_window: int, obs_window: int, pool_kernel: int):
        self.caches = [SnapKV(budget, recent_window, obs_window, pool_kernel) for budget in budgets]
        self.slots = [{0: 0} for _ in budgets]

    def seed(self, cache: int, positions: list[int], attn: list[list[float]] | None) -> None:
        if cache >= len(self.caches):
            raise Refused("cache")
        if len(positions) > self.caches[cache].effective:
            raise Refused("full")
        self.caches[cache].seed(positions, attn)
        self.slots[cache] = {pos: slot for slot, pos in enumerate(positions)}

    def step(
        self, pos: list[int], joins: list[bool] | None, weights: list[list[float]] | None
    ) -> list[tuple[int, int, int]]:
        """Take a token in: moves (cache, from, to). A refusal's arguments are the status and the first cache."""
        tried = copy.deepcopy(self.caches)
        slots, moves = copy.deepcopy(self.slots), []
        for number, (cache, at) in enumerate(zip(tried, slots, strict=True)):
            if joins is not None and not joins[number]:
                continue
            seen = None if weights is None else [weights[number][at[kept]] for kept in cache.kept]
            try:
                cache.step(pos[number], seen)
            except Refused as refused:
                raise Refused(str(refused), number) from None
            newest = len(at)
            at[pos[number]] = newest
            for victim in cache.evict(None):
                freed = at.pop(victim)
                if freed != newest:
                    at[pos[number]] = freed
                    moves.append((number, newest, freed))
        self.caches, self.slots = tried, slots
        return moves


def dot(a, b):
    """Return the product of two rows of float32: 16 interleaved sums, folded in halves."""
    lanes = np.zeros(16, F)
    for start in range(0, len(a), 16):
        part = a[start : start + 16] * b[start : start + 16]
        lanes[: len(part)] += part
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def decode_weights(queries, rows, offsets, counts, scale, softcap=0.0, sinks=None, reduce="mean"):
    """Return each cache's weights. `queries` ``(caches, group, head_dim)``, `rows` ``(rows, head_dim)``, float32."""
    weights = []
    for cache, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
        heads = []
        for g, query in enumerate(queries[cache]):
            logits = np.array([dot(query, rows[offset + slot]) for slot in range(count)], F) * F(scale)
            if softcap:
                x = logits / F(softcap)
                e = exact_exp(F(-2) * np.abs(x))
                logits = F(softcap) * np.copysign((F(1) - e) / (F(1) + e), x)
            sink = None if sinks is None else F(sinks[cache * len(queries[cache]) + g])
            top = logits.max(initial=-np.inf) if sink is None else max(logits.max(initial=-np.inf), sink)
            e = exact_exp(logits - F(top))
            total = exact_sum(e) + (0.0 if sink is None else float(exact_exp(np.array([sink - F(top)], F))[0]))
            heads.append(e * F(1.0 / total) if count else e)
        total = heads[0]
        for head in heads[1:]:
            total = np.maximum(total, head) if reduce == "max" else total + head
        weights.append(total / F(len(heads)) if reduce == "mean" else total)
    return weights
