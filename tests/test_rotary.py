"""Queries before their rotation, and the rotation of the next positions: beside the model's own projections."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import HeadPlan, Selection  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, compressed, use  # noqa: E402
from pb_kvcache.transformers._probe import facts_of  # noqa: E402
from pb_kvcache.transformers._prompt_queries import PromptQueries  # noqa: E402
from pb_kvcache.transformers._rotary import Course, Rotation, in_model_order, noting_modules, turned  # noqa: E402

from . import reference_scores, reference_select  # noqa: E402
from .test_transformers import (  # noqa: E402
    CACHE,
    SIZES,
    VERSION,
    DynamicCache,
    _one_thread,  # noqa: F401
    run,
    stock,
    tokens,
    used,
)

SCALED = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def built(scaling: dict):
    """Return a small Llama with a way to scale its rotation."""
    torch.manual_seed(3)
    if VERSION < (5, 0):
        config = transformers.LlamaConfig(**SIZES, rope_scaling=scaling or None)
    else:
        config = transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | scaling
        )
    return transformers.LlamaForCausalLM(config).eval()


def projections(model, ids: torch.Tensor, mask=None) -> list[torch.Tensor]:
    """Return what every layer's q_proj makes, ``(batch, q_heads, n, head_dim)``: queries before rotation."""
    found = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, output: found.append(output.detach().unflatten(-1, (-1, 8)).transpose(1, 2))
        )
        for layer in model.model.layers
    ]
    run(model, ids, DynamicCache(config=model.config), mask)
    for hook in hooks:
        hook.remove()
    return found


class Spy(PromptQueries):
    """Notes what it is given."""

    made: ClassVar[list] = []

    def add(self, query, rotation):
        Spy.made.append((self, query, rotation))
        super().add(query, rotation)


@pytest.mark.parametrize("scaling", SCALED)
def test_queries_before_rotation_are_the_projections(scaling, monkeypatch):
    model = use(built(SCALED[scaling]))
    assert {layer.layout for layer in facts_of(model.config).layers.values()} == {"half"}
    monkeypatch.setattr("pb_kvcache.transformers._layer.PromptQueries", Spy)
    ids = tokens(90, batch=2)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, :13] = 0
    before = projections(model, ids, mask)
    Spy.made.clear()
    run(model, ids, BudgetedCache(model.config, budget=40, selection="mixed"), mask)
    assert len(Spy.made) == 8
    for index, (_, query, rotation) in enumerate(Spy.made):
        layer, row = divmod(index, 2)
        want = before[layer][row][:, 13 * row :]
        torch.testing.assert_close(rotation.before(query), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scaling", SCALED)
def test_the_next_positions_are_the_models_own(scaling):
    model = built(SCALED[scaling])
    for seen in (2, 3, 40, 3000):
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(5, 5 + seen)[None])
        course = Course()
        for start in range(0, seen, 1000):
            part = slice(start, start + 1000)
            course.add(Rotation(cos[0, part], sin[0, part], "half"))
        own = model.model.rotary_emb(torch.zeros(1), torch.arange(5 + seen, 5 + seen + 300)[None])
        # The model multiplies position and frequency in float32: 3,300 radians are 1e-4 apart. Two positions tell the
        # angle of a step to 1e-7, which grows 300 times.
        for mine, theirs in zip(course.next(300), own, strict=True):
            torch.testing.assert_close(mine, theirs[0], atol=5e-4, rtol=0)
    course = Course()
    course.add(Rotation(cos[0, :1], sin[0, :1], "half"))
    with pytest.raises(ValueError, match="prompt: has one position"):
        course.next(3)


