"""PyramidKV inside transformers models: what a compressed cache computes, whatever the model, the batch or the calls.

Small random models built from configs; nothing is downloaded. The right values come from the stock model: with
``DynamicCache`` where nothing is evicted, and else from a plain attention over the *full* cache in which the evicted
positions are masked out (:class:`Masked`), which shares no code with the package.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, PretrainedConfig  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import pb_kvcache  # noqa: E402
from pb_kvcache.transformers import PyramidKVCache, use  # noqa: E402

from . import reference_select  # noqa: E402

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
#: The model's argument that takes the cache; generate takes both names.
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"

WINDOW = 4
KERNEL = 3
COMMON = {"window": WINDOW, "kernel": KERNEL}

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _gemma3() -> PretrainedConfig:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, layer_types=types)


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=101,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def _gemma2() -> PretrainedConfig:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=16, layer_types=types, attn_logit_softcapping=2.0
    )


def _gpt_oss() -> PretrainedConfig:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=16, layer_types=types, num_local_experts=2, num_experts_per_tok=1
    )


FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral-sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "gemma3": _gemma3,
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "gpt2": _gpt2,
    "gemma2": _gemma2,  # caps its logits
    "gpt-oss": _gpt_oss,  # has sinks without a position
    "llama-multi-query": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
}
#: Families whose attention is more than sdpa can do.
EAGER_ALONE = ["gemma2", "gpt-oss"]
#: Every family with every arithmetic that it has, and those of them with something to compress.
ALL = [(name, way) for name in FAMILIES for way in ("sdpa", "eager") if way == "eager" or name not in EAGER_ALONE]
COMPRESSED = [(name, way) for name, way in ALL if name != "mistral-sliding"]

_models: dict = {}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Keep torch from waiting for cores that other work has: these models are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stock(family: str, attention: str = "sdpa"):
    """Return a random model of a family with stock attention: the same weights every time."""
    if (family, attention) not in _models:
        torch.manual_seed(list(FAMILIES).index(family))
        config = FAMILIES[family]()
        config._attn_implementation = attention
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():  # broader attention than the usual initialisation gives: the right positions matter
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and ("q_proj" in name or "k_proj" in name or "qkv" in name or "c_attn" in name):
                    parameter.mul_(8)
                if name.endswith("sinks"):
                    parameter.normal_()
        _models[family, attention] = model
    return _models[family, attention]


def used(family: str, attention: str = "sdpa"):
    """Return the same model with its attention redirected."""
    key = (family, attention, "used")
    if key not in _models:
        _models[key] = use(copy.deepcopy(stock(family, attention)))
    return _models[key]


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, 101, (batch, length), generator=generator)


def run(model, ids, cache, mask=None):
    """Run one forward and return its logits."""
    positions = None
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache}).logits


class Masked:
    """A stock model over the full cache, in which chosen positions are masked out: slow, obvious, independent.

    `evicted` maps a layer to a boolean ``(batch, kv_heads, columns)``; later columns are visible. The last call's
    queries and keys are in `seen`.
    """

    def __init__(self, family: str, mask=None) -> None:
        self.model = copy.deepcopy(stock(family, "eager"))
        self.cache = DynamicCache(config=self.model.config)
        self.evicted: dict[int, np.ndarray] = {}
        self.seen: dict[int, tuple] = {}
        self.weights: dict[int, torch.Tensor] = {}
        name = f"masked_{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        # The stock mask function of "eager" under this name: additive masks from the stock library.
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        masks.register(name, masks["eager"])
        self.model.set_attn_implementation(name)

    def _attend(self, module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        layer = module.layer_idx
        groups = query.shape[1] // key.shape[1]
        self.seen[layer] = (query, key)
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if attention_mask is None:
            n, m = logits.shape[-2:]
            logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 + m - n), -math.inf)
        else:
            logits = logits + attention_mask[..., : logits.shape[-1]]
        if layer in self.evicted:
            gone = torch.as_tensor(self.evicted[layer]).repeat_interleave(groups, 1)
            gone = torch.nn.functional.pad(gone, (0, logits.shape[-1] - gone.shape[-1]))
            logits = logits.masked_fill(gone[:, :, None], -math.inf)
        if s_aux is not None:
            logits = torch.cat([s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1), logits], -1)
        weights = torch.softmax(logits.float(), -1)[..., 0 if s_aux is None else 1 :]
        self.weights[layer] = weights
        return (weights.to(value.dtype) @ values).transpose(1, 2).contiguous(), None

    def __call__(self, ids, mask=None):
        return run(self.model, ids, self.cache, mask)

    def evict(self, cache: PyramidKVCache, columns: int) -> None:
        """Mask what `cache` does not hold among the first `columns`."""
        for layer in cache.compressed_layers:
            kept = cache.positions(layer)
            gone = np.ones((*kept.shape[:2], columns), bool)
            for row, head in np.ndindex(*kept.shape[:2]):
                inside = kept[row, head][(kept[row, head] >= 0) & (kept[row, head] < columns)]
                gone[row, head, inside] = False
            self.evicted[layer] = gone


def selected(query, key, keep: int, scale: float, window: int, kernel: int) -> list[list[int]]:
    """Choose positions the slow way: one list per KV head, from one sequence's queries and keys, in float64."""
    q_heads, n, kv_heads = query.shape[0], key.shape[1], key.shape[0]
    group = q_heads // kv_heads
    answer = []
    for head in range(kv_heads):
        scores = [0.0] * (n - window)
        for query_head in range(head * group, (head + 1) * group):
            for i in range(window):
                at = n - window + i
                logits = [scale * float(query[query_head, at].double() @ key[head, j].double()) for j in range(at + 1)]
                top = max(logits)
                exps = [math.exp(x - top) for x in logits]
                total = sum(exps)
                for j in range(n - window):
                    scores[j] += exps[j] / total / window / group
        side = kernel // 2
        pooled = [max(scores[max(0, j - side) : j + side + 1]) for j in range(n - window)]
        best = sorted(range(n - window), key=lambda j: (-pooled[j], j))[: keep - window]
        answer.append(sorted(best) + list(range(n - window, n)))
    return answer


