"""The prefill selection in float64 and plain loops: slow, obvious, and independent of the package."""

from __future__ import annotations

import math

import numpy as np


def probabilities(logits, scale=1.0):
    """Softmax of ``(window, n)`` logits, query ``w`` seeing positions up to ``n - window + w``."""
    window, n = logits.shape
    result = np.zeros((window, n))
    for w in range(window):
        seen = [float(x) * scale for x in logits[w, : n - window + w + 1]]
        top = max(seen)
        powers = [math.exp(x - top) for x in seen]
        total = math.fsum(powers)
        result[w, : len(powers)] = [p / total for p in powers]
    return result


def window_scores(attn, kv_heads, reduce="mean", from_logits=False, scale=1.0):
    """``(q_heads, window, n)`` to ``(kv_heads, n - window)``."""
    q_heads, window, n = attn.shape
    group = q_heads // kv_heads
    scores = np.zeros((kv_heads, n - window))
    for h in range(kv_heads):
        heads = []
        for q in range(h * group, (h + 1) * group):
            weights = probabilities(attn[q], scale) if from_logits else np.asarray(attn[q], np.float64)
            heads.append([math.fsum(weights[:, i]) / window for i in range(n - window)])
        for i in range(n - window):
            values = [head[i] for head in heads]
            total = math.fsum(values)
            scores[h, i] = {"mean": total / group, "max": max(values), "sum": total}[reduce]
    return scores


def pool(scores, kernel, pooling="max"):
    """Pool a row over the neighbours that exist; whatever is not finite is no neighbour and becomes -inf."""
    n = len(scores)
    half = (kernel - 1) // 2
    pooled = []
    for i in range(n):
        near = [float(scores[j]) for j in range(max(0, i - half), min(n, i + half + 1)) if math.isfinite(scores[j])]
        if not math.isfinite(scores[i]):
            pooled.append(-math.inf)
        elif pooling == "max":
            pooled.append(max(near))
        else:
            pooled.append(math.fsum(near) / len(near))
    return pooled


def top(scores, k):
    """Positions of the k highest, ties to the lower one, ascending; what is not finite is the lowest."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i] if math.isfinite(scores[i]) else math.inf, i))
    return sorted(ranked[:k])


def select(attn, budget, kv_heads, window, kernel=7, pooling="max", **options):
    """Run the chain in float64: one list of positions per KV head. `budget` counts the window."""
    n = attn.shape[-1]
    if budget >= n:
        return [list(range(n))] * kv_heads
    scores = window_scores(attn, kv_heads, **options)
    tail = list(range(n - window, n))
    return [top(pool(row, kernel, pooling), budget - window) + tail for row in scores]
