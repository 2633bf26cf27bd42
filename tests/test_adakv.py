"""AdaKV's budgets: against plain loops, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_kvcache import adakv_budgets, select_from_scores

from . import reference_select


def reference(scores, budget, window, kernel, alpha):
    """Every head's best first, then the best of all that are left, one after the other."""
    heads, scored = scores.shape
    free = min(budget - window, scored)
    pooled = [reference_select.pool(row, kernel) for row in scores]
    taken = [set(reference_select.top(row, int(alpha * free) if free < scored else scored)) for row in pooled]
    order = sorted((-pooled[h][i], h, i) for h in range(heads) for i in range(scored) if i not in taken[h])
    for _, head, position in order[: free * heads - sum(map(len, taken))]:
        taken[head].add(position)
    return [len(row) + window for row in taken]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 25), st.sampled_from([1, 3, 7]), st.data())
def test_budgets_are_those_of_plain_loops(heads, scored, extra, kernel, data):
    scores = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 6), min_size=scored, max_size=scored), min_size=heads, max_size=heads)
        ),
        np.float32,
    )
    alpha, window = data.draw(st.sampled_from([0, 0.2, 0.5, 1])), data.draw(st.integers(1, 4))
    budget = window + extra
    found = adakv_budgets(scores, budget, protect=window, kernel=kernel, alpha=alpha)
    assert found.tolist() == reference(scores, budget, window, kernel, alpha)
    assert found.sum() == heads * min(budget, scored + window)
    if extra < scored:
        assert found.min() >= window + int(alpha * extra)
    kept = select_from_scores(scores, found.tolist(), window, kernel=kernel)
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


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (np.ones(4, np.float32), {}, r"scores: has shape \(4,\), must be \(kv_heads, n - protect\)"),
        (np.ones((2, 0), np.float32), {}, r"scores: has shape \(2, 0\)"),
        (np.ones((2, 4), np.float32), {"budget": 1}, "budget = 1: must be at least 2"),
        (np.ones((2, 4), np.float32), {"alpha": 1.5}, "alpha = 1.5: must be between 0 and 1"),
        (np.ones((2, 4), np.float32), {"alpha": float("nan")}, "alpha"),
        (np.full((2, 4), np.nan, np.float32), {}, "scores"),
        (np.ones((2, 4), np.float32), {"protect": 0}, "protect = 0"),
    ],
)
def test_bad_input_is_named(scores, options, message):
    with pytest.raises(ValueError, match=message):
        adakv_budgets(scores, **{"budget": 4, "protect": 2, **options})
