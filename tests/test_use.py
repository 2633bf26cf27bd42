"""``use`` and what it puts before a model: the probe, generation that never goes past the cache, and one line for it.

Every case is one of a kind that went wrong for a user: each is right, or refused, or warned of once with the fix.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import pb_kvcache  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, PyramidKVCache, compressed, use  # noqa: E402
from pb_kvcache.transformers._generation import CACHE_NAME  # noqa: E402
from pb_kvcache.transformers._probe import facts_of  # noqa: E402

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
WINDOW, KERNEL = 4, 3
SMALL = {"window": WINDOW, "kernel": KERNEL}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(attention: str = "sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def built(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(1000 * seed + length))


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=8, do_sample=False, **options)


def step(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, use_cache=True, **{CACHE: cache}, **options)


# ---- the probe ----


def hybrids() -> dict:
    """Return models whose class did not always say that it goes through the attention interface."""
    found = {
        "stablelm": lambda: transformers.StableLmConfig(**SIZES),
        "biogpt": lambda: transformers.BioGptConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        ),
    }
    if VERSION >= (5, 24):
        every = ["linear_attention", "full_attention"] * 2
        found["qwen3-next"] = lambda: transformers.Qwen3NextConfig(
            **SIZES,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=every,
        )
        found["jamba"] = lambda: transformers.JambaConfig(
            **SIZES,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
        )
    return found


@pytest.mark.parametrize("family", hybrids())
def test_what_behaves_is_served_whatever_its_class_says(family):
    if VERSION < (5, 24):
        pytest.skip("these classes go through the attention interface from transformers 5 on")
    model = built(hybrids()[family]())
    model._supports_attention_backend = False
    whole = model(tokens(60), use_cache=True).logits
    use(model)
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    torch.testing.assert_close(step(model, tokens(60), cache).logits, whole, rtol=0, atol=2e-6)
    step(model, tokens(1), cache)
    assert len(cache.compressed_layers) in (2, 4)
    assert all(cache.lengths[layer] == 25 for layer in cache.compressed_layers)


def test_attention_that_is_called_twice_an_update_is_refused_with_its_layer():
    model = built(transformers.DiffLlamaConfig(**SIZES))
    before = model.config._attn_implementation
    with pytest.raises(
        ValueError, match=r"DiffLlamaForCausalLM cannot be served: layer 0: .*(2 attentions|does not read)"
    ):
        use(model)
    assert model.config._attn_implementation == before
    assert greedy(model, tokens(20)).shape == (1, 28)


def test_a_state_beside_the_keys_in_one_cache_layer_is_refused():
    if VERSION < (5, 24):
        pytest.skip("these caches have a layer class of their own from transformers 5 on")
    config = transformers.FalconH1Config(**SIZES, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_d_ssm=128)
    with pytest.raises(ValueError, match="layer 0: its cache is a LinearAttentionAndFullAttentionLayer"):
        use(built(config))


def test_keys_that_change_between_cache_and_attention_are_refused():
    model = llama()
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attention = model.model.layers[2].self_attn
    original = type(attention).forward

    def forward(self, *args, **kwargs):
        given = kwargs.get(CACHE)
        update = given.update

        def changed(keys, values, *rest, **more):
            keys, values = update(keys, values, *rest, **more)
            return keys * 1.0, values

        given.update = changed
        try:
            return original(self, *args, **kwargs)
        finally:
            del given.update

    attention.forward = forward.__get__(attention)
    with pytest.raises(ValueError, match="layer 2: its attention does not read the keys that the cache returned"):
        use(model)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_a_position_bias_is_refused():
    model = llama()
    attention = model.model.layers[1].self_attn
    original = type(attention).forward

    def forward(self, hidden_states, *args, **kwargs):
        new = hidden_states.shape[1]
        bias = torch.arange(float(new)).expand(1, 1, new, new) + torch.full((new, new), -torch.inf).triu(1)
        return original(self, hidden_states, *args, **{**kwargs, "attention_mask": bias})

    attention.forward = forward.__get__(attention)
    with pytest.raises(ValueError, match="layer 1: its mask says more than causality"):
        use(model)


def test_a_model_that_is_not_causal_is_refused():
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"cannot be served|cannot be redirected|encoder"):
        use(built(config))


def test_a_mask_that_no_layer_reads_is_no_reason_to_refuse():
    """Qwen2-MoE makes a mask of a local window at every forward, whichever its layers use."""
    if VERSION < (5, 0):
        pytest.skip("in transformers 4 this model does not go through the attention interface, and is refused")
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    model = use(built(transformers.Qwen2MoeConfig(**SIZES, **experts, num_experts_per_tok=2)))
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    step(model, tokens(60), cache)
    step(model, tokens(1), cache)
    assert cache.lengths.tolist() == [25] * 4


def test_layers_that_could_share_keys_and_do_not_are_served():
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this release has no Gemma 4")
    every = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **SIZES, layer_types=every, vocab_size_per_layer_input=128, hidden_size_per_layer_input=8
    )
    assert BudgetedCache(config, budget=40).compressed_layers == (1, 3)


def test_the_probe_leaves_the_model_as_it_was():
    model = llama()
    model.train()
    model.model.layers[1].eval()
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    use(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    facts = facts_of(model.config)
    assert sorted(facts.layers) == [0, 1, 2, 3]
    assert (facts.layers[0].kv_heads, facts.layers[0].key_dim, facts.layers[0].key_dtype) == (2, 16, torch.float32)


def test_layers_that_are_alike_are_tried_once(monkeypatch):
    ran = []
    attention = type(llama().model.layers[0].self_attn)
    original = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **k: (ran.append(self.layer_idx), original(self, *a, **k))[1]
    )
    model = use(llama())
    assert set(ran) == {0, 1}  # the second one shows that the first came to its end
    assert len(set(facts_of(model.config).layers.values())) == 1
    assert sorted(facts_of(model.config).layers) == [0, 1, 2, 3]
    ran.clear()
    other = llama()
    other.model.layers[3].self_attn.scaling *= 2
    use(other)
    assert set(ran) == {0, 1, 2, 3}


def test_a_model_without_weights_says_so():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=r"weights .* not loaded .* on the meta device.*probe=False"):
        use(model)
    assert use(model, probe=False) is model


def test_a_probe_that_fails_names_what_failed():
    model = llama()
    model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ValueError, match=r"forward of 2 tokens .* failed.*ZeroDivisionError.*probe=False"):
        use(model)
    assert model.config._attn_implementation == "sdpa"


def test_layers_that_text_never_reaches_have_no_budget():
    if VERSION < (5, 24):
        pytest.skip("needs the text part of this model alone")
    config = transformers.models.mllama.MllamaTextConfig(
        **{**SIZES, "bos_token_id": 1},
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = use(transformers.MllamaForCausalLM(config).eval())
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    step(model, tokens(60), cache)
    assert cache.compressed_layers == (0, 2, 3)
    assert cache.lengths.tolist() == [24, 0, 24, 24]
    assert cache.budgets.sum() == 3 * 24


def test_a_mask_function_that_is_causal_for_text_is_served():
    if VERSION < (5, 24):
        pytest.skip("needs a small multimodal config")
    config = transformers.Gemma3Config(
        text_config={
            **SIZES,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    torch.manual_seed(0)
    model = use(transformers.Gemma3ForConditionalGeneration(config).eval())
    ids, text = tokens(60), torch.zeros(1, 60, dtype=torch.long)
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    step(model, ids, cache, token_type_ids=text)
    assert cache.lengths.tolist()[1::2] == [24, 24]
    image = text.clone()
    image[:, 3:9] = 1
    with pytest.raises(ValueError, match="more than a causal mask"):
        step(model, ids, BudgetedCache(model.config, budget=24, **SMALL), token_type_ids=image)


# ---- nothing silent ----


@pytest.mark.parametrize("length", [257, 300, 250])
def test_a_model_that_drops_its_cache_fills_the_same_one_anew(length):
    """Phi-3 reads everything again when it passes its original length, with other rotary phases."""
    config = transformers.Phi3Config(**SIZES, original_max_position_embeddings=256, max_position_embeddings=512)
    model = use(built(config))
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    if length < 256 and (5, 0) <= VERSION < (5, 24):
        with pytest.raises(RuntimeError, match="gives it the last token alone"):
            greedy(model, tokens(length), **{CACHE_NAME: cache})
        return
    greedy(model, tokens(length), **{CACHE_NAME: cache})
    assert cache.get_seq_length() == length + 7
    assert cache.lengths.max() <= 24 + 8
    whole = BudgetedCache(model.config, budget=400, **SMALL)
    assert torch.equal(greedy(model, tokens(length), **{CACHE_NAME: whole}), greedy(model, tokens(length)))


def test_a_model_that_replaces_its_cache_is_refused():
    model = use(llama())
    original = type(model).prepare_inputs_for_generation

    class Other(type(model)):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return {**original(self, *args, **kwargs), CACHE_NAME: DynamicCache(config=self.config)}

    model.__class__ = Other
    with pytest.raises(RuntimeError, match="replaces the cache that it is given"):
        greedy(model, tokens(40), **{CACHE_NAME: BudgetedCache(model.config, budget=24, **SMALL)})


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("at", ["prompt", "decode"])
@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_a_step_that_failed_between_layers_is_noticed(layer, at, decode):
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    if at == "decode":
        step(model, tokens(60), cache)
    ids = tokens(60 if at == "prompt" else 1)
    hook = model.model.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, ids, cache)
    hook.remove()
    if layer == 0:  # nothing had changed
        step(model, ids, cache)
        assert cache.get_seq_length() == (60 if at == "prompt" else 61)
        return
    with pytest.raises(RuntimeError, match=r"failed half-way: cache.reset\(\)"):
        step(model, ids, cache)
    cache.reset()
    fresh = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    assert torch.equal(step(model, tokens(60), cache).logits, step(model, tokens(60), fresh).logits)


def test_a_cache_of_another_text_is_not_continued():
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    first = greedy(model, tokens(60), **{CACHE_NAME: cache})
    second = greedy(model, torch.cat([first, tokens(5)], dim=1), **{CACHE_NAME: cache})  # the conversation goes on
    assert cache.get_seq_length() == second.shape[1] - 1
    held = cache.lengths.copy()
    for other in (tokens(90, seed=3), tokens(20), tokens(90, batch=2)):
        with pytest.raises(ValueError, match=r"of another text .* cache.reset\(\) for a new prompt"):
            greedy(model, other, **{CACHE_NAME: cache})
    assert (cache.lengths == held).all()
    cache.reset()
    assert torch.equal(greedy(model, tokens(60), **{CACHE_NAME: cache}), first)


def test_prompts_in_equal_chunks_are_warned_of():
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    step(model, tokens(20), cache)
    with pytest.warns(UserWarning, match="compress='decode'"):
        step(model, tokens(20, seed=1), cache)
    roomy = BudgetedCache(model.config, budget=100, **SMALL)
    step(model, tokens(20), roomy)
    step(model, tokens(20, seed=1), roomy)  # all of it fits: nothing to say


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_gradients_through_a_continuation_are_warned_of_once(decode):
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    model(tokens(60), use_cache=True, **{CACHE: cache}).logits.sum().backward()  # those of the prompt flow
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    with pytest.warns(UserWarning, match="gradients do not flow"):
        model(tokens(2), use_cache=True, **{CACHE: cache}).logits.sum().backward()
    model(tokens(2), use_cache=True, **{CACHE: cache}).logits.sum().backward()


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_attention_weights_are_given_where_they_are_asked_for(decode):
    if VERSION < (5, 0):
        pytest.skip("transformers 4 gives weights under its own name of eager alone, and says so")
    model = use(llama("eager"))
    cache = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    step(model, tokens(60), cache)
    held = cache.positions(1)
    weights = step(model, tokens(1), cache, output_attentions=True).attentions
    assert len(weights) == 4
    assert all(layer.shape == (1, 4, 1, 25) for layer in weights)
    torch.testing.assert_close(weights[1].sum(dim=-1), torch.ones(1, 4, 1))
    # By ascending position: against the full model, restricted to what is held and renormalised, in the first layer.
    whole = llama("eager")
    full = whole(torch.cat([tokens(60), tokens(1)], dim=1), output_attentions=True).attentions[0][0, :, -1]
    cache0 = cache.positions(0) if decode == "grow" else None
    if cache0 is not None:
        for head in range(4):
            part = full[head, torch.as_tensor(cache0[0, head // 2])]
            torch.testing.assert_close(weights[0][0, head, 0], part / part.sum(), rtol=1e-4, atol=1e-5)
    assert held.shape == (1, 2, 24)
    several = step(model, tokens(3), cache, output_attentions=True).attentions
    torch.testing.assert_close(several[0].sum(dim=-1), torch.ones(1, 4, 3))


def test_the_weights_of_hold_are_by_ascending_position():
    if VERSION < (5, 0):
        pytest.skip("transformers 4 gives weights under its own name of eager alone, and says so")
    model = use(llama("eager"))
    grow = BudgetedCache(model.config, budget=24, **SMALL)
    hold = BudgetedCache(model.config, budget=24, decode="hold", **SMALL)
    for cache in (grow, hold):
        step(model, tokens(60), cache)
    first = [step(model, tokens(1), cache, output_attentions=True).attentions[0] for cache in (grow, hold)]
    torch.testing.assert_close(first[0], first[1])  # nothing was evicted before it
    for seed in range(6):
        before = hold.positions(0)
        weights = step(model, tokens(1, seed=seed), hold, output_attentions=True).attentions[0]
        after = hold.positions(0)
        # the newest token's own weight is the last one, and its position joins
        assert after[0, 0, -1] == before[0, 0, -1] + 1
        assert weights.shape[-1] == before.shape[-1] + 1
    keys = hold.layers[0].keys
    assert keys.shape[2] == 24


def test_a_cache_can_be_looked_at():
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    assert not cache.is_initialized
    assert [keys for keys, _ in cache] == [None] * 4
    step(model, tokens(60), cache)
    assert cache.is_initialized
    assert [tuple(keys.shape) for keys, _ in cache] == [(1, 2, 24, 16)] * 4


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_autocast_leaves_keys_and_scores_as_they_are(decode):
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        step(model, tokens(300), cache)
        for seed in range(3):
            step(model, tokens(1, seed=seed), cache)
    assert cache.layers[0].keys.dtype == torch.float32
    assert cache.layers[0].values.dtype == torch.bfloat16
    assert (cache.lengths == (27 if decode == "grow" else 24)).all()
    assert cache.nbytes_full == 4 * 303 * 2 * 16 * (4 + 2)
    # The scores are of float32: the kept positions are those of the same keys and queries without autocast's rounding.
    layer = cache.layers[0]
    assert layer.positions().shape[-1] == cache.lengths[0]
    with pytest.raises(ValueError, match="with or without autocast throughout"):
        step(model, tokens(1), cache)


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_a_compiled_model_gives_the_same_tokens(decode):
    model = use(llama())
    fast = torch.compile(copy.deepcopy(model), backend="eager")
    expected = greedy(model, tokens(40), **{CACHE_NAME: BudgetedCache(model.config, budget=24, decode=decode, **SMALL)})
    cache = BudgetedCache(model.config, budget=24, decode=decode, **SMALL)
    ids, found = tokens(40), []
    with torch.no_grad():
        for _ in range(8):
            logits = fast(ids, use_cache=True, **{CACHE: cache}).logits
            ids = logits[:, -1:].argmax(dim=-1)
            found.append(ids)
    assert torch.equal(expected[:, 40:], torch.cat(found, dim=1))
    torch._dynamo.reset()


def test_use_finds_the_model_within_its_wrappers():
    model = llama()
    wrapped = torch.compile(model, backend="eager")
    assert use(wrapped) is wrapped
    assert model.config._attn_implementation == "pb_kvcache_sdpa"

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def get_base_model(self):
            return self.base

    inner = llama()
    outer = Adapted(inner)
    assert use(outer, budget=40) is outer
    assert inner.generate.options == {"budget": 40}
    with pytest.raises(TypeError, match="PreTrainedModel, not Linear"):
        use(torch.nn.Linear(2, 2))


def test_generate_batch_works_as_before():
    if not hasattr(transformers.GenerationMixin, "generate_batch") or VERSION < (5, 24):
        pytest.skip("this release has no continuous batching that runs on a CPU")
    model = use(llama(), budget=40)
    options = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0, num_blocks=16, max_batch_tokens=64
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = model.generate_batch(inputs=[tokens(10)[0].tolist()], generation_config=options).values()
    expected = llama().generate(tokens(10), max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert found.generated_tokens == expected[0, 10:].tolist()
    assert model.config._attn_implementation == "pb_kvcache_sdpa"


# ---- one line ----


def test_every_generate_of_a_used_model_has_a_fresh_cache():
    model = use(llama(), budget=40)
    expected = greedy(model, tokens(100), **{CACHE_NAME: BudgetedCache(model.config, budget=40)})
    for _ in range(2):
        answer = greedy(model, tokens(100), return_dict_in_generate=True)
        assert torch.equal(answer.sequences, expected)
        cache = getattr(answer, CACHE)
        assert isinstance(cache, BudgetedCache)
        assert cache.lengths.tolist() == [40 + 7] * 4
    assert greedy(model, tokens(100, batch=2), num_beams=2).shape == (2, 108)


def test_a_call_may_ask_for_something_else():
    model = use(llama(), budget=40)
    own = DynamicCache(config=model.config)
    answer = greedy(model, tokens(100), **{CACHE_NAME: own})
    assert own.get_seq_length() == 107
    assert torch.equal(answer, greedy(llama(), tokens(100)))
    assert torch.equal(greedy(model, tokens(100), use_cache=False), answer)
    with pytest.warns(UserWarning, match="cache_implementation = 'static'"):
        assert torch.equal(greedy(model, tokens(100), cache_implementation="static"), answer)


def test_a_prompt_in_chunks_is_compressed_at_its_end():
    if VERSION[0] == 5 and VERSION < (5, 3):
        pytest.skip("this release gives every chunk the positions of the last, to any cache")
    model = use(llama(), budget=40)
    whole = greedy(model, tokens(100))
    assert torch.equal(greedy(model, tokens(100), prefill_chunk_size=30), whole)


def test_a_block_leaves_the_model_as_it_was():
    model, stock = llama(), llama()
    attributes = dict(model.__dict__)
    with compressed(model, budget=40) as same:
        assert same is model
        inside = greedy(model, tokens(100))
        with compressed(model, plan=pb_kvcache.plan(4, 60, ratio=1)):
            answer = greedy(model, tokens(100), return_dict_in_generate=True)
            assert getattr(answer, CACHE).lengths.tolist() == [67] * 4
        assert torch.equal(greedy(model, tokens(100)), inside)
    assert model.config._attn_implementation == "sdpa"
    assert model.__dict__.keys() == attributes.keys()
    assert not model._forward_pre_hooks
    assert torch.equal(greedy(model, tokens(100)), greedy(stock, tokens(100)))
    with pytest.raises(ZeroDivisionError), compressed(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_scoring_without_a_cache_is_warned_of_once():
    model = use(llama(), budget=40)
    plain = use(llama())
    with torch.no_grad():
        with pytest.warns(UserWarning, match="loglikelihood"):
            model(tokens(100))
        model(tokens(100))
        plain(tokens(100))  # without a budget nothing was promised


def test_copies_and_pickles_of_a_used_model_are_used_models():
    model = use(llama(), budget=40)
    expected = greedy(model, tokens(100))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.generate.model is twin
        assert torch.equal(greedy(twin, tokens(100)), expected)


def test_a_used_model_can_be_saved(tmp_path):
    model = use(llama(), budget=40)
    model.save_pretrained(tmp_path)
    assert "pb_kvcache" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


def test_setting_another_attention_undoes_it():
    model = use(llama(), budget=40)
    model.set_attn_implementation("sdpa")
    assert torch.equal(greedy(model, tokens(100)), greedy(llama(), tokens(100)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 3}, ValueError, "budget = 3: must be at least window"),
        ({"budget": 40, "ratio": 0}, ValueError, "ratio = 0"),
        ({"colour": 1}, TypeError, "colour"),
        ({"plan": "nowhere.json"}, OSError, "nowhere.json"),
    ],
)
def test_bad_options_are_refused_and_change_nothing(options, error, message):
    model = llama()
    with pytest.raises(error, match=message):
        use(model, **options)
    assert model.config._attn_implementation == "sdpa"
    assert "generate" not in model.__dict__


# ---- plans, budgets, reports ----


def test_the_general_cache_is_uniform_and_the_pyramid_is_a_pyramid():
    config = llama().config
    assert BudgetedCache(config, budget=100).budgets.tolist() == [100] * 4
    assert PyramidKVCache(config, budget=100).budgets.tolist() == pb_kvcache.plan(4, 100, minimum=33).budgets.tolist()
    assert isinstance(PyramidKVCache(config), BudgetedCache)
    assert repr(PyramidKVCache(config, budget=100)).startswith("<PyramidKVCache: budget 100, ratio 4")


def test_a_plan_may_be_a_path(tmp_path):
    plan = pb_kvcache.plan(4, 60, ratio=3, minimum=33)
    path = tmp_path / "plan.json"
    pb_kvcache.save_plan(path, plan)
    cache = BudgetedCache(llama().config, plan=path)
    assert cache.budgets.tolist() == plan.budgets.tolist()
    assert BudgetedCache(llama().config, plan=str(path)).budgets.tolist() == plan.budgets.tolist()
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json: not a plan"):
        BudgetedCache(llama().config, plan=path)
    with pytest.raises(TypeError, match=r"a LayerPlan .* or the path of a plan file, not int"):
        BudgetedCache(llama().config, plan=3)


def test_memory_counts_the_heads_of_all_ranks(monkeypatch):
    model = llama()
    position = 2 * 16 * 4 * 2  # heads, size, bytes, keys and values
    for ranks in (1, 2):
        monkeypatch.setattr(type(model), "tp_size", property(lambda _, ranks=ranks: ranks), raising=False)
        twin = use(copy.deepcopy(model))
        cache = BudgetedCache(twin.config, memory=4 * 80 * position, **SMALL)
        step(twin, tokens(200), cache)
        assert cache.lengths.tolist() == [80 // ranks] * 4


def test_hybrids_reset_to_another_batch_and_count_every_byte():
    if VERSION < (5, 24):
        pytest.skip("the states of these layers are tensors of the cache from transformers 5 on")
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2)
    model = use(built(config))
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    step(model, tokens(60, batch=2), cache)
    states = [
        state for layer in cache.layers[::2] for state in vars(layer)["conv_states"].values() if state is not None
    ]
    assert len(states) == 2
    conv = sum(state.numel() * state.element_size() for state in states)
    assert cache.nbytes == conv + sum(cache.layers[layer].nbytes for layer in (1, 3))
    assert cache.nbytes_full == conv + 2 * 2 * 60 * 2 * 16 * 4 * 2
    cache.reset()
    assert cache.nbytes == 0
    fresh = BudgetedCache(model.config, budget=24, **SMALL)
    assert torch.equal(step(model, tokens(60), cache).logits, step(model, tokens(60), fresh).logits)


def test_the_report_has_every_sequence_and_head():
    model = use(llama())
    cache = BudgetedCache(model.config, budget=24, **SMALL)
    ids = tokens(60, batch=3)
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[1, :30] = 0
    mask[2, :45] = 0
    step(model, ids, cache, attention_mask=mask)
    layer = cache.report().layers[0]
    assert [sequence.seen for sequence in layer.sequences] == [60, 30, 15]
    assert [sequence.kept for sequence in layer.sequences] == [(24, 24), (24, 24), (15, 15)]
    assert [sequence.evicted for sequence in layer.sequences] == [(36, 36), (6, 6), (0, 0)]
    assert [sequence.what for sequence in layer.sequences] == ["native kernels", "native kernels", "nothing evicted"]
    assert (layer.seen, layer.kept, layer.evicted) == (60, 24, 36)
    assert layer.kind == "native kernels, nothing evicted, then all kept"
    text = str(cache.report())
    assert "15 to 60" in text
    assert "0 to 36" in text
    json.dumps(cache.report().to_dict())
    rows = np.array([2, 0])
    for entry in cache.layers:
        entry.batch_select_indices(torch.as_tensor(rows))
    assert [sequence.seen for sequence in cache.report().layers[0].sequences] == [15, 60]
    assert [sequence.what for sequence in cache.report().layers[0].sequences] == ["nothing evicted", "native kernels"]
