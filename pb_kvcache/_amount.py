"""How much a cache holds, and how its layers divide it.

The planner, the command line and the caches are asked for both in the same terms. :class:`Amount` is how many
positions: a budget, a total, bytes or a share of a sequence. :class:`Curve` is how the layers' budgets fall: a shape
and its ratio, or one weight per layer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ._checks import natural, real, shown, uint32
from ._native import lib
from ._options import choice
from ._tensor import plain_array

_Name = TypeVar("_Name", bound=str)

#: The ways to say how much.
Kind = Literal["budget", "total", "memory", "fraction"]

#: How budgets may fall from the first layer to the last.
Shape = Literal["uniform", "pyramid", "geometric", "weights"]

#: The shapes, by name.
SHAPES: dict[str, int] = {
    "uniform": lib.PB_KVCACHE_PLAN_UNIFORM,
    "pyramid": lib.PB_KVCACHE_PLAN_PYRAMID,
    "geometric": lib.PB_KVCACHE_PLAN_GEOMETRIC,
    "weights": lib.PB_KVCACHE_PLAN_WEIGHTS,
}

#: First layer over last where nobody states a ratio, a beta or weights: milder than the paper's pyramids.
DEFAULT_RATIO = 4.0


def only_one(arguments: Mapping[_Name, Any], rule: str = "") -> _Name | None:
    """Return the name of the argument that is given, None where all of them are None.

    Parameters
    ----------
    arguments
        The values by the names that the caller knows.
    rule
        What else the error says.

    Raises
    ------
    ValueError
        More than one is given.
    """
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        stated = ", ".join(
            f"{name} = {shown(arguments[name])}" if isinstance(arguments[name], (numbers.Number, str)) else name
            for name in given
        )
        raise ValueError(f"{stated}: only one of them can be given{rule}")
    return given[0] if given else None


class TotalError(ValueError):
    """A total that is out of range. :meth:`Amount.refusal` says it in the terms that the caller used.

    Attributes
    ----------
    total
        The positions that were to be divided.
    rule
        What they break, as a sentence without its subject.
    limit
        The total that would keep it.
    """

    def __init__(self, total: int, rule: str, limit: int) -> None:
        super().__init__(total, rule, limit)  # all of them, or it could not be pickled on its way out of a worker
        self.total = total
        self.rule = rule
        self.limit = limit

    def __str__(self) -> str:
        return f"total = {self.total}: {self.rule}"


@dataclass(frozen=True)
class Amount:
    """How many positions the layers of a model hold together. Made by :meth:`of`.

    Attributes
    ----------
    kind
        ``"budget"``: positions per layer on average. ``"total"``: positions in all layers. ``"memory"``: bytes for the
        keys and values of all layers. ``"fraction"``: share of a sequence that the layers keep on average.
    value
        As the kind says.
    name
        What the caller calls it.
    """

    kind: Kind
    value: int | float
    name: str

    @classmethod
    def of(cls, kind: Kind, value: Any, name: str | None = None) -> Amount:
        """Check a value of a kind.

        Raises
        ------
        TypeError, ValueError
            A budget that is not an integer of 32 unsigned bits. A total or a memory that is not an integer of 0 or
            more. A fraction that is not a real number above 0 and at most 1.
        """
        name = kind if name is None else name
        return cls(kind, _CHECKS[kind](name, value), name)

    @classmethod
    def one_of(cls, arguments: Mapping[Kind, Any]) -> Amount | None:
        """Check the one argument that is given. None where all of them are None.

        Raises
        ------
        TypeError, ValueError
            More than one is given, or as for :meth:`of`.
        """
        kind = only_one(arguments)
        return None if kind is None else cls.of(kind, arguments[kind])

    @property
    def needs_prompt(self) -> bool:
        """Whether the total depends on a sequence: on its length, or on what one of its positions takes."""
        return self.kind in ("memory", "fraction")

    def total(self, num_layers: int, *, position_bits: int = 0, length: int = 0, multiple_of: int = 1) -> int:
        """Return the positions of all layers together.

        Parameters
        ----------
        num_layers
            Layers that share them.
        position_bits
            Bits of one position in one layer, above 0. A memory needs it.
        length
            Positions of the sequence. A fraction needs it.
        multiple_of
            The block size. What a memory holds and a share comes to are rounded down to it. A budget and a total are
            taken as they are.
        """
        if self.kind == "budget":
            return int(self.value) * num_layers
        if self.kind == "total":
            return int(self.value)
        if self.kind == "memory":
            return 8 * int(self.value) // position_bits // multiple_of * multiple_of
        return round(Fraction(self.value) * length * num_layers) // multiple_of * multiple_of

    def refusal(
        self, error: TotalError, num_units: int, units: str = "layers", /, *, position_bits: int = 0, length: int = 0
    ) -> ValueError:
        """Return the error of an amount whose total is out of range, with the amount that would do."""
        if self.kind == "total":
            return error
        if self.kind == "budget":
            return ValueError(
                f"{self.name} = {self.value}: in {num_units} {units} it is {error.total} in all, and {error.rule}, "
                f"that is a budget of {-(-error.limit // num_units)}"
            )
        if self.kind == "memory":
            return ValueError(
                f"{self.name} = {self.value}: holds {error.total} positions of {position_bits / 8:g} bytes, and "
                f"{error.rule}, that is {-(-error.limit * position_bits // 8)} bytes"
            )
        return ValueError(
            f"{self.name} = {self.value}: of {length} positions in {num_units} {units} it is {error.total} in all, and "
            f"{error.rule}, that is a fraction of {error.limit / (length * num_units):g}"
        )


def _share(name: str, value: Any) -> float:
    share = real(name, value)
    if not 0 < share <= 1:
        raise ValueError(f"{name} = {shown(value)}: must be above 0 and at most 1")
    return share


_CHECKS: dict[Kind, Callable[[str, Any], int | float]] = {
    "budget": uint32,
    "total": natural,
    "memory": natural,
    "fraction": _share,
}


@dataclass(frozen=True, eq=False)
class Curve:
    """What the layers' budgets are proportional to. Made by :meth:`of`.

    Attributes
    ----------
    shape
        A name of :data:`SHAPES`.
    ratio
        First layer over last, for ``"pyramid"`` and ``"geometric"``. None for the others.
    beta
        The paper's parameter where it was stated. `ratio` follows from it.
    weights
        For ``"weights"``: one per layer, float64, shape ``(num_layers,)``, read-only; None for the others.
    """

    shape: Shape
    ratio: float | None = None
    beta: float | None = None
    weights: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls,
        num_layers: int,
        shape: Any = None,
        ratio: Any = None,
        beta: Any = None,
        weights: Any = None,
        *,
        layer: str = "layer",
    ) -> Curve:
        """Check what a caller stated. None is not stated.

        The shape is ``"weights"`` where weights are given and ``"pyramid"`` else. The ratio is :data:`DEFAULT_RATIO`
        where no beta is given. `layer` is what has a weight each, in the caller's terms.

        Raises
        ------
        TypeError
            A shape that is not a string, a ratio or beta that is not a real number, weights that are not an array of
            real numbers.
        ValueError
            Arguments that contradict each other. A ratio or weight that is not finite and above 0, a beta that is not
            finite and above 0.5.
        """
        # Which of them belong together.
        if shape is None and weights is not None:
            only_one({"ratio": ratio, "beta": beta, "weights": weights})
        only_one({"ratio": ratio, "beta": beta}, "; ratio = 2 * beta - 1")
        if shape is None:
            shape = "pyramid" if weights is None else "weights"
        form = _shape(shape)
        if beta is not None and form != "pyramid":
            raise ValueError(f"beta = {shown(beta)}: belongs to shape 'pyramid', not to {form!r}")
        if ratio is not None and form not in ("pyramid", "geometric"):
            raise ValueError(f"ratio = {shown(ratio)}: belongs to shapes 'pyramid' and 'geometric', not to {form!r}")
        if (weights is not None) != (form == "weights"):
            missing = "must be given for" if weights is None else "cannot be given for"
            raise ValueError(f"weights: {missing} shape {form!r}")
        # Their values.
        if weights is not None:
            return cls("weights", weights=_weights(weights, num_layers, layer))
        if form == "uniform":
            return cls("uniform")
        if beta is not None:
            value = real("beta", beta)
            if not (value > 0.5 and math.isfinite(2 * value)):
                raise ValueError(f"beta = {shown(beta)}: must be finite and greater than 0.5")
            return cls("pyramid", 2 * value - 1, value)
        value = DEFAULT_RATIO if ratio is None else real("ratio", ratio)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"ratio = {shown(ratio)}: must be finite and greater than 0")
        return cls(form, value)


def _shape(value: Any) -> Shape:
    if not isinstance(value, str):
        raise TypeError(f"shape = {value!r}: must be a string")
    choice("shape", value, SHAPES)
    return cast(Shape, str(value))


def _weights(value: Any, num_layers: int, layer: str) -> npt.NDArray[np.float64]:
    array = plain_array("weights", value, "real numbers")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"weights: must be an array of real numbers, not of dtype {array.dtype}")
    if array.shape != (num_layers,):
        raise ValueError(f"weights: has shape {array.shape}, must be ({num_layers},): one for each {layer}")
    with np.errstate(over="ignore", under="ignore"):
        converted = np.array(array, np.float64, order="C")  # a copy: the plan keeps it
    wrong = ~(np.isfinite(converted) & (converted > 0))
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"weights[{index}] = {array[index]}: must be finite and greater than 0, as a double")
    converted.flags.writeable = False
    return converted
