"""Budgets for every KV head, calibrated on a model's own answers: what ``pb-kvcache calibrate`` measures.

>>> from pb_kvcache.lab import calibrate, record
>>> from pb_kvcache.transformers import use                          # doctest: +SKIP
>>> model, tokenizer = record.load_model("model")                    # doctest: +SKIP
>>> use(model)                                                       # doctest: +SKIP
>>> curves = calibrate.calibrate(model, prompts, selection="output")  # doctest: +SKIP
>>> curves.plan(128).budgets                                         # doctest: +SKIP

For each prompt two things are measured. The output error of every KV head at a dozen budgets, in one pass: how far the
output of its layer moves where the head keeps that many of its best positions, a part of the residual stream. And the
outcome of every layer: how far the next tokens' distribution moves, in nats, where that layer alone is compressed. A
layer's outcome over its error says how much errors there matter, and multiplies the errors of its heads. The curves are
of the rule that ranks positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import CurveSet
from .._selection import Selection
from ._extra import extra, versions

__all__ = ["JUDGED", "OUTCOME_POINTS", "calibrate"]

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
    selection: Selection | str = "output",
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
        Whether outcomes are measured. Without them a layer's errors count as they are, which costs a tenth and makes
        plans that gain less.
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
        **{f"selection.{name}": value for name, value in rule.to_dict().items()},
        "prompts": len(prompts),
        "length": n,
        "judged_tokens": JUDGED,
        "own_answers": sum(not following for _, following in prompts),
        "head_dim": head_dim,
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
