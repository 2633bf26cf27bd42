"""Prefill selection: which positions of a prompt each KV head keeps.

Once the prompt is processed, the attention of its last `window` queries says which of the earlier positions matter. It
is averaged over the window and over the query heads that share a KV head (:mod:`._score`) and pooled over neighbours
(:mod:`._pool`). The best positions stay (:mod:`._choose`), and the window with them: SnapKV, arXiv 2404.14469.
PyramidKV, arXiv 2406.02069, gives every layer its own budget.

NumPy arrays and torch CPU tensors are read in place by the native kernels. A tensor on another device takes an
equivalent path in torch, there (:mod:`._torch_path`). An answer is of the kind that was given: NumPy arrays with uint32
positions, or tensors with int64 positions on the tensor's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from . import _torch_path
from ._calls import OK, ScoreRows, floats, head_ranges, scratch, words, workspace_size
from ._native import ffi, lib
from ._options import NAN, REDUCE, at_least, choice, head_budgets, pooling_options
from ._score import Attention, Part, run_parts
from ._shapes import by_head, prompt_length
from ._tensor import give, on_other_device

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ._types import Array, ChooseOptions, PerHead, Positions, Scores, SelectOptions


@overload
def select(
    attn: Array, budget: int, *, num_kv_heads: int, window: int, valid: None = None, **options: Unpack[SelectOptions]
) -> Positions: ...


@overload
def select(
    attn: Array, budget: int, *, num_kv_heads: int, window: int, valid: Any, **options: Unpack[SelectOptions]
) -> Positions | list[Positions]: ...


@overload
def select(
    attn: Array, budget: PerHead, *, num_kv_heads: int, window: int, valid: Any = None, **options: Unpack[SelectOptions]
) -> list[Any]: ...


@overload
def select(
    attn: Tensor, budget: int, *, num_kv_heads: int, window: int, valid: None = None, **options: Unpack[SelectOptions]
) -> Tensor: ...


@overload
def select(
    attn: Tensor, budget: int, *, num_kv_heads: int, window: int, valid: Any, **options: Unpack[SelectOptions]
) -> Tensor | list[Tensor]: ...


@overload
def select(
    attn: Tensor,
    budget: PerHead,
    *,
    num_kv_heads: int,
    window: int,
    valid: Any = None,
    **options: Unpack[SelectOptions],
) -> list[Any]: ...


def select(
    attn: Any,
    budget: int | PerHead,
    *,
    num_kv_heads: int,
    window: int,
    kernel: int = 7,
    pooling: str = "max",
    edge: str = "count",
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
        How many queries `attn` has. Their positions are always kept.
    kernel, pooling, edge
        As for :func:`pool_scores`.
    window_in_budget
        True: `budget` counts the window and is at least as large. False: the window comes on top, as in the code
        published with the paper.
    valid
        For a padded batch: which columns are tokens, as a boolean mask ``(batch, n)``, or how many from the left, one
        number per sequence. The rows of a sequence are the queries of its own last tokens. The positions returned are
        columns of the padded row, and those of a sequence are what it would get alone. None: all.

    Returns
    -------
    numpy.ndarray, torch.Tensor or list
        ``(num_kv_heads, kept)``, ascending, uint32 or (torch) int64. With one budget per head a list of vectors. For a
        batch ``(batch, num_kv_heads, kept)`` where every sequence keeps the same number, else a list of them.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule. The message says which.
    """
    if on_other_device("attn", attn):
        return _torch_path.select(
            attn,
            budget,
            num_kv_heads=num_kv_heads,
            window=window,
            kernel=kernel,
            pooling=pooling,
            edge=edge,
            reduce=reduce,
            from_logits=from_logits,
            scale=scale,
            window_in_budget=window_in_budget,
            valid=valid,
            nan=nan,
        )
    attention = Attention(attn, num_kv_heads, window, from_logits, scale, reduce, nan)
    shape = attention.shape
    params = _params(kernel, pooling, edge, attention.nan, attention.reduce)
    budgets, per_head = head_budgets(budget, shape.kv_heads, shape.window, window_in_budget)
    threads = at_least("threads", threads, 1)
    parts = [Part(attention, sequence, columns) for sequence, columns in enumerate(shape.token_columns(valid))]
    counts = [np.array([min(value, part.n) for value in budgets], np.uint32) for part in parts]
    kept = [np.empty((shape.kv_heads, int(count.max())), np.uint32) for count in counts]

    def job(part: Part, first: int, end: int) -> Callable[[], int]:
        count, rows = counts[part.sequence], kept[part.sequence]

        def run() -> int:
            size = workspace_size(lib.pb_kvcache_select_workspace_size, part.struct, params, first, end)
            return lib.pb_kvcache_select(  # type: ignore[no-any-return]
                part.struct,
                params,
                words(count),
                first,
                end,
                scratch(size),
                size,
                words(rows),
                rows.shape[1],
                rows.size,
            )

        return run

    # A sequence that every budget covers is kept whole, however short it is. The others are longer than the window.
    for count, rows, part in zip(counts, kept, parts, strict=True):
        if count.min() == part.n:
            rows[:] = np.arange(part.n, dtype=np.uint32)
    limited = [part for part, count in zip(parts, counts, strict=True) if count.min() < part.n]
    ranges = head_ranges(shape.kv_heads, len(limited), threads)
    run_parts([(part, job(part, first, end)) for part in limited for first, end in ranges], threads)

    # Positions among the tokens become columns of the padded row, in the caller's kind and shape.
    torch = attention.view.torch
    if per_head:
        results = [
            [give(_as_columns(part, head), torch) for head in by_head(rows, count.tolist())]
            for part, rows, count in zip(parts, kept, counts, strict=True)
        ]
        return results if shape.batched else results[0]
    columns = [_as_columns(part, rows) for part, rows in zip(parts, kept, strict=True)]
    if not shape.batched:
        return give(columns[0], torch)
    if len({rows.shape for rows in columns}) == 1:
        return give(np.stack(columns), torch)
    return [give(rows, torch) for rows in columns]


