"""What the prefill selection costs, against torch and kvpress: ``python benchmarks/prefill.py``.

In one process, medians of interleaved rounds, 32 query heads, 8 KV heads, head size 128. Needs torch. kvpress is
measured where it is installed. Two tables, in milliseconds:

- *from logits*: from the window's logits to the kept positions. The chain in torch reuses its softmax's output, gets
  logits that are masked already, and sorts stably, since ``torch.topk`` leaves ties open. The floor is one read of the
  logits.
- *from q and k*: from queries and keys to keys and values of the kept positions only. The chain in torch reuses its
  product's and softmax's outputs. The floor is the product alone, by torch, in float32.

Before them compaction, against copies of the same rows and of as many bytes, and the choice of the best, against
NumPy's.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import pb_kvcache as pb
from pb_kvcache.lab import bench

# This folder has a transformers.py, which is not the package that kvpress imports.
sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

Q_HEADS, KV_HEADS, DIM, KERNEL = 32, 8, 128, 7
GROUP = Q_HEADS // KV_HEADS
SCALE = DIM**-0.5


def medians(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return each way's median, in milliseconds, over rounds that run every way once."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def best_positions(scores: torch.Tensor, budget: int, window: int) -> torch.Tensor:
    """Return what each head keeps, by torch: ties to the lower position, ascending, and the window."""
    past = scores.shape[-1]
    pooled = F.max_pool1d(scores[None], KERNEL, stride=1, padding=KERNEL // 2)[0]
    order = torch.sort(pooled, dim=-1, descending=True, stable=True).indices[:, : budget - window]
    tail = torch.arange(past, past + window).expand(KV_HEADS, window)
    return torch.cat([torch.sort(order, dim=-1).values, tail], dim=-1)


def of_softmax(weights: torch.Tensor, n: int, window: int) -> torch.Tensor:
    """Return window scores from probabilities."""
    return weights.view(KV_HEADS, GROUP, window, n)[..., : n - window].mean(dim=(1, 2), dtype=torch.float32)


def gathered(kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the kept rows, copied by torch."""
    return kv.gather(1, indices[..., None].expand(-1, -1, DIM))


def kvpress_way(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, budget: int, window: int) -> Any:
    """Return kvpress's scoring, topk and gather, without its projection of the queries. None: not installed."""
    try:
        from kvpress import SnapKVPress
        from kvpress.presses import snapkv_press
    except ImportError:
        return None
    snapkv_press.get_prerope_query_states = lambda module, hidden: q[None]
    press = SnapKVPress(compression_ratio=0.5, window_size=window, kernel_size=KERNEL)
    config = SimpleNamespace(num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS)
    module = SimpleNamespace(config=config, head_dim=DIM)
    n = k.shape[1]
    hidden = torch.zeros(1, n, 1)
    rotary = (torch.ones(1, window, DIM, dtype=q.dtype), torch.zeros(1, window, DIM, dtype=q.dtype))

    def run() -> Any:
        scores = press.score(module, hidden, k[None], v[None], None, {"position_embeddings": rotary})
        indices = scores.topk(budget, dim=-1).indices[..., None].expand(-1, -1, -1, DIM)
        return k[None].gather(2, indices).contiguous(), v[None].gather(2, indices).contiguous()

    return run


def line(cells: list[Any]) -> None:
    """Print a row of a table."""
    print(
        "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |", flush=True
    )


def from_logits(n: int, window: int, dtype: torch.dtype, threads: int, rounds: int) -> None:
    """Print one row of the first table."""
    future = torch.triu(torch.full((window, n), -torch.inf), 1 + n - window)
    logits = (torch.randn(Q_HEADS, window, n) + future).to(dtype)
    weights = torch.empty_like(logits)
    budget = n // 16
    words = logits.view(-1).view(torch.int64).numpy()

    def chain() -> torch.Tensor:
        torch.softmax(logits, dim=-1, out=weights)
        return best_positions(of_softmax(weights, n, window), budget, window)

    def ours() -> torch.Tensor:
        return pb.select(
            logits, budget, num_kv_heads=KV_HEADS, window=window, kernel=KERNEL, from_logits=True, threads=threads
        )

    found = medians({"chain": chain, "ours": ours, "read": lambda: np.bitwise_or.reduce(words)}, rounds)
    t = [found[name] for name in ("chain", "ours", "read")]
    line([n, window, str(dtype).removeprefix("torch."), threads, *t, t[0] / t[1], t[1] / (2 * t[2])])


