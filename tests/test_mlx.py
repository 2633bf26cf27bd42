"""Budgets inside mlx-lm: what is computed is what a full cache with masked rows computes.

The reference is mlx-lm's own cache of all positions. A mask of one's own, for each layer and head, hides from the later
tokens what was evicted.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_kvcache import HeadPlan, Selection, plan, save_plan, scores_from_qk, select_from_scores, window_scores

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models import gemma2, gpt_oss, llama
from mlx_lm.models.base import create_attention_mask

from pb_kvcache.mlx import BudgetedKVCache, end_prompt, make_prompt_cache, unuse, use
from pb_kvcache.mlx._selection import choose
from pb_kvcache.mlx._value_weights import projection_of

from .conftest import Run

SMALL = Selection(window=8, kernel=3)
KEYS = Selection(window=8, score="keydiff")
VOCABULARY = 97


def tiny(**changes: Any) -> Any:
    """Return a random Llama of four layers whose attention is far from even."""
    mx.random.seed(0)
    options: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,  # or every token would be followed by itself
    }
    model = llama.Model(llama.ModelArgs(**{**options, **changes}))
    for layer in model.layers:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight * 4
        layer.self_attn.v_proj.weight = layer.self_attn.v_proj.weight * 8
    mx.eval(model.parameters())
    return model


@pytest.fixture
def model() -> Iterator[Any]:
    made = use(tiny())
    yield made
    unuse(made)


def tokens(length: int, seed: int = 0, batch: int = 1) -> Any:
    return mx.array(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)))


def read(model: Any, prompt: Any, caches: list[Any], step: int = 10_000) -> Any:
    """Read a prompt as mlx-lm does: its last token apart. Return the logits of that."""
    for start in range(0, prompt.shape[1] - 1, step):
        model(prompt[:, start : min(start + step, prompt.shape[1] - 1)], cache=caches)
    return model(prompt[:, -1:], cache=caches)


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


def close(one: Any, other: Any) -> None:
    one, other = np.array(one), np.array(other)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


# ---- what is computed ----


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


def test_a_model_with_sinks_and_sliding_windows_is_served() -> None:
    mx.random.seed(0)
    args = gpt_oss.ModelArgs(
        model_type="gpt_oss",
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
    )
    model = use(gpt_oss.Model(args))
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    assert [type(cache).__name__ for cache in caches] == ["RotatingKVCache", "BudgetedKVCache"] * 2
    close(read(model, tokens(60), caches), read(model, tokens(60), stock.make_prompt_cache(model)))
    assert [caches[1].rows, caches[3].rows] == [20, 20]
    unuse(model)


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


def generated(model: Any, prompt: Any, caches: list[Any] | None, count: int = 12, **options: Any) -> list[int]:
    steps = generate_step(prompt, model, max_tokens=count, prompt_cache=caches, **options)
    return [int(token) for token, _ in steps]


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


# ---- going back, copies, files ----


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


# ---- models ----


def test_other_caches_and_models_compute_what_they_did() -> None:
    prompt, plain = tokens(40), llama.scaled_dot_product_attention
    model, other = tiny(), tiny()
    before = np.array(read(model, prompt, stock.make_prompt_cache(model)))
    use(model)
    use(use(other))
    assert llama.scaled_dot_product_attention is not plain
    np.testing.assert_array_equal(before, np.array(read(model, prompt, stock.make_prompt_cache(model))))
    close(before, model(prompt)[:, -1:])  # without a cache
    unuse(model)
    unuse(model)
    assert llama.scaled_dot_product_attention is not plain
    assert make_prompt_cache(other)
    unuse(other)
    assert llama.scaled_dot_product_attention is plain


def test_a_model_that_is_not_used_is_refused_and_one_no_longer_used_fails() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"call pb_kvcache\.mlx\.use\(model\) first"):
        make_prompt_cache(model)
    caches = make_prompt_cache(use(model), budget=40)
    unuse(model)
    model(tokens(60), cache=caches)
    with pytest.raises(RuntimeError, match="layer 0: the attention of the last step did not reach its cache"):
        model(tokens(1), cache=caches)


def test_a_layer_that_cannot_be_served_is_named() -> None:
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    capped = gemma2.Model(
        gemma2.ModelArgs(
            model_type="gemma2", head_dim=16, rms_norm_eps=1e-5, vocab_size=9, num_key_value_heads=2, **args
        )
    )
    with pytest.raises(ValueError, match="none of its modules calls mlx-lm's scaled_dot_product_attention"):
        use(capped)
    with pytest.raises(TypeError, match=r"model: must be an mlx\.nn\.Module"):
        use("a model")


class Changed(llama.Attention):
    """An attention that does one thing that a compressed cache cannot follow."""

    how = ""

    def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is None:
            return super().__call__(x, mask, cache)
        batch, new, _ = x.shape
        queries, keys, values = (
            part(x).reshape(batch, new, heads, -1).transpose(0, 2, 1, 3)
            for part, heads in ((self.q_proj, 4), (self.k_proj, 2), (self.v_proj, 2))
        )
        offset = cache.offset if self.how != "rows" or cache.empty() else cache.held
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        if self.how == "rows":
            cache.held = keys.shape[2]
        if self.how == "keys":
            keys = keys * 1.0
        if self.how == "bias":
            mask = mx.zeros((new, keys.shape[2]))
        options = {"cache": cache, "scale": self.scale, "mask": mask}
        if self.how == "none":
            output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        else:
            output = llama.scaled_dot_product_attention(queries, keys, values, **options)
        if self.how == "twice":
            output = llama.scaled_dot_product_attention(queries, keys, values, **options)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, new, -1))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("rows", "the number of rows is taken for a position"),
        ("keys", "layer 2: it changes keys or values between its cache and its attention"),
        ("bias", "layer 2: its attention has a mask of its own"),
        ("none", "layer 2: its attention does not go through"),
        ("twice", "layer 2: its attention runs more often than its cache is written"),
    ],
)
def test_the_probe_finds_what_cannot_be_followed(how: str, reason: str) -> None:
    model, plain = tiny(), llama.scaled_dot_product_attention
    model.layers[2].self_attn.__class__ = type("Other", (Changed,), {"how": how})
    with pytest.raises(ValueError, match=reason):
        use(model)
    assert llama.scaled_dot_product_attention is plain
    model.layers[2].self_attn.__class__ = type("Same", (Changed,), {"how": "same"})
    unuse(use(model))


def test_layers_with_a_sliding_window_keep_their_own_cache() -> None:
    model = use(tiny(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=16))
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    assert [type(cache).__name__ for cache in caches] == ["BudgetedKVCache", "RotatingKVCache"] * 2
    close(read(model, tokens(60), caches), read(model, tokens(60), stock.make_prompt_cache(model)))
    assert [caches[0].rows, caches[2].rows] == [20, 20]
    unuse(model)


# ---- what is refused ----


def test_without_mlx_the_error_names_the_extra(run: Run) -> None:
    script = """
