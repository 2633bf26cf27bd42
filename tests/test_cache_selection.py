"""Rules of selection in a compressed cache: what every head keeps, beside the same chain over whole attention."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import HeadPlan, Selection, select, select_from_scores  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, repetition_scores, use  # noqa: E402
from pb_kvcache.transformers._probe import facts_of  # noqa: E402
from pb_kvcache.transformers._value_weights import value_weights  # noqa: E402

from . import reference_select  # noqa: E402
from .test_transformers import (  # noqa: E402
    CACHE,
    COMPRESSED,
    FAMILIES,
    DynamicCache,
    Masked,
    _one_thread,  # noqa: F401
    run,
    stock,
    tokens,
    used,
)

RULES = {
    "protect": Selection(window=12, kernel=3, protect=4),
    "sinks": Selection(window=4, kernel=3, sinks=5),
    "values": Selection(window=12, pooling=None, protect=3, value_weight=True),
    "all": Selection(window=9, kernel=5, pooling="avg", edge="kernel", protect=2, sinks=3, value_weight=True),
}


def projection_of(module: torch.nn.Module) -> np.ndarray:
    """Return the output projection of an attention module as ``(out, heads * value_dim)``, by its name in the class."""
    found = next(part for name, part in module.named_children() if name in ("o_proj", "c_proj"))
    weight = found.weight.detach().double().numpy()
    return weight.T if isinstance(found, transformers.pytorch_utils.Conv1D) else weight


def attention_modules(model) -> list[torch.nn.Module]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and {"o_proj", "c_proj"} & {name for name, _ in module.named_children()}
    ]


def norms(weight: np.ndarray, values: np.ndarray, q_heads: int) -> np.ndarray:
    """``||W_O,q V_i||``, the mean over the query heads of each KV head, one vector at a time."""
    kv_heads, n, size = values.shape
    group = q_heads // kv_heads
    found = np.zeros((kv_heads, n))
    for q in range(q_heads):
        for i in range(n):
            found[q // group, i] += np.linalg.norm(weight[:, q * size : (q + 1) * size] @ values[q // group, i]) / group
    return found


def whole_attention(family: str, ids: torch.Tensor):
    """Return every layer's attention ``(q_heads, n, n)``, keys' owner aside, and values ``(kv_heads, n, dim)``."""
    model = copy.deepcopy(stock(family, "eager"))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        seen = model(ids, use_cache=True, output_attentions=True, **{CACHE: cache})
    values = [layer.values[0].double().numpy() for layer in cache.layers]
    return [rows[0].double().numpy() for rows in seen.attentions], values, attention_modules(model)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("family", "attention"), COMPRESSED)
def test_every_head_keeps_what_the_chain_over_whole_attention_keeps(family, attention, rule):
    model = used(family, attention)
    selection = RULES[rule]
    cache = BudgetedCache(model.config, budget=20, selection=selection)
    prompt = tokens(60)
    run(model, prompt, cache)
    attentions, values, modules = whole_attention(family, prompt)
    for layer in cache.compressed_layers:
        window = attentions[layer][:, -selection.window :]
        kv_heads = values[layer].shape[0]
        weights = None
        if selection.value_weight:
            weights = norms(projection_of(modules[layer]), values[layer], len(window))
        kept = reference_select.select(
            window,
            20,
            kv_heads,
            selection.window,
            selection.kernel,
            selection.pooling,
            selection.edge,
            protect=selection.protected,
            sinks=selection.sinks,
            weights=weights,
        )
        assert cache.positions(layer)[0].tolist() == kept


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("rule", RULES)
def test_chunks_padding_heads_and_plans_keep_the_same(rule, decode):
    model = used("llama")
    options = {"budget": 16, "selection": RULES[rule], "decode": decode}
    ids = tokens(70, batch=2)
    alone = []
    for row in (0, 1):
        cache = BudgetedCache(model.config, **options)
        run(model, ids[row : row + 1, 15 * row :], cache)
        alone.append([cache.positions(layer)[0].tolist() for layer in range(4)])
    together = BudgetedCache(model.config, **options)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :15] = 0
    run(model, ids, together, mask)
    chunks = BudgetedCache(model.config, compress="decode", **options)
    for part in ids[:1].split(24, dim=1):
        run(model, part, chunks)
    run(model, tokens(1), chunks)
    for layer in range(4):
        assert together.positions(layer)[0].tolist() == alone[0][layer]
        assert together.positions(layer)[1].tolist() == alone[1][layer]
        if decode == "grow":
            assert (chunks.positions(layer)[0, :, :16] == alone[0][layer]).all()


def test_hold_protects_as_many_as_the_rule_does():
    model = used("llama")
    cache = BudgetedCache(model.config, budget=16, selection=RULES["values"], decode="hold")
    run(model, tokens(60), cache)
    for seed in range(25):
        run(model, tokens(1, seed=seed), cache)
    for layer in range(4):
        held = cache.positions(layer)[0]
        assert held.shape == (2, 16)
        assert (held[:, -3:] == np.arange(82, 85)).all()
        assert (held[:, 0] < 60).all()  # and more of the window may have left


def test_adakv_weighs_values_too():
    model = used("llama")
    options = {"budget": 16, "heads": "adakv", "selection": RULES["values"]}
    cache = BudgetedCache(model.config, **options)
    run(model, tokens(60), cache)
    assert (cache.head_lengths.sum(axis=1) == 32).all()
    assert len({tuple(row) for row in cache.head_lengths.tolist()}) > 1


def test_a_name_is_its_rule_and_a_report_says_it():
    model = used("llama")
    by_name = BudgetedCache(model.config, budget=16, selection="output")
    fields = {"window": 32, "kernel": 1, "protect": 8, "value_weight": True}
    by_rule = BudgetedCache(model.config, budget=16, selection=Selection(**fields))
    for cache in (by_name, by_rule):
        run(model, tokens(60), cache)
    for layer in range(4):
        assert (by_name.positions(layer) == by_rule.positions(layer)).all()
    assert "output (window 32, score window times the value's norm, no pooling, last 8 kept" in str(by_name.report())
    loose = BudgetedCache(model.config, budget=40, window=12, kernel=3, protect=4)
    run(model, tokens(60), loose)
    ruled = BudgetedCache(model.config, budget=40, selection=RULES["protect"])
    run(model, tokens(60), ruled)
    assert all((loose.positions(layer) == ruled.positions(layer)).all() for layer in range(4))


def test_a_prompt_shorter_than_the_window_is_ranked_by_the_queries_that_there_are():
    model = used("llama")
    cache = BudgetedCache(model.config, budget=12, selection="output")
    prompt = tokens(20)
    run(model, prompt, cache)
    attentions, values, modules = whole_attention("llama", prompt)
    for layer in range(4):
        weights = norms(projection_of(modules[layer]), values[layer], 4)
        kept = reference_select.select(attentions[layer], 12, 2, 20, 1, protect=8, weights=weights)
        assert cache.positions(layer)[0].tolist() == kept


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"selection": "best"}, ValueError, "selection = 'best': must be a Selection or one of snapkv, output"),
        ({"selection": 3}, TypeError, "selection = 3: must be a Selection or one of"),
        ({"selection": "output", "window": 4}, ValueError, "selection and window"),
        ({"selection": "output", "kernel": 3}, ValueError, "selection and kernel"),
        ({"selection": "output", "budget": 8}, ValueError, "budget = 8: must be at least 9, one more than"),
        ({"protect": 4, "sinks": 3, "budget": 7}, ValueError, "budget = 7: must be at least 8, one more than"),
        ({"budget": 32}, ValueError, r"budget = 32: must be at least window \+ 1 = 33"),
        ({"protect": 0}, ValueError, "protect = 0"),
        ({"sinks": -1}, ValueError, "sinks = -1"),
    ],
)
def test_rules_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        BudgetedCache(used("llama").config, **options)


# ---- The output projection ----


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral-sliding"])
def test_the_probe_finds_the_output_projection(family):
    facts = facts_of(used(family, "eager").config)
    assert {layer.projection for layer in facts.layers.values()} == {"c_proj" if family == "gpt2" else "o_proj"}


class Quantised(torch.nn.Module):
    """A linear map that only knows itself how its weights are stored."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("scale", scale)
        self.register_buffer("stored", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = torch.nn.Parameter(torch.ones(linear.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.stored.float() * self.scale).T + self.bias


def test_weights_that_are_stored_otherwise_are_read_through_their_module():
    model = copy.deepcopy(stock("llama"))
    linear = model.model.layers[2].self_attn.o_proj
    model.model.layers[2].self_attn.o_proj = Quantised(linear)
    use(model)
    assert facts_of(model.config).layers[2].projection == "o_proj"
    values = torch.randn(2, 2, 9, 8)
    found = value_weights(model.model.layers[2].self_attn.o_proj, values, 4)
    stored = model.model.layers[2].self_attn.o_proj
    weight = (stored.stored.float() * stored.scale).double().numpy()
    for row in range(2):
        np.testing.assert_allclose(found[row], norms(weight, values[row].double().numpy(), 4), rtol=1e-5)
    cache = BudgetedCache(model.config, budget=16, selection="output")
    run(model, tokens(60), cache)
    assert cache.lengths.tolist() == [16] * 4


def test_weights_are_read_again_where_they_changed():
    linear = torch.nn.Linear(32, 16, bias=False)
    values = torch.randn(2, 5, 8)
    first = value_weights(linear, values, 4)
    assert torch.equal(value_weights(linear, values, 4), first)
    with torch.no_grad():
        linear.weight.mul_(2)
    torch.testing.assert_close(value_weights(linear, values, 4), 2 * first)
    linear.weight.data = torch.zeros(16, 32)
    assert (value_weights(linear, values, 4) == 0).all()


def test_a_model_without_a_projection_is_refused_for_such_a_rule():
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=True,
    )
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(ValueError, match="use\\(model\\) finds; call it"):
        BudgetedCache(model.config, budget=16, selection="output")
    use(model)
    with pytest.raises(ValueError, match="layer 0 has none within its attention module; use a rule without"):
        BudgetedCache(model.config, budget=16, selection="output")
    BudgetedCache(model.config, budget=16, selection=RULES["protect"])
    assert not any(module._forward_pre_hooks for module in model.bert.modules())


# ---- Scores that the window's attention does not make ----


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_keydiff_keeps_the_keys_that_are_least_like_the_others(decode):
    model = used("llama")
    rule = Selection(window=6, kernel=3, protect=4, sinks=2, score="keydiff")
    cache = BudgetedCache(model.config, budget=15, selection=rule, decode=decode)
    prompt = tokens(60)
    full = DynamicCache(config=model.config)
    run(model, prompt, full)
    run(model, prompt, cache)
    for layer in range(4):
        keys = full.layers[layer].keys[0].double().numpy()
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        mean = unit.mean(axis=1, keepdims=True)
        scores = -(unit * mean / np.linalg.norm(mean, axis=-1, keepdims=True)).sum(axis=-1)
        kept = reference_select.select_from_scores(scores[:, :56], [15, 15], 4, 3, "max", sinks=2)
        assert cache.positions(layer)[0].tolist() == kept
    with pytest.raises(ValueError, match="value_weight = True: weighs scores of 0 and more, and score = 'keydiff'"):
        Selection(score="keydiff", value_weight=True)


def test_a_score_that_no_prefill_makes_is_refused_with_the_way_to_it():
    model = used("llama")
    with pytest.raises(ValueError, match=r"score = 'repeat': .*BudgetedCache\.filled"):
        BudgetedCache(model.config, budget=40, selection=Selection(score="repeat"))


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("options", [{"budget": 15}, {"plan": "heads"}, {"budget": 15, "heads": "adakv"}])
def test_a_cache_is_filled_by_scores_from_elsewhere(options, decode):
    model = used("llama")
    if "plan" in options:
        options = {"plan": HeadPlan([[13, 30], [9, 21], [24, 24], [40, 11]])}
    rule = Selection(kernel=1, protect=4, score="repeat")
    context, question = tokens(60), tokens(7)
    full = DynamicCache(config=model.config)
    run(model, context, full)
    generator = torch.Generator().manual_seed(5)
    scores = [torch.rand(2, 60, generator=generator) for _ in range(4)]
    cache = BudgetedCache.filled(model.config, full, scores, selection=rule, decode=decode, **options)
    held = [layer.keys.clone() for layer in full.layers]
    assert cache.get_seq_length() == 60
    if "heads" in options:
        assert (cache.head_lengths.sum(axis=1) == 30).all()
    else:
        for layer in range(4):
            budgets = options["plan"].budgets[layer].tolist() if "plan" in options else [15, 15]
            kept = reference_select.select_from_scores(scores[layer][:, :56].double().numpy(), budgets, 4, 1)
            found = cache.positions(layer)[0]
            assert [row[row >= 0].tolist() for row in found] == kept
    masked = Masked("llama")
    masked(context)
    masked.evict(cache, 60)
    if decode == "grow":
        torch.testing.assert_close(run(model, question, cache), masked(question), atol=1e-5, rtol=1e-5)
    else:
        run(model, question, cache)
        assert cache.lengths.max() <= 40
    for layer, keys in zip(full.layers, held, strict=True):
        assert torch.equal(layer.keys, keys)


def test_scores_of_a_repetition_fill_a_cache():
    model = used("llama")
    context = tokens(50)
    full = DynamicCache(config=model.config)
    run(model, context, full)
    scores = repetition_scores(model, full, context, request=tokens(4), block=20)
    cache = BudgetedCache.filled(model.config, full, scores, budget=12, selection=Selection(kernel=1, protect=2))
    assert cache.lengths.tolist() == [12] * 4
    run(model, tokens(3), cache)
    assert cache.lengths.tolist() == [15] * 4
    again = BudgetedCache.filled(model.config, full, scores, budget=12, selection=Selection(protect=2, score="repeat"))
    again.reset()
    with pytest.raises(ValueError, match=r"score = 'repeat': no prefill makes it; BudgetedCache\.filled"):
        run(model, tokens(40), again)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": [torch.zeros(2, 60)] * 3}, ValueError, "context and scores: have 4 and 3 layers, the model 4"),
        ({"scores": [torch.zeros(2, 59)] * 4}, ValueError, r"of layer 0 have shape \(2, 59\), must be \(2, 60\)"),
        ({"scores": [np.zeros((2, 60))] * 4}, TypeError, "of layer 0 must be a tensor, not ndarray"),
        ({"scores": [torch.full((2, 60), torch.nan)] * 4}, ValueError, r"layer 0: .* = nan"),
        ({"context": 3}, TypeError, "context: must be a cache of transformers, not int"),
        ({"context": DynamicCache()}, ValueError, "context and scores: have 0 and 4 layers"),
        ({"merge": "nearest"}, ValueError, "merge: needs the prompt's forward"),
        ({"compress": "decode"}, ValueError, "compress: needs the prompt's forward"),
        ({"selection": "output"}, ValueError, "selection: weighs values, which needs the prompt's forward"),
        ({"budget": 4}, ValueError, "budget = 4: must be at least 5"),
        ({"selection": Selection(kernel=1, protect=4, second_hop=0.2)}, ValueError, "second_hop: needs the prompt's"),
    ],
)
def test_what_does_not_fill_a_cache_is_refused(change, error, message):
    model = used("llama")
    full = DynamicCache(config=model.config)
    run(model, tokens(60), full)
    given = {"context": full, "scores": [torch.zeros(2, 60)] * 4, "budget": 12, **change}
    given.setdefault("selection", Selection(kernel=1, protect=4))
    with pytest.raises(error, match=message):
        BudgetedCache.filled(model.config, given.pop("context"), given.pop("scores"), **given)


