"""What a compressed cache costs and saves inside a real model, against DynamicCache and, where installed, kvpress.

    python benchmarks/transformers.py                    # SmolLM2-135M-Instruct at 4096 tokens, some minutes

Prefill and decoding are timed in one process, the variants taking turns, and reported as medians and as ratios of the
same turn: seconds on the clock, and seconds of processor time, which other work on the machine disturbs less. Peak
memory is measured in a process of its own for each variant, above what the loaded model takes.
kvpress needs transformers below 5.3; its PyramidKVPress gets the same average budget, window, kernel and steepness.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This file's own name must not be found in place of the library; the example has the model and the prompts.
sys.path[:] = [str(HERE.parent / "examples"), *(path for path in sys.path if Path(path).resolve() != HERE)]

import torch  # noqa: E402
import transformers  # noqa: E402
from generate import packaged_model, prompts  # noqa: E402

from pb_kvcache.lab.record import load_model  # noqa: E402
from pb_kvcache.transformers import PyramidKVCache, use  # noqa: E402
from pb_kvcache.transformers._layer import BudgetedLayer  # noqa: E402

try:
    import kvpress
except ImportError:
    kvpress = None

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
VARIANTS = ["DynamicCache", "pyramid grow", "pyramid hold", *(["kvpress"] if kvpress else [])]


class Variant:
    """One way of holding the cache: a prefill, then steps of one token."""

    def __init__(self, model: Any, name: str, budget: int) -> None:
        self.model, self.name, self.budget = model, name, budget
        self.position = 0

    def _switch(self) -> None:
        if self.name.startswith("pyramid"):
            use(self.model)
        else:
            self.model.set_attn_implementation("sdpa")

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> None:
        """Read the prompt into a new cache."""
        self._switch()
        self.position = ids.shape[1]
        if self.name.startswith("pyramid"):
            self.cache = PyramidKVCache(self.model.config, budget=self.budget, decode=self.name.split()[1])
        else:
            self.cache = transformers.DynamicCache(config=self.model.config)
        if self.name != "kvpress":
            self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
            return
        # beta 2.5 is a ratio of 4 between the first and the last layer.
        press = kvpress.PyramidKVPress(
            compression_ratio=1 - self.budget / ids.shape[1], window_size=32, kernel_size=7, beta=2.5
        )
        with press(self.model):
            self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token."""
        ids, position = torch.tensor([[7]]), torch.tensor([[self.position]])
        extra = {"cache_position": position[0]} if self.name == "kvpress" else {}
        self.model(ids, position_ids=position, use_cache=True, **{CACHE: self.cache}, **extra)
        self.position += 1

    def kept(self) -> int:
        """Return the positions held, all layers together."""
        return sum(int(layer.keys.shape[-2]) for layer in self.cache.layers)


class Times:
    """Seconds of each turn, on the clock and of the processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall.append(time.perf_counter() - self._start[0])
        self.processor.append(time.process_time() - self._start[1])

    def row(self, base: Times, digits: int, factor: float = 1.0) -> str:
        """Return medians, and medians of the ratios to another's same turn."""
        cells = []
        for own, other in ((self.wall, base.wall), (self.processor, base.processor)):
            ratio = median([a / b for a, b in zip(own, other, strict=True)])
            cells.append(f"{median(own) * factor:8.{digits}f} {ratio:7.3f}")
        return " ".join(cells)


class Stopwatch:
    """Adds up the processor time that choosing and moving positions takes in a prefill."""

    def __init__(self) -> None:
        self.seconds = 0.0
        original = BudgetedLayer._end_prompt

        def timed(layer: BudgetedLayer) -> None:
            start = time.process_time()
            original(layer)
            self.seconds += time.process_time() - start

        BudgetedLayer._end_prompt = timed


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field + ":"))) * 1024


def measure_memory(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, float]:
    """Return MB above the loaded model: the peak of the prefill, what stays after it, and the peak of decoding."""
    ids = prompts(tokenizer, args.tokens, 1)[0]
    variant = Variant(model, args.child, args.budget)
    warm = Variant(model, args.child, args.budget)
    warm.prefill(ids[:, :600])
    warm.step()
    del warm
    base = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    variant.prefill(ids)
    peak, after = _status("VmHWM") - base, _status("VmRSS") - base
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(8):
        variant.step()
    return {"prefill peak": peak / 1e6, "after prefill": after / 1e6, "decode peak": (_status("VmHWM") - base) / 1e6}


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5, help="turns of every variant")
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["prefill", "decode", "memory"], nargs="+")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = args.only or ["prefill", "decode", "memory"]
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model or packaged_model())
    model.set_attn_implementation("sdpa")
    if args.child:
        print(json.dumps(measure_memory(args, model, tokenizer)))
        return
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    print(
        f"{cpu}, {os.cpu_count()} cores, {args.threads} threads; python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, kvpress "
        f"{'not installed' if kvpress is None else 'installed'}\n"
        f"{model.config.num_hidden_layers} layers, float32, {args.tokens} tokens, budget {args.budget} a layer"
    )
    ids = prompts(tokenizer, args.tokens, 1)[0]
    watch = Stopwatch()
    variants = [Variant(model, name, args.budget) for name in VARIANTS]

    if "prefill" in parts:
        times = {name: Times() for name in VARIANTS}
        shares: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(args.repeats):
            for variant in variants:
                watch.seconds = 0.0
                with times[variant.name]:
                    variant.prefill(ids)
                shares[variant.name].append(watch.seconds / times[variant.name].processor[-1])
        print(f"\nprefill, {args.repeats} turns      s   ratio    CPU s   ratio   compression, share of CPU s")
        for name, found in times.items():
            share = f"{median(shares[name]):.2%}" if name.startswith("pyramid") else "-"
            print(f"  {name:16s} {found.row(times['DynamicCache'], 2)} {share:>20s}")

    if "decode" in parts:
        for variant in variants:
            if "prefill" not in parts:
                variant.prefill(ids)
        times = {name: Times() for name in VARIANTS}
        for _ in range(args.repeats):
            for variant in variants:
                variant._switch()
                variant.step()  # not timed: what switching left cold
                with times[variant.name]:
                    for _ in range(args.steps):
                        variant.step()
        print(f"\ndecode, {args.repeats} turns of {args.steps}  ms   ratio   CPU ms   ratio   positions held")
        for variant in variants:
            row = times[variant.name].row(times["DynamicCache"], 1, 1e3 / args.steps)
            print(f"  {variant.name:16s} {row} {variant.kept():16d}")

    if "memory" in parts:
        print("\nmemory above the model, MB   prefill peak   after prefill   decode peak")
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        for name in VARIANTS:
            command = [sys.executable, __file__, "--child", name, "--tokens", str(args.tokens)]
            command += ["--budget", str(args.budget), "--threads", str(args.threads)]
            command += ["--model", str(args.model)] if args.model else []
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            print(f"  {name:20s}" + "".join(f"{value:16.0f}" for value in found.values()))


if __name__ == "__main__":
    main()
