"""Which positions of one prompt a layer keeps: the window's attention from queries and keys, then the selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .._adakv import adakv_budgets
from .._qk import scores_from_qk
from .._score import window_scores
from .._scores import keydiff_scores, mixed_scores
from .._select import select_from_scores
from .._selection import Selection
from .._torch_path import reduce_axis
from ._second_hop import with_second_hop

if TYPE_CHECKING:
    from ._budgets import Budgets
    from ._prompt_queries import PromptQueries


@dataclass(frozen=True)
class Scoring:
    """How this layer turns products of queries and keys into attention, beyond the softmax."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # one logit per query head that takes part in the softmax and has no position

    @classmethod
    def from_options(cls, options: dict[str, Any], head_dim: int) -> Scoring:
        """Read what a model passes to its attention function."""
        if options.get("position_bias") is not None:
            raise ValueError(
                "this model adds a position bias to its attention; a compressed cache cannot score positions with one"
            )
        scale = options.get("scaling")
        sinks = options.get("s_aux")
        return cls(
            float(head_dim**-0.5 if scale is None else scale),
            options.get("softcap"),
            None if sinks is None else sinks.detach(),
        )

    def of_heads(self, heads: slice) -> Scoring:
        """Return that of some of the query heads."""
        return self if self.sinks is None else Scoring(self.scale, self.softcap, self.sinks[heads])

    @property
    def plain(self) -> bool:
        """Whether attention is the softmax of the scaled products."""
        return self.softcap is None and self.sinks is None

    def logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the products, ``(..., q_heads, queries, n)``, float32, before scale and cap.

        `query` is ``(..., q_heads, queries, head_dim)``, `keys` ``(..., kv_heads, n, head_dim)``. Both become float32
        before they are multiplied, as half precision would make most scores tie.
        """
        kv_heads = keys.shape[-3]
        queries = query.shape[-2]
        grouped = query.float().unflatten(-3, (kv_heads, -1)).flatten(-3, -2)
        products = grouped @ keys.float().transpose(-1, -2)
        return products.unflatten(-2, (-1, queries)).flatten(-4, -3)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of products, which are overwritten: scaled, and capped where the layer does that."""
        scaled = logits.mul_(self.scale)
        return scaled if self.softcap is None else scaled.div_(self.softcap).tanh_().mul_(self.softcap)

    def weights(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Return the attention of the logits, which are overwritten.

        `allowed` broadcasts and says which query may see which position, or is what is added to the logits.
        """
        scaled = self.capped(logits)
        if allowed is not None and allowed.is_floating_point():
            scaled = scaled.add_(allowed)
        elif allowed is not None:
            scaled = scaled.masked_fill_(~allowed, -torch.inf)
        if self.sinks is None:
            return torch.softmax(scaled, dim=-1)
        sinks = self.sinks.float().reshape(-1, 1, 1).expand(*scaled.shape[:-1], 1)
        return torch.softmax(torch.cat([scaled, sinks], dim=-1), dim=-1)[..., :-1]

    def window_weights(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the attention of a prompt's last queries, ``(q_heads, window, n)``."""
        window, n = query.shape[-2], keys.shape[-2]
        allowed = torch.ones(window, n, dtype=torch.bool, device=keys.device).tril_(n - window)
        return self.weights(self.logits(query, keys), allowed)

    def normaliser(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the log of what each of a prompt's last queries divides by, ``(q_heads, window)``, float32."""
        window, n = query.shape[-2], keys.shape[-2]
        later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(1)
        rows = []
        # A KV head at a time stays in the second cache: 5 ms instead of 12 for 9 heads of 32 queries and 4,096 keys.
        for head, queries in enumerate((query.float() * self.scale).unflatten(0, (keys.shape[0], -1))):
            products = queries.flatten(0, 1) @ keys[head].float().mT
            products.view(-1, window, n)[..., n - window :].masked_fill_(later, -torch.inf)
            highest = products.amax(dim=-1)
            rows.append(highest + products.sub_(highest[:, None]).exp_().sum(dim=-1).log())
        return torch.cat(rows).view(-1, window)

    def decode_weights(
        self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, reduce: str
    ) -> torch.Tensor:
        """Return what one new token gave to every slot, ``(batch, kv_heads, slots)``, each group of heads reduced."""
        batch, kv_heads, slots, head_dim = keys.shape
        # One product per KV head, straight: broadcasting a matmul of four dimensions costs as much again.
        grouped = query.float().reshape(batch * kv_heads, -1, head_dim)
        logits = torch.bmm(grouped, keys.float().flatten(0, 1).mT).view(batch, -1, 1, slots)
        weights = self.weights(logits, mask).view(batch, kv_heads, -1, slots)
        if reduce == "mean":  # what mean() does on a processor, in 5 us instead of 8 for 3 heads of 3 and 513 slots
            return weights.sum(dim=2).div_(weights.shape[2])
        return reduce_axis(weights, 2, reduce)


def reduce_groups(weights: torch.Tensor, kv_heads: int, reduce: str) -> torch.Tensor:
    """Return one row per KV head from one per query head: ``(..., q_heads, n)`` to ``(..., kv_heads, n)``."""
    return reduce_axis(weights.unflatten(-2, (kv_heads, -1)), -2, reduce)


@dataclass(frozen=True)
class Prompt:
    """What one sequence's prompt is in one layer, padding left out."""

    keys: torch.Tensor  # (kv_heads, n, head_dim), after rotation
    values: torch.Tensor
    query: torch.Tensor | None  # the last queries after rotation, (q_heads, window or fewer, head_dim). None: not known
    scoring: Scoring | None  # of them
    weights: torch.Tensor | None  # what scores are multiplied by, (kv_heads, n). None: nothing
    scores: torch.Tensor | None = None  # (kv_heads, n), where they come from elsewhere
    before: PromptQueries | None = None  # what is known of its queries before rotation
    queries: torch.Tensor | None = None  # all of them, (q_heads, n, head_dim), where a second hop needs them


def choose(prompt: Prompt, keep: int | npt.NDArray[np.int64], budgets: Budgets, *, seed: bool) -> tuple[Any, str, Any]:
    """Choose the positions of one sequence.

    Parameters
    ----------
    prompt
        The sequence.
    keep
        How many, or how many of each KV head. More than the selection always keeps where it is less than ``n``.
    seed
        Whether the third answer is wanted.

    Returns
    -------
    The positions ``(kv_heads, keep)``, ascending, or a list of vectors where `keep` is an array. What chose them, in
    words. The attention of the window's queries to them, ``(kv_heads, queries, keep)`` in float32, for a policy to
    start from: empty where `seed` is false, a list where `keep` is an array, None where there are no queries.
    """
    keys = prompt.keys
    kv_heads, n = keys.shape[:2]
    rule, second_hop = budgets.first_hop, budgets.selection.second_hop
    attention = window_attention(prompt) if seed else None
    each = isinstance(keep, np.ndarray) or budgets.adakv
    if np.all(keep >= n):
        positions: Any = torch.arange(n, device=keys.device).repeat(kv_heads, 1)
        method = "nothing evicted"
    else:
        scores, weights = scores_of(prompt, rule, attention), prompt.weights
        if budgets.adakv:
            if weights is not None:
                weights = budgets.ranks.gathered(weights)
            together = adakv_budgets(
                budgets.ranks.gathered(scores), int(keep), selection=rule, weights=weights, alpha=budgets.alpha
            )
            keep = budgets.ranks.own(together)
            if weights is not None:
                weights = budgets.ranks.part(weights)
        asked = keep.tolist() if isinstance(keep, np.ndarray) else keep
        if second_hop:
            of_heads = asked if isinstance(asked, list) else [asked] * kv_heads
            positions = with_second_hop(prompt, scores, of_heads, rule, second_hop, weights)
            positions = positions if each else torch.stack(positions)
        else:
            positions = select_from_scores(scores, asked, selection=rule, weights=weights)
        method = "native kernels" if keys.device.type == "cpu" else f"torch on {keys.device.type}"
    if not seed:
        return positions, method, keys.new_empty(0)
    if attention is None:  # no queries
        return positions, method, None
    rows = reduce_groups(attention.transpose(0, 1), kv_heads, rule.reduce).transpose(0, 1)
    if each:
        return positions, method, [rows[head].index_select(-1, positions[head]) for head in range(kv_heads)]
    return positions, method, rows.gather(-1, positions[:, None].expand(-1, rows.shape[1], -1))


def window_attention(prompt: Prompt) -> torch.Tensor | None:
    """Return the attention of the window's queries, ``(q_heads, window, n)``. None where they are not known."""
    if prompt.query is None or prompt.scoring is None:
        return None
    return prompt.scoring.window_weights(prompt.query, prompt.keys)


def scores_of(prompt: Prompt, rule: Selection, attention: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scores of the positions that are not protected, ``(kv_heads, n - protected)``.

    `attention` is that of the window, where the caller has it.
    """
    kv_heads, n = prompt.keys.shape[:2]
    scored = n - rule.protected
    if prompt.scores is not None:
        return prompt.scores[:, :scored].contiguous()
    if rule.score == "keydiff":
        return keydiff_scores(prompt.keys)[:, :scored].contiguous()
    if rule.score == "repeat":  # a cache that was filled, and then reset
        raise ValueError("selection: score = 'repeat': no prefill makes it; BudgetedCache.filled takes such scores")
    assert prompt.query is not None
    assert prompt.scoring is not None
    expected = None
    if rule.score in ("expected", "mixed"):
        assert prompt.before is not None
        expected = prompt.before.expected(prompt.keys, prompt.scoring.scale)[:, :scored].contiguous()
        if rule.score == "expected":
            return expected
    if attention is None and not prompt.scoring.plain:
        attention = window_attention(prompt)
    if attention is not None:
        window = window_scores(attention, num_kv_heads=kv_heads, selection=rule)
    else:
        window = scores_from_qk(prompt.query, prompt.keys, scale=prompt.scoring.scale, selection=rule)
    return window if expected is None else mixed_scores(window, expected)
