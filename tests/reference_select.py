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


def window_scores(attn, kv_heads, reduce="mean", from_logits=False, scale=1.0, protect=None):
    """``(q_heads, window, n)`` to ``(kv_heads, n - protect)``; `protect` None is the window.

    A position of the window has the sum over the queries that see it, divided by the whole window.
    """
    q_heads, window, n = attn.shape
    group = q_heads // kv_heads
    scored = n - (window if protect is None else protect)
    scores = np.zeros((kv_heads, scored))
    for h in range(kv_heads):
        heads = []
        for q in range(h * group, (h + 1) * group):
            weights = probabilities(attn[q], scale) if from_logits else np.asarray(attn[q], np.float64)
            seen = [[float(weights[w, i]) for w in range(window) if i <= n - window + w] for i in range(scored)]
            heads.append([math.fsum(values) / window for values in seen])
        for i in range(scored):
            values = [head[i] for head in heads]
            total = math.fsum(values)
            scores[h, i] = {"mean": total / group, "max": max(values), "sum": total}[reduce]
    return scores


def pool(scores, kernel, pooling="max", edge="count"):
    """Pool a row over the neighbours that exist. What is not finite is no neighbour and becomes -inf.

    With `edge` ``"kernel"`` an average also counts what lies beyond the ends, as zeros.
    """
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
            beyond = [0.0] * (max(0, half - i) + max(0, i + half + 1 - n)) if edge == "kernel" else []
            pooled.append(math.fsum(near + beyond) / len(near + beyond))
    return pooled


def top(scores, k):
    """Positions of the k highest, ties to the lower one, ascending. What is not finite is the lowest."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i] if math.isfinite(scores[i]) else math.inf, i))
    return sorted(ranked[:k])


def select(
    attn,
    budget,
    kv_heads,
    window,
    kernel=7,
    pooling="max",
    edge="count",
    protect=None,
    sinks=0,
    weights=None,
    **options,
):
    """Run the chain in float64: one list of positions per KV head. `budget` counts what is always kept."""
    n = attn.shape[-1]
    if budget >= n:
        return [list(range(n))] * kv_heads
    protect = window if protect is None else protect
    scores = window_scores(attn, kv_heads, protect=protect, **options)
    return select_from_scores(scores, [budget] * kv_heads, protect, kernel, pooling, edge, sinks=sinks, weights=weights)


def select_from_scores(
    scores, budgets, protect, kernel=7, pooling="max", edge="count", exact=False, sinks=0, weights=None
):
    """Weigh and pool rows of ``n - protect`` scores and keep the best, the sinks and the last: a list per row.

    One budget a row, which counts what is always kept. n or more keeps everything. A row of `weights` has a number for
    each score, or more. `exact`: averages of finite scores are the definition's, to the bit.
    """
    kept = []
    for index, (row, budget) in enumerate(zip(scores, budgets, strict=True)):
        n = len(row) + protect
        if budget >= n:
            kept.append(list(range(n)))
            continue
        if weights is not None:
            row = [x * w if math.isfinite(x) else x for x, w in zip(row, weights[index], strict=False)]
        bits = exact and pooling == "avg" and all(math.isfinite(x) for x in row)
        pooled = exact_average(row, kernel, edge) if bits else pool(row, kernel, pooling, edge)
        best = [sinks + i for i in top(pooled[sinks:], budget - protect - sinks)]
        kept.append([*range(sinks), *best, *range(n - protect, n)])
    return kept


# ---- To the bit: the definition's own float32 operations, one numpy operation at a time ----

F = np.float32


def exact_exp(t):
    """Return exp of an array of float32 <= 0 as the definition computes it."""
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = t * F(float.fromhex("0x1.715476p+0")) + F(12582912)
        k = shifted - F(12582912)
        r = (t - k * F(float.fromhex("0x1.63p-1"))) - k * F(float.fromhex("-0x1.bd0106p-13"))
        a = [F(float.fromhex(x)) for x in ("0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558f2p-5", "0x1.1239e2p-7")]
        s = r * r
        high = (a[2] + a[3] * r) + F(float.fromhex("0x1.6a2434p-10")) * s
        power = (((a[0] + a[1] * r) + high * s) * s + r) + F(1)
        # k is the power of two: scaling by it is exact.
        scaled = np.ldexp(power, np.nan_to_num(k, nan=0, neginf=0, posinf=0).astype(int)).astype(F)
    return np.where(t >= F(-87.25), scaled, F(0))


def exact_sum(e):
    """Return a row's sum: 64 interleaved float32 sums per 1024 elements, folded in halves. Tiles add in double."""
    total = 0.0
    for start in range(0, len(e), 1024):
        lanes = np.zeros(64, F)
        tile = e[start : start + 1024]
        for i in range(0, len(tile), 64):
            part = tile[i : i + 64]
            lanes[: len(part)] += part
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += float(lanes[0])
    return total


def exact_scores(attn, kv_heads, reduce="mean", from_logits=False, scale=1.0, lowest=False, protect=None):
    """``window_scores`` of float32 to the bit. NaN and infinities only with `lowest`."""
    q_heads, window, n = attn.shape
    past = n - window
    scored = n - (window if protect is None else protect)
    group = q_heads // kv_heads
    means = np.zeros((q_heads, scored), F)
    with np.errstate(over="ignore", invalid="ignore"):
        for q in range(q_heads):
            sums = np.zeros(scored, F)
            for w in range(window):
                seen = min(scored, past + w + 1)
                if not from_logits:
                    row = attn[q, w, :seen]
                    sums[:seen] += np.where(np.isfinite(row), row, F(-np.inf)) if lowest else row
                    continue
                row = attn[q, w, : past + w + 1]
                bad = ~(row * F(scale) < F(np.inf))
                row = np.where(bad, F(-np.inf), row)
                shift = row.max() * F(scale)
                e = np.zeros(len(row), F)
                factor = F(1)
                if shift > -np.inf:
                    e = exact_exp(row * F(scale) - shift)
                    factor = F(1.0 / exact_sum(e))
                e = np.where(bad, F(-np.inf), e)
                sums[:seen] += e[:seen] * factor
            means[q] = sums / F(window)
    scores = np.zeros((kv_heads, scored), F)
    for h in range(kv_heads):
        heads = means[h * group : (h + 1) * group]
        total = heads[0]
        for mean in heads[1:]:
            total = np.maximum(total, mean) if reduce == "max" else total + mean
        absent = np.isneginf(heads).any(axis=0)
        scores[h] = np.where(absent, F(-np.inf), total / F(group) if reduce == "mean" else total)
    return scores


def exact_average(scores, kernel, edge="count"):
    """Average pooling of a row of finite float32 to the bit: blocks of 1, 2, 4, ... neighbours, in double."""
    n = len(scores)
    half = min((kernel - 1) // 2, n - 1)
    width = 2 * half + 1
    padded = np.concatenate([np.zeros(half), np.asarray(scores, np.float64), np.zeros(half)])

    def block(start, length):
        return padded[start] if length == 1 else block(start, length // 2) + block(start + length // 2, length // 2)

    pooled = []
    for i in range(n):
        total, offset, bit = 0.0, 0, 1
        while bit <= width:
            if width & bit:
                total += block(i + offset, bit)
                offset += bit
            bit *= 2
        number = kernel if edge == "kernel" else min(n, i + half + 1) - max(0, i - half)
        pooled.append(F(total / number))
    return np.array(pooled, F)