# ---- nothing evicted: the stock model, bit for bit ----


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_a_budget_of_the_prompt_or_more_is_dynamic_cache_bit_for_bit(family, attention):
    plain, redirected = stock(family, attention), used(family, attention)
    reference = DynamicCache(config=plain.config)
    cache = PyramidKVCache(redirected.config, budget=40, **COMMON)
    calls = [tokens(40), tokens(1, seed=1), tokens(5, seed=2), tokens(1, seed=3)]
    for ids in calls:
        assert torch.equal(run(plain, ids, reference), run(redirected, ids, cache))
    assert cache.get_seq_length() == 47


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_batch_within_the_budget_is_dynamic_cache_bit_for_bit(family, attention):
    plain, redirected = stock(family, attention), used(family, attention)
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[1, :9] = 0
    mask[2, :28] = 0
    reference, cache = DynamicCache(config=plain.config), PyramidKVCache(redirected.config, budget=64, **COMMON)
    for new in (30, 1, 4):
        ids = tokens(new, 3)
        if new != 30:
            mask = torch.nn.functional.pad(mask, (0, new), value=1)
        expected, got = run(plain, ids, reference, mask), run(redirected, ids, cache, mask)
        assert torch.equal(expected[mask[:, -new:].bool()], got[mask[:, -new:].bool()])


@pytest.mark.parametrize(("family", "attention"), COMPRESSED)
def test_the_prompt_itself_is_read_with_full_attention(family, attention):
    reference = run(stock(family, attention), tokens(50), DynamicCache(config=stock(family, attention).config))
    model = used(family, attention)
    assert torch.equal(reference, run(model, tokens(50), PyramidKVCache(model.config, budget=8, **COMMON)))


def test_other_caches_are_served_as_before():
    plain, redirected = stock("llama"), used("llama")
    for make in (
        lambda config: DynamicCache(config=config),
        lambda config: transformers.StaticCache(config=config, max_cache_len=64),
    ):
        reference, cache = make(plain.config), make(redirected.config)
        for ids in (tokens(20), tokens(4), tokens(1)):
            position = torch.arange(reference.get_seq_length(), reference.get_seq_length() + ids.shape[1])
            extra = {"cache_position": position} if VERSION < (5, 4) else {}
            with torch.no_grad():
                expected = plain(ids, **{CACHE: reference}, **extra).logits
                got = redirected(ids, **{CACHE: cache}, **extra).logits
            assert torch.equal(expected, got)


# ---- below the budget: the full cache with the evicted positions masked out ----


@pytest.mark.parametrize(("family", "attention"), COMPRESSED)
def test_a_compressed_cache_is_the_full_one_with_the_evicted_positions_masked(family, attention):
    model = used(family, attention)
    cache = PyramidKVCache(model.config, budget=12, ratio=3, **COMMON)
    full = Masked(family)
    prompt = tokens(60)
    torch.testing.assert_close(run(model, prompt, cache), full(prompt), atol=1e-5, rtol=1e-5)
    layers = list(cache.compressed_layers)
    assert cache.budgets[layers].sum() == cache.lengths[layers].sum() == 12 * len(layers)
    full.evict(cache, 60)
    assert all(full.evicted[layer].any() for layer in layers)
    for step, new in enumerate((1, 1, 6, 1, 3)):
        ids = tokens(new, seed=step)
        torch.testing.assert_close(run(model, ids, cache), full(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "sdpa"), ("gpt2", "eager")])
def test_the_kept_positions_are_those_that_the_window_attended_to(family, attention):
    model = used(family, attention)
    cache = PyramidKVCache(model.config, budget=14, ratio=3, **COMMON)
    full = Masked(family)
    prompt = tokens(40)
    run(model, prompt, cache)
    full(prompt)
    for layer, budget in enumerate(cache.budgets):
        query, key = full.seen[layer]
        expected = selected(query[0], key[0], int(budget), query.shape[-1] ** -0.5, WINDOW, KERNEL)
        assert cache.positions(layer)[0].tolist() == expected


