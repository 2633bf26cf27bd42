"""Measure an eviction rule of your own on real attention, beside SnapKV at the same total memory.

The rule here drops the position that received least attention per step of its life: the sum that H2O ranks by, divided
by age, so that old positions have no head start. When your rule is worth running in an engine, csrc/ shows how a policy
looks in C.
"""

import numpy as np

from pb_kvcache import H2O, SnapKV
from pb_kvcache.lab import traces
from pb_kvcache.lab.replay import replay


class MeanAttention:
    """One layer's cache. The replay needs these two methods alone."""

    def __init__(self, recent_window: int) -> None:
        self.recent_window = recent_window
        self.kept = np.array([0])
        self.total = np.zeros(1)

    def on_decode_step(self, pos: int, attn: np.ndarray) -> None:
        """Take in the weights that the kept positions got from the token at `pos`."""
        self.total += attn
        self.kept = np.append(self.kept, pos)
        self.total = np.append(self.total, 0.0)

    def evict(self, budget: int) -> np.ndarray:
        """Drop positions until `budget` are kept, and say which."""
        excess = len(self.kept) - budget
        age = self.kept[-1] - self.kept[: -self.recent_window]
        lowest = np.argsort(self.total[: -self.recent_window] / age, kind="stable")[:excess]
        dropped = self.kept[lowest]
        self.kept = np.delete(self.kept, lowest)
        self.total = np.delete(self.total, lowest)
        return dropped


def main() -> None:
    """Replay the shipped recording at a tenth of its length."""
    trace = traces.recorded()
    budget, recent = trace.length // 10, 14
    policies = {
        "mean attention": lambda layer: MeanAttention(recent),
        "H2O": lambda layer: H2O(budget, recent),
        "SnapKV": lambda layer: SnapKV(budget, recent),
    }
    print(f"{trace.name}: {trace.num_layers} layers, {budget} of {trace.length} positions a layer")
    for name, make in policies.items():
        report = replay(trace, make, budget, name=name)
        worst = report.worst_layer
        print(f"  {name:15} retains {report.retained_mass:.4f}, layer {worst.layer} least: {worst.retained_mass:.3f}")


if __name__ == "__main__":
    main()
