"""AdaKV's budgets: against plain loops, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_kvcache import adakv_budgets, select_from_scores

from . import reference_select


def reference(scores, budget, protect, kernel, alpha, sinks=0, weights=None):
    """Every head's best first, then the best of all that are left, one after the other."""
    heads, scored = scores.shape
    behind = scored - sinks
    free = min(budget - protect - sinks, behind)
    rows = scores if weights is None else scores * weights[:, :scored]
    pooled = [reference_select.pool(row, kernel)[sinks:] for row in rows]
    taken = [set(reference_select.top(row, int(alpha * free) if free < behind else behind)) for row in pooled]
    order = sorted((-pooled[h][i], h, i) for h in range(heads) for i in range(behind) if i not in taken[h])
    for _, head, position in order[: free * heads - sum(map(len, taken))]:
        taken[head].add(position)
    return [len(row) + protect + sinks for row in taken]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 25), st.sampled_from([1, 3, 7]), st.data())
def test_budgets_are_those_of_plain_loops(heads, scored, extra, kernel, data):
    def rows(width):
        row = st.lists(st.integers(0, 6), min_size=width, max_size=width)
        return np.array(data.draw(st.lists(row, min_size=heads, max_size=heads)), np.float32)

    scores = rows(scored)
    alpha, protect = data.draw(st.sampled_from([0, 0.2, 0.5, 1])), data.draw(st.integers(1, 4))
    sinks = data.draw(st.integers(0, min(3, scored)))
    weights = rows(scored + data.draw(st.sampled_from([0, protect]))) if data.draw(st.booleans()) else None
    options = {"kernel": kernel, "sinks": sinks, "weights": weights}
    budget = protect + sinks + extra
    found = adakv_budgets(scores, budget, protect=protect, alpha=alpha, **options)
    assert found.tolist() == reference(scores, budget, protect, kernel, alpha, sinks, weights)
    assert found.sum() == heads * min(budget, scored + protect)
    if extra < scored - sinks:
        assert found.min() >= protect + sinks + int(alpha * extra)
    kept = select_from_scores(scores, found.tolist(), protect, **options)
    assert [len(row) for row in kept] == found.tolist()


def test_tensors_give_what_arrays_give():
    torch = pytest.importorskip("torch")
    scores = np.random.default_rng(0).random((4, 300), np.float32) * np.array([[1], [2], [4], [8]], np.float32)
    before = scores.copy()
    expected = adakv_budgets(scores, 50, protect=8)
    assert adakv_budgets(torch.from_numpy(scores), 50, protect=8).tolist() == expected.tolist()
    assert (scores == before).all()
    assert expected[3] > expected[0] == 8 + int(0.2 * 42)
    assert adakv_budgets(scores, 50, protect=8, alpha=1).tolist() == [50] * 4
    weights = 1 / scores[:, ::-1].copy()
    weighted = adakv_budgets(scores, 50, protect=8, sinks=2, weights=weights)
    assert weighted.tolist() != expected.tolist()
    given = adakv_budgets(torch.from_numpy(scores), 50, protect=8, sinks=2, weights=torch.from_numpy(weights))
    assert given.tolist() == weighted.tolist()


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (np.ones(4, np.float32), {}, r"scores: has shape \(4,\), must be \(kv_heads, n - protect\)"),
        (np.ones((2, 0), np.float32), {}, r"scores: has shape \(2, 0\)"),
        (np.ones((2, 4), np.float32), {"budget": 1}, "budget = 1: must be at least 2"),
        (np.ones((2, 4), np.float32), {"alpha": 1.5}, "alpha = 1.5: must be between 0 and 1"),
        (np.ones((2, 4), np.float32), {"alpha": float("nan")}, "alpha"),
        (np.full((2, 4), np.nan, np.float32), {}, "scores"),
        (np.full((2, 4), np.nan, np.float32), {"weights": np.ones((2, 4), np.float32)}, r"scores\[0, 0\] = nan"),
        (
            np.ones((2, 4), np.float32),
            {"weights": -np.ones((2, 4), np.float32)},
            r"weights\[0, 0\] = -1.0: every weight",
        ),
        (np.full((2, 4), 2, np.float32), {"weights": np.full((2, 6), 3e38, np.float32)}, r"scores\[0, 0\] = 2: is too"),
        (np.ones((2, 4), np.float32), {"weights": np.ones((2, 5), np.float32)}, "weights: has shape"),
        (np.ones((2, 4), np.float32), {"sinks": 3}, "budget = 4: must be at least 5"),
        (np.ones((2, 4), np.float32), {"protect": 0}, "protect = 0"),
    ],
)
def test_bad_input_is_named(scores, options, message):
    with pytest.raises(ValueError, match=message):
        adakv_budgets(scores, **{"budget": 4, "protect": 2, **options})