@pytest.mark.parametrize("family", EAGER_ALONE)
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize(("pooling", "edge"), [("max", "count"), ("avg", "count"), ("avg", "kernel")])
def test_caps_and_sinks_take_part_in_the_scores(family, reduce, pooling, edge):
    model = used(family, "eager")
    cache = PyramidKVCache(model.config, budget=14, ratio=3, reduce=reduce, pooling=pooling, edge=edge, **COMMON)
    full = Masked(family)
    prompt = tokens(40)
    run(model, prompt, cache)
    full(prompt)
    for layer in cache.compressed_layers:
        weights = full.weights[layer][0, :, -WINDOW:].double().numpy()
        expected = reference_select.select(
            weights, int(cache.budgets[layer]), 2, WINDOW, KERNEL, pooling=pooling, edge=edge, reduce=reduce
        )
        assert cache.positions(layer)[0].tolist() == expected


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_several_tokens_in_one_call_equal_one_at_a_time(family, decode):
    model = used(family)
    together = PyramidKVCache(model.config, budget=12, decode=decode, **COMMON)
    apart = PyramidKVCache(model.config, budget=12, decode=decode, **COMMON)
    ids = tokens(56)
    run(model, ids[:, :48], together)
    run(model, ids[:, :48], apart)
    one = torch.cat([run(model, ids[:, i : i + 1], apart) for i in range(48, 56)], dim=1)
    torch.testing.assert_close(run(model, ids[:, 48:], together), one, atol=1e-5, rtol=1e-5)
    for layer in together.compressed_layers:
        assert np.array_equal(together.positions(layer), apart.positions(layer))


def test_a_second_turn_brings_only_the_new_tokens():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    fed = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    options = {"max_new_tokens": 4, "do_sample": False, "past_key_values": cache}
    if VERSION >= (5, 24):
        options["cache"] = options.pop("past_key_values")
    first = model.generate(tokens(40), attention_mask=torch.ones(1, 40, dtype=torch.long), **options)
    conversation = torch.cat([first, tokens(7, seed=1)], dim=1)
    second = model.generate(conversation, attention_mask=torch.ones_like(conversation), **options)
    handle.remove()
    assert fed == [40, 1, 1, 1, 8, 1, 1, 1]  # the last token of an answer is fed with the next turn
    assert cache.get_seq_length() == 54
    assert cache.positions(0)[0, 0, -1] == 53

    full = Masked("llama")
    again = PyramidKVCache(model.config, budget=12, **COMMON)
    run(model, first[:, :40], again)
    full(first[:, :40])
    full.evict(again, 40)
    answer = second[:, conversation.shape[1] :]
    logits = full(torch.cat([conversation[:, 40:], answer], dim=1))
    assert logits[0, -5:-1].argmax(-1).tolist() == answer[0].tolist()


# ---- batches, padding, chunks ----


def padded(lengths, total, seed=0):
    """Return left-padded ids and their mask."""
    ids, mask = torch.zeros(len(lengths), total, dtype=torch.long), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, total - length :] = tokens(length, seed=seed + row)[0]
        mask[row, total - length :] = 1
    return ids, mask


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa")])
@pytest.mark.parametrize("amount", [{"budget": 14}, {"fraction": 0.4}])
def test_padded_rows_equal_the_rows_alone(family, attention, decode, amount):
    model = used(family, attention)
    lengths = [50, 31, 15, 6, 2]
    ids, mask = padded(lengths, 50)
    batch = PyramidKVCache(model.config, **amount, decode=decode, **COMMON)
    got = [run(model, ids, batch, mask)[:, -1:]]
    steps = [tokens(1, len(lengths), seed=9), tokens(3, len(lengths), seed=10), tokens(1, len(lengths), seed=11)]
    for more in steps:
        mask = torch.nn.functional.pad(mask, (0, more.shape[1]), value=1)
        got.append(run(model, more, batch, mask))
    for row, length in enumerate(lengths):
        alone = PyramidKVCache(model.config, **amount, decode=decode, **COMMON)
        expected = [run(model, ids[row : row + 1, 50 - length :], alone)[:, -1:]]
        expected += [run(model, more[row : row + 1], alone) for more in steps]
        for one, many in zip(expected, got, strict=True):
            torch.testing.assert_close(many[row : row + 1], one, atol=1e-5, rtol=1e-5)
        for layer in batch.compressed_layers:
            kept = batch.positions(layer)[row]
            kept = kept[kept >= 0].reshape(len(kept), -1)
            assert np.array_equal(kept, alone.positions(layer)[0])


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_a_prompt_in_chunks_equals_the_whole_prompt(decode):
    model = used("llama")
    ids, mask = padded([47, 30], 47)
    whole = PyramidKVCache(model.config, budget=14, decode=decode, **COMMON)
    chunks = PyramidKVCache(model.config, budget=14, decode=decode, compress="decode", **COMMON)
    run(model, ids, whole, mask)
    for start in range(0, 47, 10):  # the last chunk's 7 queries hold the window; one of 2 must not be enough
        run(model, ids[:, start : start + 10], chunks, mask[:, : start + 10])
    assert (chunks.lengths == 47).all()
    assert "not finished" in str(chunks.report())
    for step in range(3):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        one = tokens(1, 2, seed=step)
        torch.testing.assert_close(run(model, one, chunks, mask), run(model, one, whole, mask), atol=1e-5, rtol=1e-5)
    for layer in range(4):
        assert np.array_equal(chunks.positions(layer), whole.positions(layer))


