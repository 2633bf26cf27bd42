"""The planner: every layer's budget, adding up exactly, in whole blocks and within bounds.

The shapes are those of PyramidKV (arXiv 2406.02069), a geometric one, and any measured curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ._amount import SHAPES, Amount, Curve, TotalError, only_one
from ._bounds import Bounds
from ._checks import UINT32_MAX, integer, positive, shown
from ._dtypes import cache_nbytes, position_bits
from ._errors import status_text
from ._groups import LayerGroups, group_layers, runs_of
from ._native import ffi, lib


@dataclass(frozen=True, eq=False, repr=False)
class LayerPlan:
    """Every layer's budget. Made by :func:`plan`, :meth:`from_memory` or :meth:`from_ratio`.

    Attributes
    ----------
    budgets
        Positions that each layer keeps, shape ``(num_layers,)``, uint32, read-only.
    requested
        Positions that were to be divided. They are more than :attr:`total` only where every layer is at its maximum.
    shape, ratio, weights
        What the budgets are proportional to: `ratio` is None for the shapes without one, `weights` for all but
        ``"weights"``.
    minimum, maximum
        The bounds as they were given: a number, an array with one per layer, or None for no maximum.
    multiple_of
        The block size: every budget is a multiple of it.
    """

    budgets: npt.NDArray[np.uint32]
    requested: int
    shape: str
    ratio: float | None
    weights: npt.NDArray[np.float64] | None
    minimum: int | npt.NDArray[np.uint32]
    maximum: int | npt.NDArray[np.uint32] | None
    multiple_of: int

    @classmethod
    def from_memory(
        cls, nbytes: int, num_kv_heads: int, head_dim: int, dtype: Any, num_layers: int, **options: Any
    ) -> LayerPlan:
        """Return the plan of as many positions as fit `nbytes` bytes.

        Parameters
        ----------
        nbytes
            Bytes for the keys and values of all layers.
        num_kv_heads, head_dim, dtype
            What one position of one layer takes, as for :meth:`nbytes`.
        num_layers
            Layers of the model.
        **options
            The shape, bounds and block size, as for :func:`plan`.

        Returns
        -------
        LayerPlan
            Its :meth:`nbytes` is at most `nbytes`, and falls short of it by less than one block.

        Raises
        ------
        TypeError, ValueError
            As for :func:`plan`. Also where `nbytes` does not hold every layer's minimum.

        Examples
        --------
        >>> LayerPlan.from_memory(64 * 2**20, 8, 128, "float16", 32, multiple_of=16).total
        16384
        """
        layers = positive("num_layers", num_layers)
        amount = Amount.of("memory", nbytes, "nbytes")
        bits = position_bits(num_kv_heads, head_dim, dtype)
        return cls._of_amount(amount, layers, options, position_bits=bits)

    @classmethod
    def from_ratio(cls, fraction: float, sequence_length: int, num_layers: int, **options: Any) -> LayerPlan:
        """Return the plan that keeps a share of a sequence.

        Parameters
        ----------
        fraction
            Share of the sequence that the layers keep on average, above 0 and at most 1. The total is
            ``fraction * sequence_length * num_layers`` to the nearest position, and then rounded down to a block.
        sequence_length
            Positions of the sequence. No layer gets more, unless `maximum` says otherwise.
        num_layers
            Layers of the model.
        **options
            The shape, bounds and block size, as for :func:`plan`.

        Raises
        ------
        TypeError, ValueError
            As for :func:`plan`. Also where the share does not hold every layer's minimum.

        Examples
        --------
        >>> LayerPlan.from_ratio(0.125, 4096, 32) == plan(32, 512, maximum=4096)
        True
        """
        layers = positive("num_layers", num_layers)
        amount = Amount.of("fraction", fraction)
        length = positive("sequence_length", sequence_length)
        return cls._of_amount(amount, layers, {"maximum": length} | options, length=length)

    @classmethod
    def _of_amount(cls, amount: Amount, layers: int, options: dict[str, Any], **sizes: int) -> LayerPlan:
        """Return the plan of a memory or a fraction, with errors in its terms."""
        block = positive("multiple_of", options.get("multiple_of", 1))
        others = {name: options.pop(name, None) for name in ("budget", "total")}
        only_one({amount.name: amount.value} | others)
        try:
            return plan(layers, total=amount.total(layers, multiple_of=block, **sizes), **options)
        except TotalError as error:
            raise amount.refusal(error, layers, **sizes) from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for value in state.values():  # NumPy's pickles and copies forget that an array is read-only
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.budgets)

    @property
    def total(self) -> int:
        """Positions in all layers: the sum of the budgets."""
        return int(self.budgets.sum(dtype=np.uint64))

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each layer begins in one arena, and at the end the total: shape ``(num_layers + 1,)``."""
        offsets = np.zeros(self.num_layers + 1, np.uint64)
        np.cumsum(self.budgets, dtype=np.uint64, out=offsets[1:])
        return offsets

    def _bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return Bounds(self.minimum, self.maximum, self.multiple_of).in_blocks(self.num_layers)

    @property
    def at_minimum(self) -> npt.NDArray[np.bool_]:
        """The layers that hold their minimum (rounded up to a multiple), shape ``(num_layers,)``."""
        return np.equal(self.budgets, self._bounds()[0])

    @property
    def at_maximum(self) -> npt.NDArray[np.bool_]:
        """The layers that hold their maximum (rounded down to a multiple), shape ``(num_layers,)``."""
        return np.equal(self.budgets, self._bounds()[1])

    def nbytes(self, num_kv_heads: int, head_dim: int, dtype: Any = "float16") -> int:
        """Return the bytes of all layers' keys and values.

        Parameters
        ----------
        num_kv_heads
            Key-value heads of a layer; not the query heads.
        head_dim
            Elements of one head's key, and of its value.
        dtype
            Of the elements: a name (``float16``, ``bfloat16``, ``float8``, ``int8``, ``int4`` ...), a NumPy dtype or a
            torch one. ``float8`` is ``float8_e4m3fn``.

        Returns
        -------
        int
            ``2 * total * num_kv_heads * head_dim * bytes of an element``, rounded up to a whole byte.
        """
        return cache_nbytes(self.total, num_kv_heads, head_dim, dtype)

    def groups(self, n: int) -> LayerGroups:
        """Return at most `n` groups of consecutive layers with equal budgets.

        For engines whose layers share a page table. Of all splits, this one has the least sum of squared changes to the
        layers' budgets. Each group gets the mean of its layers, rounded down to a multiple. What that leaves goes to
        whole groups, the largest remainders first, as far as it reaches. Bounds and order of the budgets are kept.
        :attr:`LayerGroups.rounding` says how many positions are left.

        Raises
        ------
        TypeError, ValueError
            `n` is not an integer above 0. The layers' own bounds allow no `n` groups. There are more than 4096 runs of
            equal budgets, or finding `n` groups of them would take minutes.

        Examples
        --------
        >>> for group in plan(8, 512, maximum=700, multiple_of=16).groups(3):
        ...     print(group)
        LayerGroup(start=0, stop=4, budget=656)
        LayerGroup(start=4, stop=6, budget=448)
        LayerGroup(start=6, stop=8, budget=272)
        """
        n = integer("n", n)
        if n <= 0:
            raise ValueError(f"n = {shown(n)}: must be greater than 0")
        return group_layers(self.budgets, *self._bounds(), self.multiple_of, n)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings and lists, ready for JSON."""
        return {
            "num_layers": self.num_layers,
            "total": self.total,
            "requested": self.requested,
            "shape": self.shape,
            "ratio": self.ratio,
            "weights": None if self.weights is None else self.weights.tolist(),
            "minimum": self.minimum if isinstance(self.minimum, int) else self.minimum.tolist(),
            "maximum": self.maximum.tolist() if isinstance(self.maximum, np.ndarray) else self.maximum,
            "multiple_of": self.multiple_of,
            "at_minimum": int(self.at_minimum.sum()),
            "at_maximum": int(self.at_maximum.sum()),
            "budgets": self.budgets.tolist(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LayerPlan:
        """Return the plan whose members :meth:`to_dict` returned, also after a way through JSON.

        The plan is made anew from its shape, bounds and total, and must come out with the same budgets. Budgets that
        were changed by hand are refused. Members that :meth:`to_dict` does not have are not looked at.

        Raises
        ------
        TypeError, ValueError
            A member is missing, breaks a rule of :func:`plan`, or does not follow from the others.

        Examples
        --------
        >>> LayerPlan.from_dict(plan(4, 100, ratio=3).to_dict()) == plan(4, 100, ratio=3)
        True
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields: must be a mapping, as LayerPlan.to_dict returns it, not {type(fields).__name__}")
        options = ("shape", "ratio", "weights", "minimum", "maximum", "multiple_of")
        needed = ("num_layers", "requested", *options, "budgets")
        for name in needed:
            if name not in fields:
                raise ValueError(f"{name}: is missing; a plan has {', '.join(needed)}")
        budgets = fields["budgets"]
        # Before the plan is made: a number alone must not take gigabytes.
        if not isinstance(budgets, Sequence) or len(budgets) != positive("num_layers", fields["num_layers"]):
            raise ValueError(f"budgets: must be a list of num_layers = {shown(fields['num_layers'])} integers")
        if not isinstance(fields["shape"], str):  # a plan has one: None is not the default here
            raise TypeError(f"shape = {fields['shape']!r}: must be a string")
        made = plan(len(budgets), total=fields["requested"], **{name: fields[name] for name in options})
        for layer, (found, budget) in enumerate(zip(budgets, made.budgets.tolist(), strict=True)):
            if isinstance(found, bool) or found != budget:
                raise ValueError(
                    f"budgets[{layer}] = {shown(found)}: must be {budget}, which follows from the plan's other members"
                )
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.requested, self.shape, self.ratio, self.multiple_of, self.budgets.tobytes()))

    def _shape_text(self) -> str:
        if self.ratio is None:
            return {"uniform": "uniform", "weights": "by weights"}[self.shape]
        return f"{self.shape} of ratio {self.ratio:g}"

    def __repr__(self) -> str:
        return (
            f"<LayerPlan: {self.num_layers} layers, {self._shape_text()}, {self.budgets[0]} .. {self.budgets[-1]}, "
            f"total {self.total}>"
        )

    def __str__(self) -> str:
        """Return a table: a line per run of layers with equal budgets."""
        starts = runs_of(self.budgets)
        stops = [*starts[1:].tolist(), self.num_layers]
        offsets = self.offsets
        rows = [("layers", "budget", "offset")]
        for start, stop in zip(starts.tolist(), stops, strict=True):
            name = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
            rows.append((name, str(self.budgets[start]), str(offsets[start])))
        if len(rows) > 401:
            rows = [*rows[:201], ("...", "...", "..."), *rows[-200:]]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        blocks = f", in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        lines.append(
            f"total {self.total} positions in {self.num_layers} layers ({self._shape_text()}){blocks}; "
            f"{int(self.at_minimum.sum())} at their minimum, {int(self.at_maximum.sum())} at their maximum"
        )
        if self.total != self.requested:
            lines.append(f"requested {self.requested}: more than the maximums hold")
        return "\n".join(lines)


