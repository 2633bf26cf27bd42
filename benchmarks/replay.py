"""What replaying costs: ``python benchmarks/replay.py``.

A replay of the shipped recording per policy, split into the policies' part and the replay's own, and the whole default
benchmark in one process. Every policy is an object for each layer. Where there is a stack, the same replay through it
follows. Medians. What a stack costs beside its C calls is in ``benchmarks/stack.py``.
"""

from __future__ import annotations

import statistics
import time

from pb_kvcache.lab import bench, traces
from pb_kvcache.lab.bench import positions

ROUNDS = 5


def main() -> None:
    """Measure and print."""
    print(", ".join(f"{key} {value}" for key, value in bench.machine().items()))
    trace = traces.recorded()
    policies = [policy for policy in bench.POLICIES if policy != "full"]
    rounds = [bench.run(trace, ["20%"], policies) for _ in range(ROUNDS)]
    print(f"\n{trace.name}, {trace.num_layers} layers, {trace.steps} steps, {positions('20%', trace.length)} a layer")
    for number, policy in enumerate(policies):
        for how, kind in (("objects", "reports"), ("stack", "stacks")):
            reports = [getattr(results, kind)[number] for results in rounds]
            reports = [report for report in reports if report is not None]
            if not reports:
                continue
            own = statistics.median(r.seconds - r.policy_seconds for r in reports)
            theirs = statistics.median(r.policy_seconds for r in reports)
            rate = statistics.median(r.steps_per_second for r in reports)
            step = 1e6 * theirs / trace.steps
            print(
                f"  {policy:14} {how:7}  policies {1e3 * theirs:4.0f} ms ({step:4.0f} µs a step), "
                f"replay {1e3 * own:4.0f} ms, {rate:6,.0f} steps/s"
            )
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        bench.run()
        taken.append(time.perf_counter() - started)
    print(f"\nthe default benchmark, one process: {statistics.median(taken):.1f} s")


if __name__ == "__main__":
    main()