def test_the_window_may_span_two_chunks():
    model = used("llama")
    ids = tokens(42)
    whole = PyramidKVCache(model.config, budget=14, **COMMON)
    chunks = PyramidKVCache(model.config, budget=14, compress="decode", **COMMON)
    run(model, ids, whole)
    for part in (ids[:, :40], ids[:, 40:]):
        run(model, part, chunks)
    run(model, tokens(1), chunks)
    run(model, tokens(1), whole)
    assert all(np.array_equal(chunks.positions(layer), whole.positions(layer)) for layer in range(4))


def test_generate_reads_a_prompt_in_chunks():
    model = used("llama")
    ids = tokens(50)
    chunks = PyramidKVCache(model.config, budget=14, compress="decode", **COMMON)
    fed = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _, args, options: fed.extend(options["position_ids"][0].tolist()), with_kwargs=True
    )
    got = generate(model, ids, chunks, do_sample=False, prefill_chunk_size=10)[0]
    handle.remove()
    if fed[:50] != list(range(50)):
        pytest.skip(
            f"transformers {transformers.__version__} gives every chunk the positions of the last, to any cache"
        )
    prompt = chunks.layers[0].prompt
    assert prompt in (49, 50)  # some releases keep the last token of the prompt for the first decode step
    whole = PyramidKVCache(model.config, budget=14, **COMMON)
    logits = run(model, ids[:, :prompt], whole)
    if prompt == 49:
        logits = run(model, ids[:, 49:], whole)
    for token in got[50:-1]:
        assert logits[0, -1].argmax() == token
        logits = run(model, torch.tensor([[token]]), whole)
    assert logits[0, -1].argmax() == got[-1]
    for layer in range(4):
        assert np.array_equal(chunks.positions(layer), whole.positions(layer))


def test_a_prompt_that_seems_to_come_in_chunks_is_warned_of():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=14, **COMMON)
    run(model, tokens(30), cache)
    with pytest.warns(UserWarning, match="compress='decode'"):
        run(model, tokens(30), cache)


# ---- how much is kept ----


@pytest.mark.parametrize(
    "amount",
    [
        {},
        {"ratio": 1},
        {"ratio": 0.25},
        {"beta": 2.5},
        {"weights": [1, 5, 2, 2]},
        {"plan": pb_kvcache.plan(4, 20, shape="geometric", minimum=5)},
    ],
)
@pytest.mark.parametrize("length", [100, 30, 21, 20, 12, 5, 3])
def test_lengths_sum_exactly_to_the_plan(amount, length):
    model = used("llama")
    cache = PyramidKVCache(model.config, **({"budget": 20} if "plan" not in amount else {}), **amount, **COMMON)
    run(model, tokens(length), cache)
    assert cache.lengths.sum() == min(20, length) * 4
    assert np.array_equal(cache.lengths, np.minimum(cache.budgets, length))
    assert (cache.lengths >= min(WINDOW + 1, length)).all()
    for layer in range(4):
        kept = cache.positions(layer)
        assert kept.shape == (1, 2, cache.lengths[layer])
        assert (np.diff(kept) > 0).all()
        assert (kept[..., -min(WINDOW, length) :] == np.arange(length)[-min(WINDOW, length) :]).all()


def test_a_plan_is_kept_to_the_position():
    model = used("llama")
    layer_plan = pb_kvcache.plan(4, 20, ratio=3, minimum=5)
    cache = PyramidKVCache(model.config, plan=layer_plan, **COMMON)
    assert np.array_equal(cache.budgets, layer_plan.budgets)
    run(model, tokens(80), cache)
    assert np.array_equal(cache.lengths, layer_plan.budgets)


def test_a_fraction_of_the_prompt_is_kept():
    model = used("llama")
    cache = PyramidKVCache(model.config, fraction=0.25, ratio=2, **COMMON)
    with pytest.raises(RuntimeError, match="follow from the prompt"):
        _ = cache.budgets
    run(model, tokens(81), cache)
    assert cache.lengths.sum() == 81  # a quarter of four layers of 81
    assert cache.lengths[0] > cache.lengths[3]