# ---- A second hop ----


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": "heads"}, {"budget": 20, "heads": "adakv"}])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt2", "sdpa"), ("gpt-oss", "eager")])
def test_a_second_hop_keeps_what_the_first_one_attended_to(family, attention, options):
    model = used(family, attention)
    prompt, share = tokens(60), 0.4
    attentions, values, _ = whole_attention(family, prompt)
    rule = Selection(window=10, kernel=1, protect=4, sinks=1, second_hop=share)
    layers = BudgetedCache(model.config, budget=20, selection=rule).compressed_layers
    kv_heads = values[layers[0]].shape[0]
    if "plan" in options:
        options = {"plan": HeadPlan(np.random.default_rng(1).integers(8, 30, (len(layers), kv_heads)))}
    cache = BudgetedCache(model.config, selection=rule, **options)
    first = BudgetedCache(model.config, selection=Selection(window=10, kernel=1, protect=4, sinks=1), **options)
    run(model, prompt, cache)
    run(model, prompt, first)
    assert cache.head_lengths.tolist() == first.head_lengths.tolist()
    differ = 0
    for layer in layers:
        scores = reference_select.window_scores(attentions[layer][:, -10:], kv_heads, protect=4)
        group = len(attentions[layer]) // kv_heads
        for head in range(kv_heads):
            held = cache.positions(layer)[0, head]
            held = held[held >= 0].tolist()
            hops = int(share * (len(held) - 5))
            once = reference_select.select_from_scores(scores[head : head + 1], [len(held) - hops], 4, 1, sinks=1)[0]
            heads = attentions[layer][head * group : (head + 1) * group].mean(axis=0)
            reached = [sum(scores[head][i] * heads[i, j] for i in once if i < 56) for j in range(56)]
            for i in once[:-4]:
                reached[i] = -1.0
            want = sorted(once + reference_select.top(reached, hops))
            assert held == want
            differ += held != first.positions(layer)[0, head][: len(held)].tolist()
    assert differ > 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"second_hop": 1}, "second_hop = 1: must be 0 or more and below 1"),
        ({"second_hop": -0.1}, "second_hop = -0.1"),
        ({"second_hop": 0.2, "score": "keydiff"}, "goes by attention, and score = 'keydiff' is none"),
    ],
)
def test_second_hops_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Selection(**fields)


def test_a_second_hop_is_of_a_cache_that_sees_the_whole_prompt():
    rule = Selection(second_hop=0.25)
    with pytest.raises(ValueError, match="second_hop: needs the queries of the whole prompt at once"):
        BudgetedCache(used("llama").config, budget=40, selection=rule, compress="decode")
    with pytest.raises(ValueError, match=r"has second_hop = 0\.25, which needs the prompt's queries"):
        select_from_scores(np.zeros((2, 50), np.float32), 40, selection=rule)
    with pytest.raises(ValueError, match=r"has second_hop = 0\.25, which needs the prompt's queries"):
        select(np.ones((2, 32, 50), np.float32), 40, num_kv_heads=1, selection=rule)
    assert "0.25 of them by a second hop" in str(rule)
