"""A cache's report agrees with itself and with what the cache holds: rows, budgets, evictions, lengths and bytes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import HeadPlan, plan  # noqa: E402
from pb_kvcache.transformers import BudgetedCache  # noqa: E402

from .test_transformers import COMMON, _one_thread, run, tokens, used  # noqa: E402, F401

HEADS = HeadPlan(np.array([[40, 20], [30, 30], [12, 44], [20, 24]]))
#: By name: what a cache is made with, and the rows that all heads of all layers keep of a long prompt.
MODES = {
    "uniform": ({"budget": 48}, 48 * 8),
    "pyramid": ({"budget": 48, "ratio": 4}, 48 * 8),
    "plan": ({"plan": plan(4, 40, ratio=2, minimum=10)}, 40 * 8),
    "heads": ({"plan": HEADS}, HEADS.total),
    "adakv": ({"budget": 40, "heads": "adakv"}, 40 * 8),
    "prompt": ({"budget": 40, "allocate": "prompt"}, 40 * 8),
    "nearest": ({"budget": 48, "merge": "nearest"}, 48 * 8),
    "macro": ({"budget": 48, "merge": "macro"}, 48 * 8),
    "fitted heads": ({"plan": HEADS, "merge": "fitted"}, HEADS.total),
    "output": ({"budget": 48, "selection": "output", "window": None, "kernel": None}, 48 * 8),
}


def empty(mode: str, **options: object) -> tuple[BudgetedCache, int]:
    given, total = MODES[mode]
    options = {**COMMON, **given, **options}
    return BudgetedCache(used("llama").config, **{k: v for k, v in options.items() if v is not None}), total


def _tensor_bytes(layer: object) -> int:
    """Return the bytes of all tensors that a layer reaches, found without asking it. Of a view, its part alone."""
    storages, views, done, waiting = {}, 0, set(), [vars(layer)]
    while waiting:
        value = waiting.pop()
        if id(value) in done:
            continue
        done.add(id(value))
        if isinstance(value, torch.Tensor):
            if value is layer._mask:
                views += value.nbytes
                continue
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            left_out = ("budgets", "_facts", "_attention", "_holder", "_scoring")
            waiting += [entry for name, entry in value.items() if name not in left_out]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith("pb_kvcache") and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return sum(storages.values()) + views


def check(cache: BudgetedCache, seen: list[int]) -> int:
    """Check every figure of a report against the others and the cache. `seen` has each sequence's tokens.

    Returns the rows that all layers and heads hold.
    """
    report = cache.report()
    rows = 0
    for index, layer in enumerate(report.layers):
        held = (cache.positions(index) >= 0).sum(axis=-1)
        own = cache.layers[index]
        rows += int(held.sum())
        assert [sequence.seen for sequence in layer.sequences] == seen
        for sequence, counts in zip(layer.sequences, held, strict=True):
            assert list(sequence.kept) == counts.tolist()
            assert [kept + gone for kept, gone in zip(sequence.kept, sequence.evicted, strict=True)] == (
                [sequence.seen] * len(counts)
            )
            assert sequence.budget == max(sequence.head_budgets)
            if own.seen == own.prompt:  # nothing was generated
                assert all(np.less_equal(sequence.kept, sequence.head_budgets))
        assert (layer.seen, layer.kept) == (max(seen), held.max())
        assert layer.evicted == max(max(sequence.evicted) for sequence in layer.sequences)
        assert layer.budget == max(sequence.budget for sequence in layer.sequences) == cache.budgets[index]
        assert cache.lengths[index] == held.max()
        assert cache.head_lengths[index].tolist() == held.max(axis=0).tolist()
        assert layer.nbytes == _tensor_bytes(own) + (0 if own._holder is None else own._holder.nbytes)
    assert (report.nbytes, report.nbytes_full) == (cache.nbytes, cache.nbytes_full)
    assert report.to_dict()["nbytes"] == sum(layer.nbytes for layer in report.layers)
    return rows


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_an_answer_and_another_turn_add_up(mode: str, decode: str) -> None:
    model = used("llama")
    cache, total = empty(mode, decode=decode)
    run(model, tokens(200), cache)
    assert check(cache, [200]) == total
    for seed in range(3):
        run(model, tokens(1, seed=seed), cache)
    run(model, tokens(20), cache)
    assert check(cache, [223]) == (total if decode == "hold" else total + 8 * 23)
    full = transformers.DynamicCache(config=model.config)
    run(model, tokens(200), full)
    run(model, tokens(23), full)
    assert cache.nbytes_full == sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    twin = cache.copy()
    for layer in twin.layers:
        layer.batch_repeat_interleave(2)
    check(twin, [223, 223])
    check(cache, [223])


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("mode", MODES)
def test_sequences_of_a_padded_batch_add_up_and_still_do_when_some_leave(mode: str, decode: str) -> None:
    model = used("llama")
    cache, _ = empty(mode, decode=decode)
    mask = torch.ones(3, 120, dtype=torch.long)
    mask[1, :40], mask[2, :70] = 0, 0
    run(model, tokens(120, batch=3), cache, mask)
    check(cache, [120, 80, 50])
    mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    run(model, tokens(5, batch=3), cache, mask)
    check(cache, [125, 85, 55])
    for layer in cache.layers:
        layer.batch_select_indices(torch.tensor([2, 1]))
    check(cache, [55, 85])
    for layer in cache.layers:
        layer.batch_select_indices(torch.tensor([0]))
    check(cache, [55])


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_in_chunks_adds_up_before_and_after_its_end(mode: str) -> None:
    model = used("llama")
    cache, total = empty(mode, compress="decode")
    for end in (80, 160, 200):
        run(model, tokens(200)[:, end - (80 if end < 200 else 40) : end], cache)
        report = cache.report()
        for index, layer in enumerate(report.layers):
            assert (layer.seen, layer.kept, layer.evicted) == (end, end, 0)
            assert layer.sequences[0].budget is None
            assert layer.kind == "prompt not finished: full"
            assert layer.nbytes == _tensor_bytes(cache.layers[index])
    run(model, tokens(1), cache)
    assert check(cache, [201]) == total + 8


@pytest.mark.parametrize("mode", MODES)
def test_a_short_prompt_is_kept_whole_and_the_report_says_so(mode: str) -> None:
    model = used("llama")
    cache, _ = empty(mode)
    prompt = 9
    run(model, tokens(prompt), cache)
    assert check(cache, [prompt]) == prompt * 8
    assert {layer.kind for layer in cache.report().layers} == {"nothing evicted, then all kept"}
    assert cache.report().layers[0].budget == prompt


def test_the_table_shows_budgets_of_heads_as_it_shows_their_rows() -> None:
    cache, _ = empty("heads")
    run(used("llama"), tokens(200), cache)
    first = str(cache.report()).splitlines()[2].split()
    assert " ".join(first[:9]) == "0 20 to 40 200 20 to 40 160"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_report_says_where_eager_attention_costs_time(attention: str) -> None:
    cache = BudgetedCache(used("llama", attention).config, budget=40, **COMMON)
    run(used("llama", attention), tokens(100), cache)
    report = cache.report()
    assert report.attention == attention
    assert ("use(model, attention='sdpa')" in str(report)) == (attention == "eager")
    assert max(map(len, str(report).splitlines())) <= 120