def test_memory_buys_positions():
    model = used("llama")
    position = 2 * 2 * 8 * 4  # keys and values, 2 heads of size 8 in float32
    cache = PyramidKVCache(model.config, memory=3 * 4 * 17 * position + position, **COMMON)
    run(model, tokens(60, 3), cache)
    assert cache.lengths.sum() == 4 * 17
    kept = sum(2 * layer.keys.numel() * 4 for layer in cache.layers)
    assert kept == 3 * 4 * 17 * position
    with pytest.raises(ValueError, match=f"memory = 999: .* which is {4 * 5 * position} bytes"):
        run(model, tokens(60), PyramidKVCache(model.config, memory=999, **COMMON))


def test_hybrid_models_keep_their_sliding_layers():
    model = used("gemma3")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    assert cache.compressed_layers == (1, 3)
    run(model, tokens(60), cache)
    assert cache.lengths.tolist() == [15, 19, 15, 5]
    assert cache.budgets.tolist() == [0, 19, 0, 5]
    assert "not compressed: DynamicSlidingWindowLayer" in str(cache.report())
    with pytest.raises(ValueError, match="layer = 0: is not compressed"):
        cache.positions(0)


def test_a_model_without_full_attention_says_that_nothing_is_compressed():
    model = used("mistral-sliding")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    run(model, tokens(60), cache)
    assert cache.compressed_layers == ()
    assert "0 of 4 layers compressed" in repr(cache)
    assert all("not compressed" in layer.kind for layer in cache.report().layers)


# ---- memory ----


