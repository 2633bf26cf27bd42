"""One variant's figures at one budget over one set of prompts, and what the full cache does in a task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._estimate import Array, Estimate

#: The variant that every other is compared with: equal budgets, SnapKV's selection, nothing merged.
UNIFORM = "uniform"
#: The variant of the rows that tell of the full cache.
FULL = "full"

#: One line of a results file.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """One variant at one budget, over one set of prompts. A figure that no prompt has is None."""

    #: What the prompts have in common: ``"all"``, ``"task"`` or ``"kind"``.
    part: str
    #: The task or kind. Empty for all.
    name: str
    #: As it was asked for: ``"64"`` or ``"25%"``.
    budget: str
    variant: str
    #: Prompts.
    count: int
    #: Mean over prompts of the mean over tokens of KL(full || variant), in nats.
    kl: float | None
    #: That less uniform's, by prompt. Negative: better. None for uniform itself.
    difference: Estimate | None
    #: Mean KL over uniform's mean KL, less 1. None, too, where a draw's uniform has no divergence at all.
    relative: Estimate | None
    #: Parts of the paired prompts whose KL is lower, and higher, than uniform's.
    better: float | None
    worse: float | None
    #: The prompt with the largest difference, and that difference.
    worst: tuple[str, float] | None
    #: Nats a token of the true continuation, and the paired difference.
    nll: float | None
    nll_difference: Estimate | None
    #: Part of tokens whose likeliest one is the full cache's.
    same: float | None
    #: Mean score, and the paired difference. Positive: better. None over several tasks: their scores do not add up.
    score: Estimate | None
    score_difference: Estimate | None
    #: Medians over prompts: bytes really held, rows for each layer and head, milliseconds a decoded token.
    bytes: float
    rows: float
    decode_ms: float | None


@dataclass(frozen=True)
class Reference:
    """What the full cache does in one task."""

    task: str
    count: int
    score: Estimate | None
    #: Of a blind guess, mean over prompts.
    chance: float
    nll: float | None
    bytes: float
    decode_ms: float | None

    @property
    def ranked(self) -> bool:
        """Whether scores of this task compare variants: the full cache's is clearly above chance."""
        return self.score is not None and self.score.low > self.chance


def asked(row: Row) -> str:
    """Return a row's budget as it was asked for."""
    return str(row.get("budget_asked") or row["budget"])


def divergence(row: Row) -> float | None:
    """Return a row's mean KL over its tokens."""
    return float(np.mean(row["kl"])) if row["kl"] else None


def figures(
    key: tuple[str, str, str, str],
    held: Mapping[str, Row],
    uniform: Mapping[str, Row] | None,
    single: bool,
    resample: Callable[..., Estimate],
) -> Figures:
    """Return one variant's figures, against uniform's rows where there are any.

    `key` is the part, the name, the budget and the variant. `single` says that all prompts are of one task. `resample`
    makes an estimate of values, or of their ratio to others.
    """

    def pairs(value: Callable[[Row], float | None]) -> tuple[list[str], Array, Array]:
        """Return the prompts that both sides have a value of, the variant's values and uniform's."""
        both = [(p, value(row), value(uniform[p])) for p, row in held.items() if uniform and p in uniform]
        found = [(p, mine, other) for p, mine, other in both if mine is not None and other is not None]
        return [p for p, _, _ in found], np.array([m for _, m, _ in found]), np.array([o for _, _, o in found])

    names, mine, other = pairs(divergence)
    lost = mine - other
    _, nll, nll_uniform = pairs(lambda row: row["nll"])
    _, score, score_uniform = pairs(lambda row: row["score"])
    scores = _values(held, lambda row: row["score"]) if single else np.array([])
    some = len(lost) > 0
    return Figures(
        *key,
        count=len(held),
        kl=_mean(_values(held, divergence)),
        difference=resample(lost) if some else None,
        relative=resample(mine, other) if some and np.all(other > 0) else None,
        better=float(np.mean(lost < 0)) if some else None,
        worse=float(np.mean(lost > 0)) if some else None,
        worst=(names[int(np.argmax(lost))], float(np.max(lost))) if some else None,
        nll=_mean(_values(held, lambda row: row["nll"])),
        nll_difference=resample(nll - nll_uniform) if len(nll) else None,
        same=_mean(_values(held, lambda row: row["same"])),
        score=resample(scores) if len(scores) else None,
        score_difference=resample(score - score_uniform) if single and len(score) else None,
        bytes=_median(held, "bytes") or 0.0,
        rows=_median(held, "rows") or 0.0,
        decode_ms=_median(held, "decode_ms"),
    )


def reference_of(task: str, rows: Mapping[str, Row], resample: Callable[..., Estimate]) -> Reference:
    scores = _values(rows, lambda row: row["score"])
    return Reference(
        task,
        len(rows),
        resample(scores) if len(scores) else None,
        _mean(_values(rows, lambda row: row["chance"])) or 0.0,
        _mean(_values(rows, lambda row: row["nll"])),
        _median(rows, "bytes") or 0.0,
        _median(rows, "decode_ms"),
    )


def _values(rows: Mapping[str, Row], value: Callable[[Row], float | None]) -> Array:
    return np.array([v for row in rows.values() if (v := value(row)) is not None], dtype=np.float64)


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _median(rows: Mapping[str, Row], name: str) -> float | None:
    values = [row[name] for row in rows.values() if row[name] is not None]
    return float(statistics.median(values)) if values else None
