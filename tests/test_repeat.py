"""``repetition_scores``: what a model looks at while it repeats a context.

The right values come from the stock model: the attention of plain forwards over context, request and repetition.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

import pb_kvcache  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, compressed, repetition_scores  # noqa: E402

from .test_transformers import _one_thread, run, stock, tokens, used  # noqa: E402, F401

REQUEST, LATER = tokens(3, seed=5)[0].tolist(), tokens(2, seed=6)[0].tolist()


def filled(model, context) -> DynamicCache:
    cache = DynamicCache()
    run(model, context, cache)
    return cache


def plain(family: str, context: torch.Tensor, fed: list[list[int]]) -> list[torch.Tensor]:
    """Return the largest attention of every layer ``(kv_heads, n)`` to the context in forwards without a cache."""
    model = stock(family, "eager")
    n = context.shape[1]
    largest = []
    for ids in fed:
        whole = torch.cat([context, torch.tensor([ids])], dim=1)
        with torch.no_grad():
            layers = model(whole, use_cache=False, output_attentions=True).attentions
        kv_heads = getattr(model.config, "num_key_value_heads", layers[0].shape[1])
        largest.append(torch.stack([a[0, :, n:, :n].amax(1).unflatten(0, (kv_heads, -1)).amax(1) for a in layers]))
    return list(torch.stack(largest).amax(0))


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("gpt2", "sdpa"), ("phi3", "eager")],
)
@pytest.mark.parametrize("block", [50, 30, 16])
def test_scores_are_the_largest_attention_of_plain_forwards(family, attention, block):
    context = tokens(50)
    ids = context[0].tolist()
    fed = [REQUEST + ids[:block]]
    for start in range(block, 50, block):
        fed.append(LATER + ids[start - 4 : start] + ids[start : start + block])
    model = used(family, attention)
    cache = filled(model, context)
    rows = [layer.keys for layer in cache.layers]
    scores = repetition_scores(model, cache, context, request=REQUEST, later_request=LATER, block=block, overlap=4)
    for found, wanted in zip(scores, plain(family, context, fed), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5)
    assert all(layer.keys is keys and keys.shape[2] == 50 for layer, keys in zip(cache.layers, rows, strict=True))


def test_without_another_request_and_overlap_every_part_is_asked_for_alike():
    context = tokens(40)
    ids, cache = context[0].tolist(), filled(used("llama"), context)
    found = repetition_scores(used("llama"), cache, ids, request=torch.tensor([REQUEST]), block=20, overlap=0)
    wanted = plain("llama", context, [REQUEST + ids[:20], REQUEST + ids[20:]])
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-3, atol=2e-5)


def test_a_stock_model_is_redirected_for_the_call():
    model, context = copy.deepcopy(stock("llama")), tokens(30)
    cache = filled(model, context)
    found = repetition_scores(model, cache, context, request=REQUEST)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, repetition_scores(used("llama"), cache, context, request=REQUEST))
    kept = pb_kvcache.select_from_scores(found[0][:, :26], 10, 4, kernel=1)
    assert kept.shape == (2, 10)


def test_half_precision_is_scored_in_float32():
    model, context = copy.deepcopy(used("llama")).to(torch.bfloat16), tokens(30)
    found = repetition_scores(model, filled(model, context), context, request=REQUEST)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(
        torch.stack(found), torch.stack(plain("llama", context, [REQUEST + context[0].tolist()])), rtol=0, atol=0.2
    )
    assert len(set(found[0].ravel().tolist())) > 55  # of 60: attention in bfloat16 would tie


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"context": tokens(29)},
            ValueError,
            r"layer 0 has keys of shape \(1, 2, 30, 8\), must be \(1, kv_heads, 29, head",
        ),
        ({"context": []}, ValueError, "context: is empty"),
        ({"request": [101]}, ValueError, "request: has token 101, must be from 0 to 100"),
        ({"later_request": "again"}, TypeError, "later_request: is text"),
        ({"block": 0}, ValueError, "block = 0: must be at least 1"),
        ({"overlap": -1}, ValueError, "overlap = -1: must be at least 0"),
        ({"cache": None}, TypeError, "cache: must be a cache of transformers, such as a DynamicCache, not NoneType"),
        ({"cache": DynamicCache()}, ValueError, "cache: holds no layer, must hold the context, 30 tokens"),
        ({"model": 3}, TypeError, "model: must be a transformers PreTrainedModel, not int"),
    ],
)
def test_bad_arguments_are_named(changed, error, message):
    context = tokens(30)
    good = {"model": used("llama"), "cache": filled(used("llama"), context), "context": context, "request": REQUEST}
    with pytest.raises(error, match=message):
        repetition_scores(**{**good, **changed})


def test_layers_that_cannot_be_scored_are_refused():
    context = tokens(30)
    cache = BudgetedCache(used("llama").config, budget=64)
    run(used("llama"), context, cache)
    with pytest.raises(ValueError, match=r"cache: layer 0, a .*, does not keep every position"):
        repetition_scores(used("llama"), cache, context, request=REQUEST)
    local = used("gemma3")
    with pytest.raises(ValueError, match="cache: layer 0, a DynamicLayer, does not keep every position"):
        repetition_scores(local, filled(local, context), context, request=REQUEST)
    batch = filled(used("llama"), tokens(30, 2))
    with pytest.raises(ValueError, match=r"cache: layer 0 has keys of shape \(2, 2, 30, 8\)"):
        repetition_scores(used("llama"), batch, context, request=REQUEST)


def test_attention_that_is_more_than_a_softmax_of_products_is_refused():
    config = transformers.Gemma2Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    model, context = transformers.Gemma2ForCausalLM(config).eval(), tokens(20)
    with compressed(model), pytest.raises(ValueError, match="model: layer 0 caps its logits"):
        repetition_scores(model, filled(model, context), context, request=REQUEST)


def test_a_model_in_training_mode_is_refused():
    model, context = copy.deepcopy(used("llama")), tokens(20)
    cache = filled(model, context)
    with pytest.raises(ValueError, match="model: is in training mode"):
        repetition_scores(model.train(), cache, context, request=REQUEST)


def test_a_model_that_drops_its_cache_is_told_of(monkeypatch):
    model, context = copy.deepcopy(used("llama")), tokens(20)
    cache = filled(model, context)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, **_: forward(input_ids, use_cache=False))
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM did not use the cache .*layer 0 has seen 0 of 1 blocks"):
        repetition_scores(model, cache, context, request=REQUEST)
