"""A budget for every KV head: rows of different numbers in memory, the same logits as a full cache with masks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache  # noqa: E402

from pb_kvcache import CurveSet, HeadPlan, save_plan  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, use  # noqa: E402

from .test_transformers import (  # noqa: E402
    CACHE,
    COMMON,
    COMPRESSED,
    WINDOW,
    Masked,
    _one_thread,  # noqa: F401
    _tensor_bytes,
    padded,
    run,
    tokens,
    used,
)


def heads_of(model) -> int:
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def head_plan(model, seed: int = 0, most: int = 24) -> HeadPlan:
    """Return budgets from the least that is allowed up to `most`, different in every head."""
    layers = len(BudgetedCache(model.config, budget=12, **COMMON).compressed_layers)
    budgets = np.random.default_rng(seed).integers(WINDOW + 1, most, (layers, heads_of(model)))
    budgets[0, 0], budgets[-1, -1] = WINDOW + 1, most
    return HeadPlan(budgets)


@pytest.mark.parametrize(("family", "attention"), COMPRESSED)
def test_every_head_is_the_full_one_with_its_evicted_positions_masked(family, attention):
    model = used(family, attention)
    plan = head_plan(model)
    cache = BudgetedCache(model.config, plan=plan, **COMMON)
    full = Masked(family)
    prompt = tokens(60)
    torch.testing.assert_close(run(model, prompt, cache), full(prompt), atol=1e-5, rtol=1e-5)
    full.evict(cache, 60)
    layers = list(cache.compressed_layers)
    for row, layer in enumerate(layers):
        kept = (cache.positions(layer)[0] >= 0).sum(-1)
        assert kept.tolist() == plan.budgets[row].tolist()
        assert (~full.evicted[layer]).sum(-1)[0].tolist() == kept.tolist()
    assert cache.head_lengths[layers].tolist() == plan.budgets.tolist()
    # One at a time past the spare rows, several at once, one again.
    for count, seed in [*((1, 10 + i) for i in range(20)), (5, 40), (1, 41)]:
        more = tokens(count, seed=seed)
        torch.testing.assert_close(run(model, more, cache), full(more), atol=1e-5, rtol=1e-5)
    assert cache.head_lengths[layers].tolist() == (plan.budgets + 26).tolist()
    assert cache.positions(layers[0])[0, 0, WINDOW + 1 :][:26].tolist() == list(range(60, 86))


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa")])
def test_padded_rows_equal_the_rows_alone(family, attention):
    model = used(family, attention)
    plan = head_plan(model)
    lengths = [50, 31, 15, 6, 2]
    ids, mask = padded(lengths, 50)
    batch = BudgetedCache(model.config, plan=plan, **COMMON)
    got = [run(model, ids, batch, mask)[:, -1:]]
    steps = [tokens(1, len(lengths), seed=9), tokens(3, len(lengths), seed=10), tokens(1, len(lengths), seed=11)]
    for more in steps:
        mask = torch.nn.functional.pad(mask, (0, more.shape[1]), value=1)
        got.append(run(model, more, batch, mask))
    for row, length in enumerate(lengths):
        alone = BudgetedCache(model.config, plan=plan, **COMMON)
        expected = [run(model, ids[row : row + 1, 50 - length :], alone)[:, -1:]]
        expected += [run(model, more[row : row + 1], alone) for more in steps]
        for one, many in zip(expected, got, strict=True):
            torch.testing.assert_close(many[row : row + 1], one, atol=1e-5, rtol=1e-5)
        for layer in batch.compressed_layers:
            for head in range(heads_of(model)):
                many, one = batch.positions(layer)[row, head], alone.positions(layer)[0, head]
                assert many[many >= 0].tolist() == one[one >= 0].tolist()


def test_what_a_head_cannot_use_of_a_short_prompt_goes_to_the_others():
    model = used("llama")
    plan = HeadPlan([[5, 60], [30, 8], [9, 40], [20, 12]])
    for length in (3, 5, 18, 25, 40, 59, 60, 100):
        cache = BudgetedCache(model.config, plan=plan, **COMMON)
        run(model, tokens(length), cache)
        kept = cache.head_lengths
        assert kept.sum() == min(plan.total, 8 * length)
        assert kept.max() <= length
        if length >= 60:
            assert kept.tolist() == plan.budgets.tolist()
        elif 8 * length > plan.total:
            assert (kept >= np.minimum(plan.budgets, length)).all()


def test_a_sequence_that_ends_may_be_padded_on():
    model = used("llama")
    cache, alone = (BudgetedCache(model.config, plan=head_plan(model), **COMMON) for _ in range(2))
    ids = tokens(40, 2)
    mask = torch.ones(2, 40, dtype=torch.long)
    run(model, ids, cache, mask)
    run(model, ids[1:], alone)
    for step in range(12):  # the first sequence has ended: padding follows
        mask = torch.cat([mask, torch.tensor([[0], [1]])], dim=1)
        more = tokens(1, 2, seed=step)
        got = run(model, more, cache, mask)
        torch.testing.assert_close(got[1:], run(model, more[1:], alone), atol=1e-5, rtol=1e-5)
    kept = cache.positions(0)
    assert kept[0].max() == 39
    assert kept[1].max() == 51


def test_a_prompt_in_chunks_equals_the_whole_prompt():
    model = used("llama")
    plan = head_plan(model)
    whole = BudgetedCache(model.config, plan=plan, **COMMON)
    chunks = BudgetedCache(model.config, plan=plan, compress="decode", **COMMON)
    ids = tokens(50)
    run(model, ids, whole)
    for start, end in ((0, 20), (20, 45), (45, 50)):
        run(model, ids[:, start:end], chunks)
    for seed in range(12):
        more = tokens(1, seed=seed)
        torch.testing.assert_close(run(model, more, chunks), run(model, more, whole), atol=1e-5, rtol=1e-5)
    for layer in whole.compressed_layers:
        assert np.array_equal(whole.positions(layer), chunks.positions(layer))


@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 25, 7]])
def test_reordered_repeated_and_copied_sequences_go_on_as_their_sources(lengths):
    model = used("llama")
    ids, mask = padded(lengths, 40)
    cache = BudgetedCache(model.config, plan=head_plan(model), **COMMON)
    run(model, ids, cache, mask)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    run(model, tokens(1, 3, seed=1), cache, mask)
    order = torch.tensor([2, 0, 0])
    beams = cache.copy()
    beams.reorder_cache(order)
    more, longer = tokens(9, 3, seed=2), torch.nn.functional.pad(mask, (0, 9), value=1)
    got = run(model, more, beams, longer[order])
    for beam, source in enumerate(order.tolist()):
        single = cache.copy()
        single.batch_select_indices(torch.tensor([source]))
        expected = run(model, more[beam : beam + 1], single, longer[source : source + 1])
        torch.testing.assert_close(got[beam : beam + 1], expected, atol=1e-5, rtol=1e-5)
    one = torch.nn.functional.pad(mask, (0, 1), value=1)
    expected = run(model, tokens(1, 3, seed=3), cache.copy(), one)
    cache.batch_repeat_interleave(2)
    got = run(model, tokens(1, 3, seed=3).repeat_interleave(2, 0), cache, one.repeat_interleave(2, 0))
    torch.testing.assert_close(got, expected.repeat_interleave(2, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt-oss", "eager"), ("gpt2", "sdpa")])
def test_adakv_divides_a_layers_positions_over_its_heads(family, attention, decode):
    model = used(family, attention)
    cache = BudgetedCache(model.config, budget=14, ratio=2, heads="adakv", decode=decode, **COMMON)
    full = Masked(family)
    run(model, tokens(60), cache)
    full(tokens(60))
    layers = list(cache.compressed_layers)
    equal = BudgetedCache(model.config, budget=14, ratio=2, **COMMON)
    run(model, tokens(60), equal)
    assert cache.head_lengths[layers].sum(axis=1).tolist() == (equal.lengths[layers] * heads_of(model)).tolist()
    assert (cache.head_lengths[layers].min(axis=1) < cache.head_lengths[layers].max(axis=1)).any()
    for step in range(12):
        full.evict(cache, 60 + (step if decode == "hold" else 0))
        more = tokens(1, seed=step)
        torch.testing.assert_close(run(model, more, cache), full(more), atol=1e-5, rtol=1e-5)
    assert "heads by AdaKV with alpha 0.2" in repr(cache)


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_adakv_divides_for_every_sequence_of_a_batch(decode):
    model = used("llama")
    lengths = [50, 31, 15, 6, 2]
    ids, mask = padded(lengths, 50)
    options = {"budget": 14, "heads": "adakv", "decode": decode, **COMMON}
    batch = BudgetedCache(model.config, **options)
    got = [run(model, ids, batch, mask)[:, -1:]]
    for seed in range(6):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        got.append(run(model, tokens(1, 5, seed=seed), batch, mask))
    for row, length in enumerate(lengths):
        alone = BudgetedCache(model.config, **options)
        expected = [run(model, ids[row : row + 1, 50 - length :], alone)[:, -1:]]
        expected += [run(model, tokens(1, 5, seed=seed)[row : row + 1], alone) for seed in range(6)]
        for one, many in zip(expected, got, strict=True):
            torch.testing.assert_close(many[row : row + 1], one, atol=1e-5, rtol=1e-5)


def test_generate_with_a_plan_file(tmp_path):
    model = used("llama")
    path = tmp_path / "heads.json"
    plan = head_plan(model)
    save_plan(path, plan)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(1, 50, dtype=torch.long)}
    served = use(model, plan=path, **COMMON)
    try:
        first = served.generate(tokens(50), **options)
        assert torch.equal(first, served.generate(tokens(50), **options))
        beams = served.generate(tokens(50), num_beams=3, **options)
        assert beams.shape == first.shape
    finally:
        use(model)
    cache = BudgetedCache(model.config, plan=plan, **COMMON)
    ids = tokens(50)
    for _ in range(12):
        logits = run(model, ids[:, cache.get_seq_length() :], cache)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ids, first)


def test_a_prompt_within_the_budgets_is_dynamic_cache_bit_for_bit():
    model = used("llama")
    cache = BudgetedCache(model.config, plan=HeadPlan(np.full((4, 2), 70) + np.arange(2)), **COMMON)
    full = DynamicCache(config=model.config)
    for count in (60, 1, 1):
        more = tokens(count, seed=count)
        assert torch.equal(run(model, more, cache), run(model, more, full))


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_a_cache_may_be_filled_in_one_gradient_mode_and_used_in_another(decode):
    model = used("llama")
    answers = []
    for modes in (
        [torch.inference_mode, torch.enable_grad, torch.no_grad],
        [torch.no_grad] * 3,
        [torch.enable_grad] * 3,
    ):
        cache = BudgetedCache(model.config, plan=head_plan(model), decode=decode, **COMMON)
        for step, mode in enumerate(modes):
            with mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # gradients do not flow through what is held
                for seed in range(12 if step else 1):
                    more = tokens(1, seed=seed) if step else tokens(50)
                    last = model(more, use_cache=True, **{CACHE: cache}).logits
        answers.append(last.detach().clone())
    torch.testing.assert_close(answers[1], answers[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(answers[2], answers[0], atol=1e-5, rtol=1e-5)


def test_what_is_held_is_what_the_plan_says():
    model = used("llama")
    plan = head_plan(model, most=190)
    run(model, tokens(400), DynamicCache(config=model.config))  # what a first forward leaves behind
    before = _tensor_bytes()
    cache = BudgetedCache(model.config, plan=plan, **COMMON)
    run(model, tokens(200), cache)
    held = _tensor_bytes() - before
    assert cache.nbytes == held
    # Beside the rows, 8 spare ones in each of 8 heads, the column of each row in 4 bytes, and 8 bytes a head.
    assert held == plan.nbytes(8, "float32") + 8 * 8 * 2 * 8 * 4 + 4 * plan.total + 8 * 8
    assert cache.nbytes_full == 200 * 4 * 2 * 2 * 8 * 4
    report = str(cache.report())
    assert f"{plan.budgets[0].min()} to {plan.budgets[0].max()}" in report
    assert cache.budgets.tolist() == plan.budgets.max(axis=1).tolist()
    cache.reset()
    assert cache.nbytes == 0
    run(model, tokens(210), cache)
    assert cache.head_lengths.tolist() == plan.budgets.tolist()


@pytest.mark.parametrize(("family", "attention"), COMPRESSED)
def test_hold_keeps_every_head_at_its_budget(family, attention):
    model = used(family, attention)
    plan = head_plan(model)
    cache = BudgetedCache(model.config, plan=plan, decode="hold", **COMMON)
    full = Masked(family)
    run(model, tokens(60), cache)
    full(tokens(60))
    layers = list(cache.compressed_layers)
    held: list[int] = []
    for step in range(20):
        before = {layer: cache.positions(layer) for layer in layers}
        full.evict(cache, 60 + step)
        more = tokens(1, seed=step)
        torch.testing.assert_close(run(model, more, cache), full(more), atol=1e-5, rtol=1e-5)
        for row, layer in enumerate(layers):
            for head, budget in enumerate(plan.budgets[row]):
                kept = cache.positions(layer)[0, head]
                kept = kept[kept >= 0]
                assert len(kept) == budget
                assert kept[-1] == 60 + step
                assert set(kept[:-1]) < set(before[layer][0, head])
        held = held or [layer.nbytes for layer in cache.report().layers]  # the first step makes what weighs slots
    assert cache.head_lengths[layers].tolist() == plan.budgets.tolist()
    now = [layer.nbytes for layer in cache.report().layers]
    assert [now[layer] for layer in layers] == [held[layer] for layer in layers]


def test_hold_with_equal_heads_is_hold_with_a_layer_plan():
    model = used("llama")
    plan = HeadPlan(np.repeat([[20], [9], [14], [11]], 2, axis=1))
    heads = BudgetedCache(model.config, plan=plan, decode="hold", **COMMON)
    layers = BudgetedCache(model.config, plan=plan.layer_plan(), decode="hold", **COMMON)
    ids, mask = padded([50, 31, 6], 50)
    for step in range(12):
        more = ids if step == 0 else tokens(1 + step % 3, 3, seed=step)
        if step:
            mask = torch.nn.functional.pad(mask, (0, more.shape[1]), value=1)
        got, expected = (run(model, more, cache, mask)[:, -1] for cache in (heads, layers))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if step == 5:
            order = torch.tensor([2, 0, 2])
            heads.reorder_cache(order)
            layers.reorder_cache(order)
            mask = mask[order]
            heads = heads.copy()
        for layer in range(4):
            assert np.array_equal(heads.positions(layer), layers.positions(layer))


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        (np.full((3, 2), 12), {}, "plan: has 3 layers, the model has 4 with full attention"),
        (np.full((4, 3), 12), {}, "plan: has 3 KV heads a layer, and layer 0 of the model 2"),
        (
            [[12, 12], [12, 4], [12, 12], [12, 12]],
            {},
            r"plan: gives layer 1 head 1 a budget of 4, every head needs .* 5",
        ),
        (np.full((4, 2), 12), {"ratio": 2}, "plan and ratio"),
        (np.full((4, 2), 12), {"heads": "adakv"}, "plan and heads"),
        (np.full((4, 2), 12), {"alpha": 2}, "alpha = 2: must be between 0 and 1"),
        (np.full((4, 2), 12), {"heads": "mine"}, "heads = 'mine': must be one of adakv"),
    ],
)
def test_plans_that_do_not_fit_are_refused(budgets, options, message):
    model = used("llama")
    with pytest.raises(ValueError, match=message):
        run(model, tokens(40), BudgetedCache(model.config, plan=HeadPlan(budgets), **options, **COMMON))


def curves_of(heads: int = 2) -> CurveSet:
    """Return convex curves, steep in one head of each layer."""
    grid = np.array([6, 12, 24, 48, 96])
    enough = np.random.default_rng(3).uniform(10, 150, (4, heads, 1))
    return CurveSet(grid, np.maximum(1 - grid / enough, 0) ** 2 * enough)


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_curves_divide_what_a_prompt_allows(tmp_path, decode):
    model = used("llama")
    curves = curves_of()
    curves.save(tmp_path / "curves.npz")
    least = max(WINDOW + 1, 6)
    for length in (3, 6, 14, 30, 70, 200):
        options = {"curves": tmp_path / "curves.npz", "decode": decode, **COMMON}
        cache = BudgetedCache(model.config, 20, **options)
        run(model, tokens(length), cache)
        most = None if decode == "hold" else length
        if decode == "grow" and length <= 20:
            want = np.full((4, 2), length)
        else:
            want = np.minimum(curves.plan(20, minimum=least, maximum=most).budgets, length)
        assert cache.head_lengths.tolist() == want.tolist()
        assert "heads by curves" in str(cache.report())
    # By memory: 2 sequences, keys and values of 8 floats, in each of 8 heads
    cache = BudgetedCache(model.config, curves=curves, memory=2 * 2 * 8 * 4 * (8 * 30), **COMMON)
    run(model, tokens(100, batch=2), cache)
    assert cache.head_lengths.tolist() == curves.plan(30, minimum=least, maximum=100).budgets.tolist()
    # and by a share of the prompt
    cache = BudgetedCache(model.config, curves=curves, fraction=0.25, **COMMON)
    run(model, tokens(100), cache)
    assert cache.head_lengths.tolist() == curves.plan(25, minimum=least, maximum=100).budgets.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 5}, "budget = 5: below 6, where the curves begin"),
        ({"ratio": 2}, "curves and ratio"),
        ({"heads": "adakv"}, "curves and heads"),
        ({"plan": HeadPlan(np.full((4, 2), 12))}, "plan, curves: only one of them"),
        ({"memory": 8}, "memory = 8: every head needs at least 6 positions, which is 3072 bytes"),
        ({"curves": curves_of(3)}, "curves: has 3 KV heads a layer, and layer 0 of the model 2"),
        ({"curves": CurveSet([6, 9], np.zeros((3, 2, 2)))}, "curves: has 3 layers, the model has 4"),
    ],
)
def test_curves_that_do_not_fit_are_refused(options, message):
    model = used("llama")
    with pytest.raises(ValueError, match=message):
        run(model, tokens(40), BudgetedCache(model.config, **{"curves": curves_of(), **COMMON, **options}))
    with pytest.raises(TypeError, match="curves: must be a CurveSet or the path of a curve file, not int"):
        BudgetedCache(model.config, curves=3)


def test_growing_frees_what_it_grew_out_of():
    model = used("llama")
    run(model, tokens(400), DynamicCache(config=model.config))  # what a first forward leaves behind
    before = _tensor_bytes()
    cache = BudgetedCache(model.config, plan=head_plan(model), **COMMON)
    run(model, tokens(100), cache)
    for seed in range(30):  # past the spare rows, more than once
        run(model, tokens(1, seed=seed), cache)
    assert _tensor_bytes() - before == cache.nbytes
    for layer in cache.layers:
        assert layer.keys is layer._ragged.keys
        assert layer.values is layer._ragged.values


def peak_bytes(model, prompt: torch.Tensor, cache) -> int:
    """Return the most bytes that torch held at once during a forward, counted at every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(model, prompt, cache)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert changes
    return int(np.cumsum([change for _, change in changes]).max())


def test_a_prefill_holds_one_whole_layer_at_a_time():
    model = used("llama")
    prompt = tokens(1600)
    run(model, prompt, DynamicCache(config=model.config))  # what a first forward leaves behind
    full = peak_bytes(model, prompt, DynamicCache(config=model.config))
    cache = BudgetedCache(model.config, plan=head_plan(model, most=190), **COMMON)
    most = peak_bytes(model, prompt, cache)
    layer = cache.nbytes_full // 4
    # In the last layer three others are at their budgets, and what the heads keep is copied beside the whole layer.
    assert most <= full - 3 * layer + 2 * cache.nbytes
