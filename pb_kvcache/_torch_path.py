"""The prefill selection in torch: for tensors on a device whose memory the native kernels do not read.

The arguments and rules are those of the native functions, which call these for such tensors, and the scores are the
same up to rounding. Everything stays on the tensor's device. Scores are float32 whatever the input is. Ties go to the
lower position. ``torch.topk`` leaves them open, so a stable sort decides.

torch is not imported here. :func:`pb_kvcache._tensor.torch_module` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._options import NAN, at_least, choice, head_budgets, logit_scale, not_finite, pooling_options
from ._position_weights import bad_weight, check_weights_shape, product_too_large, require_weights
from ._selection import DEFAULT, Selection, require_window_score, rule_for, rule_of_scores
from ._shapes import AttentionShape, by_head, prompt_length
from ._tensor import torch_module

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import PerHead


def window_scores(
    attn: Tensor,
    *,
    num_kv_heads: int,
    selection: Selection | str | None = None,
    reduce: str = DEFAULT.reduce,
    protect: int | None = None,
    from_logits: bool = False,
    scale: float = 1.0,
    nan: str = "raise",
) -> Tensor:
    """Return what the window's queries gave to each position before the protected ones.

    As :func:`pb_kvcache.window_scores`: ``(..., q_heads, window, n)`` to ``(..., num_kv_heads, n - protect)``.
    """
    torch = torch_module()
    shape = _attention_shape(attn, num_kv_heads)
    rule = rule_for(selection, shape.window, shape.n, reduce=reduce, protect=protect)
    choice("nan", nan, NAN)
    scored = shape.n - rule.protected
    grouped = attn.detach().float().unflatten(-3, (shape.kv_heads, -1))  # (..., kv_heads, group, window, n)
    if from_logits:
        weights, left_out = _softmax(grouped * logit_scale(scale), _future(attn, shape), nan)
    else:
        weights = grouped[..., :scored]
        if rule.protected < shape.window:  # a position of the window is not seen by the queries before it
            weights = weights.masked_fill(_future(attn, shape)[:, :scored], 0.0)
        wrong = weights < 0 if nan == "lowest" else ~(torch.isfinite(weights) & (weights >= 0))
        _refuse(attn, wrong.flatten(-4, -3), "every probability must be finite and >= 0")
        left_out = ~torch.isfinite(weights).flatten(-3, -2).all(dim=-2)
        weights = weights.masked_fill(left_out[..., None, None, :], 0.0)
    scores = reduce_axis(weights[..., :scored].mean(dim=-2), -2, rule.reduce)
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("attn: a sum of probabilities is too large for float32")
    return scores.masked_fill(left_out[..., :scored], -torch.inf)


def reduce_axis(values: Tensor, dim: int, reduce: str) -> Tensor:
    """Return the values of the query heads of a group, which lie along `dim`, as one."""
    if reduce == "mean":
        return values.mean(dim=dim)
    if reduce == "sum":
        return values.sum(dim=dim)
    return values.amax(dim=dim)


def _future(attn: Tensor, shape: AttentionShape) -> Tensor:
    """Return which positions each query of the window does not see, ``(window, n)``: those that follow it."""
    ones = torch_module().ones(shape.window, shape.n, dtype=torch_module().bool, device=attn.device)
    return ones.triu_(1 + shape.n - shape.window)


def _softmax(scaled: Tensor, future: Tensor, nan: str) -> tuple[Tensor, Tensor]:
    """Return the causal softmax of ``(..., group, window, n)``, and which columns ``(..., n)`` have no number in it."""
    torch = torch_module()
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


def _refuse(values: Tensor, wrong: Tensor, rule: str) -> None:
    """Raise for the first wrong value."""
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"attn[{', '.join(map(str, index))}] = {values[index].item()}: {rule}")


def pool_scores(
    scores: Tensor, kernel: int = 7, pooling: str = "max", *, edge: str = "count", nan: str = "raise"
) -> Tensor:
    """Return each score pooled with its `kernel` neighbours, as :func:`pb_kvcache.pool_scores`."""
    torch = torch_module()
    width, _, _ = pooling_options(kernel, pooling, edge)
    finite = _finite(scores, nan)
    n = scores.shape[-1]
    if scores.numel() == 0:
        return scores.clone()
    kernel = min(width, 2 * n - 1)  # no further than any neighbour
    side = kernel // 2
    rows = scores.detach().reshape(-1, 1, n)
    is_score = finite.reshape(-1, 1, n)
    functional = torch.nn.functional
    if pooling == "max":
        filled = functional.pad(rows.masked_fill(~is_score, -torch.inf), (side, side), value=-torch.inf)
        pooled = functional.max_pool1d(filled, kernel, stride=1)
    else:  # sums in double, divided by the neighbours that are scores, or also by those beyond the ends
        ones = torch.ones(1, 1, kernel, dtype=torch.float64, device=rows.device)
        sums = functional.conv1d(rows.masked_fill(~is_score, 0.0).double(), ones, padding=side)
        counts = functional.conv1d(is_score.double(), ones, padding=side)
        if edge == "kernel":
            counts += width - functional.conv1d(torch.ones_like(rows[:1], dtype=torch.float64), ones, padding=side)
        pooled = (sums / counts).float()
    return pooled.masked_fill(~is_score, -torch.inf).reshape(scores.shape)


def select_top(scores: Tensor, k: int, *, nan: str = "raise") -> Tensor:
    """Return the positions of the `k` highest scores of each row, ascending, as :func:`pb_kvcache.select_top`."""
    torch = torch_module()
    k = at_least("k", k, 0)
    finite = _finite(scores, nan)
    n = scores.shape[-1]
    if k >= n:
        return torch.arange(n, device=scores.device).expand(*scores.shape[:-1], n).clone()
    ranked = scores.detach().masked_fill(~finite, -torch.inf)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.sort(order, dim=-1).values


def select_from_scores(
    scores: Tensor,
    budget: int | PerHead,
    protect: int | None = None,
    *,
    selection: Selection | str | None = None,
    kernel: int = DEFAULT.kernel,
    pooling: str = DEFAULT.pooling,
    edge: str = DEFAULT.edge,
    sinks: int = DEFAULT.sinks,
    weights: Any = None,
    window_in_budget: bool = True,
    nan: str = "raise",
) -> Any:
    """Return the positions that each KV head keeps, from scores, as :func:`pb_kvcache.select_from_scores`, int64."""
    torch = torch_module()
    _check_float32(scores)
    rule = rule_of_scores(selection, protect=protect, kernel=kernel, pooling=pooling, edge=edge, sinks=sinks)
    n = prompt_length(scores.shape, rule.protected)
    require_weights(rule.value_weight, weights)
    kv_heads, scored = scores.shape[-2:]
    first = rule.sinks
    budgets, per_head = head_budgets(budget, kv_heads, rule.protected, first, window_in_budget)
    # The scores and weights of a head that keeps everything are not looked at.
    limited = torch.tensor([kept < n for kept in budgets], device=scores.device)[:, None]
    _finite(scores, nan, limited)
    pooled = scores
    if weights is not None:
        pooled = weighted_scores(scores, weights, n, read=limited)
    if min(budgets) < n:
        pooled = pool_scores(pooled, rule.kernel, str(rule.pooling), edge=rule.edge, nan="lowest")
    head = torch.arange(first, device=scores.device)
    tail = torch.arange(scored, n, device=scores.device)

    def best_and_always(rows: Tensor, kept: int) -> Tensor:
        if kept >= n:
            return torch.arange(n, device=scores.device).expand(*rows.shape[:-1], n)
        best = select_top(rows[..., first:], kept - first - len(tail), nan="lowest") + first
        around = [always.expand(*best.shape[:-1], len(always)) for always in (head, tail)]
        return torch.cat([around[0], best, around[1]], dim=-1)

    if not per_head:
        return best_and_always(pooled, budgets[0])
    counts = [min(kept, n) for kept in budgets]
    positions = tail.new_zeros(*scores.shape[:-1], max(counts))
    for row, count in enumerate(counts):
        positions[..., row, :count] = best_and_always(pooled[..., row, :], count)
    return by_head(positions, counts)


def weighted_scores(scores: Tensor, weights: Any, n: int, read: Tensor | bool = True) -> Tensor:
    """Return scores times the weights of their positions. What is not finite stays so, as -inf.

    Parameters
    ----------
    scores
        ``(..., kv_heads, scored)`` float32.
    weights
        ``(..., kv_heads, scored)`` or ``(..., kv_heads, n)`` float32, on the same device.
    read
        Broadcasts to the scores and says of which of them a bad weight or product is refused.

    Raises
    ------
    TypeError, ValueError
        For other weights, one that is negative or not finite, or a product that is too large.
    """
    torch = torch_module()
    scored = scores.shape[-1]
    _check_weights(weights, scores.device, scores.shape[:-1], scored, n)
    rows = weights.detach()[..., :scored]
    wrong = ~(torch.isfinite(rows) & (rows >= 0)) & read
    if bool(wrong.any()):
        raise bad_weight(rows, wrong.nonzero()[0].tolist())
    finite = torch.isfinite(scores)
    products = (scores.detach() * rows).masked_fill(~finite, -torch.inf)
    wrong = finite & ~torch.isfinite(products) & read
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise product_too_large(place, scores[place], rows[place])
    return products


def select(
    attn: Tensor,
    budget: int | PerHead,
    *,
    num_kv_heads: int,
    window: int | None = None,
    selection: Selection | str | None = None,
    kernel: int = DEFAULT.kernel,
    pooling: str = DEFAULT.pooling,
    edge: str = DEFAULT.edge,
    reduce: str = DEFAULT.reduce,
    protect: int | None = None,
    sinks: int = DEFAULT.sinks,
    weights: Any = None,
    from_logits: bool = False,
    scale: float = 1.0,
    window_in_budget: bool = True,
    valid: Any = None,
    nan: str = "raise",
) -> Any:
    """Return the positions of a prompt that each KV head keeps, as :func:`pb_kvcache.select`, int64."""
    torch = torch_module()
    shape = _attention_shape(attn, num_kv_heads, window)
    rule = rule_for(
        selection,
        shape.window,
        shape.n,
        window=window,
        kernel=kernel,
        pooling=pooling,
        edge=edge,
        reduce=reduce,
        protect=protect,
        sinks=sinks,
    )
    require_window_score(rule)
    require_weights(rule.value_weight, weights)
    choice("nan", nan, NAN)
    if from_logits:
        logit_scale(scale)
    budgets, per_head = head_budgets(budget, shape.kv_heads, rule.protected, rule.sinks, window_in_budget)
    if weights is not None:
        heads = (shape.batch, shape.kv_heads) if shape.batched else (shape.kv_heads,)
        _check_weights(weights, attn.device, heads, shape.n - rule.protected, shape.n)
    counted = budgets if per_head else budgets[0]

    def kept(part: Tensor, rows: Tensor | None) -> Any:
        """Choose among one sequence's tokens, which are perhaps fewer than the window."""
        length = part.shape[-1]
        if min(budgets) >= length:
            everything = torch.arange(length, device=attn.device).expand(shape.kv_heads, -1)
            return list(everything) if per_head else everything
        own = part[:, -min(shape.window, length) :]  # a sequence shorter than the window has fewer queries
        scoring: dict[str, Any] = {"num_kv_heads": shape.kv_heads, "reduce": rule.reduce, "protect": rule.protected}
        scores = window_scores(own, from_logits=from_logits, scale=scale, nan=nan, **scoring)
        return select_from_scores(scores, counted, selection=rule, weights=rows, nan=nan)

    results: list[Any] = []
    tokens = shape.token_columns(valid)
    attention, weighing = (attn, weights) if shape.batched else (attn[None], None if weights is None else weights[None])
    for index, where in enumerate(tokens):
        rows = None if weighing is None else weighing[index]
        if where is None:
            results.append(kept(attention[index], rows))
        else:
            columns = torch.as_tensor(where, device=attn.device)
            if rows is not None:
                rows = rows[:, columns[: max(0, len(where) - rule.protected)]]
            chosen = kept(attention[index][..., columns], rows)
            results.append([columns[row] for row in chosen] if per_head else columns[chosen])
    if not shape.batched:
        return results[0]
    if not per_head and len({rows.shape for rows in results}) == 1:
        return torch.stack(results)
    return results


