"""A stack of caches, stated a second time: a list of the references' caches, tried on copies before anything counts."""

from __future__ import annotations

import copy

from .reference import PyramidKV, Refused, SnapKV


class Stack:
    """One reference cache per layer; `plan` gives their budgets, else they are PyramidKV's shares."""

    def __init__(
        self,
        num_layers: int,
        budget: int,
        pyramid_ratio: int,
        recent_window: int,
        obs_window: int,
        pool_kernel: int,
        spare: int = 0,
        max_rollback: int = 0,
        plan: list[int] | None = None,
    ):
        rest = (recent_window, obs_window, pool_kernel, spare, max_rollback)
        if plan is None:
            self.layers: list[SnapKV] = [
                PyramidKV(budget, layer, num_layers, pyramid_ratio, *rest) for layer in range(num_layers)
            ]
        else:
            self.layers = [SnapKV(share, *rest) for share in plan]
        self.peak = 0
        self.count()

    @property
    def resident(self) -> int:
        return sum(len(layer.kept) for layer in self.layers)

    def count(self) -> None:
        self.peak = max(self.peak, self.resident)

    def step(self, pos: int, attn: list[list[float] | None] | None) -> None:
        """Take in a step. A refusal's arguments are the status and the first layer that refuses."""
        rows = [None] * len(self.layers) if attn is None else attn
        tried = copy.deepcopy(self.layers)
        for number, (layer, row) in enumerate(zip(tried, rows, strict=True)):
            try:
                layer.step(pos, row)
            except Refused as refused:
                raise Refused(str(refused), number) from None
        self.layers = tried
        self.count()

    def evict(self, multiple_of: int = 1) -> list[list[int]]:
        return [layer.evict(None, multiple_of) for layer in self.layers]

    @property
    def most(self) -> int:
        return min(len(layer.past) for layer in self.layers)

    def rollback(self, count: int) -> None:
        if count > self.most:
            raise Refused("rollback")
        for layer in self.layers:
            layer.rollback(count)

    def seed(self, layer: int, positions: list[int], attn: list[list[float]] | None) -> None:
        if layer >= len(self.layers):
            raise Refused("layer")
        self.layers[layer].seed(positions, attn)
        self.count()

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()
        self.peak = self.resident
