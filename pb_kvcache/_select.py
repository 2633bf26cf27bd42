"""Prefill selection: which positions of a prompt each KV head keeps, over NumPy arrays and torch tensors.

Once the prompt is processed, the attention of its last `window` queries tells which of the earlier positions matter:
averaged over the window and over the query heads that share a KV head, pooled over neighbours, the best stay, and the
window itself (SnapKV, arXiv 2404.14469; PyramidKV, arXiv 2406.02069, gives every layer its own budget).

NumPy arrays and torch CPU tensors are read in place by the native kernels; a tensor on another device takes an
equivalent path in torch, there. What comes back is of the kind that was given: NumPy arrays with uint32 positions, or
tensors with int64 positions on the tensor's device.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, integer, plain_array, shown, uint32_array
from ._errors import status_text
from ._native import ffi, lib
from ._options import NAN, POOLING, REDUCE, at_least, choice, head_budgets, kernel_size, logit_scale
from ._tensor import View, give, is_torch, on_other_device
from ._threads import in_threads

_OK: int = lib.PB_KVCACHE_OK


def _elsewhere() -> Any:
    """Return the torch path: for tensors that are not in this computer's own memory."""
    return importlib.import_module("._torch_select", __package__)


class _Attention:
    """The checked `attn` of a call, always with a batch in front."""

    def __init__(
        self, attn: Any, num_kv_heads: Any, window: Any, from_logits: bool, scale: Any, reduce: Any, nan: Any
    ) -> None:
        self.view = View("attn", attn)
        shape = self.view.shape
        if len(shape) not in (3, 4):
            raise ValueError(f"attn: must have shape (q_heads, window, n) or (batch, q_heads, window, n), not {shape}")
        self.batched = len(shape) == 4
        self.batch, q_heads, self.window, self.n = shape if self.batched else (1, *shape)
        self.strides = self.view.strides if self.batched else (0, *self.view.strides)
        self.kv_heads = integer("num_kv_heads", num_kv_heads)
        if self.kv_heads < 1 or q_heads < 1 or q_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads = {shown(self.kv_heads)}: must divide the {q_heads} query heads of attn")
        if window is not None and integer("window", window) != self.window:
            raise ValueError(
                f"window = {shown(integer('window', window))}: must be the number of queries in attn, shape {shape}"
            )
        if not 0 < self.window < self.n:
            raise ValueError(f"window = {self.window}: must be greater than 0 and smaller than n = {self.n}")
        if self.n > UINT32_MAX:
            raise ValueError(f"attn: has n = {self.n} positions, must have at most {UINT32_MAX}")
        self.scale = logit_scale(scale) if from_logits else 1.0
        self.reduce = choice("reduce", reduce, REDUCE)
        self.nan = choice("nan", nan, NAN)
        self.fields = {
            "dtype": self.view.code,
            "logits": bool(from_logits),
            "scale": self.scale,
            "num_q_heads": q_heads,
            "num_kv_heads": self.kv_heads,
            "window": self.window,
        }


class _Part:
    """One sequence of an attention: some of its columns, by default all."""

    def __init__(self, attention: _Attention, sequence: int, columns: npt.NDArray[np.intp] | None = None) -> None:
        self.attention = attention
        self.sequence = sequence
        self.columns = columns
        view = attention.view
        self.n = attention.n if columns is None else len(columns)
        start = 0
        strides = attention.strides[1:]
        address = view.address
        if columns is not None and self.n:
            start = int(columns[0])
            if int(columns[-1]) - start != self.n - 1:  # tokens with padding between them: copied together
                owner = view.owner[sequence][..., columns]
                self.owner = View("attn", owner)
                address, strides, start = self.owner.address, self.owner.strides, 0
                sequence = 0
        address += (sequence * attention.strides[0] + start) * view.size
        self.struct = ffi.new(
            "pb_kvcache_attention *",
            {
                **attention.fields,
                "data": ffi.cast("void *", address),
                "n": self.n,
                "head_stride": strides[0],
                "row_stride": strides[1],
            },
        )

    def refusal(self, status: int) -> Exception:
        """Return the error for a status, with the first value that broke the rule."""
        attention = self.attention
        floats = attention.view.floats()
        floats = floats[self.sequence] if attention.batched else floats
        columns = np.arange(attention.n) if self.columns is None else self.columns
        floats = floats[..., columns]
        scored = self.n - attention.window
        lowest = attention.nan == lib.PB_KVCACHE_NAN_LOWEST
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = floats * np.float32(attention.scale)
        visible = np.arange(self.n) <= scored + np.arange(attention.window)[:, None]
        if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
            bad = (floats < 0) | (np.zeros_like(visible) if lowest else ~np.isfinite(floats))
            index = np.argwhere(bad[..., :scored])
            rule = "every probability must be finite and >= 0"
        elif status == lib.PB_KVCACHE_ERROR_LOGIT:
            index = np.argwhere(~(scaled < np.inf) & visible)
            rule = f"no logit may be NaN or +inf, nor become so times scale = {attention.scale}"
        elif status == lib.PB_KVCACHE_ERROR_MASKED:
            index = np.argwhere(~((scaled > -np.inf) & visible).any(-1))
            rule = "every query must see a position, all its logits are -inf"
        elif status == lib.PB_KVCACHE_ERROR_SCORE:
            return ValueError("attn: a sum of probabilities is too large for float32")
        else:
            return RuntimeError(status_text(status))
        first = tuple(int(i) for i in index[0])
        where = ((self.sequence,) if attention.batched else ()) + first[:2]
        if len(first) == 3:
            return ValueError(f"attn[{', '.join(map(str, (*where, columns[first[2]])))}] = {floats[first]}: {rule}")
        return ValueError(f"attn[{', '.join(map(str, where))}]: {rule}")