def _attention_shape(attn: Tensor, num_kv_heads: int, window: int | None = None) -> AttentionShape:
    """Return the shape of an `attn` of the right kind that agrees with the arguments."""
    torch = torch_module()
    if not isinstance(attn, torch.Tensor) or attn.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        what = attn.dtype if isinstance(attn, torch.Tensor) else type(attn).__name__
        raise TypeError(f"attn: must be a torch tensor of float32, float16 or bfloat16, not {what}")
    return AttentionShape.of(attn.shape, num_kv_heads, window)


def _check_float32(scores: Tensor) -> None:
    """Refuse anything but a float32 tensor with a dimension."""
    torch = torch_module()
    if not isinstance(scores, torch.Tensor) or scores.dtype != torch.float32:
        what = scores.dtype if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TypeError(f"scores: must be a torch tensor of float32, not {what}")
    if scores.dim() == 0:
        raise ValueError("scores: must have at least 1 dimension, (..., n)")


def _check_weights(weights: Any, device: Any, heads: Sequence[int], scored: int, n: int) -> None:
    """Refuse weights that are no float32 tensor on the device, or have another shape. Values are not looked at."""
    torch = torch_module()
    if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32 or weights.device != device:
        what = f"{weights.dtype} on {weights.device}" if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TypeError(f"weights: must be a torch tensor of float32 on {device}, as the scores, not {what}")
    check_weights_shape(weights.shape, heads, scored, n)


def _finite(scores: Tensor, nan: str, read: Tensor | bool = True) -> Tensor:
    """Return which scores are finite. With ``nan="raise"`` refuse the first that is not and that `read` is true of."""
    _check_float32(scores)
    finite = torch_module().isfinite(scores)
    if choice("nan", nan, NAN) == NAN["raise"]:
        wrong = ~finite & read
        if bool(wrong.any()):
            raise not_finite(scores, wrong.nonzero()[0].tolist())
    return finite