def plan(
    num_layers: int,
    budget: int | None = None,
    *,
    total: int | None = None,
    shape: Literal["uniform", "pyramid", "geometric", "weights"] | None = None,
    ratio: float | None = None,
    beta: float | None = None,
    weights: npt.ArrayLike | None = None,
    minimum: int | npt.ArrayLike = 1,
    maximum: int | npt.ArrayLike | None = None,
    multiple_of: int = 1,
) -> LayerPlan:
    """Divide a cache's positions over a model's layers, to the last position.

    Layer ``l`` has a weight ``w[l]`` by the shape, and the target ``clamp(lambda * w[l], minimum, maximum)``, with
    ``lambda`` such that the targets add up to the total. What one layer may not hold goes to the others. The budgets
    are the targets rounded to multiples, the largest remainders up, the lower layer first on a tie. For every input the
    budgets add up to the total, keep their bounds, are less than one multiple away from their targets, and are the same
    on every machine.

    Parameters
    ----------
    num_layers
        Layers that share the cache.
    budget
        Positions per layer on average.
    total
        Positions in all, instead of `budget`; a multiple of `multiple_of`. A total above the sum of the maximums gives
        every layer its maximum.
    shape
        ``"pyramid"``: arithmetic, the first layer's weight `ratio` times the last one's. ``"geometric"``: the same
        ends, and equal quotients between neighbours. ``"uniform"``: all equal. ``"weights"``: the caller's. None:
        ``"weights"`` where `weights` are given, and ``"pyramid"`` else.
    ratio
        First layer over last, for ``"pyramid"`` and ``"geometric"``: any real number above 0. Below 1 the deep layers
        get more. None: 4, or what `beta` says. 4 is a starting point, milder than the paper's pyramids: measure your
        model.
    beta
        The paper's parameter instead of `ratio`, for ``"pyramid"``: the last layer keeps ``budget / beta`` and the
        first ``2 * budget`` less that, which is a ratio of ``2 * beta - 1``. Above 0.5. The paper uses 10 to 30.
    weights
        One per layer, finite and above 0: a measured curve. Only their proportions matter. A weight below the 2**-60th
        part of the largest counts as that part.
    minimum, maximum
        The fewest and the most positions of a layer: a number, or one per layer. The maximum is typically the
        sequence's length. None is no maximum. A minimum is rounded up to a multiple, a maximum down.
    multiple_of
        The block size of a paged cache: every budget is a multiple of it.

    Returns
    -------
    LayerPlan
        The budgets, and what follows from them.

    Raises
    ------
    TypeError
        Not a number, or not a whole number where one is needed.
    ValueError
        Zero layers. Not exactly one of `budget` and `total`. A total that is not a multiple, or is below the sum of the
        minimums. A ratio, beta or weight that is out of range. Arguments that contradict each other. Bounds that cross
        or that have no multiple between them.

    Notes
    -----
    :func:`pyramid_budget` floors each layer's share by itself, which loses up to ``num_layers - 1`` positions, and
    knows no bounds. Without bounds in the way this plan is within one position of it in every layer.

    The paper does not say what a layer does with a share above the sequence's length. At beta 20 the first layer's is
    almost twice the average. Clipping such shares would waste positions, and raising the deep layers to a minimum would
    overspend. The total here is exact.

    The pyramid: PyramidKV, arXiv 2406.02069.

    Examples
    --------
    >>> plan(32, 512, maximum=8192, multiple_of=16).budgets[[0, 15, 31]]
    array([816, 528, 208], dtype=uint32)
    >>> paper = plan(32, 2048, beta=20, maximum=7950)
    >>> int(paper.budgets[0]), int(paper.budgets[-1]), paper.total
    (3994, 102, 65536)
    """
    layers = positive("num_layers", num_layers)
    amount = Amount.one_of({"budget": budget, "total": total})
    if amount is None:
        raise ValueError("budget, total: one of them must be given")
    curve = Curve.of(layers, shape, ratio, beta, weights)
    bounds = Bounds.of(layers, minimum, maximum, multiple_of)
    positions = amount.total(layers)
    budgets = _divide(layers, positions, curve, bounds)
    return LayerPlan(
        budgets, positions, curve.shape, curve.ratio, curve.weights, bounds.minimum, bounds.maximum, bounds.multiple_of
    )