def _tensor_bytes() -> int:
    """Return the bytes of every storage that some tensor in the process refers to."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_evicted_keys_and_values_are_freed(decode):
    model = used("llama")
    run(model, tokens(200, 2), DynamicCache(config=model.config))  # what a first forward leaves behind
    before = _tensor_bytes()
    full = DynamicCache(config=model.config)
    run(model, tokens(200, 2), full)
    full_bytes = _tensor_bytes() - before
    assert full_bytes == 2 * 200 * 4 * 2 * 2 * 8 * 4
    del full
    assert _tensor_bytes() == before
    cache = PyramidKVCache(model.config, budget=24, decode=decode, **COMMON)
    run(model, tokens(200, 2), cache)
    held = _tensor_bytes() - before
    assert held < 0.5 * full_bytes
    assert cache.nbytes_full == full_bytes
    # Policies and maps are not tensors; the rest of what is reported is.
    policies = sum(layer._holder.nbytes for layer in cache.layers) if decode == "hold" else 0
    assert cache.nbytes - policies == held


def test_the_whole_prompt_is_never_held_by_two_layers_at_once():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    refs, alive = [], []
    original = cache.update

    def update(keys, values, layer_idx, *args, **kwargs):
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(keys))
        return original(keys, values, layer_idx, *args, **kwargs)

    cache.update = update
    run(model, tokens(100), cache)
    assert max(alive) == 0


def test_what_is_reported_is_a_table_and_a_dict():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    assert "empty" in str(cache.report())
    run(model, tokens(60), cache)
    run(model, tokens(1), cache)
    report = cache.report()
    assert [layer.kept for layer in report.layers] == (cache.budgets + 1).tolist()
    assert [layer.evicted for layer in report.layers] == (60 - cache.budgets).tolist()
    assert report.nbytes == cache.nbytes
    assert report.to_dict()["layers"][0]["seen"] == 61
    text = str(report)
    assert "budget 12, ratio 4, window 4, score window, max of 3, last 4 kept" in text
    assert "attention: sdpa" in text
    assert len(text.splitlines()) == 7


# ---- decode="hold" ----


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt2", "sdpa"), ("gpt-oss", "eager")])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_hold_keeps_what_the_native_policy_keeps(family, attention, reduce):
    model = used(family, attention)
    cache = PyramidKVCache(model.config, budget=12, reduce=reduce, decode="hold", **COMMON)
    full = Masked(family)
    prompt = tokens(40)
    run(model, prompt, cache)
    full(prompt)

    def grouped(layer):
        weights = full.weights[layer][0].unflatten(0, (full.seen[layer][1].shape[1], -1))
        return weights.mean(1) if reduce == "mean" else weights.amax(1)

    policies = {}
    for layer in cache.compressed_layers:
        budget = cache.budgets[layer]
        for head, kept in enumerate(cache.positions(layer)[0]):
            policy = pb_kvcache.SnapKV(int(budget), WINDOW, WINDOW, KERNEL)
            policy.seed(kept, grouped(layer)[head][-WINDOW:][:, kept].numpy())
            policies[layer, head] = policy
    full.evict(cache, 40)
    for step in range(30):
        ids = tokens(1, seed=step)
        got = run(model, ids, cache)
        torch.testing.assert_close(got, full(ids), atol=1e-5, rtol=1e-5)
        for (layer, head), policy in policies.items():
            policy.on_decode_step(40 + step, grouped(layer)[head, 0, policy.kept.astype(int)].numpy())
            policy.evict()
            assert cache.positions(layer)[0, head].tolist() == policy.kept.tolist()
        layers = list(cache.compressed_layers)
        assert np.array_equal(cache.lengths[layers], cache.budgets[layers])
        full.evict(cache, 41 + step)
    assert all(cache.layers[layer]._key_buffer.shape[2] == cache.budgets[layer] + 1 for layer in layers)
    assert cache.get_seq_length() == 70


def test_hold_fills_up_a_short_prompt_and_then_stays():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, decode="hold", **COMMON)
    run(model, tokens(3), cache)
    assert cache.lengths.tolist() == [3] * 4
    for step in range(25):
        run(model, tokens(1, seed=step), cache)
        assert np.array_equal(cache.lengths, np.minimum(cache.budgets, 4 + step))


# ---- generate ----


def generate(model, ids, cache, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, **{CACHE: cache}, **options).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    ],
)
@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_generate_within_the_budget_is_generate_with_dynamic_cache(options, decode):
    ids, mask = padded([20, 13], 20)
    torch.manual_seed(5)
    expected = generate(stock("llama"), ids, DynamicCache(config=stock("llama").config), mask, **options)
    torch.manual_seed(5)
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=64, ratio=1, decode=decode, **COMMON)
    assert generate(model, ids, cache, mask, **options) == expected


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_generate_with_left_padding_is_generate_of_each_row(decode):
    model = used("llama")
    ids, mask = padded([50, 33, 9], 50)
    make = lambda: PyramidKVCache(model.config, budget=12, decode=decode, **COMMON)  # noqa: E731
    together = generate(model, ids, make(), mask, do_sample=False)
    for row, length in enumerate((50, 33, 9)):
        alone = generate(model, ids[row : row + 1, 50 - length :], make(), do_sample=False)
        assert together[row][-8:] == alone[0][-8:]


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_reordered_and_repeated_sequences_go_on_as_their_sources(decode):
    model = used("llama")
    ids, mask = padded([40, 25, 7], 40)
    cache = PyramidKVCache(model.config, budget=12, decode=decode, **COMMON)
    run(model, ids, cache, mask)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    run(model, tokens(1, 3, seed=1), cache, mask)
    order = torch.tensor([2, 0, 0])
    beams = cache.copy()
    beams.reorder_cache(order)
    more = tokens(4, 3, seed=2)
    longer = torch.nn.functional.pad(mask, (0, 4), value=1)
    # What each beam is fed, for the source that it came from.
    for beam, source in enumerate(order.tolist()):
        single = cache.copy()
        single.batch_select_indices(torch.tensor([source]))
        kept, before = single.positions(0)[0], cache.positions(0)[source]
        assert np.array_equal(kept[kept >= 0], before[before >= 0])
        expected = run(model, more[beam : beam + 1], single, longer[source : source + 1])
        probe = beams.copy()
        got = run(model, more, probe, longer[order])
        torch.testing.assert_close(got[beam : beam + 1], expected, atol=1e-5, rtol=1e-5)
    one = torch.nn.functional.pad(mask, (0, 1), value=1)
    expected = run(model, tokens(1, 3, seed=3), cache.copy(), one)
    cache.batch_repeat_interleave(2)
    got = run(model, tokens(1, 3, seed=3).repeat_interleave(2, 0), cache, one.repeat_interleave(2, 0))
    torch.testing.assert_close(got, expected.repeat_interleave(2, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("duplicate", [lambda cache: cache.copy(), copy.deepcopy])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copy_of_a_prompt_serves_several_questions(family, duplicate, decode):
    model = used(family)
    prompt = PyramidKVCache(model.config, budget=12, decode=decode, **COMMON)
    run(model, tokens(50), prompt)
    kept = [prompt.positions(layer).tolist() for layer in prompt.compressed_layers]
    answers = []
    for question in (1, 2, 1):
        cache = duplicate(prompt)
        answers.append([run(model, tokens(1, seed=100 * question + i), cache) for i in range(5)])
    assert all(torch.equal(a, b) for a, b in zip(answers[0], answers[2], strict=True))
    assert not torch.equal(answers[0][-1], answers[1][-1])
    assert [prompt.positions(layer).tolist() for layer in prompt.compressed_layers] == kept
    assert prompt.get_seq_length() == 50


def test_reset_makes_a_new_cache():
    model = used("gemma3")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    run(model, tokens(60, 2), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    fresh = PyramidKVCache(model.config, budget=12, **COMMON)
    for ids in (tokens(45, 3), tokens(1, 3)):
        assert torch.equal(run(model, ids, cache), run(model, ids, fresh))
    assert np.array_equal(cache.positions(1), fresh.positions(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_half_precision_keeps_its_dtype_and_scores_in_float32(dtype, decode):
    model = use(copy.deepcopy(stock("llama")).to(dtype))
    plain = copy.deepcopy(stock("llama")).to(dtype)
    cache = PyramidKVCache(model.config, budget=64, ratio=1, decode="grow", **COMMON)
    reference = DynamicCache(config=plain.config)
    assert torch.equal(run(model, tokens(40), cache), run(plain, tokens(40), reference))
    assert torch.equal(run(model, tokens(1), cache), run(plain, tokens(1), reference))

    cache = PyramidKVCache(model.config, budget=14, decode=decode, **COMMON)
    run(model, tokens(40), cache)
    assert all(layer.keys.dtype == dtype for layer in cache.layers)
    assert torch.isfinite(run(model, tokens(1), cache)).all()
    query = reference_queries(plain, tokens(40))
    expected = selected(query[0], query[1], int(cache.budgets[0]), 8**-0.5, WINDOW, KERNEL)
    if decode == "grow":
        assert cache.positions(0)[0, :, :-1].tolist() == expected


def reference_queries(plain, ids):
    """Return the first layer's queries and keys after rotation, ``(heads, n, head_dim)`` each."""
    seen = []
    name = "record_queries"

    def attend(module, query, key, value, attention_mask, **kwargs):
        if module.layer_idx == 0:
            seen.append((query[0], key[0]))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    masks.register(name, masks["sdpa"])
    model = copy.deepcopy(plain)
    model.set_attn_implementation(name)
    run(model, ids, DynamicCache(config=model.config))
    return seen[0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cache_may_be_filled_and_used_in_any_gradient_mode(context):
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    with context():
        model(tokens(40), use_cache=True, **{CACHE: cache})
    assert not cache.layers[0].keys.requires_grad
    twin = copy.deepcopy(cache)
    for later in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
        told = pytest.warns(UserWarning, match="gradients do not flow") if later is torch.enable_grad else nullcontext()
        with later(), told:
            logits = model(tokens(20), use_cache=True, **{CACHE: twin}).logits
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("length", [5, torch.arange(5)])
def test_mask_sizes_take_a_length_or_positions(length):
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    assert cache.get_mask_sizes(length, 0) == (5, 0)
    run(model, tokens(60), cache)
    for layer, kept in enumerate(cache.lengths):
        assert cache.get_mask_sizes(length, layer) == (kept + 5, 60 - kept)


# ---- refusals ----


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_model_that_was_not_redirected_is_noticed_at_the_first_step(family):
    model = stock(family)
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    with pytest.raises(RuntimeError, match=r"use\(model\)"):
        run(model, tokens(40), cache)


def test_a_config_that_does_not_tell_is_noticed_at_the_second_layer():
    config = FAMILIES["llama"]()
    config._attn_implementation_internal = None
    cache = PyramidKVCache(config, budget=12, **COMMON)
    with pytest.raises(RuntimeError, match=r"use\(model\).*reset"):
        run(stock("llama"), tokens(40), cache)
    cache.reset()
    run(used("llama"), tokens(40), cache)
    assert cache.lengths.sum() == 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 4}, r"budget = 4: must be at least window \+ 1 = 5"),
        ({"budget": 0}, "budget = 0"),
        ({"budget": 12, "window": 12}, r"window \+ 1 = 13"),
        ({"window": 0}, "window = 0"),
        ({"kernel": 4}, "kernel = 4"),
        ({"pooling": "min"}, "pooling = 'min'"),
        ({"edge": "zeros"}, "edge = 'zeros'"),
        ({"reduce": "median"}, "reduce = 'median'"),
        ({"decode": "shrink"}, "decode = 'shrink'"),
        ({"compress": "never"}, "compress = 'never'"),
        ({"fraction": 0.0}, "fraction = 0"),
        ({"fraction": 1.5}, "fraction = 1.5"),
        ({"memory": 0}, "memory = 0"),
        ({"memory": -1}, "memory = -1"),
        ({"budget": 2**32}, "budget = 4294967296: must be between 0 and 4294967295"),
        ({"budget": 12, "fraction": 0.5}, "budget = 12, fraction = 0.5: only one of them can be given"),
        ({"ratio": 2, "beta": 2}, "ratio = 2, beta = 2: only one of them can be given"),
        ({"ratio": 2, "weights": [1, 2, 3, 4]}, "ratio = 2, weights: only one of them can be given"),
        ({"budget": 12, "plan": pb_kvcache.plan(4, 20)}, "plan, budget = 12: only one of them can be given"),
        ({"ratio": 0, "fraction": 0.5}, "ratio = 0: must be finite and greater than 0"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": -1.0}, "ratio"),
        ({"beta": 0.0}, "beta"),
        ({"weights": [1, 2, 3]}, r"weights: has shape \(3,\), must be \(4,\): one for each full-attention layer"),
        ({"weights": [1, 2, 3, -1]}, "weights"),
        ({"plan": pb_kvcache.plan(3, 20)}, "plan: has 3 layers, the model has 4"),
        ({"plan": pb_kvcache.plan(4, 6, ratio=4)}, "plan: gives layer 3 a budget of 2"),
        ({"plan": pb_kvcache.plan(4, 20), "ratio": 2}, "plan and ratio"),
    ],
)
def test_bad_parameters_are_named(options, message):
    options = {**COMMON, **options}
    with pytest.raises(ValueError, match=message):
        PyramidKVCache(used("llama").config, **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, {}, "config"),
        ("llama", {"budget": 12.5}, "budget = 12.5"),
        ("llama", {"window": True}, "window"),
        ("llama", {"plan": [20] * 4}, "plan: must be a LayerPlan"),
        ("llama", {"fraction": "half"}, "fraction"),
        ("llama", {"weights": [True] * 4}, "weights: must be an array of real numbers, not of dtype bool"),
        ("llama", {"offloading": True}, "offloading"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(config, options, message):
    with pytest.raises(TypeError, match=message):
        PyramidKVCache(used(config).config if config else config, **options)
    with pytest.raises(TypeError, match=r"pass model\.config"):
        PyramidKVCache(used("llama"))


def test_models_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="encoder-decoder"):
        PyramidKVCache(transformers.T5Config())
    shared = transformers.LlamaConfig(**SIZES)
    shared.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="read the keys of others"):
        PyramidKVCache(shared)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        use(torch.nn.Linear(2, 2))
    model = copy.deepcopy(stock("llama"))
    with pytest.raises(ValueError, match="attention = 'flash'"):
        use(model, attention="flash")
    model._supports_sdpa = False
    with pytest.raises(ValueError, match=r"use\(model, attention='eager'\)"):
        use(model)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="cannot be redirected"):
        use(bloom, attention="eager")


