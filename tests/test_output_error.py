"""What a layer's output loses: against plain NumPy, and against caches that evict."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pb_kvcache import HeadPlan, Selection, divide  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, HeldPrompt  # noqa: E402
from pb_kvcache.transformers._calibration import prompt_curves  # noqa: E402
from pb_kvcache.transformers._layer import JUDGED  # noqa: E402
from pb_kvcache.transformers._output_error import budget_grid, output_differences, output_errors  # noqa: E402
from pb_kvcache.transformers._selection import Scoring  # noqa: E402

from .test_transformers import ALL, _one_thread, run, stock, tokens, used  # noqa: E402, F401

RULE = Selection(window=8, kernel=3, protect=3)


def plain_differences(query, own, prompt, order, grid, scale, cap=None, sinks=None):
    """Return the same in float64, a head, a token and a budget at a time."""
    q_heads, judged, _ = query.shape
    group = q_heads // len(prompt[0])
    out = np.zeros((len(grid), q_heads, judged, prompt[1].shape[-1]))
    for head in range(q_heads):
        kv = head // group
        for token in range(judged):
            for point, kept in enumerate([*grid, grid[-1]]):
                rows = np.concatenate([prompt[0][kv][order[kv][:kept]], own[0][kv][: token + 1]])
                values = np.concatenate([prompt[1][kv][order[kv][:kept]], own[1][kv][: token + 1]])
                logits = rows @ query[head, token] * scale
                logits = logits if cap is None else cap * np.tanh(logits / cap)
                weights = np.exp(logits)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
                if point < len(grid):
                    out[point, head, token] += weights @ values / total
                else:
                    out[:, head, token] -= weights @ values / total
    return out


@pytest.mark.parametrize(("cap", "sink"), [(None, False), (2.0, False), (None, True)])
def test_differences_and_errors_are_those_of_the_formula(cap, sink):
    draw = np.random.default_rng(5)
    query = draw.normal(size=(6, 4, 8))
    own = draw.normal(size=(2, 2, 4, 8))
    prompt = draw.normal(size=(2, 2, 20, 8))
    order = np.stack([draw.permutation(20) for _ in range(2)])
    grid = [3, 4, 11, 20]
    sinks = draw.normal(size=6) if sink else None
    plain = plain_differences(query, own, prompt, order, grid, 0.5, cap, sinks)
    as_tensor = lambda array: torch.tensor(array, dtype=torch.float32)  # noqa: E731
    scoring = Scoring(0.5, cap, None if sinks is None else as_tensor(sinks))
    found = output_differences(
        as_tensor(query), tuple(as_tensor(own)), tuple(as_tensor(prompt)), torch.tensor(order), grid, scoring
    )
    np.testing.assert_allclose(found, plain, atol=2e-6)
    assert (found[-1] == 0).all()
    weight = draw.normal(size=(10, 48))  # of an output projection
    for parts in (6, 2, 1):
        columns = np.split(weight, parts, axis=1)
        products = as_tensor(np.stack([one.T @ one for one in columns]))
        errors = np.zeros((parts, len(grid), 4))
        for part, own_columns in enumerate(columns):
            heads = np.split(plain, parts, axis=1)[part]  # (points, heads, judged, 8)
            joined = heads.transpose(0, 2, 1, 3).reshape(len(grid), 4, -1)
            errors[part] = np.square(joined @ own_columns.T).sum(axis=-1)
        np.testing.assert_allclose(output_errors(found, products), errors, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("least", "n"), [(9, 1000), (33, 1000), (1, 2), (7, 7), (9, 10), (5, 3)])
def test_a_grid_rises_by_thirds_up_to_the_length(least, n):
    grid = budget_grid(least, n)
    assert grid[0] == min(least, n)
    assert grid[-1] == n
    steps = np.diff(grid)
    assert (steps > 0).all()
    assert all(step <= max(1, round(before * 0.6)) for before, step in zip(grid, steps, strict=False))


@pytest.mark.parametrize(("family", "attention"), [pair for pair in ALL if pair[0] != "mistral-sliding"])
def test_outcomes_are_those_of_caches_in_which_one_layer_evicts(family, attention):
    model = used(family, attention)
    ids, later = tokens(60), tokens(5, seed=3)
    held = HeldPrompt.read(model, ids)
    rule = Selection(window=8, kernel=3)
    grid, outcome_grid = [9, 14, 25, 60], [14, 25]
    curves = prompt_curves(model, held, later, selection=rule, grid=grid, outcome_grid=outcome_grid)
    layers = BudgetedCache(model.config, budget=60, selection=rule).compressed_layers
    heads = curves.head_errors.shape[1]
    assert curves.head_errors.shape == (len(layers), heads, 4)
    assert curves.layer_errors.shape == (len(layers), 4)
    assert (curves.head_errors[..., -1] == 0).all()
    assert (curves.head_errors[..., :-1] > 0).all()
    full = run(model, later, held.full())[0].float().log_softmax(-1)
    for layer in range(len(layers)):
        for point, budget in enumerate(outcome_grid):
            budgets = np.full((len(layers), heads), 60)
            budgets[layer] = budget
            cache = held.compressed(plan=HeadPlan(budgets), selection=rule)
            alone = run(model, later, cache)[0].float().log_softmax(-1)
            kl = float((full.exp() * (full - alone)).sum(-1).mean())
            assert curves.outcomes[layer, point] == pytest.approx(kl, rel=0.02, abs=2e-6)
    again = run(model, later, held.full())[0].float().log_softmax(-1)
    torch.testing.assert_close(again, full, rtol=0, atol=0)  # the model is as it was


@pytest.mark.parametrize("score", ["window", "mixed", "keydiff"])
def test_errors_are_a_part_of_the_residual_stream(score):
    """A layer that evicts alone has the whole cache's hidden states before it, so that its error can be seen."""
    model = used("llama")
    rule = Selection(window=8, kernel=3, protect=3, score=score)
    ids, later = tokens(40), tokens(3, seed=3)
    held = HeldPrompt.read(model, ids)
    curves = prompt_curves(model, held, later, selection=rule, grid=[4, 10, 40])
    assert curves.outcomes is None
    found = {}
    block = model.model.layers[2]
    handles = [
        block.self_attn.register_forward_hook(lambda _, inputs, output: found.update(output=output[0][0])),
        block.register_forward_pre_hook(
            lambda _, inputs, options: found.update(residual=options.get("hidden_states", (*inputs, None)[0])[0]),
            with_kwargs=True,
        ),
    ]
    budgets = np.full((4, 2), 40)
    outputs = []
    for kept in (40, 10):
        budgets[2] = kept
        run(model, later, held.compressed(plan=HeadPlan(budgets), selection=rule))
        outputs.append(found["output"])
    for handle in handles:
        handle.remove()
    error = (outputs[0] - outputs[1]).square().sum(-1) / found["residual"].square().sum(-1)
    assert curves.layer_errors[2, 1] == pytest.approx(float(error.mean()), rel=1e-3)