def _divide(layers: int, total: int, curve: Curve, bounds: Bounds) -> npt.NDArray[np.uint32]:
    """Return every layer's budget, read-only, from the native planner."""
    b = bounds.multiple_of
    most = 2**64 - 1
    given = total
    if bounds.maximum is not None and total > most and total % b == 0:
        given = most // b * b  # more than the maximums hold, as well
    if given > most:
        raise ValueError(f"total = {shown(total)}: must be at most {most}")

    params = ffi.new("pb_kvcache_plan_params *")
    params.total = given
    params.shape = SHAPES[curve.shape]
    params.multiple_of = b
    params.ratio = 1.0 if curve.ratio is None else curve.ratio
    params.maximum = UINT32_MAX
    keep = []  # what the struct points to
    if curve.weights is not None:
        keep.append(ffi.from_buffer("double[]", curve.weights))
        params.weights = keep[-1]
    if isinstance(bounds.minimum, int):
        params.minimum = bounds.minimum
    else:
        keep.append(ffi.from_buffer("uint32_t[]", bounds.minimum))
        params.minimums = keep[-1]
    if isinstance(bounds.maximum, int):
        params.maximum = bounds.maximum
    elif bounds.maximum is not None:
        keep.append(ffi.from_buffer("uint32_t[]", bounds.maximum))
        params.maximums = keep[-1]
    budgets = np.empty(layers, np.uint32)
    status = lib.pb_kvcache_plan(params, ffi.from_buffer("uint32_t[]", budgets), layers)
    if status != lib.PB_KVCACHE_OK:
        raise _refusal(status, layers, total, bounds)
    budgets.flags.writeable = False
    return budgets