def test_neighbours_may_be_the_pairs():
    torch.manual_seed(1)
    angles = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    vectors = torch.randn(2, 7, 8)  # 6 of 8 dimensions turn
    pairs = torch.view_as_complex(vectors[..., :6].unflatten(-1, (3, 2)).contiguous())
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones(7, 3), angles)).flatten(-2)
    rotated = torch.cat([rotated, vectors[..., 6:]], dim=-1)
    for repeat in (lambda x: torch.cat([x, x], -1), lambda x: x.repeat_interleave(2, -1), lambda x: x):
        rotation = Rotation(repeat(angles.cos()), repeat(angles.sin()), "interleaved")
        assert rotation.dims == 6
        before = rotation.before(rotated)
        torch.testing.assert_close(in_model_order(before, 6, "interleaved"), vectors)
        cos, sin = (torch.cat([wave, wave], -1) for wave in (angles.cos(), angles.sin()))
        torch.testing.assert_close(in_model_order(turned(before, cos, sin), 6, "interleaved"), rotated)


LAYOUTS = {
    "llama": (["half"] * 4, lambda: transformers.LlamaConfig(**SIZES)),
    "qwen3": (["half"] * 4, lambda: transformers.Qwen3Config(**SIZES, head_dim=8)),
    "phi": (
        ["half"] * 4,
        lambda: transformers.PhiConfig(**SIZES | {"num_key_value_heads": 4}, partial_rotary_factor=0.5),
    ),
    "glm": (["interleaved"] * 4, lambda: transformers.GlmConfig(**SIZES, head_dim=8)),
    "cohere": (["interleaved"] * 4, lambda: transformers.CohereConfig(**SIZES)),
    "gpt2": (["unturned"] * 2, lambda: transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)),
    "smollm3": (["half"] * 3 + ["unturned"], lambda: transformers.SmolLM3Config(**SIZES)),
    "hunyuan": ([None] * 4, lambda: transformers.HunYuanDenseV1Config(**SIZES, head_dim=8)),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_probe_tells_how_dimensions_are_paired(family):
    layouts, config = LAYOUTS[family]
    if VERSION < (5, 0) and family in ("smollm3", "hunyuan"):
        pytest.skip("a family of newer releases")
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query_layernorm" in name:
                parameter.uniform_(0.5, 2)
    use(model)
    assert [layer.layout for layer in facts_of(model.config).layers.values()] == layouts
    assert bool(noting_modules(model)) == ("half" in layouts or "interleaved" in layouts)
    if None in layouts:
        with pytest.raises(ValueError, match=r"score = 'mixed': needs .* how layer 0 of this model rotates"):
            BudgetedCache(model.config, budget=40, selection="mixed")
        return
    cache = BudgetedCache(model.config, budget=20, selection=Selection(window=8, kernel=1, protect=4, score="expected"))
    run(model, tokens(50), cache)
    assert (cache.lengths == 20).all()


def test_it_is_put_once_copied_and_taken_away():
    model = copy.deepcopy(stock("llama"))
    with compressed(model, budget=40):
        assert len(noting_modules(model)) == 4
    assert not noting_modules(model)
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in model.modules())
    use(use(model))
    assert len(noting_modules(model)) == 4
    assert all(len(module._forward_pre_hooks) == 1 for module in noting_modules(model))
    twin = copy.deepcopy(model)
    assert len(noting_modules(twin)) == 4
    with compressed(twin, budget=40):
        pass
    assert len(noting_modules(twin)) == 4


def test_nothing_of_a_step_is_kept_alive():
    model = use(copy.deepcopy(stock("llama")))
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, options: seen.append(weakref.ref(options["position_embeddings"][0])), with_kwargs=True
    )
    run(model, tokens(30), BudgetedCache(model.config, budget=40))
    gc.collect()
    assert seen
    assert seen[0]() is None


