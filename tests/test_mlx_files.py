"""Caches of mlx-lm that go back, are copied, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import plan

# isort: split
# First: where mlx is missing it skips this module.
from .small_mlx import SMALL, read, tiny, tokens

# isort: split
from mlx_lm.models import cache as stock

from pb_kvcache.mlx import BudgetedKVCache, end_prompt, make_prompt_cache, unuse, use


@pytest.fixture
def model() -> Iterator[Any]:
    made = use(tiny())
    yield made
    unuse(made)


def test_tokens_after_the_prompt_can_be_taken_back(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    read(model, tokens(60), caches)
    model(tokens(2, seed=1), cache=caches)
    twin = copy.deepcopy(caches)
    model(tokens(5, seed=2), cache=caches)
    assert stock.can_trim_prompt_cache(caches)
    assert stock.trim_prompt_cache(caches, 5) == 5
    later = tokens(3, seed=3)
    np.testing.assert_array_equal(np.array(model(later, cache=caches)), np.array(model(later, cache=twin)))
    before = [(cache.offset, cache.rows) for cache in caches]
    with pytest.raises(ValueError, match="n = 6: must be at most 5, the tokens after the prompt"):
        stock.trim_prompt_cache(caches, 6)
    assert [(cache.offset, cache.rows) for cache in caches] == before


def test_a_prompt_that_is_whole_can_be_taken_back_and_read_further(model: Any) -> None:
    caches = make_prompt_cache(model, budget=50, ratio=4, selection=SMALL)
    prompt = tokens(90)
    read(model, prompt[:, :40], caches)
    assert stock.trim_prompt_cache(caches, 10) == 10
    read(model, prompt[:, 30:], caches)
    whole = make_prompt_cache(model, budget=50, ratio=4, selection=SMALL)
    read(model, prompt, whole)
    assert [cache.rows for cache in caches] == [cache.rows for cache in whole]
    for one, other in zip(caches, whole, strict=True):
        np.testing.assert_array_equal(one.positions(), other.positions())
    again = make_prompt_cache(model, budget=100, selection=SMALL)
    read(model, prompt, again)
    assert stock.trim_prompt_cache(again, 1000) == 90
    assert all(cache.empty() for cache in again)


def test_a_prompt_that_is_read_is_only_taken_back_where_its_length_is_known(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    model(tokens(60), cache=caches)
    assert stock.trim_prompt_cache(caches, 5) == 0
    with pytest.raises(ValueError, match="n = 5: the prompt is still read"):
        caches[0].trim(5)
    known = make_prompt_cache(model, budget=20, selection=SMALL, prompt_length=60)
    model(tokens(58), cache=known)
    assert stock.trim_prompt_cache(known, 5) == 5
    model(tokens(60)[:, 53:], cache=known)
    assert {cache.rows for cache in known} == {20}


@pytest.mark.parametrize("ended", [True, False])
def test_files_of_mlx_lm_hold_them(model: Any, tmp_path: Path, ended: bool) -> None:
    made = plan(4, total=100, ratio=3, minimum=9)
    caches = make_prompt_cache(model, plan=made, selection=SMALL, prompt_length=70)
    prompt = tokens(70)
    model(prompt if ended else prompt[:, :50], cache=caches)
    stock.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches, {"of": "a test"})
    loaded, metadata = stock.load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert metadata == {"of": "a test"}
    assert all(type(cache) is BudgetedKVCache for cache in loaded)
    for later in ([] if ended else [prompt[:, 50:]]) + [tokens(3, seed=1), tokens(1, seed=2)]:
        np.testing.assert_array_equal(np.array(model(later, cache=caches)), np.array(model(later, cache=loaded)))
    for one, other in zip(caches, loaded, strict=True):
        np.testing.assert_array_equal(one.positions(), other.positions())
        assert (one.rows, one.offset, one.prompt, one.budget) == (other.rows, other.offset, other.prompt, other.budget)
        assert one.rows == one.budget + 4


@pytest.mark.parametrize(
    "given",
    [
        {"budget": np.int64(20), "weights": np.array([1, 2, 3, 1], np.float32)},
        {"fraction": np.float32(0.3), "ratio": np.float64(3)},
        {"memory": 80 * 256, "beta": 1.5},
        {"plan": plan(4, 20, ratio=2)},
    ],
)
def test_a_file_says_what_was_asked_for(model: Any, tmp_path: Path, given: dict[str, Any]) -> None:
    caches = make_prompt_cache(model, selection=SMALL, **given)
    model(tokens(60)[:, :-1], cache=caches)
    stock.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = stock.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    for some in (caches, loaded):
        model(tokens(60)[:, -1:], cache=some)
    assert [cache.rows for cache in loaded] == [cache.rows for cache in caches]
    assert sum(cache.rows for cache in loaded) < 100


def test_an_empty_cache_and_a_weighing_rule_in_files(model: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "cache.safetensors")
    stock.save_prompt_cache(file, make_prompt_cache(model, budget=20, selection=SMALL))
    loaded = stock.load_prompt_cache(file)
    read(model, tokens(60), loaded)
    assert {cache.rows for cache in loaded} == {20}
    weighing = make_prompt_cache(model, budget=20, selection="output")
    model(tokens(60), cache=weighing)
    stock.save_prompt_cache(file, weighing)
    with pytest.raises(RuntimeError, match="loaded before its prompt was over does not know the model"):
        end_prompt(stock.load_prompt_cache(file))


@pytest.mark.parametrize("state", [None, [], [None] * 5 + ["{}"], [None] * 5 + ["x"], (1, 2, 3)])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state: is not one of a BudgetedKVCache"):
        BudgetedKVCache.from_state(state)


def test_a_copy_is_independent(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, selection="output")
    model(tokens(60), cache=caches)
    twin = copy.deepcopy(caches)
    read(model, tokens(20, seed=1), caches)
    assert {cache.offset for cache in twin} == {60}
    read(model, tokens(20, seed=1), twin)
    later = tokens(2, seed=2)
    np.testing.assert_array_equal(np.array(model(later, cache=caches)), np.array(model(later, cache=twin)))
