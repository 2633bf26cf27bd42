"""What a benchmark's plots show, in sentences with their figures, for who does not see them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from .._policies import label
from .bench import Results
from .findings import points
from .replay import ReplayReport


def extremes(results: Results, field: str) -> str:
    """Say which policy has the most and the least of a figure at each budget."""
    said = []
    for budget in results.budgets:
        values = {label(r.policy): getattr(r, field) for r in results.at(budget) if r.budget is not None}
        if not values:
            continue
        best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
        least = f", {worst} the least, {values[worst]:.3f}" if len(values) > 1 else ""
        said.append(f"at {budget} positions a layer {best} has the most, {values[best]:.3f}{least}")
    said += [f"{label(r.policy)} has {getattr(r, field):.3f}" for r in results.reports if r.budget is None]
    return _sentence(said)


def by_layer(reports: Iterable[ReplayReport], names: Collection[str]) -> str:
    """Say what the named policies retain: on average, and in the layer that retains least."""
    return _sentence(
        f"{label(r.policy)} retains {r.retained_mass:.3f} on average and least in layer {r.worst_layer.layer}, "
        f"{r.worst_layer.retained_mass:.3f}"
        for r in reports
        if label(r.policy) in names
    )


def gains(
    reports: Iterable[ReplayReport], uniform: str, pyramids: Collection[str]
) -> dict[str, npt.NDArray[np.float64]]:
    """Return what each pyramid retains more than uniform budgets, by name and layer."""
    mass = {r.policy: np.array([layer.retained_mass for layer in r.per_layer]) for r in reports}
    return {label(policy): mass[policy] - mass[uniform] for policy in pyramids}


def gained(gain_of: Mapping[str, npt.NDArray[np.float64]]) -> str:
    """Say what :func:`gains` found in the first and in the last layer, and on average."""
    return _sentence(
        f"{name} has {points(gain[0])} points in layer 0, {points(gain[-1])} in the last and {points(gain.mean())} on "
        "average"
        for name, gain in gain_of.items()
    )


def divided(reports: Iterable[ReplayReport], policies: Collection[str]) -> str:
    """Say what policies give to the first and to the last layer."""
    return _sentence(
        f"{label(r.policy)} keeps {r.per_layer[0].budget} positions in layer 0 and {r.per_layer[-1].budget} in the last"
        for r in reports
        if r.policy in policies
    )


def held(results: Results, budget: int, policies: Collection[str]) -> str:
    """Say what policies hold at most and on average."""
    return _sentence(
        f"{label(r.policy)} holds {r.peak_resident:,} positions at most and {r.mean_resident:,.0f} on average"
        for r in results.at(budget)
        if r.policy in policies
    )


def _sentence(parts: Iterable[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
