"""Budgets for every KV head, calibrated on a model's own answers: what ``pb-kvcache calibrate`` measures.

>>> from pb_kvcache.lab import calibrate, record
>>> from pb_kvcache.transformers import use                          # doctest: +SKIP
>>> model, tokenizer = record.load_model("model")                    # doctest: +SKIP
>>> use(model)                                                       # doctest: +SKIP
>>> curves = calibrate.calibrate(model, prompts)                     # doctest: +SKIP
>>> curves.plan(128).budgets                                         # doctest: +SKIP

For each prompt two things are measured. The output error of every KV head at a dozen budgets, in one pass: how far the
output of its layer moves where the head keeps that many of its best positions, a part of the residual stream. And the
outcome of every layer: how far the next tokens' distribution moves, in nats, where that layer alone is compressed. A
layer's outcome over its error says how much errors there matter, and multiplies the errors of its heads. The curves are
of the rule that ranks positions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import CurveSet
from .._curves import RULE_PREFIX
from .._selection import Selection
from . import _own_text
from ._extra import extra, versions
from .verdict import Summary, summarise

if TYPE_CHECKING:
    from .tasks import Item

__all__ = ["JUDGED", "OUTCOME_POINTS", "Judgement", "calibrate", "judge"]

#: Tokens after each prompt that are judged.
JUDGED = 32
#: Budgets at which each layer is compressed alone.
OUTCOME_POINTS = 4
#: KL in nats a token that the rounding of half precision alone makes.
_NOISE = 1e-3


def calibrate(
    model: Any,
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    selection: Selection | str = "mixed",
    outcome: bool = True,
    measured: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> CurveSet:
    """Measure what every KV head of a model loses at each of a few budgets.

    Parameters
    ----------
    model
        A transformers model in evaluation mode that :func:`pb_kvcache.transformers.use` was called with.
    prompts
        Token ids of prompts, all of one length, and the tokens that follow each: 32 of them are judged. Where none
        follow, the model's own answer is, which is generated with the full cache.
    selection
        The rule that ranks positions, which the curves belong to.
    outcome
        Whether outcomes are measured. Without them a layer's errors count as they are, which takes a quarter of the
        time and makes plans that gain less.
    measured
        What only the caller knows, such as the texts. It is added to the curves' own.
    progress
        Called with the steps done and of all.

    Raises
    ------
    ImportError
        The extra ``transformers`` is not installed.
    TypeError, ValueError
        Prompts of several lengths or too short for the rule, or a model that cannot be measured.
    """
    extra("torch", "calibration"), extra("transformers", "calibration")
    from ..transformers import HeldPrompt
    from ..transformers._calibration import prompt_curves
    from ..transformers._output_error import budget_grid

    rule = Selection.of(selection)
    if rule.score == "repeat" or rule.second_hop:
        raise ValueError(f"selection: {rule} ranks positions by more than a prefill, whose curves cannot be measured")
    lengths = sorted({len(context) for context, _ in prompts})
    if len(lengths) != 1:
        raise ValueError(f"prompts: have {lengths or 'no'} tokens, must be one or more of the same length")
    least, n = rule.always_kept + 1, lengths[0]
    if n < 4 * least:
        raise ValueError(f"prompts: have {n} tokens, must have {4 * least} or more, four times the smallest budget")
    for number, (_, following) in enumerate(prompts):
        if 0 < len(following) < JUDGED:
            raise ValueError(f"prompts[{number}]: {len(following)} tokens follow, must be {JUDGED} or more, or none")
    outcome_grid = _outcome_grid(least, n) if outcome else []
    grid = sorted({*budget_grid(least, n), *outcome_grid})
    found, head_dim = [], None
    for number, (context, following) in enumerate(prompts):
        held = HeldPrompt.read(model, context, window=max(rule.window, 32))
        tokens = list(following)[:JUDGED] or held.answer(model, JUDGED)

        def after_layer(done: int, layers: int, number: int = number) -> None:
            if progress is not None:
                progress(number * layers + done, len(prompts) * layers)

        head_dim = held.head_dim
        found.append(
            prompt_curves(
                model, held, tokens, selection=rule, grid=grid, outcome_grid=outcome_grid, progress=after_layer
            )
        )
    losses = np.mean([one.head_errors for one in found], axis=0)
    if outcome:
        outcomes = np.mean([one.outcomes for one in found if one.outcomes is not None], axis=0)
        alone = np.mean([one.layer_errors for one in found], axis=0)[:, [grid.index(at) for at in outcome_grid]]
        losses *= _outcome_weights(outcomes, alone, noise=0.0 if _exact(model) else _NOISE)[:, None, None]
    how: dict[str, Any] = {
        "what": "output error times outcome weight" if outcome else "output error",
        "selection": rule.name or rule.describe(),
        **{RULE_PREFIX + name: value for name, value in rule.to_dict().items()},
        "prompts": len(prompts),
        "length": n,
        "judged_tokens": JUDGED,
        "own_answers": sum(not following for _, following in prompts),
        "head_dim": head_dim,
        _own_text.FIELD: _own_text.marks(context for context, _ in prompts),
        **{f"version.{name}": version for name, version in versions().items()},
    }
    return CurveSet(grid, losses, {**how, **(measured or {})})


def _outcome_grid(least: int, n: int) -> list[int]:
    """Return budgets from a few positions more than are always kept to two fifths of the prompt."""
    points = np.geomspace(least + 3, max(least + 3, 2 * n / 5), OUTCOME_POINTS)
    return sorted({round(point) for point in points})


def _outcome_weights(
    outcomes: npt.NDArray[np.float64], errors: npt.NDArray[np.float64], noise: float
) -> npt.NDArray[np.float64]:
    """Return what a layer's errors count, ``(layers,)``: the sum of its outcomes over that of its errors.

    A layer whose outcomes are lost in the noise counts a little, so that its heads still divide what there is.
    """
    above = np.maximum(outcomes - noise, 0).sum(axis=1) + 1e-4
    return np.asarray(above / (errors.sum(axis=1) + 1e-9))


def _exact(model: Any) -> bool:
    """Return whether a model computes in single precision or better."""
    return bool(next(model.parameters()).dtype.itemsize >= 4)


@dataclass(frozen=True)
class Judgement:
    """What prompts that the calibration did not see say of its plans."""

    #: Of :func:`pb_kvcache.lab.verdict.summarise`.
    summary: Summary
    #: What the plans are called in it, and what uniform budgets and the pyramid of the same rule are.
    plan: str
    others: tuple[str, ...]

    @property
    def wins(self) -> bool:
        """Whether the mean KL of the plan is below that of the others at every budget."""
        return not self.losses()

    def losses(self) -> list[str]:
        """Return a sentence for each budget and each other that the plan does not beat."""
        found = []
        for budget in self.summary.budgets:
            kl = {figures.variant: figures.kl for figures in self.summary.at(budget)}
            ours = kl[self.plan]
            for other in self.others:
                theirs = kl[other]
                if ours is None or theirs is None or ours >= theirs:
                    found.append(
                        f"At {budget} the calibrated plan's KL is {ours:.4f}, and that of {other} {theirs:.4f}."
                    )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the figures at each budget as JSON values."""
        return {
            budget: {
                figures.variant: {
                    "kl": figures.kl,
                    "prompts": figures.count,
                    "difference_to_uniform": None
                    if figures.difference is None
                    else [figures.difference.value, figures.difference.low, figures.difference.high],
                }
                for figures in self.summary.at(budget)
            }
            for budget in self.summary.budgets
        }


