"""Merging in a compressed cache: rows and biases are those of merge(), and attention adds the biases."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import pb_kvcache.transformers._merging  # noqa: E402
from pb_kvcache import HeadPlan, Selection, merge  # noqa: E402
from pb_kvcache.transformers import BudgetedCache  # noqa: E402

from .test_transformers import (  # noqa: E402
    CACHE,
    COMPRESSED,
    EAGER_ALONE,
    Masked,
    _one_thread,  # noqa: F401
    _tensor_bytes,
    run,
    stock,
    tokens,
    used,
)

RULE = Selection(window=6, kernel=1, protect=3)
PLAIN = [(family, attention) for family, attention in COMPRESSED if family not in EAGER_ALONE]
PLAN = HeadPlan([[13, 30], [9, 21], [24, 24], [40, 11]])


class Biased(Masked):
    """The full cache whose kept rows are replaced by merged ones and whose logits get their biases."""

    def replace(self, cache: BudgetedCache, columns: int) -> None:
        """Take over the rows of a cache of one sequence, at the columns that it holds."""
        self.evict(cache, columns)
        self.bias = {}
        for layer in cache.compressed_layers:
            own = cache.layers[layer]
            full = self.cache.layers[layer]
            bias = torch.zeros(1, full.keys.shape[1], columns)
            for head in range(full.keys.shape[1]):
                at = cache.positions(layer)[0, head]
                at = at[at >= 0]
                keys, values, added = rows_of(own, head, len(at))
                full.keys[0, head, at], full.values[0, head, at] = keys, values
                bias[0, head, at] = added
            self.bias[layer] = bias

    def _attend(self, module, query, key, value, attention_mask, **options):
        bias = getattr(self, "bias", {}).get(module.layer_idx)
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, key.shape[2] - bias.shape[2]))
            bias = bias.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None]
            attention_mask = bias if attention_mask is None else attention_mask + bias
        return super()._attend(module, query, key, value, attention_mask, **options)


def rows_of(layer, head: int, count: int):
    """Return keys, values and biases of one head's first rows, wherever they are stored."""
    if layer._ragged is not None:
        ragged = layer._ragged
        start = int(ragged.starts[0, head])
        place = slice(start, start + count)
        bias = torch.zeros(count) if ragged.bias is None else ragged.bias[0, place]
        return ragged.keys[0, place], ragged.values[0, place], bias
    bias = torch.zeros(count) if layer._bias_buffer is None else layer._bias_buffer[0, head, :count]
    return layer._key_buffer[0, head, :count], layer._value_buffer[0, head, :count], bias