# ---- Scores in the cache ----


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("score", ["expected", "mixed"])
def test_positions_are_those_of_the_formula(score, decode):
    model = used("llama")
    rule = Selection(window=8, kernel=1, protect=4, score=score)
    prompt = tokens(60)
    before = projections(copy.deepcopy(stock("llama")), prompt)
    full = DynamicCache(config=model.config)
    run(model, prompt, full)
    attentions = None
    if score == "mixed":
        eager = copy.deepcopy(stock("llama", "eager"))
        with torch.no_grad():
            attentions = eager(
                prompt, use_cache=True, output_attentions=True, **{CACHE: DynamicCache(config=eager.config)}
            ).attentions
    cache = BudgetedCache(model.config, budget=20, selection=rule, decode=decode)
    run(model, prompt, cache)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(60, 60 + 256)[None])
    for layer in range(4):
        moments = [reference_scores.moments(head[4:].double().numpy()) for head in before[layer][0]]
        mean, covariance = (np.array(part) for part in zip(*moments, strict=True))
        keys = full.layers[layer].keys[0].double().numpy()
        scores = np.array(
            reference_scores.expected_scores(keys, mean, covariance, cos[0].numpy(), sin[0].numpy(), 8**-0.5)
        )[:, :56]
        if attentions is not None:
            window = attentions[layer][0, :, -8:].double().numpy()
            scores = scores + reference_select.window_scores(window, 2, protect=4)
        kept = reference_select.select_from_scores(scores, [20, 20], 4, 1)
        assert cache.positions(layer)[0].tolist() == kept


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": "heads"}, {"budget": 20, "heads": "adakv"}])
def test_chunks_and_padding_keep_the_same(options):
    model = used("llama")
    if "plan" in options:
        options = {"plan": HeadPlan([[13, 30], [9, 21], [24, 24], [40, 11]])}
    rule = Selection(window=8, kernel=1, protect=4, score="mixed", value_weight=True)
    options = {"selection": rule, "merge": "fitted", **options}
    ids, more = tokens(80, batch=2), tokens(1)
    alone = []
    for row in (0, 1):
        cache = BudgetedCache(model.config, **options)
        run(model, ids[row : row + 1, 17 * row :], cache)
        alone.append(cache)
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, :17] = 0
    together = BudgetedCache(model.config, **options)
    run(model, ids, together, mask)
    chunks = BudgetedCache(model.config, compress="decode", **options)
    for part in ids[:1].split(33, dim=1):
        run(model, part, chunks)
    twin = chunks.copy()
    answers = [run(model, more, cache) for cache in (alone[0], chunks, twin)]
    for layer in range(4):
        for row, one in enumerate(alone):
            held, own = together.positions(layer)[row], one.positions(layer)[0]
            for head in range(2):
                kept = own[head][(own[head] >= 0) & (own[head] < 80 - 17 * row)]
                assert held[head][held[head] >= 0].tolist() == kept.tolist()
        assert (chunks.positions(layer) == alone[0].positions(layer)).all()
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], atol=5e-4, rtol=5e-4)


def test_a_sample_is_of_the_prompt_and_the_same_however_it_is_cut():
    torch.manual_seed(4)
    query = torch.randn(4, 300, 8)
    angles = torch.arange(300.0)[:, None] * torch.tensor([1.0, 0.2, 0.04, 0.008])
    rotation = Rotation(torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1), "half")
    samples = []
    for sizes in ([300], [1, 299], [120, 7, 173]):
        queries = PromptQueries(2, moments=True, sample=True)
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            queries.add(query[:, part], rotation.part(part))
            start += size
        samples.append(queries.sample())
        assert queries.nbytes > 2 * 96 * 8 * 4
    assert samples[0].shape == (2, 96, 8)
    for sample in samples[1:]:
        torch.testing.assert_close(sample, samples[0], atol=1e-4, rtol=1e-4)
    # Each is one of its group's queries, turned to one of the 32 next positions.
    before = rotation.before(query)
    nexts = torch.arange(300.0, 332.0)[:, None] * torch.tensor([1.0, 0.2, 0.04, 0.008])
    for head in range(2):
        own = before[2 * head : 2 * head + 2].flatten(0, 1)
        for index in range(96):
            wave = nexts[index % 32]
            cos, sin = torch.cat([wave.cos()] * 2), torch.cat([wave.sin()] * 2)
            distance = (turned(own[:, None], cos[None], sin[None])[:, 0] - samples[0][head, index]).abs().amax(-1)
            assert distance.min() < 1e-4
