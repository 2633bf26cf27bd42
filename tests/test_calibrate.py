"""Calibration on a tiny model: curves that belong to it, and plans that gain where its heads differ."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import CurveSet, Selection  # noqa: E402
from pb_kvcache.lab.calibrate import JUDGED, _outcome_grid, _outcome_weights, calibrate  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, HeldPrompt  # noqa: E402
from pb_kvcache.transformers._calibration import prompt_curves  # noqa: E402

from .test_transformers import _one_thread, stock, tokens, used  # noqa: E402, F401

RULE = Selection(window=6, kernel=3, protect=3)


def prompts(count, following=JUDGED):
    rows = tokens(80 + following, batch=count, seed=7).tolist()
    return [(row[:80], row[80:]) for row in rows]


def test_curves_are_the_mean_errors_times_what_they_matter():
    model = used("llama")
    given = prompts(2)
    done = []
    curves = calibrate(
        model, given, selection=RULE, measured={"texts": "random"}, progress=lambda *steps: done.append(steps)
    )
    assert done == [(step, 8) for step in range(1, 9)]
    grid, outcome_grid = curves.grid.tolist(), _outcome_grid(4, 80)
    assert set(outcome_grid) <= set(grid)
    assert (grid[0], grid[-1]) == (4, 80)
    single = [
        prompt_curves(
            model,
            HeldPrompt.read(model, context),
            following,
            selection=RULE,
            grid=grid,
            outcome_grid=outcome_grid,
        )
        for context, following in given
    ]
    errors = (single[0].head_errors + single[1].head_errors) / 2
    at = [grid.index(point) for point in outcome_grid]
    for layer in range(4):
        kl = np.maximum((single[0].outcomes[layer] + single[1].outcomes[layer]) / 2, 0).sum()
        alone = sum((single[0].layer_errors[layer, point] + single[1].layer_errors[layer, point]) / 2 for point in at)
        np.testing.assert_allclose(curves.losses[layer], errors[layer] * (kl + 1e-4) / (alone + 1e-9), rtol=1e-6)
    plain = calibrate(model, given, selection=RULE, outcome=False)
    np.testing.assert_allclose(plain.losses[:, :, plain.grid == 80], 0)
    shared = [point for point in plain.grid.tolist() if point in grid]
    ours, theirs = ([points.index(point) for point in shared] for points in (plain.grid.tolist(), grid))
    np.testing.assert_allclose(plain.losses[..., ours], errors[..., theirs], rtol=1e-6)


def test_a_curve_file_says_how_it_was_made(tmp_path):
    model = used("llama")
    curves = calibrate(model, prompts(2, 0), selection=RULE, outcome=False, measured={"texts": "random"})
    curves.save(tmp_path / "curves.npz")
    measured = CurveSet.load(tmp_path / "curves.npz").measured
    assert measured["what"] == "output error"
    assert measured["texts"] == "random"
    assert (measured["prompts"], measured["length"], measured["own_answers"]) == (2, 80, 2)
    assert measured["head_dim"] == 8
    fields = {name.partition(".")[2]: value for name, value in measured.items() if name.startswith("selection.")}
    assert Selection.from_dict(fields) == RULE
    assert "version.torch" in measured
    named = calibrate(model, prompts(1), outcome=False)
    assert named.measured["selection"] == "mixed"


def test_a_cache_of_curves_ranks_by_their_own_rule():
    model = used("llama")
    curves = calibrate(model, prompts(1), selection=RULE, outcome=False)
    cache = BudgetedCache(model.config, curves=curves, budget=20)
    assert RULE.describe() in cache.report().settings
    assert "snapkv" in BudgetedCache(model.config, curves=curves, budget=40, selection="snapkv").report().settings
    assert "window 8" in BudgetedCache(model.config, curves=curves, budget=20, window=8).report().settings
    plain = CurveSet(curves.grid, curves.losses)
    assert "snapkv" in BudgetedCache(model.config, curves=plain, budget=40).report().settings


def test_a_layer_in_the_noise_still_counts_a_little():
    weights = _outcome_weights(np.array([[0.5, 0.3], [1e-4, 0.0]]), np.array([[2.0, 2.0], [1.0, 1.0]]), noise=1e-3)
    np.testing.assert_allclose(weights, [(0.499 + 0.299 + 1e-4) / 4, 1e-4 / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "prompts: have no tokens"),
        ([([5] * 40, []), ([5] * 41, [])], {}, r"prompts: have \[40, 41\] tokens, must be one or more of the same"),
        ([([5] * 15, [])], {}, "prompts: have 15 tokens, must have 16 or more"),
        ([([5] * 40, [1] * 31)], {}, r"prompts\[0\]: 31 tokens follow, must be 32 or more, or none"),
        ([([5] * 40, [])], {"selection": Selection(kernel=1, score="repeat")}, "more than a prefill"),
        ([([5] * 40, [])], {"selection": "best"}, "selection = 'best'"),
    ],
)
def test_prompts_and_rules_that_cannot_be_measured_are_refused(given, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(used("llama"), given, **{"selection": RULE, **options})


def test_a_model_that_was_not_redirected_is_refused():
    with pytest.raises(ValueError, match=r"call pb_kvcache\.transformers\.use\(model\) first"):
        calibrate(stock("llama"), prompts(1), selection=RULE)
