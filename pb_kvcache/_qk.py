"""Window scores from queries and keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._options import NAN, at_least, choice, logit_scale
from ._score import window_scores
from ._selection import DEFAULT, Selection, rule_for
from ._tensor import View, is_torch, on_other_device, torch_module
from ._threads import in_threads

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ._types import Array, ProductOptions, Scores


@overload
def scores_from_qk(q: Array, k: Array, **options: Unpack[ProductOptions]) -> Scores: ...


@overload
def scores_from_qk(q: Tensor, k: Tensor, **options: Unpack[ProductOptions]) -> Tensor: ...


def scores_from_qk(
    q: Any,
    k: Any,
    *,
    scale: float | None = None,
    selection: Selection | str | None = None,
    reduce: str = DEFAULT.reduce,
    protect: int | None = None,
    nan: str = "raise",
    threads: int = 1,
) -> Any:
    """Return the window scores of a prompt from its last queries and its keys.

    NumPy's or torch's own matrix multiplication makes the products, one KV head at a time in a buffer that is reused.
    Neither ``n * n`` nor all heads' products are ever held.

    Parameters
    ----------
    q
        ``(q_heads, window, head_dim)``, or a batch of them: the queries of the last `window` positions, with their
        rotary embedding applied. float32, float16 or bfloat16.
    k
        ``(kv_heads, n, head_dim)``, or a batch of them: the keys of all positions, of the same kind as `q`.
    scale
        What products are multiplied by. None means ``head_dim ** -0.5``.
    selection, reduce, protect, nan, threads
        As for :func:`window_scores`. `threads` does not concern the multiplication: its library has its own setting.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, n - protect)`` float32, or a batch of them.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule.
    """
    kv_heads, window, n = _check(q, k)
    q_heads, head_dim = q.shape[-3], q.shape[-1]
    group = q_heads // kv_heads
    threads = at_least("threads", threads, 1)
    rule = rule_for(selection, window, n, reduce=reduce, protect=protect)
    choice("nan", nan, NAN)
    factor = logit_scale(head_dim**-0.5 if scale is None else scale)
    options: dict[str, Any] = {"selection": rule, "from_logits": True, "nan": nan, "scale": factor}
    if is_torch(q):
        q, k = q.detach(), k.detach()
    batched = len(q.shape) == 4
    pairs = [
        (one_q[head * group : (head + 1) * group].reshape(group * window, head_dim), one_k[head])
        for one_q, one_k in (zip(q, k, strict=True) if batched else [(q, k)])
        for head in range(kv_heads)
    ]
    rows: list[Any] = [None] * len(pairs)

    def score(part: range) -> None:
        products = None
        for index in part:
            queries, keys = pairs[index]
            products = _products(as_float32(queries), keys, products)
            try:
                rows[index] = window_scores(products.reshape(group, window, n), num_kv_heads=1, **options)
            except ValueError as error:
                where = f"sequence {index // kv_heads}, " if batched else ""
                raise ValueError(f"q and k: in the products of {where}KV head {index % kv_heads}, {error}") from None

    parts = [range(start, len(pairs), threads) for start in range(min(threads, len(pairs)))]
    in_threads([functools.partial(score, part) for part in parts], threads)
    scores = torch_module().cat(rows) if is_torch(q) else np.concatenate(rows)
    return scores.reshape(*q.shape[:-3], kv_heads, n - rule.protected)


def _check(q: Any, k: Any) -> tuple[int, int, int]:
    """Return ``(kv_heads, window, n)`` of queries and keys that agree."""
    _same_kind(q, k)
    if len(q.shape) not in (3, 4) or len(k.shape) != len(q.shape):
        raise ValueError(
            "q and k: must have shapes (q_heads, window, head_dim) and (kv_heads, n, head_dim), or batches of them, "
            f"not {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: has shape {tuple(k.shape)}, must agree with q, {tuple(q.shape)}, in batch and head_dim")
    q_heads, window, head_dim = q.shape[-3:]
    kv_heads, n = k.shape[-3:-1]
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"k: has {kv_heads} heads, must divide the {q_heads} of q")
    if not 0 < window <= n:
        raise ValueError(f"q: has {window} queries, must have at least 1 and no more than the {n} positions of k")
    if head_dim < 1:
        raise ValueError(f"q: has head_dim = {head_dim}, must be at least 1")
    return kv_heads, window, n


def _same_kind(q: Any, k: Any) -> None:
    for name, value in (("q", q), ("k", k)):
        if not on_other_device(name, value):
            View(name, value, contiguous=False)
    if is_torch(q) != is_torch(k) or q.dtype != k.dtype or (is_torch(q) and q.device != k.device):
        raise TypeError(f"k: must be of the same kind as q, on one device; they are {_kind(k)} and {_kind(q)}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" + (f" on {value.device}" if is_torch(value) else "")


def as_float32(value: Any) -> Any:
    """Return an array or tensor in float32, itself where it is."""
    if is_torch(value):
        return value.float()
    if value.dtype.name == "bfloat16":  # four times as fast as the conversion that ml_dtypes registers
        return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(value, np.float32)


#: Keys that are converted to float32 together: 512 KB of them stay in the second cache at head_dim 128.
_TILE = 1024


def _products(queries: Any, keys: Any, products: Any) -> Any:
    """Return ``queries @ keys.T`` in float32, in the array of an earlier call where there is one.

    Keys in 16 bits are converted by tiles. A product in their own precision would round every logit to it, and most
    would tie.
    """
    library: Any = torch_module() if is_torch(queries) else np
    if products is None:
        empty = queries.new_empty if is_torch(queries) else functools.partial(np.empty, dtype=np.float32)
        products = empty((queries.shape[0], keys.shape[0]))
    step = keys.shape[0] if str(keys.dtype).endswith("float32") else _TILE
    for start in range(0, keys.shape[0], step):
        library.matmul(queries, as_float32(keys[start : start + step]).T, out=products[:, start : start + step])
    return products
