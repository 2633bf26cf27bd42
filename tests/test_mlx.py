"""Budgets inside mlx-lm: what is computed is what a full cache with masked rows computes.

The reference is mlx-lm's own cache of all positions. A mask of one's own, for each layer and head, hides from the later
tokens what was evicted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import Selection, plan, save_plan, scores_from_qk, select_from_scores, window_scores

# isort: split
# First: where mlx is missing it skips this module.
from .small_mlx import SMALL, close, generated, read, tiny, tokens

# isort: split
import mlx.core as mx
from mlx import nn
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from pb_kvcache.mlx import end_prompt, make_prompt_cache, unuse, use
from pb_kvcache.mlx._selection import choose
from pb_kvcache.mlx._value_weights import projection_of

KEYS = Selection(window=8, score="keydiff")


@pytest.fixture
def model() -> Iterator[Any]:
    made = use(tiny())
    yield made
    unuse(made)


class Masked(stock.KVCache):
    """A cache of all positions, whose layer's attention sees those that `kept` names of a prompt."""

    kept: Any = None  # (batch, kv_heads, budget)
    prompt = 0

    def mask(self, new: int, q_heads: int) -> Any:
        batch, kv_heads = self.kept.shape[:2]
        visible = np.zeros((batch, kv_heads, new, self.offset), bool)
        for index in np.ndindex(batch, kv_heads):
            visible[index][:, self.kept[index]] = True
        later = np.arange(self.prompt, self.offset)
        visible[..., self.prompt :] = later <= later[-new:, None]
        return mx.array(visible.repeat(q_heads // kv_heads, axis=1))


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any, list[Any]], list[Any]]:
    """Read a prompt with stock caches, and mask in them what other caches have evicted."""
    original = llama.scaled_dot_product_attention

    def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any = None, **rest: Any) -> Any:
        if isinstance(cache, Masked) and cache.kept is not None:
            mask = cache.mask(queries.shape[2], queries.shape[1])
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", attend)

    def make(model: Any, prompt: Any, evicted: list[Any]) -> list[Any]:
        caches = [Masked() for _ in evicted]
        read(model, prompt, caches)
        for cache, other in zip(caches, evicted, strict=True):
            cache.kept, cache.prompt = other.positions(), other.prompt
        return caches

    return make


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("selection", [SMALL, Selection(window=8, protect=3, sinks=2, pooling=None), "output", KEYS])
def test_logits_are_those_of_a_full_cache_with_masked_rows(kv_heads: int, selection: Any, masked: Any) -> None:
    model = use(tiny(num_key_value_heads=kv_heads))
    prompt = tokens(90)
    caches = make_prompt_cache(model, budget=40, ratio=4, selection=selection)
    read(model, prompt, caches)
    assert [cache.rows for cache in caches] == [cache.budget for cache in caches]
    assert sum(cache.rows for cache in caches) == 4 * 40
    assert len({cache.rows for cache in caches}) == 4
    assert all((np.diff(cache.positions(), axis=-1) > 0).all() for cache in caches)
    reference = masked(model, prompt, caches)
    for step, new in enumerate([1, 1, 5, 1, 300]):  # beyond the room of a buffer
        later = tokens(new, seed=step + 1)
        close(model(later, cache=caches), model(later, cache=reference))
    unuse(model)


def test_the_prompt_itself_is_read_with_full_attention(model: Any) -> None:
    prompt = tokens(90)
    logits = read(model, prompt, make_prompt_cache(model, budget=12, selection=SMALL))
    close(logits, read(model, prompt, stock.make_prompt_cache(model)))


