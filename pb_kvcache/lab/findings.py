"""What a benchmark's figures say, in sentences, and how its tables write numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .._policies import find, label, ratio_of
from .bench import Results
from .replay import ReplayReport

__all__ = [
    "TIMES",
    "Gain",
    "best_of",
    "findings",
    "gains",
    "layers",
    "listed",
    "points",
    "pyramids_of",
    "size",
    "step_time",
    "uniform_of",
]

_MINUS = "\N{MINUS SIGN}"


def findings(results: Results) -> list[str]:
    """Return what the figures say in a few sentences, whichever policy wins."""
    reports = {(r.policy, r.budget): r for r in results.reports if r.budget is not None}
    rated = [policy for policy in results.policies if (policy, results.budgets[0]) in reports]
    if not rated:
        return []
    best: dict[str, list[int]] = {}
    for budget in results.budgets:
        best.setdefault(max(rated, key=lambda p: reports[p, budget].retained_mass), []).append(budget)
    available = next(iter(reports.values())).available_mass
    sentences = [
        f"{label(policy)} retains most at {listed(map(str, budgets))} positions a layer: "
        f"{listed(f'{reports[policy, budget].retained_mass:.4f}' for budget in budgets)} of the attention, "
        f"where a full cache has {available:.4f}."
        for policy, budgets in best.items()
    ]
    uniform = uniform_of(results)
    for policy in pyramids_of(results) if uniform and results.num_layers > 1 else []:
        assert uniform is not None
        pairs = [(reports[policy, budget], reports[uniform, budget]) for budget in results.budgets]
        gains = [points(r.retained_mass - u.retained_mass) for r, u in pairs]
        worst = [points(r.worst_layer.retained_mass - u.worst_layer.retained_mass) for r, u in pairs]
        sentences.append(
            f"{label(policy)} against uniform SnapKV, in points of retained mass at "
            f"{listed(map(str, results.budgets))} positions a layer: {listed(gains)} on average over layers, "
            f"{listed(worst)} in the layer that retains least."
        )
    return sentences


@dataclass(frozen=True)
class Gain:
    """What a policy retains more than uniform SnapKV does, in parts of the attention, at each of the budgets."""

    policy: str
    #: On average over the layers.
    mean: tuple[float, ...]
    #: In the layer that retains least.
    worst: tuple[float, ...]

    @property
    def figures(self) -> tuple[float, ...]:
        """The means, then those of the worst layers."""
        return (*self.mean, *self.worst)


def gains(results: Results) -> list[Gain]:
    """Return what each policy gains over uniform budgets, in the policies' order. Empty where there is nothing to say.

    The full cache, which has no budget, and pyramids of ratio 1, which are uniform, are left out.
    """
    reports = {(r.policy, r.budget): r for r in results.reports if r.budget is not None}
    uniform = uniform_of(results)
    if uniform is None:
        return []
    return [
        Gain(
            policy,
            tuple(reports[policy, at].retained_mass - reports[uniform, at].retained_mass for at in results.budgets),
            tuple(
                reports[policy, at].worst_layer.retained_mass - reports[uniform, at].worst_layer.retained_mass
                for at in results.budgets
            ),
        )
        for policy in results.policies
        if (policy, results.budgets[0]) in reports and policy not in ("snapkv", uniform) and ratio_of(policy) != 1
    ]


def best_of(results: Results) -> list[str]:
    """Return a sentence for each policy that retains most at some budget."""
    at: dict[str, list[str]] = {}
    for budget in results.budgets:
        rated = [r for r in results.at(budget) if r.budget is not None]
        if rated:
            at.setdefault(max(rated, key=lambda r: r.retained_mass).policy, []).append(str(budget))
    return [f"{label(policy)} retains most at {listed(budgets)} positions a layer." for policy, budgets in at.items()]


def uniform_of(results: Results) -> str | None:
    """Return the policy that stands for uniform budgets, where one was run."""
    return next((policy for policy in ("snapkv", "pyramidkv:1") if policy in results.policies), None)


def pyramids_of(results: Results) -> list[str]:
    """Return the policies with unequal budgets: pyramids that are not flat, and plans from files."""
    return [policy for policy in results.policies if find(policy)[0].argument and ratio_of(policy) != 1]


def points(gain: float) -> str:
    """Return a difference of masses in percentage points, with its sign. What rounds to 0 has no sign."""
    text = f"{abs(100 * gain):.2f}"
    return text if float(text) == 0 else f"{'+' if gain > 0 else _MINUS}{text}"


def listed(words: Iterable[str]) -> str:
    """Return words as a sentence lists them. There is one at least."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def layers(results: Results) -> str:
    """Return how many layers there are, in words."""
    return f"{results.num_layers} layer{'s' if results.num_layers != 1 else ''}"


def step_time(report: ReplayReport | None) -> str:
    """Return what a step takes a policy, all layers together. A dash where there is no report."""
    return "-" if report is None else f"{1e6 * report.policy_seconds / report.steps:.0f} µs"


#: What stands below every table.
TIMES = (
    "Time a step: on_decode_step and evict of all layers, an object for each layer, mean over all steps. In a stack: "
    "the same choice through one PyramidStack, where one call serves all layers. Both are of this machine and this run."
)


def size(count: float) -> str:
    """Return a number of bytes as people read it, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