def judge(
    loaded: tuple[Any, Any],
    curves: CurveSet,
    items: Sequence[Item],
    *,
    budgets: Sequence[int | str],
    selection: str = "mixed",
    progress: Callable[[int, int], object] | None = None,
) -> Judgement:
    """Compare plans of curves with uniform budgets and a pyramid of ratio 4, on prompts that were not measured.

    Parameters
    ----------
    loaded
        The model and its tokenizer.
    curves
        What :func:`calibrate` measured.
    items
        Prompts, as :func:`pb_kvcache.lab.tasks.make` makes them.
    budgets, progress
        As for :func:`pb_kvcache.lab.evaluate.evaluate`.
    selection
        The name of the rule that the curves are of.

    Raises
    ------
    ValueError
        A prompt whose text was measured, or one of :func:`pb_kvcache.lab.evaluate.evaluate`'s.
    """
    from .evaluate import evaluate, make_variants

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calibrated.npz"
        curves.save(file)
        variants = make_variants(["uniform", "pyramid:4", os.fspath(file)], [selection], ["none"])
        rows = evaluate(
            loaded, items, budgets=budgets, variants=variants, directory=Path(folder) / "rows", progress=progress
        )
    labels = [variant.label for variant in variants]
    return Judgement(summarise(rows), labels[-1], tuple(labels[-3:-1]))