def test_three_tokens_at_once_equal_three_steps(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    read(model, tokens(70), caches)
    twin = copy.deepcopy(caches)
    later = tokens(3, seed=1)
    together = model(later, cache=caches)
    single = [model(later[:, index : index + 1], cache=twin) for index in range(3)]
    close(together, mx.concatenate(single, axis=1))
    assert [(cache.offset, cache.rows) for cache in caches] == [(cache.offset, cache.rows) for cache in twin]


@pytest.mark.parametrize("step", [7, 16, 30, 64])
def test_a_prompt_in_chunks_keeps_what_a_whole_one_does(model: Any, step: int) -> None:
    prompt = tokens(83)
    whole, chunked = (make_prompt_cache(model, budget=20, ratio=3, selection=SMALL) for _ in range(2))
    read(model, prompt, whole)
    read(model, prompt, chunked, step)
    for one, other in zip(whole, chunked, strict=True):
        np.testing.assert_array_equal(one.positions(), other.positions())
        close(one.keys_and_values()[0], other.keys_and_values()[0])


def test_the_kernels_of_the_library_choose(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = llama.scaled_dot_product_attention

    def spy(queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        seen.append((np.array(queries), np.array(keys)))
        return original(queries, keys, values, **options)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", spy)
    prompt = tokens(60)
    read(model, prompt, stock.make_prompt_cache(model))
    queries = [np.concatenate([first[0], last[0]], axis=2) for first, last in zip(seen[:4], seen[4:], strict=True)]
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    read(model, prompt, caches)
    for cache, q, (_, k) in zip(caches, queries, seen[4:], strict=False):
        scores = scores_from_qk(q[0, :, -8:], k[0], scale=16**-0.5, selection=SMALL)
        np.testing.assert_array_equal(cache.positions()[0], select_from_scores(scores, 20, selection=SMALL))


def test_every_sequence_of_a_batch_chooses_for_itself(model: Any, masked: Any) -> None:
    prompts = tokens(60, batch=3)
    caches = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    read(model, prompts, caches)
    for row in range(3):
        alone = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
        read(model, prompts[row : row + 1], alone)
        for one, other in zip(caches, alone, strict=True):
            np.testing.assert_array_equal(one.positions()[row], other.positions()[0])
    later = tokens(4, seed=1, batch=3)
    reference = masked(model, prompts, caches)
    close(model(later, cache=caches), model(later, cache=reference))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_scored_in_float32(dtype: Any) -> None:
    model = tiny()
    model.set_dtype(dtype)
    use(model)
    caches = make_prompt_cache(model, memory=4 * 40 * 2 * 2 * 16 * 2, selection="output")
    read(model, tokens(90), caches)
    assert [cache.rows for cache in caches] == [40] * 4
    assert {cache.keys.dtype for cache in caches} == {dtype}
    assert len(set(map(tuple, caches[3].positions()[0]))) == 2  # not ties, which go by position
    unuse(model)


def test_sinks_take_part_in_the_softmax_that_scores() -> None:
    rng = np.random.default_rng(0)
    queries, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 8, 16), (2, 2, 60, 16)))
    sinks = np.array([3, -5, 8, 0], np.float32)
    logits = np.einsum("bhwd,bhnd->bhwn", queries, keys.repeat(2, axis=1)) * 0.5
    logits[..., np.arange(60) > np.arange(52, 60)[:, None]] = -np.inf
    weights = np.exp(logits)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None, None]
    scores = window_scores(weights.reshape(8, 8, 60).astype(np.float32), num_kv_heads=4, selection=SMALL)
    expected = select_from_scores(scores, 20, selection=SMALL).reshape(2, 2, 20)
    given = {"rule": SMALL, "scale": 0.5, "weights": None}
    chosen = choose(mx.array(queries), mx.array(keys), 20, sinks=mx.array(sinks), **given)
    np.testing.assert_array_equal(chosen, expected)
    assert not np.array_equal(choose(mx.array(queries), mx.array(keys), 20, sinks=None, **given), expected)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_value_weighs_what_its_layer_makes_of_it(bits: int | None) -> None:
    layer = tiny().layers[1]
    if bits is not None:
        nn.quantize(layer, bits=bits, group_size=32)
    projection = projection_of(layer, 64)
    assert projection is not None
    values = np.random.default_rng(0).standard_normal((3, 2, 5, 16)).astype(np.float32)
    weights = np.array(projection.weights(mx.array(values)))
    for sequence, head, position in np.ndindex(3, 2, 5):
        norms = []
        for query_head in (2 * head, 2 * head + 1):
            row = np.zeros((1, 64), np.float32)
            row[0, 16 * query_head : 16 * query_head + 16] = values[sequence, head, position]
            norms.append(np.linalg.norm(np.array(layer.self_attn.o_proj(mx.array(row)))))
        np.testing.assert_allclose(weights[sequence, head, position], np.mean(norms), rtol=1e-4)


def test_a_mask_that_is_an_array_is_replaced_by_each_layers_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    read(model, tokens(60), caches)
    twin = copy.deepcopy(caches)
    later = tokens(4, seed=1)
    expected = model(later, cache=caches)
    monkeypatch.setattr(llama, "create_attention_mask", functools.partial(create_attention_mask, return_array=True))
    close(model(later, cache=twin), expected)


# ---- through mlx-lm ----


@pytest.mark.parametrize("step", [16, 2048])
def test_generate_step_evicts_after_the_last_token_of_the_prompt(model: Any, step: int) -> None:
    prompt = tokens(100)
    caches = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    generated(model, prompt[0], caches, prefill_step_size=step)
    assert {cache.prompt for cache in caches} == {100}
    whole = make_prompt_cache(model, budget=20, ratio=3, selection=SMALL)
    read(model, prompt, whole)
    for one, other in zip(caches, whole, strict=True):
        np.testing.assert_array_equal(one.positions()[..., : other.rows], other.positions())
        assert one.rows - other.rows == one.offset - 100