@overload
def select_from_scores(scores: Scores, budget: int, window: int, **options: Unpack[ChooseOptions]) -> Positions: ...


@overload
def select_from_scores(scores: Scores, budget: PerHead, window: int, **options: Unpack[ChooseOptions]) -> list[Any]: ...


@overload
def select_from_scores(scores: Tensor, budget: int, window: int, **options: Unpack[ChooseOptions]) -> Tensor: ...


@overload
def select_from_scores(scores: Tensor, budget: PerHead, window: int, **options: Unpack[ChooseOptions]) -> list[Any]: ...


def select_from_scores(
    scores: Any,
    budget: int | PerHead,
    window: int,
    *,
    kernel: int = 7,
    pooling: str = "max",
    edge: str = "count",
    window_in_budget: bool = True,
    nan: str = "raise",
) -> Any:
    """Return the positions of a prompt that each KV head keeps, from scores: the second half of :func:`select`.

    Scores are pooled, the best positions stay, and the window with them.

    Parameters
    ----------
    scores
        ``(..., kv_heads, n - window)`` float32, from :func:`window_scores`, :func:`scores_from_qk` or a rule of the
        caller's own: one for each position before the window.
    budget, window_in_budget
        As for :func:`select`. ``n`` or more keeps every position of a head, whatever its scores are.
    window
        How many positions follow the scored ones. They are always kept.
    kernel, pooling, edge
        As for :func:`pool_scores`.
    nan
        ``"raise"`` refuses a NaN or an infinity. ``"lowest"`` leaves it out of its neighbours' pools and ranks its
        position below every other.

    Returns
    -------
    numpy.ndarray, torch.Tensor or list
        ``(..., kv_heads, kept)``, ascending, uint32 or (torch) int64. With one budget per head a list of vectors, one
        per head. Axes in front of the heads make lists of such lists.

    Raises
    ------
    TypeError, ValueError
        An argument or a score that breaks a rule. The message says which.
    """
    if on_other_device("scores", scores):
        return _torch_path.select_from_scores(
            scores,
            budget,
            window,
            kernel=kernel,
            pooling=pooling,
            edge=edge,
            window_in_budget=window_in_budget,
            nan=nan,
        )
    given = ScoreRows(scores)
    n = prompt_length(given.shape, window)
    kv_heads, scored = given.shape[-2:]
    budgets, per_head = head_budgets(budget, kv_heads, n - scored, window_in_budget)
    params = _params(kernel, pooling, edge, choice("nan", nan, NAN))
    counts = [min(value, n) for value in budgets]
    most = max(counts)
    kept = np.empty((len(given.rows), most), np.uint32)
    if kept.size:
        size = workspace_size(lib.pb_kvcache_select_from_scores_workspace_size, params, n, n - scored)
        status = lib.pb_kvcache_select_from_scores(
            floats(given.rows),
            scored,
            len(kept),
            n,
            n - scored,
            params,
            words(np.array(counts * (len(kept) // kv_heads), np.uint32)),
            scratch(size),
            size,
            words(kept),
            most,
            kept.size,
        )
        if status != OK:
            raise given.refusal(status, np.array(counts)[:, None] < n)
    positions = given.give(kept, *given.shape[:-1], most)
    return by_head(positions, counts) if per_head else positions


def _params(kernel: Any, pooling: Any, edge: Any, nan: int, reduce: int = REDUCE["mean"]) -> Any:
    """Return the ``pb_kvcache_select_params``."""
    kernel, pooling, edge = pooling_options(kernel, pooling, edge)
    return ffi.new(
        "pb_kvcache_select_params *",
        {"reduce": reduce, "pooling": pooling, "kernel": kernel, "edge": edge, "nan": nan},
    )


def _as_columns(part: Part, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return positions among a sequence's tokens as columns of its padded row."""
    return positions if part.columns is None else part.columns[positions].astype(np.uint32)