def _run(jobs: list[tuple[_Part, Callable[[], int]]], threads: int) -> None:
    """Run the jobs on up to `threads` threads; raise for the first, in their order, that is refused."""
    statuses = in_threads([job for _, job in jobs], threads)
    for status, (part, _) in zip(statuses, jobs, strict=True):
        if status != _OK:
            raise part.refusal(status)


def _shards(heads: int, sequences: int, threads: int) -> list[tuple[int, int]]:
    """Return ranges of heads, of each of so many sequences: about four for each thread, so that all end together."""
    wanted = 1 if threads == 1 else 4 * threads
    parts = min(heads, max(1, -(-wanted // max(1, sequences))))
    return [(heads * part // parts, heads * (part + 1) // parts) for part in range(parts)]


def _columns(valid: Any, a: _Attention) -> list[npt.NDArray[np.intp] | None]:
    """Return the columns of each sequence that are tokens; None for all."""
    if valid is None:
        return [None] * a.batch
    if not a.batched:
        raise ValueError("valid: is for a batch, attn has no batch dimension")
    mask = plain_array("valid", _positions(valid), "booleans or lengths")
    if mask.dtype == np.bool_:
        if mask.shape != (a.batch, a.n):
            raise ValueError(f"valid: has shape {mask.shape}, must be (batch, n) = {(a.batch, a.n)}")
        return [np.flatnonzero(row) for row in mask]
    if mask.dtype.kind not in "iu":
        raise TypeError(f"valid: must be a boolean mask or integer lengths, not {mask.dtype}")
    if mask.shape != (a.batch,):
        raise ValueError(f"valid: has shape {mask.shape}, must have one length per sequence, ({a.batch},)")
    for sequence, length in enumerate(mask):
        if not 0 <= length <= a.n:
            raise ValueError(f"valid[{sequence}] = {length}: must be between 0 and n = {a.n}")
    return [np.arange(length) for length in mask]


def _floats(array: npt.NDArray[np.float32]) -> Any:
    return ffi.from_buffer("float[]", array)


def _words(array: npt.NDArray[np.uint32]) -> Any:
    return ffi.from_buffer("uint32_t[]", array)


def _bytes(size: int) -> Any:
    return ffi.from_buffer(np.empty(size, np.uint8))


def _workspace_size(function: Any, *arguments: Any) -> int:
    size = ffi.new("size_t *")
    status = function(*arguments, size)
    if status != _OK:
        raise (
            MemoryError(status_text(status))
            if status == lib.PB_KVCACHE_ERROR_TOO_LARGE
            else RuntimeError(status_text(status))
        )
    return int(size[0])


# ---- The kernels ----


def window_scores(
    attn: Any,
    *,
    num_kv_heads: int,
    reduce: str = "mean",
    from_logits: bool = False,
    scale: float = 1.0,
    nan: str = "raise",
    threads: int = 1,
) -> Any:
    """Return what the window's queries gave to each position before the window.

    Parameters
    ----------
    attn
        ``(q_heads, window, n)`` or ``(batch, q_heads, window, n)``, float32, float16 or bfloat16: how much the last
        `window` queries of the prompt look at its ``n`` positions. Read in place where the last axis is contiguous.
    num_kv_heads
        KV heads; divides ``q_heads``. Query heads ``h*g .. h*g+g-1`` belong to KV head ``h``.
    reduce
        ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a group, after the mean over the window.
    from_logits
        `attn` holds products of queries and keys: scaled, masked causally inside the window and softmaxed here, in
        one pass. -inf is a position that the query does not see.
    scale
        What logits are multiplied by, in float32.
    nan
        ``"raise"`` refuses NaN and +inf; ``"lowest"`` leaves them out of their query's softmax and gives the positions
        that have one the score -inf.
    threads
        KV heads are divided among so many threads; the result does not depend on it.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(num_kv_heads, n - window)`` float32, or a batch of them.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a value: negative probabilities, NaN, infinities, a query that sees nothing.
    """
    if on_other_device(attn):
        return _elsewhere().window_scores(
            attn, num_kv_heads=num_kv_heads, reduce=reduce, from_logits=from_logits, scale=scale, nan=nan
        )
    a = _Attention(attn, num_kv_heads, None, from_logits, scale, reduce, nan)
    threads = at_least("threads", threads, 1)
    scored = a.n - a.window
    scores = np.empty((a.batch, a.kv_heads, scored), np.float32)

    def job(part: _Part, first: int, end: int) -> Callable[[], int]:
        def run() -> int:
            size = _workspace_size(lib.pb_kvcache_window_scores_workspace_size, part.struct, first, end)
            rows = _floats(scores[part.sequence])
            return lib.pb_kvcache_window_scores(  # type: ignore[no-any-return]
                part.struct, a.reduce, a.nan, first, end, _bytes(size), size, rows, scored, a.kv_heads * scored
            )

        return run

    shards = _shards(a.kv_heads, a.batch, threads)
    parts = [_Part(a, sequence) for sequence in range(a.batch)]
    _run([(part, job(part, first, end)) for part in parts for first, end in shards], threads)
    return give(scores if a.batched else scores[0], a.view.torch)


def _scores(scores: Any) -> tuple[View, npt.NDArray[np.float32]]:
    """Return checked scores as rows: ``(rows, n)``, contiguous."""
    view = View("scores", scores, ("float32",))
    if not view.shape:
        raise ValueError("scores: must have at least 1 dimension, (..., n)")
    array = view.owner.numpy() if view.torch else view.owner
    rows = np.ascontiguousarray(array).reshape(-1, view.shape[-1]) if array.size else np.empty((0, 0), np.float32)
    return view, rows


def _score_refusal(status: int, scores: View) -> Exception:
    if status == lib.PB_KVCACHE_ERROR_SCORE:
        floats = scores.floats()
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(floats))[0])
        return ValueError(
            f"scores[{', '.join(map(str, first))}] = {floats[first]}: every score must be finite; "
            'nan="lowest" ranks others below everything'
        )
    return RuntimeError(status_text(status))


def pool_scores(scores: Any, kernel: int = 7, pooling: str = "max", *, nan: str = "raise") -> Any:
    """Return each score pooled with its `kernel` neighbours, itself in the middle.

    Parameters
    ----------
    scores
        ``(..., n)`` float32.
    kernel
        Odd. Neighbours that do not exist, at both ends, are left out.
    pooling
        ``"max"``; or ``"avg"``, which divides by the number of neighbours that there are.
    nan
        ``"raise"`` refuses a NaN or an infinity; ``"lowest"`` leaves it out of its neighbours' pools and returns -inf
        in its place.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., n)`` float32.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    if on_other_device(scores):
        return _elsewhere().pool_scores(scores, kernel, pooling, nan=nan)
    kernel = kernel_size(kernel)
    code = choice("pooling", pooling, POOLING)
    rule = choice("nan", nan, NAN)
    view, rows = _scores(scores)
    pooled = np.empty_like(rows)
    count, n = rows.shape
    if rows.size:
        size = _workspace_size(lib.pb_kvcache_pool_scores_workspace_size, n, code, kernel)
        status = lib.pb_kvcache_pool_scores(
            _floats(rows), n, count, n, code, kernel, rule, _bytes(size), size, _floats(pooled), n, pooled.size
        )
        if status != _OK:
            raise _score_refusal(status, view)
    return give(pooled.reshape(view.shape), view.torch)


def select_top(scores: Any, k: int, *, nan: str = "raise") -> Any:
    """Return the positions of the `k` highest scores of each row, ascending; ties go to the lower position.

    Parameters
    ----------
    scores
        ``(..., n)`` float32.
    k
        How many; ``n`` or more means all.
    nan
        ``"raise"`` refuses a NaN or an infinity; ``"lowest"`` ranks it below everything.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., min(k, n))``, uint32 or (torch) int64.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    if on_other_device(scores):
        return _elsewhere().select_top(scores, k, nan=nan)
    number = at_least("k", k, 0)
    rule = choice("nan", nan, NAN)
    view, rows = _scores(scores)
    count = len(rows)
    n = view.shape[-1]
    number = min(number, n)
    indices = np.empty((count, number), np.uint32)
    if rows.size:
        status = lib.pb_kvcache_select_top(
            _floats(rows),
            n,
            count,
            n,
            _words(np.full(count, number, np.uint32)),
            rule,
            _words(indices),
            number,
            indices.size,
        )
        if status != _OK:
            raise _score_refusal(status, view)
    return give(indices.reshape(*view.shape[:-1], number), view.torch)


def select(
    attn: Any,
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
    threads: int = 1,
) -> Any:
    """Return the positions of a prompt that each KV head keeps: its last `window`, and the best before them.

    Parameters
    ----------
    attn, num_kv_heads, reduce, from_logits, scale, nan, threads
        As for :func:`window_scores`.
    budget
        Positions kept: one number, or one per KV head. ``n`` or more keeps every position, whatever `attn` holds.
    window
        How many queries `attn` has; their positions are always kept.
    kernel, pooling
        As for :func:`pool_scores`.
    window_in_budget
        True: `budget` counts the window and is at least as large. False: the window comes on top, as in the code that
        the paper published.
    valid
        For a padded batch: which columns are tokens, as a boolean mask ``(batch, n)``, or how many from the left, one
        number per sequence. The rows of a sequence are the queries of its own last tokens. The positions returned are
        columns of the padded row, and those of a sequence are what it would get alone. None: all.

    Returns
    -------
    numpy.ndarray, torch.Tensor or list
        ``(num_kv_heads, kept)``, ascending, uint32 or (torch) int64; with one budget per head a list of vectors. For a
        batch ``(batch, num_kv_heads, kept)`` where every sequence keeps the same number, else a list of them.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule; the message says which.
    """
    if on_other_device(attn):
        return _elsewhere().select(
            attn,
            budget,
            num_kv_heads=num_kv_heads,
            window=window,
            kernel=kernel,
            pooling=pooling,
            reduce=reduce,
            from_logits=from_logits,
            scale=scale,
            window_in_budget=window_in_budget,
            valid=valid,
            nan=nan,
        )
    a = _Attention(attn, num_kv_heads, window, from_logits, scale, reduce, nan)
    params = ffi.new(
        "pb_kvcache_select_params *",
        {
            "reduce": a.reduce,
            "pooling": choice("pooling", pooling, POOLING),
            "kernel": kernel_size(kernel),
            "nan": a.nan,
        },
    )
    budgets, per_head = head_budgets(budget, a.kv_heads, a.window, window_in_budget)
    threads = at_least("threads", threads, 1)
    parts = [_Part(a, sequence, columns) for sequence, columns in enumerate(_columns(valid, a))]
    counts = [np.array([min(value, part.n) for value in budgets], np.uint32) for part in parts]
    kept = [np.empty((a.kv_heads, int(count.max())), np.uint32) for count in counts]

    def job(part: _Part, first: int, end: int) -> Callable[[], int]:
        count, rows = counts[part.sequence], kept[part.sequence]

        def run() -> int:
            size = _workspace_size(lib.pb_kvcache_select_workspace_size, part.struct, params, first, end)
            return lib.pb_kvcache_select(  # type: ignore[no-any-return]
                part.struct,
                params,
                _words(count),
                first,
                end,
                _bytes(size),
                size,
                _words(rows),
                rows.shape[1],
                rows.size,
            )

        return run

    # A sequence that every budget covers is kept whole, however short it is; the others are longer than the window.
    for count, rows, part in zip(counts, kept, parts, strict=True):
        if count.min() == part.n:
            rows[:] = np.arange(part.n, dtype=np.uint32)
    limited = [part for part, count in zip(parts, counts, strict=True) if count.min() < part.n]
    shards = _shards(a.kv_heads, len(limited), threads)
    _run([(part, job(part, first, end)) for part in limited for first, end in shards], threads)

    results: list[Any] = []
    for part, rows, count in zip(parts, kept, counts, strict=True):
        if per_head:
            heads = [row[:number] for row, number in zip(rows, count.tolist(), strict=True)]
            results.append([give(_of_row(part, head), a.view.torch) for head in heads])
        else:
            results.append(_of_row(part, rows))
    if per_head:
        return results if a.batched else results[0]
    if not a.batched:
        return give(results[0], a.view.torch)
    if len({rows.shape for rows in results}) == 1:
        return give(np.stack(results), a.view.torch)
    return [give(rows, a.view.torch) for rows in results]


def _of_row(part: _Part, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return positions among a sequence's tokens as columns of its padded row."""
    return positions if part.columns is None else part.columns[positions].astype(np.uint32)


def _same_kind(q: Any, k: Any) -> None:
    for name, value in (("q", q), ("k", k)):
        if not on_other_device(value):
            View(name, value, contiguous=False)
    if is_torch(q) != is_torch(k) or q.dtype != k.dtype or (is_torch(q) and q.device != k.device):
        raise TypeError(f"k: must be of the same kind as q, on one device; they are {_kind(k)} and {_kind(q)}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" + (f" on {value.device}" if is_torch(value) else "")


def _float32(value: Any) -> Any:
    if is_torch(value):
        return value.float()
    if value.dtype.name == "bfloat16":  # four times as fast as the conversion that ml_dtypes registers
        return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(value, np.float32)


def scores_from_qk(
    q: Any, k: Any, *, scale: float | None = None, reduce: str = "mean", nan: str = "raise", threads: int = 1
) -> Any:
    """Return the window scores of a prompt from its last queries and its keys.

    Products are made by NumPy's or torch's own matrix multiplication, one KV head at a time in a buffer that is
    reused, so that neither ``n * n`` nor all heads' products are ever held.

    Parameters
    ----------
    q
        ``(q_heads, window, head_dim)``, or a batch of them: the queries of the last `window` positions, with their
        rotary embedding applied. float32, float16 or bfloat16.
    k
        ``(kv_heads, n, head_dim)``, or a batch of them: the keys of all positions, of the same kind as `q`.
    scale
        What products are multiplied by; None means ``head_dim ** -0.5``.
    reduce, nan, threads
        As for :func:`window_scores`. `threads` does not concern the multiplication, whose library has its own setting.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(kv_heads, n - window)`` float32, or a batch of them.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule.
    """
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
    if not 0 < window < n:
        raise ValueError(f"q: has {window} queries, must have at least 1 and fewer than the {n} positions of k")
    if head_dim < 1:
        raise ValueError(f"q: has head_dim = {head_dim}, must be at least 1")
    group = q_heads // kv_heads
    threads = at_least("threads", threads, 1)
    choice("reduce", reduce, REDUCE)
    choice("nan", nan, NAN)
    factor = logit_scale(head_dim**-0.5 if scale is None else scale)
    options: dict[str, Any] = {"reduce": reduce, "from_logits": True, "nan": nan, "scale": factor}
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
            products = _products(_float32(queries), keys, products)
            try:
                rows[index] = window_scores(products.reshape(group, window, n), num_kv_heads=1, **options)
            except ValueError as error:
                where = f"sequence {index // kv_heads}, " if batched else ""
                raise ValueError(f"q and k: in the products of {where}KV head {index % kv_heads}, {error}") from None

    parts = [range(start, len(pairs), threads) for start in range(min(threads, len(pairs)))]
    in_threads([functools.partial(score, part) for part in parts], threads)
    scores = sys.modules["torch"].cat(rows) if is_torch(q) else np.concatenate(rows)
    return scores.reshape(*q.shape[:-3], kv_heads, n - window)


#: Keys that are converted to float32 together: 512 KB of them stay in the second cache at head_dim 128.
_TILE = 1024


def _products(queries: Any, keys: Any, products: Any) -> Any:
    """Return ``queries @ keys.T`` in float32, in the array of an earlier call where there is one.

    Keys in 16 bits are converted by tiles: a product in their own precision would round every logit to it, and so tie
    most of them.
    """
    library: Any = sys.modules["torch"] if is_torch(queries) else np
    if products is None:
        empty = queries.new_empty if is_torch(queries) else functools.partial(np.empty, dtype=np.float32)
        products = empty((queries.shape[0], keys.shape[0]))
    step = keys.shape[0] if str(keys.dtype).endswith("float32") else _TILE
    for start in range(0, keys.shape[0], step):
        library.matmul(queries, _float32(keys[start : start + step]).T, out=products[:, start : start + step])
    return products


# ---- Moving keys and values ----


def compact(kv: Any, indices: Any, *, threads: int = 1) -> Any:
    """Move the kept rows of keys or values to the front, in place, and return that front.

    Equal to a gather, without memory for a second copy. Rows behind the front keep whatever the moves left there.

    Parameters
    ----------
    kv
        ``(kv_heads, n, head_dim)``, or a batch of them; NumPy array or torch tensor of any numeric kind, whose last
        axis is contiguous. Other axes may have any strides, so that a cache that holds positions outermost is given
        transposed. On another device torch gathers one head after the other.
    indices
        What :func:`select` returned: ``(kv_heads, kept)`` ascending positions, one vector per head, or a batch of
        either.
    threads
        Heads are divided among so many threads.

    Returns
    -------
    numpy.ndarray, torch.Tensor or list
        A view of the first ``kept`` rows, ``(kv_heads, kept, head_dim)``; a list of views, one per head, where heads
        keep different numbers; for a batch the same with the batch in front, or a list.

    Raises
    ------
    TypeError, ValueError
        Positions out of range or not ascending, overlapping rows, a read-only array. Nothing has moved.
    """
    if is_torch(kv):
        if kv.layout is not sys.modules["torch"].strided or kv.device.type == "meta":
            raise TypeError(f"kv: must be a dense tensor, not {kv.layout} on {kv.device}")
        if kv.requires_grad:
            raise ValueError("kv: is part of a gradient and is not changed in place; give kv.detach()")
        size = kv.element_size()
        strides = [stride * size for stride in kv.stride()]
        address = kv.data_ptr()
    elif isinstance(kv, np.ndarray):
        kv = plain_array("kv", kv, "numbers")
        if kv.dtype.hasobject:
            raise TypeError(f"kv: must hold numbers, not {kv.dtype}")
        if not kv.flags.writeable:
            raise ValueError("kv: is read-only, must be writeable")
        size = kv.itemsize
        strides = list(kv.strides)
        address = kv.__array_interface__["data"][0]
    else:
        raise TypeError(f"kv: must be a NumPy array or torch tensor, not {type(kv).__name__}")
    shape = tuple(kv.shape)
    if len(shape) not in (3, 4):
        raise ValueError(f"kv: must have shape (kv_heads, n, head_dim) or (batch, kv_heads, n, head_dim), not {shape}")
    if shape[-1] > 1 and strides[-1] != size:
        raise ValueError("kv: its last axis must be contiguous")
    threads = at_least("threads", threads, 1)
    batched = len(shape) == 4
    if batched:
        if len(indices) != shape[0]:
            raise ValueError(f"indices: has {len(indices)} sequences, must have one per sequence of kv, {shape[0]}")
        if shape[0] > 1 and not _disjoint(shape[:3], strides[:3], shape[3] * size):
            raise ValueError("kv: its rows overlap in memory")
    sequences = (
        [_rows(f"indices[{i}]", one, shape) for i, one in enumerate(indices)]
        if batched
        else [_rows("indices", indices, shape)]
    )
    jobs: list[Callable[[], None]] = []
    elsewhere = on_other_device(kv)
    if elsewhere:
        if not _disjoint(shape[:-1], strides[:-1], shape[-1] * size):
            raise ValueError("kv: its rows overlap in memory")
        for sequence, (rows, counts) in enumerate(sequences):
            _gather_in_place(kv[sequence] if batched else kv, rows, counts)
    for sequence, (rows, counts) in enumerate(sequences if not elsewhere else []):
        struct = ffi.new(
            "pb_kvcache_rows *",
            {
                "data": ffi.cast("void *", address + (sequence * strides[0] if batched else 0)),
                "num_heads": shape[-3],
                "n": shape[-2],
                "row_bytes": shape[-1] * size,
                "head_stride": strides[-3],
                "row_stride": strides[-2],
            },
        )
        for first, end in _shards(shape[-3], len(sequences), threads):
            jobs.append(_compact_job(struct, first, end, rows, counts))
    in_threads(jobs, threads)
    fronts = [_front(kv[sequence] if batched else kv, counts) for sequence, (_, counts) in enumerate(sequences)]
    if not batched:
        return fronts[0]
    numbers = {int(count) for _, counts in sequences for count in counts}
    return kv[:, :, : numbers.pop()] if len(numbers) == 1 else fronts


def _gather_in_place(kv: Any, rows: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32]) -> None:
    torch = sys.modules["torch"]
    for head, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        index = torch.from_numpy(row[:count].astype(np.int64)).to(kv.device)
        kv[head, :count] = kv[head].index_select(0, index)


def _disjoint(shape: tuple[int, ...], strides: list[int], row_bytes: int) -> bool:
    """Tell whether rows at these strides share no byte: true for every transposed or sliced whole array."""
    extent = row_bytes
    for length, stride in sorted(zip(shape, map(abs, strides), strict=True), key=lambda axis: axis[1]):
        if length > 1:
            if stride < extent:
                return False
            extent += (length - 1) * stride
    return True


def _compact_job(
    struct: Any, first: int, end: int, rows: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32]
) -> Callable[[], None]:
    def run() -> None:
        status = lib.pb_kvcache_compact(struct, first, end, _words(rows), rows.shape[1], _words(counts))
        if status == lib.PB_KVCACHE_ERROR_STRIDE:
            raise ValueError("kv: its rows overlap in memory")
        if status == lib.PB_KVCACHE_ERROR_OVERLAP:
            raise ValueError("indices: must not lie within kv")
        if status != _OK:
            raise RuntimeError(status_text(status))

    return run


def _front(kv: Any, counts: npt.NDArray[np.uint32]) -> Any:
    numbers = counts.tolist()
    if len(set(numbers)) == 1:
        return kv[:, : numbers[0]]
    return [kv[head, :number] for head, number in enumerate(numbers)]


def _positions(value: Any) -> Any:
    """Return positions as NumPy takes them: a tensor's elements."""
    return value.detach().cpu().numpy() if is_torch(value) else value


def _ascending(name: str, value: Any, n: int | None = None) -> npt.NDArray[np.uint32]:
    """Return checked positions: a vector, strictly ascending, below `n`."""
    array = uint32_array(name, _positions(value), 1)
    beyond = np.flatnonzero(array >= n) if n is not None and n <= UINT32_MAX else np.empty(0, np.intp)
    if beyond.size:
        raise ValueError(f"{name}[{beyond[0]}] = {array[beyond[0]]}: must be smaller than {n}")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if falls.size:
        at = int(falls[0]) + 1
        raise ValueError(f"{name}[{at}] = {array[at]}: must be greater than the one before it, {array[at - 1]}")
    return array


def _table(value: Any, n: int) -> npt.NDArray[np.uint32] | None:
    """Return rows of positions that need no further look: one array, in range and ascending. None: look closely."""
    array = _positions(value)
    if type(array) is not np.ndarray or array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        return None
    ascends = bool((array[:, 1:] > array[:, :-1]).all())
    if not ascends or int(array[:, 0].min()) < 0 or int(array[:, -1].max()) >= n:
        return None
    return np.ascontiguousarray(array, np.uint32)


def _rows(name: str, value: Any, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return one sequence's positions as rows of one width, and how many each head has."""
    heads, n = shape[-3], shape[-2]
    if len(value) != heads:
        raise ValueError(f"{name}: has {len(value)} heads, must have one row per KV head, {heads}")
    table = _table(value, n)
    if table is not None:
        return table, np.full(heads, table.shape[1], np.uint32)
    rows = [_ascending(f"{name}[{head}]", row, n) for head, row in enumerate(value)]
    counts = np.array([len(row) for row in rows], np.uint32)
    table = np.zeros((max(1, heads), max([1, *counts.tolist()])), np.uint32)
    for head, row in enumerate(rows):
        table[head, : len(row)] = row
    return table, counts


# ---- For paged engines ----


def to_blocks(indices: Any, block_size: int) -> Any:
    """Return the blocks that hold kept positions, and how many each holds.

    Parameters
    ----------
    indices
        Ascending positions, ``(kept,)``; or rows of them, per KV head.
    block_size
        Positions per block; position ``p`` is in block ``p // block_size``.

    Returns
    -------
    tuple of numpy.ndarray, or list of tuples
        ``(blocks, fill)``, uint32, ascending blocks and the kept positions in each, 1 to `block_size`. For rows a list
        with one such pair per row.
    """
    size = min(at_least("block_size", block_size, 1), UINT32_MAX + 1)

    def one(name: str, row: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        blocks, fill = np.unique(_ascending(name, row) // np.uint64(size), return_counts=True)
        return blocks.astype(np.uint32), fill.astype(np.uint32)

    return _each_row("indices", indices, one)


def to_ranges(indices: Any) -> Any:
    """Return kept positions as runs: ``(runs, 2)`` int64, each ``start, stop`` with `stop` excluded.

    For rows of positions, per KV head, a list with one array per row.
    """

    def one(name: str, row: Any) -> npt.NDArray[np.int64]:
        array = _ascending(name, row).astype(np.int64)
        if not array.size:
            return np.empty((0, 2), np.int64)
        cuts = np.flatnonzero(np.diff(array) != 1)
        starts = array[np.concatenate(([0], cuts + 1))]
        stops = array[np.concatenate((cuts, [len(array) - 1]))] + 1
        return np.stack([starts, stops], axis=1)

    return _each_row("indices", indices, one)


def to_mask(indices: Any, n: int) -> Any:
    """Return kept positions as a boolean mask: ``(n,)``, or for rows of positions ``(rows, n)``."""
    length = at_least("n", n, 0)

    def one(name: str, row: Any) -> npt.NDArray[np.bool_]:
        mask = np.zeros(length, np.bool_)
        mask[_ascending(name, row, length)] = True
        return mask

    masks = _each_row("indices", indices, one)
    return np.stack(masks) if isinstance(masks, list) and masks else np.asarray(masks, np.bool_)


def _each_row(name: str, value: Any, one: Callable[[str, Any], Any]) -> Any:
    """Apply `one` to a vector of positions, or to each of several."""
    if isinstance(value, (list, tuple)):
        nested = len(value) > 0 and not np.isscalar(value[0]) and np.ndim(value[0]) > 0
    else:
        ndim = np.ndim(_positions(value))
        if ndim not in (1, 2):
            raise ValueError(f"{name}: must have 1 or 2 dimensions, not {ndim}")
        nested = ndim == 2
    return [one(f"{name}[{i}]", row) for i, row in enumerate(value)] if nested else one(name, value)


def block_select(
    scores: Any, budget: int, *, block_size: int, window: int, reduce: str = "max", nan: str = "raise"
) -> Any:
    """Return the blocks that each KV head keeps: whole blocks, scored by the positions in them.

    Parameters
    ----------
    scores
        ``(..., n - window)`` float32: what :func:`window_scores` or :func:`pool_scores` returned. Where heads share
        one page table, reduce them first: ``scores.max(axis=0, keepdims=True)``.
    budget
        Positions kept at most, window included: ``budget // block_size`` blocks, at least those of the window.
    block_size
        Positions per block. The last block may be partial.
    window
        Positions behind the scored ones; the blocks that hold one of them are always kept.
    reduce
        ``"max"``, ``"mean"`` or ``"sum"`` of the scores in a block.
    nan
        As for :func:`select_top`.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(..., blocks)``, ascending block numbers, uint32 or (torch) int64.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule.
    """
    size = at_least("block_size", block_size, 1)
    last = at_least("window", window, 1)
    positions = integer("budget", budget)
    operation = {"max": np.maximum, "mean": np.add, "sum": np.add}
    if not isinstance(reduce, str) or reduce not in operation:
        raise ValueError(f"reduce = {reduce!r}: must be one of {', '.join(operation)}")
    device = scores.device if on_other_device(scores) else None
    if device is not None:
        scores = scores.detach().cpu()
    rule = choice("nan", nan, NAN)
    view, rows = _scores(scores)
    scored = view.shape[-1]
    if scored < 1:
        raise ValueError(f"scores: has shape {view.shape}, must hold at least one score a row")
    total = -(-(scored + last) // size)
    safe = scored // size  # the first block with a position of the window
    keep = min(positions // size, total)
    if keep < total - safe:
        raise ValueError(
            f"budget = {shown(positions)}: must be at least the {total - safe} blocks of the window, {size} each"
        )
    if rule == lib.PB_KVCACHE_NAN_REFUSE and not np.isfinite(rows).all():
        raise _score_refusal(lib.PB_KVCACHE_ERROR_SCORE, view)
    always = np.broadcast_to(np.arange(safe, total, dtype=np.uint32), (len(rows), total - safe))
    whole = np.where(np.isfinite(rows), rows, np.float32(-np.inf))[:, : safe * size].reshape(len(rows), safe, size)
    folded = np.asarray(operation[reduce].reduce(whole, axis=-1), np.float32)
    if reduce == "mean":
        folded /= np.float32(size)
    best = np.asarray(select_top(np.ascontiguousarray(folded), keep - (total - safe), nan="lowest"))
    blocks = np.concatenate([best, always], axis=1)
    result = give(blocks.reshape(*view.shape[:-1], keep), view.torch)
    return result if device is None else result.to(device)