def test_budgets_that_cover_the_prompt_give_the_tokens_of_the_full_cache(model: Any) -> None:
    def drawn(caches: list[Any] | None, step: int = 2048) -> list[int]:
        mx.random.seed(1)  # a random model repeats itself where the likeliest token is taken
        return generated(model, tokens(100)[0], caches, 30, prefill_step_size=step, sampler=mx.random.categorical)

    full = drawn(None)
    assert len(set(full)) > 10
    assert drawn(make_prompt_cache(model, budget=100, ratio=4)) == full
    assert drawn(make_prompt_cache(model, fraction=1), 32) == drawn(None, 32)
    assert drawn(make_prompt_cache(model, budget=12, selection=SMALL)) != full


def test_a_remainder_of_one_token_ends_the_prompt_one_early_unless_its_length_is_given(model: Any) -> None:
    prompt = tokens(66)[0]
    for length, ends in ((None, 65), (66, 66)):
        caches = make_prompt_cache(model, budget=20, selection=SMALL, prompt_length=length)
        generated(model, prompt, caches, prefill_step_size=64)
        assert {cache.prompt for cache in caches} == {ends}
        assert {cache.offset - ends for cache in caches} == {cache.rows - 20 for cache in caches}
    singly = make_prompt_cache(model, budget=20, selection=SMALL, prompt_length=66)
    generated(model, prompt, singly, prefill_step_size=1)
    for one, other in zip(singly, caches, strict=True):
        np.testing.assert_array_equal(one.positions(), other.positions())


def test_a_second_prompt_is_appended_whole(model: Any, masked: Any) -> None:
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    prompt, second = tokens(60), tokens(40, seed=2)
    read(model, prompt, caches)
    reference = masked(model, prompt, caches)
    close(read(model, second, caches, 16), read(model, second, reference, 16))
    assert {(cache.prompt, cache.rows, cache.offset) for cache in caches} == {(60, 60, 100)}


def test_speculative_decoding_gives_the_tokens_of_plain_decoding(model: Any) -> None:
    prompt = tokens(60)[0]
    draft = tiny(num_hidden_layers=2)

    def made() -> list[Any]:
        return make_prompt_cache(model, budget=20, ratio=3, selection=SMALL, prompt_length=59)

    plain = generated(model, prompt, made(), 15)
    caches = made()
    both = [*caches, *stock.make_prompt_cache(draft)]
    steps = speculative_generate_step(prompt, model, draft, prompt_cache=both, max_tokens=15)
    assert [int(token) for token, _, _ in steps] == plain
    assert sum(cache.rows for cache in caches) == 4 * 20 + sum(cache.offset - 59 for cache in caches)
    unknown = [*make_prompt_cache(model, budget=20, selection=SMALL), *stock.make_prompt_cache(draft)]
    with pytest.raises(ValueError, match="trimmable"):
        next(speculative_generate_step(prompt, model, draft, prompt_cache=unknown))


# ---- budgets ----


def test_a_plan_or_its_file_says_what_every_layer_keeps(model: Any, tmp_path: Path) -> None:
    made = plan(4, total=120, weights=[5, 1, 2, 4], minimum=9)
    save_plan(tmp_path / "plan.json", made)
    for given in (made, str(tmp_path / "plan.json"), tmp_path / "plan.json"):
        caches = make_prompt_cache(model, plan=given, selection=SMALL)
        read(model, tokens(80), caches)
        assert [cache.rows for cache in caches] == made.budgets.tolist()


def test_what_a_layer_cannot_use_of_a_short_prompt_goes_to_the_others(model: Any) -> None:
    caches = make_prompt_cache(model, budget=40, ratio=4, selection=SMALL)
    read(model, tokens(45), caches)
    assert max(cache.rows for cache in caches) == 45
    assert sum(cache.rows for cache in caches) == 160


def test_rows_that_leave_are_freed(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    read(model, tokens(700), caches)
    assert sum(cache.nbytes for cache in caches) == 4 * 20 * 2 * 2 * 16 * 4


def test_a_loop_of_ones_own_says_when_the_prompt_is_over(model: Any) -> None:
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    model(tokens(60), cache=caches)
    assert {cache.rows for cache in caches} == {60}
    end_prompt(caches)
    end_prompt(caches)
    assert {(cache.rows, cache.prompt) for cache in caches} == {(20, 60)}
    known = make_prompt_cache(model, budget=20, selection=SMALL, prompt_length=60)
    model(tokens(60), cache=known)
    np.testing.assert_array_equal(known[2].positions(), caches[2].positions())
