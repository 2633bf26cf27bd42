"""Scores that do not come from the window, in float64 and plain loops: slow, obvious, independent of the package.

Written from the formulas of Expected Attention (arXiv 2510.00636), KeyDiff (2504.15364) and KVzip (2505.23416).
"""

from __future__ import annotations

import math


def moments(queries):
    """Mean and covariance of ``n`` vectors of one head, divided by n."""
    n, dim = len(queries), len(queries[0])
    mean = [math.fsum(float(q[i]) for q in queries) / n for i in range(dim)]
    covariance = [
        [math.fsum((float(q[i]) - mean[i]) * (float(q[j]) - mean[j]) for q in queries) / n for j in range(dim)]
        for i in range(dim)
    ]
    return mean, covariance


def rotation(cos, sin, dim):
    """Return the matrix of one position: element i turns with element i + half, the rest stays."""
    rotary = len(cos)
    half = rotary // 2
    matrix = [[float(i == j) for j in range(dim)] for i in range(dim)]
    for i in range(rotary):
        matrix[i][i] = float(cos[i])
        if i < half:
            matrix[i][i + half] = -float(sin[i])
        else:
            matrix[i][i - half] = float(sin[i])
    return matrix


def average_rotation(cos, sin, dim):
    matrices = [rotation(c, s, dim) for c, s in zip(cos, sin, strict=True)]
    return [[math.fsum(m[i][j] for m in matrices) / len(matrices) for j in range(dim)] for i in range(dim)]


def softmax(logits):
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


def dot(a, b):
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def expected_scores(keys, mean, covariance, cos, sin, scale):
    kv_heads, n, dim = keys.shape
    group = len(mean) // kv_heads
    turn = average_rotation(cos, sin, dim)
    answer = []
    for head in range(kv_heads):
        rows = []
        for q in range(head * group, (head + 1) * group):
            mu = [dot(turn[i], mean[q]) for i in range(dim)]
            half = [[dot(turn[i], covariance[q][:, j]) for j in range(dim)] for i in range(dim)]
            sigma = [[dot(half[i], turn[j]) for j in range(dim)] for i in range(dim)]
            logits = []
            for key in keys[head]:
                spread = dot(key, [dot(sigma[i], key) for i in range(dim)])
                logits.append(scale * dot(key, mu) + scale**2 / 2 * spread)
            rows.append(softmax(logits))
        answer.append([math.fsum(row[i] for row in rows) / group for i in range(n)])
    return answer


def keydiff_scores(keys):
    answer = []
    for head in keys:
        lengths = [math.sqrt(dot(key, key)) for key in head]
        units = [[float(x) / length if length else 0.0 for x in key] for key, length in zip(head, lengths, strict=True)]
        anchor = [math.fsum(unit[i] for unit in units) / len(units) for i in range(len(head[0]))]
        size = math.sqrt(dot(anchor, anchor))
        answer.append([-dot(unit, anchor) / size if size else 0.0 for unit in units])
    return answer


def repeat_scores(queries, keys, own, scale):
    """Score of a context row: its largest attention. Query i is row ``columns - Q + i`` of the keys where `own`."""
    kv_heads, columns, _ = keys.shape
    q_heads, count, _ = queries.shape
    group, n = q_heads // kv_heads, columns - own
    answer = []
    for head in range(kv_heads):
        best = [0.0] * n
        for q in range(head * group, (head + 1) * group):
            for i in range(count):
                seen = columns - count + i + 1 if own else n
                weights = softmax([scale * dot(queries[q, i], keys[head, j]) for j in range(seen)])
                best = [max(a, b) for a, b in zip(best, weights[:n], strict=True)]
        answer.append(best)
    return answer