import sys
sys.modules["mlx_lm"] = None
try:
    import pb_kvcache.mlx
except ImportError as error:
    print(error)
"""
    assert "pip install 'pb-kvcache[mlx]'" in run(sys.executable, "-c", script).stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": HeadPlan([[20, 20]] * 4)}, r"plan: is a HeadPlan.*equal rows in all heads.*plan\.layer_plan\(\)"),
        ({"plan": plan(3, 40)}, "plan: has 3 layers, the model has 4"),
        ({"budget": 32}, "budget = 32: must be at least window"),
        ({"selection": "mixed"}, "selection: has score = 'mixed'"),
        ({"selection": Selection(second_hop=0.5)}, r"second_hop = 0\.5, which needs all queries"),
        ({"selection": "best"}, "selection = 'best'"),
        ({"prompt_length": 0}, "prompt_length = 0: must be greater than 0"),
        ({"budget": 40, "fraction": 0.5}, "only one of them"),
        ({"weights": [1, 2]}, "weights: has shape"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_prompt_cache(model, **given)


def test_a_plan_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="plan: must be a LayerPlan"):
        make_prompt_cache(model, plan=[40, 40, 40, 40])


def test_another_batch_and_quantised_rows_are_refused(model: Any) -> None:
    caches = make_prompt_cache(model, budget=40)
    read(model, tokens(60), caches)
    with pytest.raises(ValueError, match="layer 0: the cache holds a batch of 1 and meets one of 2"):
        model(tokens(1, batch=2), cache=caches)
    assert {cache.offset for cache in caches} == {60}
    with pytest.raises(NotImplementedError, match="kv_bits"):
        list(generate_step(tokens(60)[0], model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0))


def test_a_step_that_failed_between_two_layers_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_prompt_cache(model, budget=40)
    read(model, tokens(60), caches)

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(caches[2], "update_and_fetch", fail)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(1), cache=caches)
    with pytest.raises(RuntimeError, match="layer 2 has seen 60 tokens and the first layer 61"):
        model(tokens(1), cache=caches)


def test_attention_that_is_not_finite_names_its_layer(model: Any) -> None:
    model.layers[2].self_attn.k_proj.weight = model.layers[2].self_attn.k_proj.weight * mx.nan
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    with pytest.raises(ValueError, match="layer 2: q and k"):
        read(model, tokens(60), caches)
