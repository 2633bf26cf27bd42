"""What one decode step of a whole model costs from Python, beside the C calls that it makes.

32 layers that keep 1,024 positions each, at their budgets, so that every step evicts one position per layer. "C calls"
are the same two calls with their arguments prepared beforehand: what a C program would spend. Medians of interleaved
repetitions. ``--most RATIO`` makes the program fail where a stack costs more than so many times the C calls.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import pb_kvcache
from pb_kvcache import PyramidKV, PyramidStack
from pb_kvcache._native import ffi, lib


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kept", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=41)
    parser.add_argument("--steps", type=int, default=20, help="steps of one repetition")
    parser.add_argument("--most", type=float, help="the highest ratio that passes")
    arguments = parser.parse_args()
    layers, kept = arguments.layers, arguments.kept

    rng = np.random.default_rng(0)
    table = rng.random((layers, kept), np.float32)
    vectors = list(table)

    def filled() -> PyramidStack:
        stack = PyramidStack(layers, budget=kept, pyramid_ratio=1)
        for layer in range(layers):
            stack.seed(layer, range(kept), np.full((16, kept), 1 / kept, np.float32))
        return stack

    def in_python(attn: list[np.ndarray] | np.ndarray) -> Callable[[int], None]:
        stack = filled()

        def step(pos: int) -> None:
            stack.on_decode_step(pos, attn)
            stack.evict()

        return step

    def flat() -> Callable[[int], None]:
        stack = filled()

        def step(pos: int) -> None:
            stack.on_decode_step(pos, table)
            stack.evict_flat()

        return step

    def in_c() -> Callable[[int], None]:
        stack = filled()
        native = stack._stack
        pointers = ffi.new("float *[]", [ffi.from_buffer("float[]", vector) for vector in vectors])
        lengths = ffi.new("size_t[]", [kept] * layers)
        victims = ffi.new("uint32_t[]", layers)
        offsets = ffi.new("size_t[]", layers + 1)

        def step(pos: int, stack: PyramidStack = stack) -> None:
            lib.pb_kvcache_stack_on_decode_step(native, pos, pointers, lengths)
            lib.pb_kvcache_stack_evict(native, victims, layers, offsets, layers + 1)

        return step

    def apart() -> Callable[[int], None]:
        caches = [PyramidKV(kept, layer, layers, 1) for layer in range(layers)]
        for cache in caches:
            cache.seed(range(kept), np.full((16, kept), 1 / kept, np.float32))

        def step(pos: int) -> None:
            for cache, vector in zip(caches, vectors, strict=True):
                cache.on_decode_step(pos, vector)
                cache.evict()

        return step

    contestants = {
        "C calls": in_c(),
        "PyramidStack, list of arrays": in_python(vectors),
        "PyramidStack, 2-D array": in_python(table),
        "PyramidStack, 2-D array, flat": flat(),
        f"{layers} PyramidKV objects": apart(),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(-1, arguments.repetitions):  # one to warm up
        for name, step in contestants.items():
            first = kept + (repetition + 1) * arguments.steps
            start = time.perf_counter()
            for pos in range(first, first + arguments.steps):
                step(pos)
            if repetition >= 0:
                times[name].append((time.perf_counter() - start) / arguments.steps)

    print(f"{platform.platform()}, {platform.machine()}; Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"pb_kvcache {pb_kvcache.__version__}; {layers} layers, {kept} kept each, one step and one eviction")
    base = statistics.median(times["C calls"])
    worst = 0.0
    for name, values in times.items():
        median = statistics.median(values)
        # The median of ratios within a repetition, which share the machine's mood.
        ratio = statistics.median(value / c for value, c in zip(values, times["C calls"], strict=True))
        print(f"{name:32} {median * 1e6:8.1f} us   {ratio:5.2f} times the C calls   +{(median - base) * 1e6:5.1f} us")
        if name.startswith("PyramidStack"):
            worst = max(worst, ratio)
    if arguments.most is not None and worst > arguments.most:
        print(f"above {arguments.most} times the C calls", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
