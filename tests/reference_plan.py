"""The planner's rule, slow and obvious, in exact fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

UINT32_MAX = 2**32 - 1


def weights_of(
    shape: str, num_layers: int, ratio: float = 4.0, weights: Sequence[float] | None = None
) -> list[Fraction]:
    """Every layer's weight as the planner takes it: a whole number, the largest of 61 bits, none below 1."""
    exact = exact_weights_of(shape, num_layers, ratio, weights)
    unit = Fraction(1)
    while max(exact) / unit >= 2**61:
        unit *= 2
    while max(exact) / unit < 2**60:
        unit /= 2
    return [Fraction(max(1, math.floor(weight / unit))) for weight in exact]


def exact_weights_of(
    shape: str, num_layers: int, ratio: float = 4.0, weights: Sequence[float] | None = None
) -> list[Fraction]:
    """Every layer's weight by its definition, as a fraction."""
    if shape == "weights":
        assert weights is not None
        return [Fraction(weight) for weight in weights]
    if shape == "uniform" or num_layers == 1:
        return [Fraction(1)] * num_layers
    last = num_layers - 1
    if shape == "pyramid":
        return [Fraction(ratio) * (last - layer) + layer for layer in range(num_layers)]
    assert shape == "geometric"
    return [geometric(ratio, Fraction(last - layer, last)) for layer in range(num_layers)]


def geometric(ratio: float, exponent: Fraction) -> Fraction:
    """``ratio ** exponent``, to the nearest number of 53 significant bits."""
    context = Context(prec=80)
    log = context.multiply(context.ln(Decimal(ratio)), Decimal(exponent.numerator))
    power = Fraction(context.exp(context.divide(log, Decimal(exponent.denominator))))
    unit = Fraction(1)
    while power / unit >= 2**53:
        unit *= 2
    while power / unit < 2**52:
        unit /= 2
    return round(power / unit) * unit


def targets_of(
    weights: Sequence[Fraction], total: int, minimums: Sequence[int], maximums: Sequence[int]
) -> list[Fraction]:
    """``clamp(lambda * w, minimum, maximum)`` of every layer, with the lambda for which they add up to `total`."""

    def filled(level: Fraction) -> list[Fraction]:
        return [
            min(max(level * weight, Fraction(low)), Fraction(high))
            for weight, low, high in zip(weights, minimums, maximums, strict=True)
        ]

    assert sum(minimums) <= total <= sum(maximums)
    # The sum rises with lambda and is a straight line between the levels at which some layer meets a bound.
    bounds = zip(weights, minimums, maximums, strict=True)
    levels = sorted({bound / weight for weight, low, high in bounds for bound in (low, high)})
    sums = {level: sum(filled(level)) for level in [Fraction(0), *levels]}
    for left, right in itertools.pairwise(sums):
        if sums[left] <= total <= sums[right]:
            if sums[left] == sums[right]:
                return filled(left)
            return filled(left + (total - sums[left]) * (right - left) / (sums[right] - sums[left]))
    return filled(levels[-1])


def bounds_of(
    minimum: int | Sequence[int], maximum: int | Sequence[int] | None, num_layers: int, multiple_of: int
) -> tuple[list[int], list[int]]:
    """Every layer's bounds: the minimum rounded up to a multiple, the maximum rounded down to one."""
    if maximum is None:
        maximum = UINT32_MAX
    minimums = [minimum] * num_layers if isinstance(minimum, int) else list(minimum)
    maximums = [maximum] * num_layers if isinstance(maximum, int) else list(maximum)
    return (
        [-(-low // multiple_of) * multiple_of for low in minimums],
        [high // multiple_of * multiple_of for high in maximums],
    )


def plan(
    num_layers: int,
    total: int,
    *,
    shape: str = "pyramid",
    ratio: float = 4.0,
    weights: Sequence[float] | None = None,
    minimum: int | Sequence[int] = 1,
    maximum: int | Sequence[int] | None = None,
    multiple_of: int = 1,
) -> list[int]:
    """Every layer's budget."""
    minimums, maximums = bounds_of(minimum, maximum, num_layers, multiple_of)
    if total >= sum(maximums):
        return maximums
    targets = targets_of(weights_of(shape, num_layers, ratio, weights), total, minimums, maximums)
    budgets = [int(target // multiple_of) * multiple_of for target in targets]
    by_remainder = sorted(range(num_layers), key=lambda layer: (budgets[layer] - targets[layer], layer))
    for layer in by_remainder[: (total - sum(budgets)) // multiple_of]:
        budgets[layer] += multiple_of
    return budgets
