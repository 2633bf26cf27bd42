"""What the harness and a stack's Python side cost: ``python benchmarks/replay.py``.

Prints medians over rounds, and ratios, which depend less on the machine than times do:

- one decode step of 32 layers at 1,024 kept through :class:`pb_kvcache.PyramidStack`, against the same two C calls
  with their arguments prepared beforehand (they still cross cffi, about 0.1 us each);
- the same step through 32 :class:`pb_kvcache.SnapKV` objects, one call a layer;
- a replay of the shipped recording: the policies' part, and the harness's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from pb_kvcache import PyramidStack, SnapKV, bench, workloads
from pb_kvcache._native import ffi, lib
from pb_kvcache.harness import replay

LAYERS, KEPT, STEPS, ROUNDS = 32, 1024, 200, 15


def main() -> None:
    """Measure and print."""
    print(", ".join(f"{key} {value}" for key, value in bench.machine().items()))
    rng = np.random.default_rng(0)
    rows = [rng.random(KEPT).astype(np.float32) / KEPT for _ in range(LAYERS)]

    stack = PyramidStack(LAYERS, KEPT, 1)
    alone = [SnapKV(KEPT) for _ in range(LAYERS)]
    native = PyramidStack(LAYERS, KEPT, 1)
    attn = ffi.new("float *[]", [ffi.from_buffer("float[]", row) for row in rows])
    lengths = ffi.new("size_t[]", [KEPT] * LAYERS)
    victims = ffi.new("uint32_t[]", LAYERS)
    offsets = ffi.new("size_t[]", LAYERS + 1)
    handle = native._stack

    for pos in range(1, KEPT):  # fill
        stack.on_decode_step(pos, None)
        native.on_decode_step(pos, None)
        for cache in alone:
            cache.on_decode_step(pos, None)

    def through_stack(pos: int) -> None:
        stack.on_decode_step(pos, rows)
        stack.evict()

    def through_c(pos: int) -> None:
        lib.pb_kvcache_stack_on_decode_step(handle, pos, attn, lengths)
        lib.pb_kvcache_stack_evict(handle, victims, LAYERS, offsets, LAYERS + 1)

    def through_layers(pos: int) -> None:
        for cache, row in zip(alone, rows, strict=True):
            cache.on_decode_step(pos, row)
            cache.evict()

    ways: dict[str, Callable[[int], None]] = {
        "C calls, prepared": through_c,
        "PyramidStack": through_stack,
        f"{LAYERS} SnapKV objects": through_layers,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    pos = KEPT
    for _ in range(ROUNDS):  # in turn, so that a busy moment of the machine strikes all alike
        for name, way in ways.items():
            started = time.perf_counter()
            for step in range(STEPS):
                way(pos + step)
            times[name].append((time.perf_counter() - started) / STEPS)
        pos += STEPS
    assert all(np.array_equal(a, b) for a, b in zip(stack.kept, native.kept, strict=True))
    base = statistics.median(times["C calls, prepared"])
    print(f"\na decode step with its eviction, {LAYERS} layers, {KEPT} kept, {ROUNDS} rounds of {STEPS} steps")
    for name, taken in times.items():
        ratio = statistics.median(t / c for t, c in zip(taken, times["C calls, prepared"], strict=True))
        print(f"  {name:20} {1e6 * statistics.median(taken):8.1f} us   {ratio:5.2f} x")
    print(f"  ({1e6 * base / LAYERS:.2f} us a layer in C)")

    trace = workloads.recorded()
    reports = [replay(trace, lambda layer: SnapKV(115, 28), 115) for _ in range(5)]
    policy, whole = (statistics.median(getattr(r, field) for r in reports) for field in ("policy_seconds", "seconds"))
    print(f"\na replay of {trace.name}, {trace.num_layers} layers, {trace.steps} steps, SnapKV at 115")
    print(
        f"  policies {1e3 * policy:.0f} ms, harness {1e3 * (whole - policy):.0f} ms, {trace.steps / whole:,.0f} steps/s"
    )
    started = time.perf_counter()
    bench.run()
    print(f"\nthe default benchmark, one process: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
