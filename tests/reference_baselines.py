"""The baselines, slow and obvious: a dict by position, everything recomputed, nothing shared with the package."""

from __future__ import annotations


class Reference:
    """One layer's cache. `name` is the C name; `params` are its parameters by name."""

    def __init__(self, name: str, **params: int) -> None:
        self.name = name
        self.budget = params["budget"]
        self.sinks = params.get("sinks", 0)
        self.recent_window = params.get("recent_window", 0)
        self.capacity = self.budget + 1
        self.reset()

    def reset(self) -> None:
        self.seed([0], [])

    def seed(self, positions: list[int], rows: list[list[float]]) -> None:
        self.kept = list(positions)
        #: By position: every weight received, with the number of positions that shared the step. Empty: unobserved.
        self.received: dict[int, list[tuple[float, int]]] = {pos: [] for pos in positions}
        for row in rows:
            self._observe(row)

    def _observe(self, attn: list[float]) -> None:
        for pos, weight in zip(self.kept, attn, strict=True):
            self.received[pos].append((weight, len(attn)))

    def on_decode_step(self, pos: int, attn: list[float] | None) -> None:
        assert pos not in self.received
        assert len(self.kept) < self.capacity
        if attn is not None:
            self._observe(attn)
        self.kept.append(pos)
        self.received[pos] = []

    def score(self, pos: int) -> float:
        weights = self.received[pos]
        if self.name == "h2o":
            total = 0.0
            for weight, _ in weights:
                total += weight
            return total
        if self.name == "tova":
            return weights[-1][0] if weights else 0.0
        if self.name == "scissorhands":
            return float(sum(1 for weight, count in weights if weight > 1.0 / count))
        raise KeyError(self.name)

    def candidates(self) -> list[int]:
        newest = self.kept[len(self.kept) - min(self.recent_window, len(self.kept)) :]
        return [
            pos
            for pos in self.kept
            if pos >= self.sinks and pos not in newest and (self.name != "tova" or self.received[pos])
        ]

    def evict(self, budget: int) -> list[int]:
        victims: list[int] = []
        order = self.candidates()
        if self.name not in ("sliding_window", "streaming_llm"):
            order.sort(key=lambda pos: (self.score(pos), pos))
        for pos in order:
            if len(self.kept) <= min(budget, self.budget):
                break
            self.kept.remove(pos)
            del self.received[pos]
            victims.append(pos)
        return sorted(victims)
