"""``loglikelihood``: what continuations score after a context that was read once and compressed.

The right values come from the stock model: from one plain forward over context and continuation where nothing is
evicted, and else from the full cache in which the evicted positions are masked out (:class:`Masked`).
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from pb_kvcache.transformers import (  # noqa: E402
    BudgetedCache,
    ContinuationScore,
    PyramidKVCache,
    compressed,
    loglikelihood,
    use,
)

from .test_transformers import CACHE, COMMON, SIZES, VERSION, Masked, _one_thread, stock, tokens, used  # noqa: E402, F401

#: Of several lengths, not in order, with a repeated one and two of one token.
LENGTHS = (3, 1, 9, 5, 1, 3)


def continuations() -> list[list[int]]:
    return [tokens(length, seed=7 + index)[0].tolist() for index, length in enumerate(LENGTHS)]


def plain(model, context: torch.Tensor, continuation: list[int]) -> torch.Tensor:
    """Return the logits before each token of a continuation, of one forward without a cache."""
    whole = torch.cat([context, torch.tensor([continuation])], dim=1)
    with torch.no_grad():
        return model(whole, use_cache=False).logits[0, context.shape[1] - 1 : -1]


def masked(family: str, context: torch.Tensor, continuation: list[int], cache) -> torch.Tensor:
    """Return them from the full cache, in which what `cache` does not hold of the context is masked out."""
    full = Masked(family)
    last = full(context)[0, -1:]
    full.evict(cache, context.shape[1])
    return torch.cat([last, full(torch.tensor([continuation]))[0, :-1]])


def check(score: ContinuationScore, continuation: list[int], logits: torch.Tensor, atol: float = 2e-5) -> None:
    """Compare a score with the one that float64 arithmetic gives for the logits before each token."""
    expected = [float(row.double().log_softmax(-1)[token]) for row, token in zip(logits, continuation, strict=True)]
    np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=atol)
    assert score.tokens == tuple(continuation)
    assert score.num_tokens == len(continuation)
    assert score.logprob == pytest.approx(math.fsum(score.logprobs), abs=1e-12)
    assert score.greedy == (logits.argmax(-1).tolist() == list(continuation))


# ---- right values ----


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "eager"), ("gpt2", "sdpa")])
def test_a_context_below_the_budget_scores_as_one_plain_forward(family, attention, batch_size):
    context = tokens(40)
    scores = loglikelihood(
        used(family, attention), context, continuations(), batch_size=batch_size, budget=60, **COMMON
    )
    for score, continuation in zip(scores, continuations(), strict=True):
        check(score, continuation, plain(stock(family, attention), context, continuation))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_context_below_the_budget_scores_as_dynamic_cache_bit_for_bit(family):
    model, context = used(family), tokens(40)
    own = loglikelihood(model, context, continuations(), cache=BudgetedCache(model.config, budget=60, **COMMON))
    full = loglikelihood(model, context, continuations(), cache=DynamicCache(config=model.config))
    assert own == full


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa")])
@pytest.mark.parametrize("kind", [BudgetedCache, PyramidKVCache])
def test_a_compressed_context_scores_as_the_full_one_with_the_evicted_positions_masked(
    kind, family, attention, batch_size
):
    model, context = used(family, attention), tokens(60)
    cache = kind(model.config, budget=12, **COMMON)
    scores = loglikelihood(model, context, continuations(), cache=cache, batch_size=batch_size)
    layers = list(cache.compressed_layers)
    assert cache.lengths[layers].sum() == 12 * len(layers)
    assert cache.get_seq_length() == 60
    evicted_matters = []
    for score, continuation in zip(scores, continuations(), strict=True):
        check(score, continuation, masked(family, context, continuation, cache))
        whole = plain(stock(family, attention), context, continuation).double().log_softmax(-1)
        evicted_matters.append(abs(whole[-1, continuation[-1]] - score.logprobs[-1]) > 1e-3)
    assert any(evicted_matters[index] for index, length in enumerate(LENGTHS) if length > 1)


def test_a_held_cache_scores_what_one_token_at_a_time_gives():
    model, context = used("llama"), tokens(60)
    options = {"budget": 12, "decode": "hold", **COMMON}
    scores = loglikelihood(model, context, continuations(), batch_size=4, **options)
    for score, continuation in zip(scores, continuations(), strict=True):
        cache = BudgetedCache(model.config, **options)
        rows = []
        with torch.no_grad():
            for ids in (context, *(torch.tensor([[token]]) for token in continuation[:-1])):
                rows.append(model(ids, use_cache=True, **{CACHE: cache}).logits[0, -1])
        check(score, continuation, torch.stack(rows))


def test_the_first_token_is_scored_by_the_whole_context():
    """The context is read with full attention: nothing that is evicted afterwards changes its last logits."""
    model, context = used("llama"), tokens(60)
    for token in (5, 90):
        (score,) = loglikelihood(model, context, [[token]], budget=5, **COMMON)
        check(score, [token], plain(stock("llama"), context, [token]), atol=2e-6)


def test_greedy_is_what_generate_gives_and_nothing_else():
    model, context = used("llama"), tokens(60)
    with compressed(model, budget=12, **COMMON):
        generated = model.generate(context, max_new_tokens=6, do_sample=False)[0, 60:].tolist()
    other = [*generated[:5], (generated[5] + 1) % 100]
    scores = loglikelihood(model, context, [generated, other, generated[:1], other[5:]], budget=12, **COMMON)
    assert [score.greedy for score in scores] == [True, False, True, False]
    assert scores[0].logprobs[:5] == pytest.approx(scores[1].logprobs[:5], abs=1e-6)


@pytest.mark.skipif(VERSION < (5, 24), reason="Lfm2 keeps its states elsewhere before transformers 5.24")
def test_a_hybrid_carries_its_other_states_into_every_continuation():
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    context = tokens(40)
    scores = loglikelihood(model, context, continuations(), budget=60, **COMMON)
    for score, continuation in zip(scores, continuations(), strict=True):
        check(score, continuation, plain(model, context, continuation))


# ---- what it is given ----


def test_ids_come_as_a_list_an_array_or_a_tensor():
    model, context = used("llama"), tokens(30)
    expected = loglikelihood(model, context, [[5, 6], [7]], budget=12, **COMMON)
    for kind in (lambda ids: ids.tolist(), lambda ids: ids[0], lambda ids: ids[0].numpy(), lambda ids: ids.numpy()):
        given = [kind(torch.tensor([[5, 6]])), kind(torch.tensor([[7]]))]
        assert loglikelihood(model, kind(context), given, budget=12, **COMMON) == expected


def test_a_model_that_was_not_redirected_is_left_as_it_was():
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(stock("llama").config)).eval()
    context = tokens(60)
    before = model.config._attn_implementation
    scores = loglikelihood(model, context, continuations(), budget=12, **COMMON)
    assert model.config._attn_implementation == before
    assert "generate" not in model.__dict__
    assert scores == loglikelihood(use(model), context, continuations(), budget=12, **COMMON)


def test_the_options_of_use_hold_unless_others_are_given():
    context = tokens(60)
    model = use(
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(stock("llama").config)).eval(), budget=12, **COMMON
    )
    own = loglikelihood(model, context, continuations())
    assert own == loglikelihood(model, context, continuations(), budget=12, **COMMON)
    assert own != loglikelihood(model, context, continuations(), budget=60, **COMMON)
    # The context comes in one call, so that the same is kept.
    assert own == loglikelihood(model, context, continuations(), budget=12, compress="decode", **COMMON)


def test_the_cache_holds_the_context_alone_afterwards():
    model, context = used("llama"), tokens(60)
    cache = BudgetedCache(model.config, budget=12, **COMMON)
    first = loglikelihood(model, context, continuations(), cache=cache)
    assert cache.get_seq_length() == 60
    assert (cache.lengths == 12).all()
    fresh = BudgetedCache(model.config, budget=12, **COMMON)
    with torch.no_grad():
        model(context, use_cache=True, **{CACHE: fresh})
    assert all(np.array_equal(cache.positions(layer), fresh.positions(layer)) for layer in range(4))
    cache.reset()
    assert loglikelihood(model, context, continuations(), cache=cache) == first


def test_a_continuation_longer_than_its_context_is_no_chunk_of_it():
    model, context = used("llama"), tokens(14)  # warnings are errors
    cache = BudgetedCache(model.config, budget=12, **COMMON)
    continuation = tokens(30, seed=3)[0].tolist()
    (score,) = loglikelihood(model, context, [continuation], cache=cache)
    check(score, continuation, masked("llama", context, continuation, cache))


def test_no_continuation_needs_no_model():
    assert loglikelihood(used("llama"), [1], [], budget=12, **COMMON) == []


# ---- text ----


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer of words with the space before them, which puts <s> before a text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["a", "b", "ab", "c", "d"]
    words = ["<s>", "</s>", "?", *words, *(f"Ġ{word}" for word in words), "Ġ"]
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="?")


def ids(tokenizer, *words: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(words)))


@pytest.mark.parametrize(
    ("context", "continuation", "before", "own"),
    [
        ("a b", " c d", ["<s>", "a", "Ġb"], ["Ġc", "Ġd"]),
        ("a b ", "c", ["<s>", "a", "Ġb"], ["Ġc"]),  # white space at the end belongs to what follows
        ("<s>a b", " c", ["<s>", "a", "Ġb"], ["Ġc"]),  # not a second one
        ("", "a b", ["<s>"], ["a", "Ġb"]),
        ("", "<s>a b", ["<s>"], ["a", "Ġb"]),
        (" ", "a", ["<s>"], ["Ġa"]),
    ],
)
def test_the_border_is_where_lm_eval_draws_it(tokenizer, context, continuation, before, own):
    model = used("llama")
    (score,) = loglikelihood(model, context, [continuation], tokenizer=tokenizer, budget=12, **COMMON)
    assert score.tokens == ids(tokenizer, *own)
    assert [score] == loglikelihood(model, ids(tokenizer, *before), [ids(tokenizer, *own)], budget=12, **COMMON)


def test_a_tokenizer_without_a_beginning_begins_with_the_end(tokenizer):
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    model = used("llama")
    (score,) = loglikelihood(model, "", ["a b"], tokenizer=other, budget=12, **COMMON)
    assert [score] == loglikelihood(model, [1], [ids(tokenizer, "a", "Ġb")], budget=12, **COMMON)


# ---- what is refused ----


def refusals() -> dict:
    """Return arguments, made when they are needed, and what is said of them."""

    def cache(**options):
        return BudgetedCache(used("llama").config, budget=12, **COMMON, **options)

    def held():
        made = cache()
        loglikelihood(used("llama"), tokens(20), [[3]], cache=made)
        return made

    return {
        "empty context": ({"context": []}, ValueError, "context: is empty.*bos_token_id"),
        "two contexts": ({"context": tokens(5, batch=2)}, ValueError, r"context: has shape \(2, 5\)"),
        "fractions": ({"context": [1.0, 2.0]}, TypeError, "context: must be token ids, not float64"),
        "text without a tokenizer": ({"context": "a"}, ValueError, "tokenizer: is missing"),
        "text after ids": ({"continuations": ["a"]}, TypeError, r"continuations\[0\]: is text"),
        "a text alone": ({"continuations": "a"}, TypeError, r"continuations: must be a list.*\[text\]"),
        "ids alone": ({"continuations": [3, 4]}, ValueError, r"continuations\[0\]: has shape \(\)"),
        "an empty continuation": ({"continuations": [[3], []]}, ValueError, r"continuations\[1\]: has no token"),
        "not in the vocabulary": ({"continuations": [[3, 101]]}, ValueError, r"continuations\[0\]: has token 101.*100"),
        "below it": ({"context": [3, -1]}, ValueError, "context: has token -1"),
        "batch_size": ({"batch_size": 0}, ValueError, "batch_size = 0: must be at least 1"),
        "a held cache": (lambda: {"cache": held()}, ValueError, "cache: holds 20 tokens.*reset"),
        "no cache": ({"cache": 3}, TypeError, "cache: must be a cache of transformers"),
        "both": (
            lambda: {"cache": cache(), "budget": 12},
            ValueError,
            "cache and budget: the cache already has",
        ),
        "a cache for chunks": (
            lambda: {"cache": cache(compress="decode")},
            ValueError,
            "cache: was made with compress='decode'",
        ),
        "no such option": ({"budgets": 12}, TypeError, "budgets"),
        "a budget below the window": ({"budget": 3, "window": 4}, ValueError, "budget = 3"),
    }


@pytest.mark.parametrize("case", refusals())
def test_bad_input_is_refused_by_name(case):
    given, kind, message = refusals()[case]
    given = {"context": [3, 4, 5], "continuations": [[3]], **(given() if callable(given) else given)}
    with pytest.raises(kind, match=message):
        loglikelihood(used("llama"), given.pop("context"), given.pop("continuations"), **given)


def test_text_that_merges_into_the_context_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"continuations\[0\]: has no token of its own after the context"):
        loglikelihood(used("llama"), "a", ["b"], tokenizer=tokenizer, budget=12, **COMMON)
    with pytest.raises(TypeError, match=r"continuations\[0\]: must be text"):
        loglikelihood(used("llama"), "a", [[3]], tokenizer=tokenizer, budget=12, **COMMON)


def test_a_model_in_training_mode_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(stock("llama").config)).train()
    with pytest.raises(ValueError, match=r"model: is in training mode.*model\.eval"):
        loglikelihood(model, [3], [[4]], budget=12, **COMMON)
    with pytest.raises(TypeError, match="model: must be a transformers PreTrainedModel"):
        loglikelihood("gpt2", [3], [[4]])


def test_a_model_that_leaves_its_cache_alone_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(stock("llama").config)).eval()
    forward = model.forward
    model.forward = lambda input_ids, **_: forward(input_ids, use_cache=False)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM did not use the cache.*0 tokens of a context of 9"):
        loglikelihood(use(model, probe=False), tokens(9), [[4]], budget=12, **COMMON)