def turning(model):
    """Return a function that turns keys by the model's own rotary embedding."""

    def turn(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = model.model.rotary_emb(keys[None], positions[None])
        crossed = torch.cat([-keys[:, keys.shape[1] // 2 :], keys[:, : keys.shape[1] // 2]], dim=1)
        return keys * cos[0] + crossed * sin[0]

    return turn


def lse_of(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the log of what each of the last queries divides by, one at a time, ``(q_heads, window)``."""
    window, n, group = query.shape[1], keys.shape[1], query.shape[0] // keys.shape[0]
    found = torch.zeros(query.shape[:2], dtype=torch.float64)
    for head in range(query.shape[0]):
        for i in range(window):
            seen = keys[head // group, : n - window + i + 1].double() @ query[head, i].double()
            found[head, i] = torch.logsumexp(scale * seen, 0)
    return found.float()


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": PLAN}], ids=["rows", "heads"])
@pytest.mark.parametrize("method", ["nearest", "fitted", "macro"])
def test_rows_and_biases_are_those_of_merge(method, options, monkeypatch):
    model = used("llama")
    asked = []
    compared = 0

    def spy(*arguments, **named):
        asked.append((arguments[3], named["lse"]))
        return merge(*arguments, **named)

    monkeypatch.setattr(pb_kvcache.transformers._merging, "merge", spy)
    full = Masked("llama")
    prompt = tokens(80)
    full(prompt)
    cache = BudgetedCache(model.config, selection=RULE, merge=method, **options)
    run(model, prompt, cache)
    for layer in range(4):
        query, key = (tensor[0] for tensor in full.seen[layer])
        values = full.cache.layers[layer].values[0]
        window = query[:, -6:]
        queries = window.unflatten(0, (2, 2)).flatten(1, 2)
        lse = lse_of(window, key, 8**-0.5).unflatten(0, (2, 2)).flatten(1, 2)
        if method != "nearest":  # which the C library does, from the window's queries alone
            of_merge, of_lse = asked.pop(0)
            torch.testing.assert_close(of_merge[:, :12], queries, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(of_lse[:, :12], lse, atol=1e-4, rtol=1e-4)
            assert of_merge.shape[1] == (12 + 96 if method == "fitted" else 12)
            for head in range(2):  # the prompt's queries see all of it
                whole = torch.logsumexp(of_merge[head, 12:].double() @ key[head].double().mT * 8**-0.5, -1)
                torch.testing.assert_close(of_lse[head, 12:].double(), whole, atol=1e-4, rtol=1e-4)
            queries, lse = of_merge, of_lse
        rotary = turning(model) if method == "macro" else None
        for head in range(2):
            at = cache.positions(layer)[0, head]
            at = at[at >= 0]
            protect = 3 if len(at) - 3 >= 8 else len(at)
            want = merge(
                key[head : head + 1],
                values[head : head + 1],
                torch.as_tensor(at)[None],
                queries[head : head + 1],
                protect=protect,
                method=method,
                lse=lse[head : head + 1],
                rotary=rotary,
            )
            got = rows_of(cache.layers[layer], head, len(at))
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs[0], atol=2e-4, rtol=2e-3)
            if protect == len(at):
                torch.testing.assert_close(got[0], key[head, at], atol=1e-5, rtol=1e-5)
                assert (got[2] == 0).all()
            else:
                assert (got[2][-3:] == 0).all()
                assert (got[2] != 0).any()
                compared += 1
    assert not asked
    assert compared >= 6


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": "heads"}], ids=["rows", "heads"])
@pytest.mark.parametrize(("family", "attention"), PLAIN)
def test_attention_adds_the_biases(family, attention, options):
    model = used(family, attention)
    layers = len(BudgetedCache(model.config, budget=20, selection=RULE).compressed_layers)
    if "plan" in options:
        heads = getattr(model.config.get_text_config(), "num_key_value_heads", None) or 4
        options = {"plan": HeadPlan(np.random.default_rng(0).integers(8, 30, (layers, heads)))}
    cache = BudgetedCache(model.config, selection=RULE, merge="nearest", **options)
    full = Biased(family)
    prompt = tokens(70)
    full(prompt)
    run(model, prompt, cache)
    full.replace(cache, 70)
    assert any(bool(bias.any()) for bias in full.bias.values())
    for seed, length in enumerate((1, 3, 1, 12, 1)):  # past the spare rows, one and several at once
        more = tokens(length, seed=seed)
        torch.testing.assert_close(run(model, more, cache), full(more), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": PLAN}], ids=["rows", "heads"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hold_moves_biases_with_their_rows(attention, options):
    """What a held cache has evicted is hidden from the growing one's rows, whose biases are as they were."""
    model = used("llama", attention)
    held = BudgetedCache(model.config, selection=RULE, merge="nearest", decode="hold", **options)
    prompt = tokens(80)
    full = Biased("llama")
    full(prompt)
    run(model, prompt, held)
    grown = BudgetedCache(model.config, selection=RULE, merge="nearest", **options)
    run(model, prompt, grown)
    full.replace(grown, 80)
    dropped = 0
    for seed in range(14):
        more = tokens(1, seed=seed)
        torch.testing.assert_close(run(model, more, held), full(more), atol=2e-5, rtol=2e-5)
        for layer in held.compressed_layers:  # hide what hold has dropped since
            columns = full.cache.layers[layer].keys.shape[2]
            gone = np.ones((1, 2, columns), bool)
            for head in range(2):
                at = held.positions(layer)[0, head]
                gone[0, head, at[at >= 0]] = False
            dropped += int(gone.sum()) - int(full.evicted[layer].sum())
            full.evicted[layer] = gone
    assert dropped > 50


@pytest.mark.parametrize("decode", ["grow", "hold"])
@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": PLAN}], ids=["rows", "heads"])
def test_padded_reordered_and_copied_sequences_keep_their_biases(options, decode):
    model = used("llama")
    options = {"selection": RULE, "merge": "nearest", "decode": decode, **options}
    ids = tokens(80, batch=2)
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, :17] = 0
    together = BudgetedCache(model.config, **options)
    run(model, ids, together, mask)
    alone = [BudgetedCache(model.config, **options) for _ in range(2)]
    run(model, ids[:1], alone[0])
    run(model, ids[1:, 17:], alone[1])
    order = [1, 0, 1]
    together.reorder_cache(torch.tensor(order))
    mask = mask[order]
    together = together.copy()
    alone = [alone[1], alone[0], alone[1].copy()]
    for seed in range(12):
        more = tokens(1, batch=3, seed=seed)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        got = run(model, more, together, mask)
        want = torch.cat([run(model, more[row : row + 1], one) for row, one in enumerate(alone)])
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_prompts_in_chunks_merge_alike():
    model = used("llama")
    options = {"budget": 20, "selection": RULE, "merge": "fitted"}
    prompt, more = tokens(80), tokens(1)
    whole = BudgetedCache(model.config, **options)
    chunks = BudgetedCache(model.config, compress="decode", **options)
    run(model, prompt, whole)
    for part in prompt.split(33, dim=1):
        run(model, part, chunks)
    torch.testing.assert_close(run(model, more, chunks), run(model, more, whole), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("options", [{"budget": 20}, {"plan": PLAN}], ids=["rows", "heads"])
def test_biases_are_counted(options):
    model = used("llama")
    run(model, tokens(400), BudgetedCache(model.config, selection=RULE, merge="nearest", **options))
    before = _tensor_bytes()
    cache = BudgetedCache(model.config, selection=RULE, merge="nearest", **options)
    run(model, tokens(100), cache)
    assert cache.nbytes == _tensor_bytes() - before
    without = BudgetedCache(model.config, selection=RULE, **options)
    run(model, tokens(100), without)
    rows = sum(layer.keys.untyped_storage().nbytes() // 32 for layer in cache.layers)
    assert cache.nbytes == without.nbytes + 4 * rows
    assert "merging (nearest)" in repr(cache)


def test_nothing_merges_where_nothing_is_evicted_or_rows_are_few():
    model = used("llama")
    for budget in (200, 10):  # all of the prompt; 7 rows that may take others in
        plain = BudgetedCache(model.config, budget=budget, selection=RULE)
        merging = BudgetedCache(model.config, budget=budget, selection=RULE, merge="fitted")
        for ids in (tokens(60), tokens(1)):
            assert torch.equal(run(model, ids, merging), run(model, ids, plain))
        assert all(layer._bias_buffer is None for layer in merging.layers)


def test_what_cannot_merge_is_refused():
    with pytest.raises(ValueError, match="merge = 'all': must be one of nearest, fitted, macro"):
        BudgetedCache(used("llama").config, merge="all")
    for family in EAGER_ALONE:
        model = used(family, "eager")
        cache = BudgetedCache(model.config, budget=20, selection=RULE, merge="nearest")
        with pytest.raises(ValueError, match="layer 1: merge = 'nearest': the attention caps its logits or has one"):
            run(model, tokens(60), cache)
    with torch.no_grad():  # and a model's own function knows nothing of it
        model = stock("llama")
        model(tokens(60), use_cache=True, **{CACHE: transformers.DynamicCache(config=model.config)})
