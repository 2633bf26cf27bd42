"""Prefill selection: which positions of a prompt each KV head keeps.

Once the prompt is processed, the attention of its last `window` queries says which of the earlier positions matter. It
is averaged over the window and over the query heads that share a KV head (:mod:`._score`), perhaps multiplied by a
weight of each position, and pooled over neighbours (:mod:`._pool`). The best positions stay (:mod:`._choose`), and with
them the last `protect`, the window by default, and the first `sinks`: SnapKV, arXiv 2404.14469. PyramidKV, arXiv
2406.02069, gives every layer its own budget. :class:`Selection` is one such rule as a whole.

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
from ._calls import OK, ScoreRows, SelectParams, floats, head_ranges, scratch, words, workspace_size
from ._native import lib
from ._options import NAN, at_least, choice, head_budgets
from ._position_weights import bad_weight, require_weights, weights_of, weights_refusal
from ._score import Attention, Part, run_parts
from ._selection import DEFAULT, Selection, require_window_score, rule_of_scores
from ._shapes import by_head, prompt_length
from ._tensor import give, on_other_device

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ._types import Array, ChooseOptions, PerHead, Positions, Scores, SelectOptions


@overload
def select(
    attn: Array, budget: int, *, num_kv_heads: int, valid: None = None, **options: Unpack[SelectOptions]
) -> Positions: ...


@overload
def select(
    attn: Array, budget: int, *, num_kv_heads: int, valid: Any, **options: Unpack[SelectOptions]
) -> Positions | list[Positions]: ...


@overload
def select(
    attn: Array, budget: PerHead, *, num_kv_heads: int, valid: Any = None, **options: Unpack[SelectOptions]
) -> list[Any]: ...


@overload
def select(
    attn: Tensor, budget: int, *, num_kv_heads: int, valid: None = None, **options: Unpack[SelectOptions]
) -> Tensor: ...


@overload
def select(
    attn: Tensor, budget: int, *, num_kv_heads: int, valid: Any, **options: Unpack[SelectOptions]
) -> Tensor | list[Tensor]: ...


@overload
def select(
    attn: Tensor,
    budget: PerHead,
    *,
    num_kv_heads: int,
    valid: Any = None,
    **options: Unpack[SelectOptions],
) -> list[Any]: ...


def select(
    attn: Any,
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
    threads: int = 1,
) -> Any:
    """Return the positions of a prompt that each KV head keeps: its last `protect`, and the best before them.

    Parameters
    ----------
    attn, num_kv_heads, reduce, from_logits, scale, nan, threads
        As for :func:`window_scores`.
    budget
        Positions kept: one number, or one per KV head. ``n`` or more keeps every position, whatever `attn` holds.
    window
        How many queries `attn` has. None: as many as it has.
    selection
        A :class:`Selection` or the name of one, instead of `window`, `kernel`, `pooling`, `edge`, `reduce`, `protect`
        and `sinks`. Its score must be the window's. With ``value_weight=True`` it needs `weights`.
    kernel, pooling, edge
        As for :func:`pool_scores`. A `kernel` of 1 is no pooling.
    protect
        How many of the last positions are always kept. None: the window. With fewer, the other positions of the window
        compete by the sum over the queries that see them, divided by the whole window.
    sinks
        How many of the first positions are always kept.
    weights
        ``(num_kv_heads, n)`` float32, or a batch of them: what the score of each position is multiplied by, once,
        before pooling. Finite and >= 0. Those of the protected positions are not read and may be left out:
        ``(num_kv_heads, n - protect)``. None: nothing is multiplied.
    window_in_budget
        True: `budget` counts what is always kept and is at least as large. False: that comes on top, as in the code
        published with the paper.
    valid
        For a padded batch: which columns are tokens, as a boolean mask ``(batch, n)``, or how many from the left, one
        number per sequence. The rows of a sequence are the queries of its own last tokens; one that is shorter than the
        window has as many queries as tokens, in the last rows. The positions returned are columns of the padded row,
        and those of a sequence are what it would get alone. None: all.

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
    rule_options: dict[str, Any] = {
        "window": window,
        "kernel": kernel,
        "pooling": pooling,
        "edge": edge,
        "reduce": reduce,
        "protect": protect,
        "sinks": sinks,
    }
    if on_other_device("attn", attn):
        return _torch_path.select(
            attn,
            budget,
            num_kv_heads=num_kv_heads,
            selection=selection,
            weights=weights,
            from_logits=from_logits,
            scale=scale,
            window_in_budget=window_in_budget,
            valid=valid,
            nan=nan,
            **rule_options,
        )
    attention = Attention(attn, num_kv_heads, from_logits, scale, nan, selection, **rule_options)
    shape, rule = attention.shape, attention.rule
    require_window_score(rule)
    require_weights(rule.value_weight, weights)
    budgets, per_head = head_budgets(budget, shape.kv_heads, rule.protected, rule.sinks, window_in_budget)
    heads = (shape.batch, shape.kv_heads) if shape.batched else (shape.kv_heads,)
    weighing = weights_of(weights, heads, shape.n - rule.protected, shape.n)
    threads = at_least("threads", threads, 1)
    parts = [Part(attention, sequence, columns) for sequence, columns in enumerate(shape.token_columns(valid))]
    counts = [np.array([min(value, part.n) for value in budgets], np.uint32) for part in parts]
    kept = [np.empty((shape.kv_heads, int(count.max())), np.uint32) for count in counts]
    row_weights = [_weights_of_part(weighing, part) for part in parts]
    params = [SelectParams(rule, attention.nan, rows) for rows in row_weights]

    def job(part: Part, first: int, end: int) -> Callable[[], int]:
        count, rows, struct = counts[part.sequence], kept[part.sequence], params[part.sequence].struct

        def run() -> int:
            size = workspace_size(lib.pb_kvcache_select_workspace_size, part.struct, struct, first, end)
            return lib.pb_kvcache_select(  # type: ignore[no-any-return]
                part.struct,
                struct,
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

    def refusal(part: Part, status: int) -> Exception:
        """Return the error of a sequence, for the first of its heads that does not keep everything."""
        limited = counts[part.sequence] < part.n
        rows = row_weights[part.sequence]
        if rows is None or status not in (lib.PB_KVCACHE_ERROR_SELECT_WEIGHT, lib.PB_KVCACHE_ERROR_SCORE):
            return part.refusal(status, limited)
        return _weight_refusal(part, status, rows, limited)

    # A sequence that every budget covers is kept whole, however short it is. The others are longer than what is always
    # kept.
    for count, rows, part in zip(counts, kept, parts, strict=True):
        if count.min() == part.n:
            rows[:] = np.arange(part.n, dtype=np.uint32)
    limited = [part for part, count in zip(parts, counts, strict=True) if count.min() < part.n]
    ranges = head_ranges(shape.kv_heads, len(limited), threads)
    run_parts([(part, job(part, first, end)) for part in limited for first, end in ranges], threads, refusal)

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
def select_from_scores(
    scores: Scores, budget: int, protect: int | None = None, **options: Unpack[ChooseOptions]
) -> Positions: ...


@overload
def select_from_scores(
    scores: Scores, budget: PerHead, protect: int | None = None, **options: Unpack[ChooseOptions]
) -> list[Any]: ...


@overload
def select_from_scores(
    scores: Tensor, budget: int, protect: int | None = None, **options: Unpack[ChooseOptions]
) -> Tensor: ...


@overload
def select_from_scores(
    scores: Tensor, budget: PerHead, protect: int | None = None, **options: Unpack[ChooseOptions]
) -> list[Any]: ...


def select_from_scores(
    scores: Any,
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
    """Return the positions of a prompt that each KV head keeps, from scores: the second half of :func:`select`.

    Scores are weighed and pooled, the best positions stay, and with them the protected ones and the sinks.

    Parameters
    ----------
    scores
        ``(..., kv_heads, n - protect)`` float32, from :func:`window_scores`, :func:`scores_from_qk` or a rule of the
        caller's own: one for each position before the protected ones.
    budget, window_in_budget
        As for :func:`select`. ``n`` or more keeps every position of a head, whatever its scores are.
    protect
        How many positions follow the scored ones. They are always kept. For scores that were made without `protect`,
        the window. Left out only with `selection`.
    selection
        A :class:`Selection` or the name of one, instead of `protect`, `kernel`, `pooling`, `edge` and `sinks`. Its
        window, `reduce` and `score` are not read: the scores are there. With ``value_weight=True`` it needs `weights`.
    kernel, pooling, edge, sinks
        As for :func:`select`.
    weights
        As for :func:`select`, ``(..., kv_heads, n)`` or ``(..., kv_heads, n - protect)``.
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
        An argument, a score or a weight that breaks a rule. The message says which.
    """
    rule_options: dict[str, Any] = {
        "protect": protect,
        "kernel": kernel,
        "pooling": pooling,
        "edge": edge,
        "sinks": sinks,
    }
    if on_other_device("scores", scores):
        return _torch_path.select_from_scores(
            scores,
            budget,
            selection=selection,
            weights=weights,
            window_in_budget=window_in_budget,
            nan=nan,
            **rule_options,
        )
    given = ScoreRows(scores)
    rule = rule_of_scores(selection, **rule_options)
    n = prompt_length(given.shape, rule.protected)
    require_weights(rule.value_weight, weights)
    kv_heads, scored = given.shape[-2:]
    budgets, per_head = head_budgets(budget, kv_heads, rule.protected, rule.sinks, window_in_budget)
    weighing = weights_of(weights, given.shape[:-1], scored, n)
    params = SelectParams(rule, choice("nan", nan, NAN), weighing)
    counts = [min(value, n) for value in budgets]
    most = max(counts)
    kept = np.empty((len(given.rows), most), np.uint32)
    if kept.size:
        size = workspace_size(lib.pb_kvcache_select_from_scores_workspace_size, params.struct, n)
        status = lib.pb_kvcache_select_from_scores(
            floats(given.rows),
            scored,
            len(kept),
            n,
            params.struct,
            words(np.array(counts * (len(kept) // kv_heads), np.uint32)),
            scratch(size),
            size,
            words(kept),
            most,
            kept.size,
        )
        if status != OK:
            read = np.array(counts)[:, None] < n
            absent = not np.isfinite(given.values[np.broadcast_to(read, given.shape)]).all()
            if weighing is None or (status == lib.PB_KVCACHE_ERROR_SCORE and nan == "raise" and absent):
                raise given.refusal(status, read)
            raise weights_refusal(status, weighing[..., :scored], given.values, read)
    positions = given.give(kept, *given.shape[:-1], most)
    return by_head(positions, counts) if per_head else positions


def _weights_of_part(weights: npt.NDArray[np.float32] | None, part: Part) -> npt.NDArray[np.float32] | None:
    """Return the weights of one sequence's tokens, ``(kv_heads, its n - protect or more)``."""
    if weights is None:
        return None
    rows = weights[part.sequence] if part.attention.shape.batched else weights
    if part.columns is None:
        return rows
    return np.ascontiguousarray(rows[:, part.columns[: max(0, part.n - part.attention.rule.protected)]])


def _weight_refusal(
    part: Part, status: int, weights: npt.NDArray[np.float32], heads: npt.NDArray[np.bool_]
) -> Exception:
    """Return the error of a sequence whose weights, or whose scores times weights, break a rule."""
    attention = part.attention
    scored = part.n - attention.rule.protected
    read = heads[:, None]
    where = (part.sequence,) if attention.shape.batched else ()
    if status == lib.PB_KVCACHE_ERROR_SELECT_WEIGHT:
        first = np.argwhere(~(np.isfinite(weights) & (weights >= 0))[:, :scored] & read)[0]
        column = first[1] if part.columns is None else part.columns[first[1]]
        return bad_weight(weights, first, (*where, int(first[0]), int(column)))
    return ValueError("attn: a sum of probabilities, times its weight, is too large for float32")


def _as_columns(part: Part, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return positions among a sequence's tokens as columns of its padded row."""
    return positions if part.columns is None else part.columns[positions].astype(np.uint32)