def test_what_cannot_be_measured_is_refused():
    model = used("llama")
    held = HeldPrompt.read(model, tokens(40))
    with pytest.raises(ValueError, match="tokens: is empty"):
        prompt_curves(model, held, [], selection=RULE, grid=[4, 40])
    with pytest.raises(ValueError, match=r"outcome_grid: has \[7\], must be points of grid"):
        prompt_curves(model, held, [3], selection=RULE, grid=[4, 40], outcome_grid=[7])


# ---- allocate="prompt" ----


@pytest.mark.parametrize("score", ["window", "mixed"])
@pytest.mark.parametrize("value_weight", [False, True])
def test_a_prompt_divides_by_what_its_last_positions_lose(score, value_weight):
    model = used("llama")
    rule = Selection(window=6, kernel=3, protect=3, score=score, value_weight=value_weight)
    ids = tokens(100)
    cache = BudgetedCache(model.config, budget=20, selection=rule, allocate="prompt")
    run(model, ids, cache)
    # The same from what a shorter prompt's layers hold: its positions are ranked, those after it judge.
    whole = HeldPrompt.read(model, ids)
    _, layers = whole.taken(budget=20, selection=rule, allocate="prompt")
    n = 100 - JUDGED
    grid = budget_grid(4, n)
    losses = []
    for layer, module in zip(layers, model.model.layers, strict=True):
        keys, values = (tensor[0].numpy().astype(np.float64) for tensor in layer.held())
        query = layer._queries[0].numpy().astype(np.float64)
        scores = _scores_of(layer, rule, n)
        order = np.argsort(-scores, axis=1, kind="stable")
        difference = plain_differences(
            query[:, -JUDGED:],
            (keys[:, n:], values[:, n:]),
            (keys[:, :n], values[:, :n]),
            order,
            grid,
            layer._scoring.scale,
        )
        weight = module.self_attn.o_proj.weight.detach().numpy().astype(np.float64)
        for head, columns in enumerate(np.split(weight, 2, axis=1)):
            own = np.split(difference, 2, axis=1)[head].transpose(0, 2, 1, 3).reshape(len(grid), JUDGED, -1)
            losses.append(np.square(own @ columns.T).sum(axis=-1).mean(axis=-1))
    plan = divide([*grid[:-1], 100], np.reshape(losses, (4, 2, -1)), 20 * 8, minimum=4)
    # Rounding may move a position between heads whose slopes are nearly equal.
    assert np.abs(cache.head_lengths - plan.budgets.astype(int)).max() <= 1
    assert cache.head_lengths.sum() == 20 * 8
    assert len(set(cache.head_lengths.ravel().tolist())) > 2


