"""Caches that start from a prompt which was read once, beside caches that read it themselves."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import CurveSet, HeadPlan, Selection  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, HeldPrompt  # noqa: E402

from .test_transformers import (  # noqa: E402
    ALL,
    DynamicCache,
    _one_thread,  # noqa: F401
    run,
    stock,
    tokens,
    used,
)

PLAN = HeadPlan(np.arange(10, 18).reshape(4, 2))
CURVES = CurveSet([9, 20, 60], np.exp(np.random.default_rng(3).normal(size=(4, 2, 1)) - [[[0, 1, 2]]]))
OUTPUT = Selection(window=12, pooling=None, protect=3, value_weight=True)
OPTIONS = {
    "snapkv": {"budget": 16, "window": 8},
    "pyramid": {"budget": 20, "ratio": 3, "window": 8, "kernel": 3},
    "fraction": {"fraction": 0.4, "window": 5},
    "output": {"budget": 12, "selection": OUTPUT},
    "adakv": {"budget": 16, "window": 6, "heads": "adakv"},
    "plan": {"plan": PLAN, "window": 8},
    "curves": {"budget": 20, "curves": CURVES, "window": 8},
    "mixed": {"budget": 16, "selection": Selection(window=6, kernel=1, protect=4, score="mixed")},
    "keydiff": {"budget": 16, "selection": Selection(kernel=1, protect=4, score="keydiff")},
    "nearest": {"budget": 24, "window": 8, "merge": "nearest"},
    "fitted": {"budget": 24, "window": 8, "merge": "fitted"},
    "macro": {"budget": 24, "window": 8, "merge": "macro"},
    "hold": {"budget": 16, "window": 8, "decode": "hold"},
    "prompt": {"budget": 16, "window": 8, "allocate": "prompt"},
    "prompt output": {"budget": 16, "selection": OUTPUT, "allocate": "prompt"},
    "prompt fitted": {"budget": 30, "window": 8, "allocate": "prompt", "merge": "fitted"},
    "prompt hold": {"budget": 16, "window": 8, "allocate": "prompt", "decode": "hold"},
    "covered": {"budget": 200, "window": 8},
}


def logits(model, ids, cache):
    """Return what a model answers after each of a few more tokens."""
    return torch.cat([run(model, one, cache)[:, -1] for one in ids.split(1, dim=1)])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_cache_from_a_held_prompt_is_the_one_that_reads_it(options):
    model = used("llama")
    ids, later = tokens(70), tokens(4, seed=9)
    held = HeldPrompt.read(model, ids)
    direct = BudgetedCache(model.config, **options)
    first = run(model, ids, direct)[0, -1]
    torch.testing.assert_close(held.logits, first.float())
    cache = held.compressed(**options)
    for layer in range(4):
        assert np.array_equal(cache.positions(layer), direct.positions(layer))
    assert cache.report().settings == direct.report().settings
    torch.testing.assert_close(logits(model, later, cache), logits(model, later, direct))


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_every_family_can_be_held(family, attention):
    model = used(family, attention)
    ids, later = tokens(40), tokens(3, seed=5)
    held = HeldPrompt.read(model, ids)
    whole = DynamicCache(config=model.config)
    run(stock(family, attention), ids, whole)
    expected = logits(stock(family, attention), later, whole)
    torch.testing.assert_close(logits(model, later, held.full()), expected, rtol=1e-4, atol=1e-4)
    direct, cache = BudgetedCache(model.config, budget=12, window=8), held.compressed(budget=12, window=8)
    run(model, ids, direct)
    for layer in direct.compressed_layers:
        assert np.array_equal(cache.positions(layer), direct.positions(layer))
    torch.testing.assert_close(logits(model, later, cache), logits(model, later, direct), rtol=1e-4, atol=1e-4)


def test_caches_of_one_prompt_leave_each_other_alone():
    model = used("llama")
    held = HeldPrompt.read(model, tokens(50)[0])
    before = held.nbytes
    ways = [held.full, lambda: held.compressed(budget=200, window=4), lambda: held.compressed(budget=12, window=4)]
    expected = [logits(model, tokens(6, seed=1), make()) for make in ways]
    caches = [make() for make in ways for _ in range(2)]
    mixed = [[] for _ in caches]
    for column in range(6):
        for index, cache in enumerate(caches):
            other = tokens(6, seed=1 if index % 2 else 2)
            mixed[index].append(logits(model, other[:, column : column + 1], cache))
    for way, answer in enumerate(expected):
        torch.testing.assert_close(torch.cat(mixed[2 * way + 1]), answer, rtol=0, atol=0)
    assert held.nbytes == before
    assert held.length == 50


def test_what_a_held_prompt_cannot_do_is_refused():
    model = used("llama")
    held = HeldPrompt.read(model, tokens(40), window=16)
    with pytest.raises(ValueError, match="looks at the last 17 queries, and the prompt was read for 16 at most"):
        held.compressed(budget=30, window=17)
    with pytest.raises(ValueError, match="second_hop: needs all queries"):
        held.compressed(budget=30, selection=Selection(window=8, second_hop=0.5))
    with pytest.raises(ValueError, match="score = 'repeat': no prefill makes it"):
        held.compressed(budget=30, selection=Selection(kernel=1, protect=8, score="repeat"))
    with pytest.raises(ValueError, match="budget = 8: must be at least window"):
        held.compressed(budget=8, window=8)
    with pytest.raises(ValueError, match="input_ids: is empty"):
        HeldPrompt.read(model, [])
    with pytest.raises(ValueError, match=r"input_ids: has shape \(2, 5\)"):
        HeldPrompt.read(model, tokens(5, batch=2))
    with pytest.raises(ValueError, match=r"call pb_kvcache\.transformers\.use\(model\) first"):
        HeldPrompt.read(stock("llama"), tokens(5))
    with pytest.raises(ValueError, match="window = 0"):
        HeldPrompt.read(model, tokens(5), window=0)
    model.train()
    with pytest.raises(ValueError, match="is in training mode"):
        HeldPrompt.read(model, tokens(5))
    model.eval()
