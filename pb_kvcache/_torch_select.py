"""The prefill selection in torch: for tensors on a device that the native kernels do not reach.

Same arguments, same rules and, up to rounding, the same scores as in :mod:`pb_kvcache._select`, which calls it by the
tensor's device; everything stays on that device. Scores are float32 whatever the input is. Ties go to the lower
position: ``torch.topk`` leaves them open, so a stable sort decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from ._checks import integer
from ._options import NAN, POOLING, REDUCE, at_least, choice, head_budgets, kernel_size, logit_scale
from ._select import _columns

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def window_scores(
    attn: torch.Tensor,
    *,
    num_kv_heads: int,
    reduce: str = "mean",
    from_logits: bool = False,
    scale: float = 1.0,
    nan: str = "raise",
) -> torch.Tensor:
    """Return what the window's queries gave to each position before the window.

    As :func:`pb_kvcache.window_scores`: ``(..., q_heads, window, n)`` to ``(..., num_kv_heads, n - window)``.
    """
    kv_heads = _check_attn(attn, num_kv_heads)
    choice("reduce", reduce, REDUCE)
    choice("nan", nan, NAN)
    window, n = attn.shape[-2:]
    past = n - window
    grouped = attn.detach().float().unflatten(-3, (kv_heads, -1))  # (..., kv_heads, group, window, n)
    if from_logits:
        weights, left_out = _softmax(grouped * logit_scale(scale), nan)
    else:
        weights = grouped[..., :past]
        wrong = weights < 0 if nan == "lowest" else ~(torch.isfinite(weights) & (weights >= 0))
        _refuse(attn, wrong.flatten(-4, -3), "every probability must be finite and >= 0")
        left_out = ~torch.isfinite(weights).flatten(-3, -2).all(dim=-2)
        weights = weights.masked_fill(left_out[..., None, None, :], 0.0)
    scores = weights[..., :past].mean(dim=-2)
    if reduce == "mean":
        scores = scores.mean(dim=-2)
    elif reduce == "sum":
        scores = scores.sum(dim=-2)
    else:
        scores = scores.amax(dim=-2)
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("attn: a sum of probabilities is too large for float32")
    return scores.masked_fill(left_out[..., :past], -torch.inf)


def _softmax(scaled: torch.Tensor, nan: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal softmax of ``(..., group, window, n)``, and which columns ``(..., n)`` have no number in it."""
    window, n = scaled.shape[-2:]
    future = torch.ones(window, n, dtype=torch.bool, device=scaled.device).triu_(1 + n - window)
    scaled = scaled.masked_fill(future, -torch.inf)
    bad = ~(scaled < torch.inf)  # NaN or plus infinity
    if nan == "raise":
        _refuse(scaled, bad, "no logit may be NaN or +inf, also after scaling")
    left_out = bad.flatten(-3, -2).any(dim=-2)
    scaled = scaled.masked_fill(bad, -torch.inf)
    blind = (scaled == -torch.inf).all(dim=-1, keepdim=True)
    if nan == "raise" and bool(blind.any()):
        raise ValueError("attn: every query must see a position, all logits of one are -inf")
    return torch.softmax(scaled, dim=-1).masked_fill(blind, 0.0), left_out


def _refuse(values: torch.Tensor, wrong: torch.Tensor, rule: str) -> None:
    """Raise for the first wrong value."""
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"attn[{', '.join(map(str, index))}] = {values[index].item()}: {rule}")


def pool_scores(scores: torch.Tensor, kernel: int = 7, pooling: str = "max", *, nan: str = "raise") -> torch.Tensor:
    """Return each score pooled with its `kernel` neighbours, as :func:`pb_kvcache.pool_scores`."""
    kernel = kernel_size(kernel)
    choice("pooling", pooling, POOLING)
    finite = _check_scores(scores, nan)
    n = scores.shape[-1]
    if scores.numel() == 0:
        return scores.clone()
    kernel = min(kernel, 2 * n - 1)  # no further than any neighbour
    side = kernel // 2
    rows = scores.detach().reshape(-1, 1, n)
    is_score = finite.reshape(-1, 1, n)
    if pooling == "max":
        filled = F.pad(rows.masked_fill(~is_score, -torch.inf), (side, side), value=-torch.inf)
        pooled = F.max_pool1d(filled, kernel, stride=1)
    else:  # sums in double, divided by the neighbours that are scores
        ones = torch.ones(1, 1, kernel, dtype=torch.float64, device=rows.device)
        sums = F.conv1d(rows.masked_fill(~is_score, 0.0).double(), ones, padding=side)
        counts = F.conv1d(is_score.double(), ones, padding=side)
        pooled = (sums / counts).float()
    return pooled.masked_fill(~is_score, -torch.inf).reshape(scores.shape)


