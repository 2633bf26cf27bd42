"""The planner: every layer's budget, adding up exactly, in whole blocks and within bounds.

The shapes are those of PyramidKV (arXiv 2406.02069), a geometric one, and any measured curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, integer, plain_array, real, shown, uint32
from ._errors import status_text
from ._native import ffi, lib

#: The shapes, by name.
SHAPES: dict[str, int] = {
    "uniform": lib.PB_KVCACHE_PLAN_UNIFORM,
    "pyramid": lib.PB_KVCACHE_PLAN_PYRAMID,
    "geometric": lib.PB_KVCACHE_PLAN_GEOMETRIC,
    "weights": lib.PB_KVCACHE_PLAN_WEIGHTS,
}

#: Bits of one element, by name.
DTYPE_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
}

#: Finding the best groups takes time in the square of this many runs of equal budgets, and room for their number times
#: the groups'.
_MOST_RUNS = 4096
#: The square times the groups: some seconds.
_MOST_GROUP_STEPS = 2**30


class _DefaultRatio(int):
    """The ratio of a plan that states none: told by identity from a 4 that is stated."""


class _DefaultShape(str):
    """The shape of a plan that states none."""

    __slots__ = ()


_RATIO = _DefaultRatio(4)
_SHAPE = _DefaultShape("pyramid")


class LayerGroup(NamedTuple):
    """Consecutive layers ``start`` .. ``stop - 1`` that hold `budget` positions each."""

    start: int
    stop: int
    budget: int


@dataclass(frozen=True)
class LayerGroups(Sequence[LayerGroup]):
    """Groups of consecutive layers with equal budgets: a sequence of :class:`LayerGroup`.

    Attributes
    ----------
    groups
        The groups, from layer 0 on.
    total
        Positions in all.
    rounding
        Positions of the plan that the groups leave out, because whole groups can only grow by one multiple a layer;
        ``plan.total - total``, never negative.
    """

    groups: tuple[LayerGroup, ...]
    total: int
    rounding: int

    @property
    def budgets(self) -> npt.NDArray[np.uint32]:
        """Every layer's budget, shape ``(num_layers,)``."""
        return np.repeat(
            np.array([group.budget for group in self.groups], np.uint32),
            [group.stop - group.start for group in self.groups],
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[LayerGroup]:
        return iter(self.groups)

    @overload
    def __getitem__(self, index: int) -> LayerGroup: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LayerGroup, ...]: ...
    def __getitem__(self, index: int | slice) -> LayerGroup | tuple[LayerGroup, ...]:
        return self.groups[index]


