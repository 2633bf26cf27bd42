"""Merging in plain loops and Python floats, one KV head: slow, obvious and without code of the package."""

from __future__ import annotations

import math

import numpy as np


def dot(a, b):
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def logits(queries, keys, scale):
    return [[scale * dot(q, k) for k in keys] for q in queries]


def log_sum(row):
    top = max(row)
    return top + math.log(math.fsum(math.exp(x - top) for x in row))


def shares(queries, keys, lse, scale):
    return [[math.exp(x - z) for x in row] for row, z in zip(logits(queries, keys, scale), lse, strict=True)]


def mean_of(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def cosine(a, b):
    length = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return dot(a, b) / length if length else 0.0


def nearest(keys, values, kept, queries, protect, lse=None, scale=None):
    """Return merged keys, values and biases of one head, steps 1 to 3."""
    scale = len(keys[0]) ** -0.5 if scale is None else scale
    lse = [log_sum(row) for row in logits(queries, keys, scale)] if lse is None else lse
    a = mean_of(shares(queries, keys, lse, scale))
    free = max(0, len(kept) - protect)
    new_keys, new_values, bias = [list(keys[i]) for i in kept], [list(values[i]) for i in kept], [0.0] * len(kept)
    taken = {i: [] for i in range(free)}
    for j in range(len(keys)):
        if j not in kept and free:
            near = [cosine(keys[j], keys[kept[i]]) for i in range(free)]
            taken[near.index(max(near))].append(j)
    for i, others in taken.items():
        if math.fsum(a[j] for j in others) < 1e-30:
            continue
        group = [kept[i], *others]
        total = math.fsum(a[j] for j in group)
        new_keys[i] = [math.fsum(a[j] * keys[j][d] for j in group) / total for d in range(len(keys[0]))]
        new_values[i] = [math.fsum(a[j] * values[j][d] for j in group) / total for d in range(len(keys[0]))]
        row = [scale * dot(q, new_keys[i]) - z for q, z in zip(queries, lse, strict=True)]
        bias[i] = math.log(total) - (log_sum(row) - math.log(len(row)))
    return new_keys, new_values, bias


def fitted(keys, values, kept, queries, protect, lse=None, scale=None):
    """Return merged keys, values and biases of one head, steps 1 to 4."""
    scale = len(keys[0]) ** -0.5 if scale is None else scale
    lse = [log_sum(row) for row in logits(queries, keys, scale)] if lse is None else lse
    new_keys, new_values, bias = nearest(keys, values, kept, queries, protect, lse, scale)
    free = max(0, len(kept) - protect)
    if free == 0 or len(kept) == len(keys):
        return new_keys, new_values, bias
    prefix = [j for j in range(len(keys)) if j not in kept[free:]]
    truth = shares(queries, [keys[j] for j in prefix], lse, scale)
    target = [math.fsum(row) for row in truth]
    wanted = np.array(truth) @ np.array([values[j] for j in prefix], np.float64)
    x0 = shares(queries, new_keys[:free], lse, scale)
    held = [min(max(math.exp(min(b, 700)), 1e-6), 1e6) for b in bias[:free]]
    for _ in range(60):
        fit = [dot(row, held) for row in x0]
        for_row = [dot(target, column) / max(dot(fit, column), 1e-20) for column in zip(*x0, strict=True)]
        held = [w * f for w, f in zip(held, for_row, strict=True)]
    held = [min(max(w, 1e-6), 1e6) for w in held]
    x = np.array(x0) * np.array(held)
    v = np.array(new_values[:free], np.float64)
    gram = x.T @ x
    ridge = 0.01 * float(np.mean(np.diag(gram)))
    if ridge > 0:
        v = v + np.linalg.inv(gram + ridge * np.eye(free)) @ x.T @ (wanted - x @ v)
    return new_keys, [*v.tolist(), *new_values[free:]], [*map(math.log, held), *bias[free:]]


def clusters(points, number):
    """Return the points of every cluster: k-means from points at even steps, none empty, in order of first points."""
    centres = [list(points[i * (len(points) - 1) // max(1, number - 1)]) for i in range(number)]
    for _ in range(8):
        labels = []
        for point in points:
            apart = [dot(c, c) - 2 * dot(point, c) for c in centres]
            labels.append(apart.index(min(apart)))
        for c in range(number):
            members = [points[j] for j, label in enumerate(labels) if label == c]
            if members:
                centres[c] = mean_of(members)
    far = [
        math.fsum((x - y) ** 2 for x, y in zip(p, centres[c], strict=True)) for p, c in zip(points, labels, strict=True)
    ]
    for c in range(number):
        if c not in labels:
            shared = [j for j in range(len(points)) if labels.count(labels[j]) > 1]
            one = max(shared, key=lambda j: (far[j], -j))
            labels[one], far[one] = c, 0.0
    groups = [[j for j, label in enumerate(labels) if label == c] for c in range(number)]
    return sorted(groups)


def macro(keys, values, kept, queries, protect, rows, lse=None, scale=None, rotary=None):
    """Return merged keys, values and biases of one head. `rotary` turns one key by a position."""
    scale = len(keys[0]) ** -0.5 if scale is None else scale
    lse = [log_sum(row) for row in logits(queries, keys, scale)] if lse is None else lse
    a = mean_of(shares(queries, keys, lse, scale))
    free = max(0, len(kept) - protect)
    new_keys, new_values, bias = [list(keys[i]) for i in kept], [list(values[i]) for i in kept], [0.0] * len(kept)
    if free == 0 or len(kept) == len(keys):
        return new_keys, new_values, bias
    freed = sorted(sorted(range(free), key=lambda i: (a[kept[i]], -i))[: min(rows, free)])
    stays = [kept[i] for i in range(len(kept)) if i not in freed]
    loose = [j for j in range(len(keys)) if j not in stays]
    points = [rotary(keys[j], -j) if rotary else list(keys[j]) for j in loose]
    square = math.fsum(dot(q, q) for q in queries) / len(queries)
    for slot, group in zip(freed, clusters(points, len(freed)), strict=True):
        centre = mean_of([points[j] for j in group])
        apart = math.fsum((x - y) ** 2 for j in group for x, y in zip(points[j], centre, strict=True))
        variance = apart / len(group) / len(centre)
        middle = sum(loose[j] for j in group) / len(group)
        new_keys[slot] = rotary(centre, middle) if rotary else centre
        new_values[slot] = mean_of([values[loose[j]] for j in group])
        bias[slot] = math.log(len(group)) + scale * scale * square * variance / 2
    return new_keys, new_values, bias
