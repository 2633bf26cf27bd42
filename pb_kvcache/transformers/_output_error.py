"""What a layer's output loses where heads keep the best of a prompt's positions alone: for every budget in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .._select import select_from_scores
from .._selection import Selection
from ._selection import Prompt, Scoring, scores_of


def budget_grid(least: int, n: int) -> list[int]:
    """Return budgets to measure at, from `least` to `n`, each a third above the last one."""
    grid = [min(least, n)]
    while grid[-1] < n:
        following = max(grid[-1] + 1, round(grid[-1] * 4 / 3))
        grid.append(n if following * 8 >= n * 7 else following)  # no step that is much smaller than the others
    return grid


def rank_order(prompt: Prompt, rule: Selection, grid: Sequence[int]) -> torch.Tensor:
    """Return a prompt's positions so that the first ``grid[i]`` are those which the rule keeps at that budget.

    Parameters
    ----------
    prompt
        The prompt. What its scores are multiplied by is `weights` of it.
    rule
        The rule.
    grid
        Budgets, ascending, each above what the rule always keeps. The last one is the prompt's length.

    Returns
    -------
    torch.Tensor
        ``(kv_heads, n)`` int64.
    """
    kv_heads, n = prompt.keys.shape[:2]
    smaller = grid[:-1]
    if not smaller:
        return torch.arange(n, device=prompt.keys.device).expand(kv_heads, n)
    scores = scores_of(prompt, rule)
    # All budgets in one call, as if each had heads of its own.
    kept = select_from_scores(
        scores.repeat(len(smaller), 1),
        [budget for budget in smaller for _ in range(kv_heads)],
        selection=rule,
        weights=None if prompt.weights is None else prompt.weights.repeat(len(smaller), 1),
    )
    heads = torch.arange(kv_heads, device=prompt.keys.device).repeat(len(smaller))
    lengths = torch.tensor([len(positions) for positions in kept], device=heads.device)
    places = torch.cat([positions.long() for positions in kept]) + (heads * n).repeat_interleave(lengths)
    # The kept ones of a budget are among those of the next: the more budgets keep a position, the better it is.
    times = torch.bincount(places, minlength=kv_heads * n).view(kv_heads, n)
    return times.argsort(dim=1, stable=True, descending=True)


def output_differences(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    prompt: tuple[torch.Tensor, torch.Tensor],
    order: torch.Tensor | None,
    grid: Sequence[int],
    scoring: Scoring,
) -> torch.Tensor:
    """Return how the attention's output changes where the first positions of an order are all that is kept.

    Parameters
    ----------
    query
        Of the tokens that are judged, after rotation, ``(q_heads, judged, head_dim)``. They follow the prompt.
    own
        Their keys and values, ``(kv_heads, judged, head_dim)`` each. Every token sees those up to its own.
    prompt
        The prompt's keys and values, ``(kv_heads, n, head_dim)`` each.
    order
        ``(kv_heads, n)``: the prompt's positions in the order in which they are kept. None: their own.
    grid
        How many of them are kept, ascending. The last one is ``n``.
    scoring
        How the layer makes attention of products.

    Returns
    -------
    torch.Tensor
        ``(points, q_heads, judged, value_dim)`` float32. The last point's are 0.
    """
    kv_heads, _, value_dim = prompt[1].shape
    judged = query.shape[1]
    keys, values = prompt
    if order is not None:
        rows = order[:, :, None]
        keys = keys.gather(1, rows.expand(-1, -1, keys.shape[-1]))
        values = values.gather(1, rows.expand(-1, -1, value_dim))
    values = values.float()
    logits = scoring.capped(scoring.logits(query, keys)).unflatten(0, (kv_heads, -1))  # (kv_heads, group, judged, n)
    later = torch.ones(judged, judged, dtype=torch.bool, device=query.device).triu_(1)
    own_logits = scoring.capped(scoring.logits(query, own[0])).masked_fill_(later, -torch.inf)
    own_logits = own_logits.unflatten(0, (kv_heads, -1))
    highest = torch.maximum(logits.amax(dim=-1), own_logits.amax(dim=-1))[..., None]
    weights, own_weights = logits.sub_(highest).exp_(), own_logits.sub_(highest).exp_()
    total = own_weights.sum(dim=-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + (scoring.sinks.float().view(kv_heads, -1, 1, 1) - highest).exp()
    output = (own_weights.flatten(1, 2) @ own[1].float()).view(kv_heads, -1, judged, value_dim)
    at = []
    for first, end in itertools.pairwise([0, *grid]):
        part = weights[..., first:end]
        total = total + part.sum(dim=-1, keepdim=True)
        output = output + (part.flatten(1, 2) @ values[:, first:end]).view_as(output)
        at.append((output / total).flatten(0, 1))
    outputs = torch.stack(at)
    return outputs - outputs[-1:]


def output_errors(differences: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return the squared norm behind the output projection of what heads' outputs differ by.

    Parameters
    ----------
    differences
        ``(points, q_heads, judged, value_dim)``.
    products
        Of the output projection, ``(parts, width, width)``. Each part has as many query heads, which are added up
        before the norm.

    Returns
    -------
    torch.Tensor
        ``(parts, points, judged)`` float32.
    """
    parts = products.shape[0]
    rows = differences.unflatten(1, (parts, -1)).permute(1, 0, 3, 2, 4).flatten(3)  # (parts, points, judged, width)
    flat = rows.flatten(1, 2)
    return ((flat @ products.to(flat.device)) * flat).sum(dim=-1).clamp_(min=0).view(rows.shape[:3])
