"""Groups of consecutive layers with equal budgets, for engines whose layers share a page table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

#: The search takes time in the square of the runs of equal budgets, and memory for runs times groups.
_MOST_RUNS = 4096
#: The square of the runs, times the groups: some seconds.
_MOST_STEPS = 2**30


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
        Positions of the plan that the groups leave out, because a group grows by one multiple in every layer or not at
        all: ``plan.total - total``, never negative.
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


def runs_of(budgets: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
    """Return the first layer of every run of equal budgets."""
    return np.flatnonzero(np.diff(budgets, prepend=budgets[0].astype(np.int64) + 1))


def group_layers(
    budgets: npt.NDArray[np.uint32], low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], multiple_of: int, n: int
) -> LayerGroups:
    """Return at most `n` groups whose budgets differ least from the layers' own.

    Parameters
    ----------
    budgets
        Positions of each layer, multiples of `multiple_of`, shape ``(num_layers,)``.
    low, high
        The bounds of each layer, multiples of `multiple_of`, of the same shape.
    multiple_of
        The block size.
    n
        The most groups, 1 or more.

    Raises
    ------
    ValueError
        The bounds allow no such groups, or the search would take minutes.
    """
    starts = runs_of(budgets)
    runs = len(starts)
    counts = np.diff(starts, append=len(budgets))
    if n >= runs:  # no run has to be joined with another
        stops = (starts + counts).tolist()
        groups = tuple(map(LayerGroup, starts.tolist(), stops, budgets[starts].tolist()))
        return LayerGroups(groups, int(budgets.sum(dtype=np.uint64)), 0)
    if runs > _MOST_RUNS:
        raise ValueError(f"n = {n}: groups are found among at most {_MOST_RUNS} runs of equal budgets, not {runs}")
    if runs * runs * n > _MOST_STEPS:
        most = _MOST_STEPS // (runs * runs)
        raise ValueError(f"n = {n}: must be at most {most}, or at least {runs}, for {runs} runs of equal budgets")

    # All in multiples from here on: sums before each run, in layers and in multiples.
    units = budgets[starts].astype(np.int64) // multiple_of
    layers = np.concatenate(([0], np.cumsum(counts)))
    sums = np.concatenate(([0], np.cumsum(counts * units)))
    lowest = np.maximum.reduceat(low // multiple_of, starts)
    highest = np.minimum.reduceat(high // multiple_of, starts)
    edges = _split(units, layers, sums, lowest, highest, n)
    if edges is None:
        raise ValueError(f"n = {n}: the layers' own minimums and maximums allow no such groups; ask for more")
    ends, amounts = layers[edges].tolist(), np.diff(sums[edges]).tolist()
    grouped = _rounded(np.diff(ends).tolist(), amounts)
    groups = tuple(
        LayerGroup(start, stop, unit * multiple_of)
        for (start, stop), unit in zip(itertools.pairwise(ends), grouped, strict=True)
    )
    total = sum((group.stop - group.start) * group.budget for group in groups)
    return LayerGroups(groups, total, sum(amounts) * multiple_of - total)


def _split(
    units: npt.NDArray[np.int64],
    layers: npt.NDArray[np.int64],
    sums: npt.NDArray[np.int64],
    lowest: npt.NDArray[np.int64],
    highest: npt.NDArray[np.int64],
    n: int,
) -> list[int] | None:
    """Return the first run of each group, and the number of runs, for the least sum of squared changes.

    None where the bounds allow no split into at most `n` groups.
    """
    runs = len(units)
    # The squares count budgets from their mean, so that the doubles are exact for real models.
    counts = np.diff(layers)
    centred = (units - sums[runs] // layers[runs]).astype(np.float64)
    c = np.concatenate(([0.0], np.cumsum(counts.astype(np.float64))))
    s = np.concatenate(([0.0], np.cumsum(counts * centred)))
    q = np.concatenate(([0.0], np.cumsum(counts * centred * centred)))

    # best[k, j]: the least sum for the first j runs in k groups; split[k, j]: where the last of them begins.
    best = np.full((n + 1, runs + 1), np.inf)
    best[0, 0] = 0.0
    split = np.zeros((n + 1, runs + 1), np.intp)
    for j in range(1, runs + 1):
        # Groups i .. j-1 for every i. Not those whose mean, rounded either way, breaks the bound of a layer.
        cost = np.maximum((q[j] - q[:j]) - (s[j] - s[:j]) ** 2 / (c[j] - c[:j]), 0.0)
        size = layers[j] - layers[:j]
        amount = sums[j] - sums[:j]
        least = np.maximum.accumulate(lowest[j - 1 :: -1])[::-1]
        most = np.minimum.accumulate(highest[j - 1 :: -1])[::-1]
        cost[(amount // size < least) | (-(-amount // size) > most)] = np.inf
        for k in range(1, n + 1):
            through = best[k - 1, :j] + cost
            split[k, j] = int(np.argmin(through))
            best[k, j] = through[split[k, j]]
    if not np.isfinite(best[1:, runs]).any():
        return None

    # Back from the last run.
    k = int(np.argmin(best[1:, runs])) + 1
    edges = [runs]
    while edges[0] > 0:
        edges.insert(0, int(split[k, edges[0]]))
        k -= 1
    return edges


def _rounded(sizes: list[int], amounts: list[int]) -> list[int]:
    """Return what each layer of a group holds, in multiples: the mean, rounded so that little of the sum is left."""
    means = [Fraction(amount, size) for amount, size in zip(amounts, sizes, strict=True)]
    grouped = [math.floor(mean) for mean in means]
    left = sum(amounts) - sum(size * unit for size, unit in zip(sizes, grouped, strict=True))
    # Largest remainders first, as far as a whole group fits what is left, and never past a group of a larger mean.
    ranked = sorted(range(len(means)), key=lambda g: (-means[g], g))
    above = {g: ranked[rank - 1] if rank else None for rank, g in enumerate(ranked)}
    for g in sorted(range(len(means)), key=lambda g: (grouped[g] - means[g], g)):
        higher = above[g]
        if means[g] > grouped[g] and sizes[g] <= left and (higher is None or grouped[higher] > grouped[g]):
            grouped[g] += 1
            left -= sizes[g]
    return grouped
