"""Window scores: what a prompt's last queries gave to each position before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from . import _torch_path
from ._calls import OK, floats, head_ranges, scratch, workspace_size
from ._errors import status_text
from ._native import ffi, lib
from ._options import NAN, REDUCE, at_least, choice, logit_scale
from ._selection import DEFAULT, Selection, rule_for
from ._shapes import AttentionShape
from ._tensor import View, give, on_other_device
from ._threads import in_threads

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ._types import Array, ScoreOptions, Scores


class Attention:
    """The checked `attn` of a call and its options. Those beside these say the rule, as for :class:`Selection`."""

    def __init__(
        self,
        attn: Any,
        num_kv_heads: Any,
        from_logits: bool,
        scale: Any,
        nan: Any,
        selection: Selection | str | None,
        **options: Any,
    ) -> None:
        self.view = View("attn", attn)
        self.shape = AttentionShape.of(self.view.shape, num_kv_heads, options.get("window"))
        self.rule = rule_for(selection, self.shape.window, self.shape.n, **options)
        #: In elements: of a sequence (0 where there is no batch), a query head and a query.
        self.strides = self.view.strides[:-1] if self.shape.batched else (0, *self.view.strides[:-1])
        self.scale = logit_scale(scale) if from_logits else 1.0
        self.nan = choice("nan", nan, NAN)
        self.from_logits = bool(from_logits)


class Part:
    """One sequence of an attention, as the kernels take it: some of its columns, by default all.

    Attributes
    ----------
    n
        How many columns.
    window
        How many queries: the sequence's last ones, no more than it has columns.
    struct
        The ``pb_kvcache_attention``.
    """

    def __init__(self, attention: Attention, sequence: int, columns: npt.NDArray[np.intp] | None = None) -> None:
        self.attention = attention
        self.sequence = sequence
        self.columns = columns
        view, shape = attention.view, attention.shape
        self.n = shape.n if columns is None else len(columns)
        self.window = min(shape.window, self.n)
        start = 0
        batch_stride, head_stride, row_stride = attention.strides
        address = view.address
        if columns is not None and self.n:
            start = int(columns[0])
            if int(columns[-1]) - start != self.n - 1:  # padding between the tokens, which are copied together
                self.owner = View("attn", view.owner[sequence][..., columns])
                address, (head_stride, row_stride, _) = self.owner.address, self.owner.strides
                sequence = start = 0
        address += (sequence * batch_stride + (shape.window - self.window) * row_stride + start) * view.size
        self.struct = ffi.new(
            "pb_kvcache_attention *",
            {
                "data": ffi.cast("void *", address),
                "dtype": view.code,
                "logits": attention.from_logits,
                "scale": attention.scale,
                "num_q_heads": shape.q_heads,
                "num_kv_heads": shape.kv_heads,
                "window": self.window,
                "n": self.n,
                "head_stride": head_stride,
                "row_stride": row_stride,
            },
        )

    def refusal(self, status: int, heads: npt.NDArray[np.bool_] | None = None) -> Exception:
        """Return the error for a status, with the first value that broke the rule. `heads`: the KV heads looked at."""
        attention, shape = self.attention, self.attention.shape
        # What the kernel saw: this sequence's queries and columns, scaled, and which of them each query may see.
        values = attention.view.floats()
        values = values[self.sequence] if shape.batched else values
        columns = np.arange(shape.n) if self.columns is None else self.columns
        first_row = shape.window - self.window
        values = values[:, first_row:, columns]
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * np.float32(attention.scale)
        position = np.arange(self.n)
        seen = position <= self.n - self.window + np.arange(self.window)[:, None]
        if heads is not None:
            seen = seen & heads.repeat(shape.q_heads // shape.kv_heads)[:, None, None]
        # Which of them broke the rule.
        if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
            bad = (values < 0) | (np.zeros_like(seen) if attention.nan == NAN["lowest"] else ~np.isfinite(values))
            index = np.argwhere(bad & seen & (position < self.n - attention.rule.protected))
            rule = "every probability must be finite and >= 0"
        elif status == lib.PB_KVCACHE_ERROR_LOGIT:
            index = np.argwhere(~(scaled < np.inf) & seen)
            rule = f"no logit may be NaN or +inf, nor become so times scale = {attention.scale}"
        elif status == lib.PB_KVCACHE_ERROR_MASKED:
            index = np.argwhere(~((scaled > -np.inf) & seen).any(-1) & seen.any(-1))
            rule = "every query must see a position, all its logits are -inf"
        elif status == lib.PB_KVCACHE_ERROR_SCORE:
            return ValueError("attn: a sum of probabilities is too large for float32")
        else:
            return RuntimeError(status_text(status))
        # Where it stands in the caller's array.
        first = tuple(int(i) for i in index[0])
        where = (*((self.sequence,) if shape.batched else ()), first[0], first[1] + first_row)
        if len(first) == 3:
            return ValueError(f"attn[{', '.join(map(str, (*where, columns[first[2]])))}] = {values[first]}: {rule}")
        return ValueError(f"attn[{', '.join(map(str, where))}]: {rule}")


def run_parts(
    jobs: list[tuple[Part, Callable[[], int]]], threads: int, refusal: Callable[[Part, int], Exception] = Part.refusal
) -> None:
    """Run the jobs on up to `threads` threads, and raise for the first, in their order, that is refused."""
    statuses = in_threads([job for _, job in jobs], threads)
    for status, (part, _) in zip(statuses, jobs, strict=True):
        if status != OK:
            raise refusal(part, status)


@overload
def window_scores(attn: Array, *, num_kv_heads: int, **options: Unpack[ScoreOptions]) -> Scores: ...


@overload
def window_scores(attn: Tensor, *, num_kv_heads: int, **options: Unpack[ScoreOptions]) -> Tensor: ...


def window_scores(
    attn: Any,
    *,
    num_kv_heads: int,
    selection: Selection | str | None = None,
    reduce: str = DEFAULT.reduce,
    protect: int | None = None,
    from_logits: bool = False,
    scale: float = 1.0,
    nan: str = "raise",
    threads: int = 1,
) -> Any:
    """Return what the window's queries gave to each position before the protected ones.

    Parameters
    ----------
    attn
        ``(q_heads, window, n)`` or ``(batch, q_heads, window, n)``, float32, float16 or bfloat16: how much the last
        `window` queries of the prompt look at its ``n`` positions. Read in place where the last axis is contiguous.
    num_kv_heads
        KV heads. They divide ``q_heads``: query heads ``h*g .. h*g+g-1`` belong to KV head ``h``.
    selection
        A :class:`Selection` or the name of one, instead of `reduce` and `protect`. `attn` has as many queries as its
        window, or as many as there are positions where there are fewer.
    reduce
        ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a group, after the mean over the window.
    protect
        How many of the last positions have no score, as they are kept anyway. None: the window. With fewer, a position
        of the window has the sum over the queries that see it, divided by the whole window.
    from_logits
        `attn` holds products of queries and keys. They are scaled, masked causally inside the window and softmaxed
        here, in one pass. -inf is a position that the query does not see.
    scale
        What logits are multiplied by, in float32.
    nan
        ``"raise"`` refuses NaN and +inf. ``"lowest"`` leaves them out of their query's softmax and gives the positions
        that have one the score -inf.
    threads
        KV heads are divided among so many threads. The result does not depend on it.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        ``(num_kv_heads, n - protect)`` float32, or a batch of them.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a value: negative probabilities, NaN, infinities, a query that sees nothing.
    """
    if on_other_device("attn", attn):
        return _torch_path.window_scores(
            attn,
            num_kv_heads=num_kv_heads,
            selection=selection,
            reduce=reduce,
            protect=protect,
            from_logits=from_logits,
            scale=scale,
            nan=nan,
        )
    attention = Attention(attn, num_kv_heads, from_logits, scale, nan, selection, reduce=reduce, protect=protect)
    threads = at_least("threads", threads, 1)
    shape = attention.shape
    protect = attention.rule.protected
    scored = shape.n - protect
    scores = np.empty((shape.batch, shape.kv_heads, scored), np.float32)

    def job(part: Part, first: int, end: int) -> Callable[[], int]:
        def run() -> int:
            size = workspace_size(lib.pb_kvcache_window_scores_workspace_size, part.struct, first, end)
            rows = floats(scores[part.sequence])
            return lib.pb_kvcache_window_scores(  # type: ignore[no-any-return]
                part.struct,
                REDUCE[attention.rule.reduce],
                attention.nan,
                protect,
                first,
                end,
                scratch(size),
                size,
                rows,
                scored,
                shape.kv_heads * scored,
            )

        return run

    ranges = head_ranges(shape.kv_heads, shape.batch, threads)
    parts = [Part(attention, sequence) for sequence in range(shape.batch)]
    run_parts([(part, job(part, first, end)) for part in parts for first, end in ranges], threads)
    return give(scores if shape.batched else scores[0], attention.view.torch)