def _scores_of(layer, rule, n):
    """Return scores of the first n positions, from the queries before the judged ones: pooled, the last 3 infinite."""
    from pb_kvcache import pool_scores
    from pb_kvcache.transformers._selection import Prompt, scores_of

    keys, values = layer.held()
    window = min(rule.window, n)
    prompt = Prompt(
        keys[0, :, :n],
        values[0, :, :n],
        layer._queries[0][:, -JUDGED - window : -JUDGED],
        layer._scoring,
        None,
        before=layer._before[0] if layer._before else None,
    )
    scores = scores_of(prompt, rule).numpy()
    weights = layer._value_weights(values)
    if weights is not None:
        scores = scores * weights[0].numpy()[:, : n - 3]
    pooled = np.stack([pool_scores(row[None], 3)[0] for row in scores])
    return np.concatenate([pooled, np.full((len(pooled), 3), np.inf)], axis=1)


@pytest.mark.parametrize("decode", ["grow", "hold"])
def test_every_sequence_of_a_batch_has_its_own_division(decode):
    model = used("llama")
    options = {"budget": 14, "window": 6, "allocate": "prompt", "decode": decode}
    ids = tokens(90, batch=2)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, :20] = 0
    together = BudgetedCache(model.config, **options)
    run(model, ids, together, mask)
    for row, skipped in enumerate((0, 20)):
        alone = BudgetedCache(model.config, **options)
        run(model, ids[row : row + 1, skipped:], alone)
        for layer in range(4):
            own = alone.positions(layer)[0]
            held = together.positions(layer)[row]
            for head in range(2):
                assert held[head][held[head] >= 0].tolist() == own[head][own[head] >= 0].tolist()
    assert "heads by the prompt" in together.report().settings


@pytest.mark.parametrize("column", [89, 70, 53])
def test_padding_among_the_judged_positions_is_refused(column):
    model = used("llama")
    mask = torch.ones(1, 90, dtype=torch.long)
    mask[0, column] = 0
    cache = BudgetedCache(model.config, budget=14, window=6, allocate="prompt")
    with pytest.raises(ValueError, match="has padding among its last 38 columns"):
        run(model, tokens(90), cache, mask)


def test_chunks_a_copy_and_a_reset_divide_alike():
    model = used("llama")
    options = {"fraction": 0.25, "window": 6, "allocate": "prompt"}
    ids = tokens(96)
    whole = BudgetedCache(model.config, **options)
    run(model, ids, whole)
    expected = [whole.positions(layer).tolist() for layer in range(4)]
    assert whole.nbytes < BudgetedCache.filled(model.config, HeldPrompt.read(model, ids).full(), _flat(96)).nbytes
    chunks = BudgetedCache(model.config, compress="decode", **options)
    for part in ids.split(40, dim=1):
        run(model, part, chunks)
    copied = chunks.copy()
    for cache in (copied, chunks):
        assert cache.report().layers[0].kind == "prompt not finished: full"
        run(model, tokens(1), cache)
        for layer in range(4):
            kept = cache.positions(layer)
            assert [[p for p in head if 0 <= p < 96] for head in kept[0].tolist()] == [
                [p for p in head if p >= 0] for head in expected[layer][0]
            ]
    whole.reset()
    run(model, ids, whole)
    assert [whole.positions(layer).tolist() for layer in range(4)] == expected


def _flat(n):
    return [torch.rand(2, n, generator=torch.Generator().manual_seed(layer)) for layer in range(4)]


@pytest.mark.parametrize(("length", "budget"), [(30, 12), (38, 12), (41, 12), (60, 60), (60, 70)])
def test_prompts_too_short_to_judge_or_to_evict_keep_what_they_may(length, budget):
    model = used("llama")
    cache = BudgetedCache(model.config, budget=budget, window=6, allocate="prompt")
    run(model, tokens(length), cache)
    assert cache.head_lengths.sum() == 8 * min(budget, length)
    if length <= 32 + 7:
        assert (cache.head_lengths == min(budget, length)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 2}, "allocate and ratio: the prompt already says"),
        ({"heads": "adakv"}, "allocate and heads: the prompt already says"),
        ({"weights": [1, 2, 3, 4]}, "allocate and weights"),
        ({"selection": Selection(window=6, second_hop=0.5)}, "allocate and second_hop"),
        ({"allocate": "layer"}, "allocate = 'layer': must be"),
    ],
)
def test_what_does_not_go_with_a_division_by_the_prompt_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BudgetedCache(used("llama").config, budget=50, **{"allocate": "prompt", **options})


def test_a_division_by_the_prompt_needs_to_know_the_model():
    with pytest.raises(ValueError, match="allocate: judges what is kept by the model's output projection"):
        BudgetedCache(stock("llama").config, budget=50, allocate="prompt")
    whole = HeldPrompt.read(used("llama"), tokens(40)).full()
    with pytest.raises(ValueError, match="allocate: needs the prompt's forward"):
        BudgetedCache.filled(used("llama").config, whole, _flat(40), budget=20, window=6, allocate="prompt")