def from_qk(n: int, window: int, dtype: torch.dtype, threads: int, rounds: int) -> None:
    """Print one row of the second table."""
    q = torch.randn(Q_HEADS, window, DIM).to(dtype)
    k, v = torch.randn(KV_HEADS, n, DIM).to(dtype), torch.randn(KV_HEADS, n, DIM).to(dtype)
    grouped = q.reshape(KV_HEADS, GROUP * window, DIM)
    budget = n // 2  # as much as kvpress is usually asked to keep
    future = torch.triu(torch.full((window, window), -torch.inf), 1).to(dtype)
    logits = torch.empty(KV_HEADS, GROUP * window, n, dtype=dtype)
    weights = torch.empty_like(logits)
    ours_k, ours_v = k.clone(), v.clone()
    wide_q, wide_k, product = grouped.float(), k.float(), torch.empty(GROUP * window, n)

    def chain() -> Any:
        torch.bmm(grouped, k.transpose(1, 2), out=logits)
        logits.mul_(SCALE)
        logits.view(KV_HEADS, GROUP, window, n)[..., n - window :].add_(future)
        torch.softmax(logits, dim=-1, out=weights)
        indices = best_positions(of_softmax(weights, n, window), budget, window)
        return gathered(k, indices), gathered(v, indices)

    def ours() -> Any:
        scores = pb.scores_from_qk(q, k, threads=threads)
        indices = pb.select_from_scores(scores, budget, window, kernel=KERNEL)
        return pb.compact(ours_k, indices, threads=threads), pb.compact(ours_v, indices, threads=threads)

    def multiply() -> None:
        for head in range(KV_HEADS):
            torch.mm(wide_q[head], wide_k[head].T, out=product)

    ways: dict[str, Callable[[], Any]] = {"chain": chain, "ours": ours, "product": multiply}
    press = kvpress_way(q, k, v, budget, window)
    if press is not None:
        ways["kvpress"] = press
    found = medians(ways, rounds)
    t = [found.get(name, float("nan")) for name in ("kvpress", "chain", "ours", "product")]
    line([n, window, str(dtype).removeprefix("torch."), threads, *t, t[0] / t[2], t[1] / t[2], t[2] / t[3]])


def choice(n: int, rounds: int) -> None:
    """Print the choice of the best against NumPy's argpartition and sort, which leaves ties open."""
    scores = np.random.default_rng(0).standard_exponential((KV_HEADS, n)).astype(np.float32)
    for k in (n // 64, n // 16, n // 4):
        found = medians(
            {
                "numpy": lambda k=k: np.sort(np.argpartition(scores, -k, axis=1)[:, -k:], axis=1),  # type: ignore[misc]
                "ours": lambda k=k: pb.select_top(scores, k),  # type: ignore[misc]
            },
            20 * rounds,
        )
        line([n, k, found["numpy"], found["ours"], found["numpy"] / found["ours"]])


def compaction(n: int, rounds: int) -> None:
    """Print compaction of half the rows against copies of them (torch, NumPy) and of as many bytes, and its memory."""
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((KV_HEADS, n, DIM), dtype=np.float32)
    other = np.zeros((KV_HEADS, n // 2, DIM), np.float32)
    indices = np.sort(np.stack([rng.permutation(n)[: n // 2] for _ in range(KV_HEADS)]), axis=1).astype(np.uint32)
    wide = torch.from_numpy(indices.astype(np.int64))
    pb.compact(kv[:, :64], indices[:, :1])  # what a first call loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pb.compact(kv, indices)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    def take() -> None:
        for head in range(KV_HEADS):
            np.take(kv[head], indices[head], axis=0, out=other[head], mode="clip")

    ways: dict[str, Callable[[], Any]] = {
        "gather": lambda: gathered(torch.from_numpy(kv), wide),
        "take": take,
        "ours": lambda: pb.compact(kv, indices),
        "copy": lambda: np.copyto(other, kv[:, n // 2 :]),
    }
    found = medians(ways, 3 * rounds)
    times = [found[name] for name in ways]
    line([n, *times, times[2] / times[1], times[2] / times[3], f"{grown} of {kv.nbytes >> 10} KB"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--window", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    # Compaction first: the high-water mark of memory says nothing once larger arrays have come and gone.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in bench.machine().items()) + f", torch {torch.__version__}")
    if "kvpress" not in sys.modules and not _installed("kvpress"):
        print("kvpress is not installed")
    print("\ncompaction of half the rows (ms)\n")
    line(["n", "torch.gather", "np.take", "ours", "copy", "ours / take", "ours / copy", "memory grew by"])
    line(["---"] * 8)
    for n in options.n:
        compaction(n, options.rounds)
    print("\nchoice of the best, 8 rows (ms)\n")
    line(["n", "k", "NumPy", "ours", "NumPy / ours"])
    line(["---"] * 5)
    for n in options.n:
        choice(n, options.rounds)
    configurations = [
        (n, window, dtype, threads)
        for threads in options.threads
        for dtype in (torch.float32, torch.bfloat16)
        for window in options.window
        for n in options.n
    ]
    print("\nfrom logits (ms)\n")
    line(["n", "window", "dtype", "threads", "torch chain", "ours", "one read", "chain / ours", "ours / two reads"])
    line(["---"] * 9)
    for configuration in configurations:
        torch.set_num_threads(configuration[3])
        from_logits(*configuration, options.rounds)
    print("\nfrom q and k (ms)\n")
    header = ["kvpress", "torch chain", "ours", "product", "kvpress / ours", "chain / ours", "ours / product"]
    line(["n", "window", "dtype", "threads", *header])
    line(["---"] * 11)
    for configuration in configurations:
        torch.set_num_threads(configuration[3])
        from_qk(*configuration, options.rounds)


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    main()