def test_another_batch_needs_a_reset():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    run(model, tokens(40, 2), cache)
    before = cache.positions(0)
    with pytest.raises(ValueError, match=r"holds 2 sequences and meets a batch of 3: cache\.reset\(\)"):
        run(model, tokens(1, 3), cache)
    assert np.array_equal(cache.positions(0), before)
    assert cache.get_seq_length() == 40
    run(model, tokens(1, 2), cache)


def test_another_device_dtype_or_model_is_refused():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    run(model, tokens(40), cache)
    shape = (1, 2, 1, 8)
    with pytest.raises(ValueError, match="keys on meta"):
        cache.update(torch.zeros(shape, device="meta"), torch.zeros(shape, device="meta"), 0)
    with pytest.raises(ValueError, match="bfloat16"):
        cache.update(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16), 0)
    with pytest.raises(ValueError, match="another model"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    with pytest.raises(ValueError, match="meets layer 4"):
        cache.update(torch.zeros(shape), torch.zeros(shape), 4)


def test_masks_that_cannot_be_served_are_refused():
    model = used("llama")
    make = lambda: PyramidKVCache(model.config, budget=12, **COMMON)  # noqa: E731
    with pytest.raises(ValueError, match=r"attention_mask: has shape \(1, 1, 40, 40\)"), torch.no_grad():
        model(tokens(40), attention_mask=torch.zeros(1, 1, 40, 40), **{CACHE: make()})
    right = torch.ones(2, 40, dtype=torch.long)
    right[1, 30:] = 0
    with pytest.raises(ValueError, match="sequence 1 has padding among its last 4 columns"):
        run(model, tokens(40, 2), make(), right)
    right[1] = 0
    with pytest.raises(ValueError, match="sequence 1 is all padding"):
        run(model, tokens(40, 2), make(), right)
    cache = make()
    run(model, tokens(40), cache)
    with pytest.raises(ValueError, match="must cover every token seen so far, 42"):
        run(model, tokens(2), cache, torch.ones(1, 2, dtype=torch.long))


def test_going_back_in_time_is_refused():
    model = used("llama")
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    assert not cache.is_croppable
    run(model, tokens(40), cache)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.layers[0].crop(10)
    cache.reset()
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match="crop"):
        generate(model, tokens(40), cache, do_sample=False, prompt_lookup_num_tokens=3, eos_token_id=100)
    cache.reset()
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match="crop"):
        generate(
            model, tokens(40), cache, do_sample=False, assistant_model=copy.deepcopy(stock("llama")), eos_token_id=100
        )
    cache.reset()
    for implementation in ("static", "quantized", "offloaded"):
        with pytest.raises(ValueError, match="cache_implementation"):
            generate(model, tokens(40), cache, do_sample=False, cache_implementation=implementation)


def test_attention_that_is_not_a_number_is_refused():
    model = copy.deepcopy(used("llama"))
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.fill_(math.nan)
    cache = PyramidKVCache(model.config, budget=12, **COMMON)
    with pytest.raises(ValueError, match=r"layer 2: .*nan"):
        run(model, tokens(40), cache)
    with pytest.raises(RuntimeError, match=r"failed in layer 2.*cache\.reset\(\)"):
        run(model, tokens(1), cache)
    cache.reset()
    run(used("llama"), tokens(40), cache)
    assert cache.lengths.sum() == 48
