"""Positions that the kept ones attended to themselves: the second step of a chain of facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._choose import select_top
from .._select import select_from_scores
from .._selection import Selection

if TYPE_CHECKING:
    from ._selection import Prompt

#: Elements of a block of attention: 16 MiB of float32.
_BLOCK = 1 << 22


def with_second_hop(
    prompt: Prompt, scores: torch.Tensor, keep: list[int], rule: Selection, share: float, weights: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return the positions of each KV head, of which a share are those that the others attended to.

    Parameters
    ----------
    prompt
        The sequence, with all of its queries.
    scores
        ``(kv_heads, n - protected)``, 0 and more.
    keep
        Positions of each head.
    rule
        What chooses by the scores, without a second hop.
    share
        Of the positions of a head that are not always kept, above 0 and below 1.
    weights
        What scores are multiplied by. None: nothing.

    Returns
    -------
    list of torch.Tensor
        For each head, ascending.
    """
    kv_heads, scored = scores.shape
    n = prompt.keys.shape[1]
    hops = [int(share * (min(count, n) - rule.always_kept)) if count < n else 0 for count in keep]
    first = select_from_scores(
        scores, [count - more for count, more in zip(keep, hops, strict=True)], selection=rule, weights=weights
    )
    chosen = []
    for head in range(kv_heads):
        kept: torch.Tensor = first[head]
        if hops[head]:
            reached = _reached(prompt, head, kept[kept < scored], scores[head], scored)
            reached[kept[kept < scored]] = -1.0
            found = select_top(reached[None], hops[head])[0]
            kept = torch.cat([kept, found]).sort().values
        chosen.append(kept)
    return chosen


def _reached(prompt: Prompt, head: int, kept: torch.Tensor, scores: torch.Tensor, scored: int) -> torch.Tensor:
    """Return what the queries of the kept positions of a head give to each position, weighted by their scores."""
    assert prompt.queries is not None
    assert prompt.scoring is not None
    keys = prompt.keys[head : head + 1]
    group = prompt.queries.shape[0] // prompt.keys.shape[0]
    queries = prompt.queries[head * group : (head + 1) * group]
    n = keys.shape[1]
    total = torch.zeros(scored, dtype=torch.float32, device=keys.device)
    step = max(1, _BLOCK // (group * n))
    at = torch.arange(n, device=keys.device)
    for start in range(0, len(kept), step):
        rows = kept[start : start + step]
        allowed = at <= rows[:, None]
        scoring = prompt.scoring.of_heads(slice(head * group, (head + 1) * group))
        attention = scoring.weights(scoring.logits(queries[:, rows], keys), allowed)
        total += (attention.mean(dim=0)[:, :scored] * scores[rows, None]).sum(dim=0)
    return total