@dataclass(frozen=True, eq=False, repr=False)
class LayerPlan:
    """Every layer's budget. Made by :func:`plan`, :meth:`from_memory` or :meth:`from_ratio`.

    Attributes
    ----------
    budgets
        Positions that each layer keeps, shape ``(num_layers,)``, uint32, read-only.
    requested
        Positions that were to be divided. More than :attr:`total` only where every layer is at its maximum.
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
            Its :meth:`nbytes` is at most `nbytes`, and less by less than one block's.

        Raises
        ------
        TypeError, ValueError
            As for :func:`plan`; also where `nbytes` does not hold every layer's minimum.

        Examples
        --------
        >>> LayerPlan.from_memory(64 * 2**20, 8, 128, "float16", 32, multiple_of=16).total
        16384
        """
        num_layers = _num_layers(num_layers)
        available = integer("nbytes", nbytes)
        if available < 0:
            raise ValueError(f"nbytes = {shown(available)}: must be 0 or more")
        bits = position_bits(num_kv_heads, head_dim, dtype)
        multiple_of = _multiple_of(options.get("multiple_of", 1))
        total = 8 * available // bits // multiple_of * multiple_of
        _refuse_both("nbytes", options)
        try:
            return plan(num_layers, total=total, **options)
        except _TotalError as error:
            raise ValueError(
                f"nbytes = {available}: holds {total} positions of {bits / 8:g} bytes, and {error.rule}, that is "
                f"{-(-error.limit * bits // 8)} bytes"
            ) from None

    @classmethod
    def from_ratio(cls, fraction: float, sequence_length: int, num_layers: int, **options: Any) -> LayerPlan:
        """Return the plan that keeps a share of a sequence.

        Parameters
        ----------
        fraction
            Share of the sequence that the layers keep on average, above 0 and at most 1. The total is
            ``fraction * sequence_length * num_layers`` to the nearest position, and then rounded down to a block.
        sequence_length
            Positions of the sequence; no layer gets more, unless `maximum` says otherwise.
        num_layers
            Layers of the model.
        **options
            The shape, bounds and block size, as for :func:`plan`.

        Raises
        ------
        TypeError, ValueError
            As for :func:`plan`; also where the share does not hold every layer's minimum.

        Examples
        --------
        >>> LayerPlan.from_ratio(0.125, 4096, 32) == plan(32, 512, maximum=4096)
        True
        """
        num_layers = _num_layers(num_layers)
        share = real("fraction", fraction)
        if not 0 < share <= 1:
            raise ValueError(f"fraction = {fraction}: must be above 0 and at most 1")
        length = uint32("sequence_length", sequence_length)
        if length == 0:
            raise ValueError(f"sequence_length = {length}: must be greater than 0")
        multiple_of = _multiple_of(options.get("multiple_of", 1))
        _refuse_both("fraction", options)
        options.setdefault("maximum", length)
        total = round(Fraction(share) * length * num_layers) // multiple_of * multiple_of
        try:
            return plan(num_layers, total=total, **options)
        except _TotalError as error:
            raise ValueError(
                f"fraction = {fraction}: of {length} positions in {num_layers} layers it is {total} in all, and "
                f"{error.rule}, that is a fraction of {error.limit / (length * num_layers):g}"
            ) from None

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
        """Return every layer's bounds as they act: the minimum rounded up to a multiple, the maximum down to one."""
        b = self.multiple_of
        shape = (self.num_layers,)
        low = np.broadcast_to(np.asarray(self.minimum, np.int64), shape)
        high = np.broadcast_to(np.asarray(UINT32_MAX if self.maximum is None else self.maximum, np.int64), shape)
        return -(-low // b) * b, high // b * b

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
            Of the elements: a name (``float16``, ``bfloat16``, ``float8_e4m3fn``, ``int8``, ``int4`` ...), a NumPy
            dtype or a torch one.

        Returns
        -------
        int
            ``2 * total * num_kv_heads * head_dim * bytes of an element``, rounded up to a whole byte.
        """
        return -(-self.total * position_bits(num_kv_heads, head_dim, dtype) // 8)

    def groups(self, n: int) -> LayerGroups:
        """Return at most `n` groups of consecutive layers with equal budgets.

        For engines whose layers share a page table. The layers are split where the squares of the changes to their
        budgets add up to least. Each group gets the mean of its layers, rounded down to a multiple; what that leaves
        goes to whole groups, the largest remainders first, as far as it reaches. Bounds and order of the budgets are
        kept, and :attr:`LayerGroups.rounding` says how many positions are left.

        Raises
        ------
        ValueError
            `n` is 0 or less; the layers' own bounds allow no `n` groups; more than 4096 runs of different budgets, or
            as many groups of as many runs as take minutes to find.

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
        return _group(self, n)

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
        """Return the plan that :meth:`to_dict` returned the members of, also after a way through JSON.

        The plan is made anew from its shape, bounds and total, and must come out with the same budgets: budgets that
        were changed by hand are no plan. Other members than those of :meth:`to_dict` are not looked at.

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
        needed = (
            "num_layers",
            "requested",
            "shape",
            "ratio",
            "weights",
            "minimum",
            "maximum",
            "multiple_of",
            "budgets",
        )
        for name in needed:
            if name not in fields:
                raise ValueError(f"{name}: is missing; a plan has {', '.join(needed)}")
        budgets = fields["budgets"]
        # Before num_layers budgets are made: a number alone must not take gigabytes.
        if not isinstance(budgets, Sequence) or len(budgets) != _num_layers(fields["num_layers"]):
            raise ValueError(f"budgets: must be a list of num_layers = {shown(fields['num_layers'])} integers")
        options = {} if fields["ratio"] is None else {"ratio": fields["ratio"]}
        made = plan(
            fields["num_layers"],
            total=fields["requested"],
            shape=fields["shape"],
            weights=fields["weights"],
            minimum=fields["minimum"],
            maximum=fields["maximum"],
            multiple_of=fields["multiple_of"],
            **options,
        )
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
        starts = np.flatnonzero(np.diff(self.budgets, prepend=self.budgets[0].astype(np.int64) + 1))
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


class _TotalError(ValueError):
    """A total that is out of range: told apart so that whoever computed it can say it in the caller's terms."""

    def __init__(self, total: int, rule: str, limit: int) -> None:
        super().__init__(total, rule, limit)  # all of them, or it could not be pickled on its way out of a worker
        self.total = total
        self.rule = rule
        self.limit = limit

    def __str__(self) -> str:
        return f"total = {self.total}: {self.rule}"


def plan(
    num_layers: int,
    budget: int | None = None,
    *,
    total: int | None = None,
    shape: Literal["uniform", "pyramid", "geometric", "weights"] = _SHAPE,  # type: ignore[assignment]
    ratio: float = _RATIO,
    beta: float | None = None,
    weights: npt.ArrayLike | None = None,
    minimum: int | npt.ArrayLike = 1,
    maximum: int | npt.ArrayLike | None = None,
    multiple_of: int = 1,
) -> LayerPlan:
    """Divide a cache's positions over a model's layers, to the last position.

    Layer ``l`` has a weight ``w[l]`` by its shape, and the target ``clamp(lambda * w[l], minimum, maximum)``, with
    ``lambda`` such that the targets add up to the total: what one layer may not hold goes to the others. The budgets
    are the targets rounded to multiples, the largest remainders up, the lower layer first on a tie. All of it is
    exact, so for every input the budgets add up to the total, keep their bounds, are less than one multiple away from
    their targets, and are the same on every machine.

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
        ends, and equal quotients between neighbours. ``"uniform"``: all equal. ``"weights"``: the caller's, and the
        default where `weights` are given.
    ratio
        First layer over last, for ``"pyramid"`` and ``"geometric"``; any real number > 0. Below 1 the deep layers get
        more. The default 4 is a starting point, milder than the paper's pyramids: measure your model.
    beta
        The paper's parameter instead of `ratio`, for ``"pyramid"``: the last layer keeps ``budget / beta`` and the
        first ``2 * budget`` less that, which is a ratio of ``2 * beta - 1``. Above 0.5; the paper uses 10 to 30.
    weights
        One per layer, finite and > 0: a measured curve. Only their proportions matter.
    minimum, maximum
        The fewest and the most positions of a layer: a number, or one per layer. The maximum is typically the
        sequence's length; None is no maximum. Budgets are multiples, so a minimum that is none acts as the next
        multiple above it, and a maximum that is none as the next one below it.
    multiple_of
        The block size of a paged cache: every budget is a multiple of it.

    Returns
    -------
    LayerPlan
        The budgets, and what follows from them.

    Raises
    ------
    TypeError
        For what is not a number, or not a whole number where one is needed.
    ValueError
        Zero layers; not exactly one of `budget` and `total`; a total that is no multiple or below the sum of the
        minimums; a ratio, beta or weight that is not finite and positive; arguments that contradict each other;
        bounds that cross or that have no multiple between them.

    Notes
    -----
    :func:`pyramid_budget` floors each layer's share by itself, which loses up to ``num_layers - 1`` positions, and
    knows no bounds. Without bounds in the way this plan is within one position of it in every layer.

    Shares above the sequence's length are the paper's unstated problem: at beta 20 the first layer wants almost twice
    the average. Clipping them would waste positions, raising the deep layers to a minimum would overspend; the total
    here is exact.

    The pyramid: PyramidKV, arXiv 2406.02069.

    Examples
    --------
    >>> plan(32, 512, maximum=8192, multiple_of=16).budgets[[0, 15, 31]]
    array([816, 528, 208], dtype=uint32)
    >>> paper = plan(32, 2048, beta=20, maximum=7950)
    >>> int(paper.budgets[0]), int(paper.budgets[-1]), paper.total
    (3994, 102, 65536)
    """
    layers = _num_layers(num_layers)
    b = _multiple_of(multiple_of)
    positions = _total(layers, budget, total)
    shape_name, ratio_value, weight_array = _shape(layers, shape, ratio, beta, weights)
    low = _bound("minimum", minimum, layers)
    high = None if maximum is None else _bound("maximum", maximum, layers)
    limit = 2**64 - 1
    given = positions
    if high is not None and positions > limit and positions % b == 0:
        given = limit // b * b  # more than the maximums hold, as well
    if given > limit:
        raise ValueError(f"total = {shown(positions)}: must be at most {limit}")

    params = ffi.new("pb_kvcache_plan_params *")
    params.total = given
    params.shape = SHAPES[shape_name]
    params.multiple_of = b
    params.ratio = 1.0 if ratio_value is None else ratio_value
    params.maximum = UINT32_MAX
    keep = []  # what the struct points to
    if weight_array is not None:
        keep.append(ffi.from_buffer("double[]", weight_array))
        params.weights = keep[-1]
    if isinstance(low, int):
        params.minimum = low
    else:
        keep.append(ffi.from_buffer("uint32_t[]", low))
        params.minimums = keep[-1]
    if isinstance(high, int):
        params.maximum = high
    elif high is not None:
        keep.append(ffi.from_buffer("uint32_t[]", high))
        params.maximums = keep[-1]
    budgets = np.empty(layers, np.uint32)
    status = lib.pb_kvcache_plan(params, ffi.from_buffer("uint32_t[]", budgets), layers)
    if status != lib.PB_KVCACHE_OK:
        raise _refusal(status, positions, layers, b, low, high)
    budgets.flags.writeable = False
    return LayerPlan(budgets, positions, shape_name, ratio_value, weight_array, low, high, b)


def _refusal(
    status: int,
    total: int,
    layers: int,
    b: int,
    low: int | npt.NDArray[np.uint32],
    high: int | npt.NDArray[np.uint32] | None,
) -> ValueError:
    """Return the error of a refused plan, with the numbers and what would be feasible."""
    lows = np.broadcast_to(np.asarray(low, np.int64), (layers,))
    highs = np.broadcast_to(np.asarray(UINT32_MAX if high is None else high, np.int64), (layers,))
    if status == lib.PB_KVCACHE_ERROR_PLAN_TOTAL:
        below = total // b * b
        return ValueError(f"total = {total}: must be a multiple of multiple_of = {b}, such as {below} or {below + b}")
    if status == lib.PB_KVCACHE_ERROR_PLAN_OVERFLOW:
        most = layers * UINT32_MAX // b * b
        return _TotalError(total, f"must be at most {most}, what {layers} layers of 32-bit budgets hold", most)
    if status == lib.PB_KVCACHE_ERROR_PLAN_BOUNDS:
        layer = int(np.flatnonzero(lows > highs)[0])
        return ValueError(
            f"{_element('minimum', low, layer)} = {lows[layer]}: must not exceed "
            f"{_element('maximum', high, layer)} = {highs[layer]}"
        )
    if status == lib.PB_KVCACHE_ERROR_PLAN_BLOCK:
        layer = int(np.flatnonzero(-(-lows // b) > highs // b)[0])
        below = int(highs[layer]) // b * b
        return ValueError(
            f"{_element('minimum', low, layer)} = {lows[layer]}, {_element('maximum', high, layer)} = {highs[layer]}: "
            f"a multiple of multiple_of = {b} must lie between them; the nearest are {below} and {below + b}"
        )
    if status == lib.PB_KVCACHE_ERROR_PLAN_MINIMUM:
        least = sum((-(-lows // b) * b).tolist())
        rounded = f", each rounded up to a multiple of {b}" if b > 1 else ""
        feasible = total // b // layers * b
        hint = f" (or minimum at most {feasible})" if isinstance(low, int) else ""
        return _TotalError(total, f"must be at least {least}, the sum of the {layers} minimums{rounded}{hint}", least)
    return ValueError(status_text(status))


def _element(name: str, bound: Any, layer: int) -> str:
    return f"{name}[{layer}]" if isinstance(bound, np.ndarray) else name


def _num_layers(value: Any) -> int:
    layers = uint32("num_layers", value)
    if layers == 0:
        raise ValueError(f"num_layers = {layers}: must be greater than 0")
    return layers


def _multiple_of(value: Any) -> int:
    multiple = uint32("multiple_of", value)
    if multiple == 0:
        raise ValueError(f"multiple_of = {multiple}: must be greater than 0")
    return multiple


def _total(layers: int, budget: Any, total: Any) -> int:
    if budget is not None and total is not None:
        raise ValueError(f"budget = {budget}, total = {total}: only one of them can be given")
    if budget is not None:
        return uint32("budget", budget) * layers
    if total is None:
        raise ValueError("budget, total: one of them must be given")
    positions = integer("total", total)
    if positions < 0:
        raise ValueError(f"total = {shown(positions)}: must be 0 or more")
    return positions


def _refuse_both(name: str, options: dict[str, Any]) -> None:
    for other in ("budget", "total"):
        if options.get(other) is not None:
            raise ValueError(f"{name}, {other} = {options[other]}: only one of them can be given")
        options.pop(other, None)


def _shape(
    layers: int, shape: Any, ratio: Any, beta: Any, weights: Any
) -> tuple[str, float | None, npt.NDArray[np.float64] | None]:
    """Return the shape's name, its ratio where it has one, and its weights where they are the caller's."""
    if shape is _SHAPE and weights is not None:
        shape = "weights"
    if not isinstance(shape, str):
        raise TypeError(f"shape = {shape!r}: must be a string")
    if shape not in SHAPES:
        raise ValueError(f"shape = {shape!r}: must be one of {', '.join(SHAPES)}")
    if beta is not None and ratio is not _RATIO:
        raise ValueError(f"ratio = {ratio}, beta = {beta}: only one of them can be given; ratio = 2 * beta - 1")
    if beta is not None and shape != "pyramid":
        raise ValueError(f"beta = {beta}: belongs to shape 'pyramid', not to {str(shape)!r}")
    if ratio is not _RATIO and shape not in ("pyramid", "geometric"):
        raise ValueError(f"ratio = {ratio}: belongs to shapes 'pyramid' and 'geometric', not to {str(shape)!r}")
    if (weights is not None) != (shape == "weights"):
        missing = "must be given for" if weights is None else "cannot be given for"
        raise ValueError(f"weights: {missing} shape {str(shape)!r}")
    if weights is not None:
        return "weights", None, _weights(weights, layers)
    if shape == "uniform":
        return "uniform", None, None
    if beta is not None:
        value = real("beta", beta)
        if not (value > 0.5 and math.isfinite(2 * value)):
            raise ValueError(f"beta = {beta}: must be finite and greater than 0.5")
        return "pyramid", 2 * value - 1, None
    value = real("ratio", ratio)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"ratio = {ratio}: must be finite and greater than 0")
    return str(shape), value, None


def _weights(value: Any, layers: int) -> npt.NDArray[np.float64]:
    array = plain_array("weights", value, "real numbers")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"weights: must be an array of real numbers, not of dtype {array.dtype}")
    if array.shape != (layers,):
        raise ValueError(f"weights: has shape {array.shape}, must be ({layers},): one for each layer")
    with np.errstate(over="ignore", under="ignore"):
        converted = np.array(array, np.float64, order="C")  # a copy: the plan keeps it
    wrong = ~(np.isfinite(converted) & (converted > 0))
    if wrong.any():
        layer = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"weights[{layer}] = {array[layer]}: must be finite and greater than 0, as a double")
    converted.flags.writeable = False
    return converted


def _bound(name: str, value: Any, layers: int) -> int | npt.NDArray[np.uint32]:
    """Return a bound as an int, or as an array with one per layer."""
    if isinstance(value, str) or not (isinstance(value, Sequence) or (hasattr(value, "__array__") and np.ndim(value))):
        return uint32(name, value)
    array = plain_array(name, value, "integers")
    # Integers that do not fit 64 bits make an array of objects.
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "O" and all(type(element) is int for element in array.flat)
    )
    if array.shape != (layers,):
        raise ValueError(f"{name}: has shape {array.shape}, must be ({layers},): one for each layer")
    if not whole:
        raise TypeError(f"{name}: must be integers, not of dtype {array.dtype}")
    outside = (array < 0) | (array > UINT32_MAX)
    if outside.any():
        layer = int(np.flatnonzero(outside)[0])
        raise ValueError(f"{name}[{layer}] = {shown(int(array[layer]))}: must be between 0 and {UINT32_MAX}")
    bounds = array.astype(np.uint32, order="C")
    bounds.flags.writeable = False
    return bounds


def dtype_bits(dtype: Any) -> int:
    """Return the bits of one element of a dtype: a name, a NumPy dtype or a torch one.

    Raises
    ------
    TypeError
        For what is no dtype.
    ValueError
        For a dtype that no cache has.
    """
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype)
    else:
        try:
            if dtype is None:  # which NumPy takes for float64
                raise TypeError
            name = np.dtype(dtype).name
        except TypeError:
            raise TypeError(f"dtype = {dtype!r}: must be a dtype or the name of one") from None
    name = name.removeprefix("torch.")
    if name not in DTYPE_BITS:
        raise ValueError(f"dtype = {name!r}: must be one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[name]


def position_bits(num_kv_heads: Any, head_dim: Any, dtype: Any) -> int:
    """Return the bits of one position's key and value in one layer."""
    heads = uint32("num_kv_heads", num_kv_heads)
    dim = uint32("head_dim", head_dim)
    for name, value in (("num_kv_heads", heads), ("head_dim", dim)):
        if value == 0:
            raise ValueError(f"{name} = {value}: must be greater than 0")
    return 2 * heads * dim * dtype_bits(dtype)


def _group(plan: LayerPlan, n: int) -> LayerGroups:
    """Split a plan's layers into at most `n` groups of equal budgets."""
    b = plan.multiple_of
    starts = np.flatnonzero(np.diff(plan.budgets, prepend=plan.budgets[0].astype(np.int64) + 1))
    m = len(starts)  # runs of equal budgets: no reason to split one
    counts = np.diff(starts, append=plan.num_layers)
    if n >= m:
        runs = zip(starts.tolist(), counts.tolist(), plan.budgets[starts].tolist(), strict=True)
        return LayerGroups(tuple(LayerGroup(i, i + count, budget) for i, count, budget in runs), plan.total, 0)
    if m > _MOST_RUNS:
        raise ValueError(f"n = {n}: groups are found among at most {_MOST_RUNS} runs of equal budgets, not {m}")
    if m * m * n > _MOST_GROUP_STEPS:
        most = _MOST_GROUP_STEPS // (m * m)
        raise ValueError(f"n = {n}: must be at most {most}, or at least {m}, for {m} runs of equal budgets")
    units = plan.budgets[starts].astype(np.int64) // b
    low, high = (bound // b for bound in plan._bounds())
    low = np.maximum.reduceat(low, starts)
    high = np.minimum.reduceat(high, starts)

    def prefix(values: npt.NDArray[np.int64]) -> list[int]:
        return [0, *np.cumsum(values).tolist()]

    layers, sums = prefix(counts), prefix(counts * units)
    # Squared changes, with the budgets counted from their mean so that the doubles stay exact for real models.
    centred = (units - sums[m] // layers[m]).astype(np.float64)
    c = np.concatenate(([0.0], np.cumsum(counts.astype(np.float64))))
    s = np.concatenate(([0.0], np.cumsum(counts * centred)))
    q = np.concatenate(([0.0], np.cumsum(counts * centred * centred)))
    exact_layers, exact_sums = np.array(layers), np.array(sums)

    best = np.full((n + 1, m + 1), np.inf)  # [k, j]: the first j runs in k groups
    best[0, 0] = 0.0
    split = np.zeros((n + 1, m + 1), np.intp)
    for j in range(1, m + 1):
        # Groups i .. j-1 for every i. One whose mean, rounded either way, breaks a layer's own bound is none.
        cost = np.maximum((q[j] - q[:j]) - (s[j] - s[:j]) ** 2 / (c[j] - c[:j]), 0.0)
        size = exact_layers[j] - exact_layers[:j]
        amount = exact_sums[j] - exact_sums[:j]
        lowest = np.maximum.accumulate(low[j - 1 :: -1] if j else low)[::-1]
        highest = np.minimum.accumulate(high[j - 1 :: -1] if j else high)[::-1]
        cost[(amount // size < lowest) | (-(-amount // size) > highest)] = np.inf
        for k in range(1, n + 1):
            through = best[k - 1, :j] + cost
            split[k, j] = int(np.argmin(through))
            best[k, j] = through[split[k, j]]
    if not np.isfinite(best[1:, m]).any():
        raise ValueError(f"n = {n}: the layers' own minimums and maximums allow no such groups; ask for more")

    k = int(np.argmin(best[1:, m])) + 1
    edges = [m]
    while edges[0] > 0:
        edges.insert(0, int(split[k, edges[0]]))
        k -= 1
    sizes = [layers[j] - layers[i] for i, j in itertools.pairwise(edges)]
    means = [Fraction(sums[j] - sums[i], layers[j] - layers[i]) for i, j in itertools.pairwise(edges)]
    grouped = [math.floor(mean) for mean in means]
    left = sums[m] - sum(size * unit for size, unit in zip(sizes, grouped, strict=True))
    # Largest remainders first, as far as a whole group fits what is left, and never past a group of a larger mean.
    ranked = sorted(range(len(means)), key=lambda g: (-means[g], g))
    above = {g: ranked[rank - 1] if rank else None for rank, g in enumerate(ranked)}
    for g in sorted(range(len(means)), key=lambda g: (grouped[g] - means[g], g)):
        higher = above[g]
        if means[g] > grouped[g] and sizes[g] <= left and (higher is None or grouped[higher] > grouped[g]):
            grouped[g] += 1
            left -= sizes[g]
    groups = tuple(
        LayerGroup(layers[i], layers[j], unit * b)
        for (i, j), unit in zip(itertools.pairwise(edges), grouped, strict=True)
    )
    return LayerGroups(groups, plan.total - left * b, left * b)