def _refusal(status: int, layers: int, total: int, bounds: Bounds) -> ValueError:
    """Return the error of a refused plan, with the numbers and what would be feasible."""
    b = bounds.multiple_of
    if status == lib.PB_KVCACHE_ERROR_PLAN_TOTAL:
        below = total // b * b
        return ValueError(f"total = {total}: must be a multiple of multiple_of = {b}, such as {below} or {below + b}")
    if status == lib.PB_KVCACHE_ERROR_PLAN_OVERFLOW:
        most = layers * UINT32_MAX // b * b
        return TotalError(total, f"must be at most {most}, what {layers} layers of 32-bit budgets hold", most)
    if status == lib.PB_KVCACHE_ERROR_PLAN_BOUNDS:
        return ValueError(bounds.crossing(layers))
    if status == lib.PB_KVCACHE_ERROR_PLAN_BLOCK:
        return ValueError(bounds.without_block(layers))
    if status == lib.PB_KVCACHE_ERROR_PLAN_MINIMUM:
        least = sum(bounds.in_blocks(layers)[0].tolist())
        rounded = f", each rounded up to a multiple of {b}" if b > 1 else ""
        feasible = total // b // layers * b
        hint = f" (or minimum at most {feasible})" if isinstance(bounds.minimum, int) else ""
        return TotalError(total, f"must be at least {least}, the sum of the {layers} minimums{rounded}{hint}", least)
    return ValueError(status_text(status))