def select_top(scores: torch.Tensor, k: int, *, nan: str = "raise") -> torch.Tensor:
    """Return the positions of the `k` highest scores of each row, ascending, as :func:`pb_kvcache.select_top`."""
    k = at_least("k", k, 0)
    finite = _check_scores(scores, nan)
    n = scores.shape[-1]
    if k >= n:
        return torch.arange(n, device=scores.device).expand(*scores.shape[:-1], n).clone()
    ranked = scores.detach().masked_fill(~finite, -torch.inf)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.sort(order, dim=-1).values


def select(
    attn: torch.Tensor,
    budget: int | Sequence[int],
    *,
    num_kv_heads: int,
    window: int,
    kernel: int = 7,
    pooling: str = "max",
    reduce: str = "mean",
    from_logits: bool = False,
    scale: float = 1.0,
    window_in_budget: bool = True,
    valid: Any = None,
    nan: str = "raise",
) -> Any:
    """Return the positions of a prompt that each KV head keeps, as :func:`pb_kvcache.select`, int64."""
    kv_heads = _check_attn(attn, num_kv_heads)
    if integer("window", window) != attn.shape[-2]:
        raise ValueError(f"window = {window}: must be the number of queries in attn, shape {tuple(attn.shape)}")
    for name, value, choices in (("pooling", pooling, POOLING), ("reduce", reduce, REDUCE), ("nan", nan, NAN)):
        choice(name, value, choices)
    kernel_size(kernel)
    if from_logits:
        logit_scale(scale)
    budgets, per_head = head_budgets(budget, kv_heads, window, window_in_budget)
    batched = attn.dim() == 4
    sequences = attn if batched else attn[None]
    n = attn.shape[-1]
    shape: Any = SimpleNamespace(batch=len(sequences), n=n, batched=batched)
    columns = _columns(valid, shape)
    options: dict[str, Any] = {
        "num_kv_heads": kv_heads,
        "reduce": reduce,
        "from_logits": from_logits,
        "scale": scale,
        "nan": nan,
    }

    results: list[Any] = []
    for sequence, where in zip(sequences, columns, strict=True):
        tokens = None if where is None else torch.as_tensor(where, device=attn.device)
        part = sequence if tokens is None else sequence[..., tokens]
        length = part.shape[-1]
        pooled = None
        if min(budgets) < length:
            pooled = pool_scores(window_scores(part, **options), kernel, pooling, nan=nan)
        heads = []
        for head, kept in enumerate(budgets):
            if pooled is None or kept >= length:
                row = torch.arange(length, device=attn.device)
            else:
                tail = torch.arange(length - window, length, device=attn.device)
                row = torch.cat([select_top(pooled[head], kept - window, nan="lowest"), tail])
            heads.append(row if tokens is None else tokens[row])
        results.append(heads if per_head else torch.stack(heads))
    if not batched:
        return results[0]
    if not per_head and len({rows.shape for rows in results}) == 1:
        return torch.stack(results)
    return results


def _check_attn(attn: torch.Tensor, num_kv_heads: int) -> int:
    if not isinstance(attn, torch.Tensor) or attn.dtype not in _DTYPES:
        what = attn.dtype if isinstance(attn, torch.Tensor) else type(attn).__name__
        raise TypeError(f"attn: must be a torch tensor of float32, float16 or bfloat16, not {what}")
    if attn.dim() not in (3, 4):
        raise ValueError(
            f"attn: must have shape (q_heads, window, n) or (batch, q_heads, window, n), not {tuple(attn.shape)}"
        )
    q_heads, window, n = attn.shape[-3:]
    kv_heads = integer("num_kv_heads", num_kv_heads)
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"num_kv_heads = {kv_heads}: must divide the {q_heads} query heads of attn")
    if not 0 < window < n:
        raise ValueError(f"window = {window}: must be greater than 0 and smaller than n = {n}")
    return kv_heads


def _check_scores(scores: torch.Tensor, nan: str) -> torch.Tensor:
    """Return which scores are finite; refuse the others where `nan` says so."""
    if not isinstance(scores, torch.Tensor) or scores.dtype != torch.float32:
        what = scores.dtype if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TypeError(f"scores: must be a torch tensor of float32, not {what}")
    if scores.dim() == 0:
        raise ValueError("scores: must have at least 1 dimension, (..., n)")
    lowest = choice("nan", nan, NAN) == NAN["lowest"]
    finite = torch.isfinite(scores)
    if not lowest and not bool(finite.all()):
        index = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(
            f"scores[{', '.join(map(str, index))}] = {scores[index].item()}: every score must be finite; "
            'nan="lowest" ranks others below everything'
        )
    return finite
