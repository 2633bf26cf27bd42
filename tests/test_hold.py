"""Caches in slots: the same victims as one SnapKV per cache, whichever way weights, batches and budgets come."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pb_kvcache as pb
from pb_kvcache._hold import Hold

WINDOWS = {"recent_window": 1, "obs_window": 3, "pool_kernel": 3}


class Loop:
    """The plain reference: a SnapKV for each cache, and a row of one number, its position, in each slot."""

    def __init__(self, budgets, **windows):
        self.policies = [pb.SnapKV(int(budget), **windows) for budget in budgets]
        self.rows = [[0] for _ in budgets]

    def seed(self, cache, positions, attn=None):
        self.policies[cache].seed(positions, attn)
        self.rows[cache] = list(positions)

    def step(self, pos, weights, joins):
        """`weights` has what each position receives, one dict a cache. Return the moves."""
        moves = []
        for cache, (policy, rows) in enumerate(zip(self.policies, self.rows, strict=True)):
            if not joins[cache]:
                continue
            seen = None if weights is None else [weights[cache][position] for position in policy.kept.tolist()]
            policy.on_decode_step(int(pos[cache]), seen)
            rows.append(int(pos[cache]))
            for victim in policy.evict().tolist():
                slot = rows.index(victim)
                last = rows.pop()
                if victim != last:
                    moves.append([cache, len(rows), slot])
                    rows[slot] = last
        return moves


def agrees(hold, loop):
    for cache, (policy, rows) in enumerate(zip(loop.policies, loop.rows, strict=True)):
        assert hold.kept(cache).tolist() == policy.kept.tolist()
        assert [rows[slot] for slot in hold.slots(cache)] == policy.kept.tolist()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_victims_are_those_of_one_policy_per_cache(data):
    windows = {
        "recent_window": data.draw(st.integers(0, 3)),
        "obs_window": data.draw(st.integers(1, 4)),
        "pool_kernel": data.draw(st.sampled_from([1, 3, 5])),
    }
    budgets = data.draw(st.lists(st.integers(windows["recent_window"] + 1, 9), min_size=1, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    hold, loop = Hold(budgets, **windows), Loop(budgets, **windows)
    pos = np.ones(len(budgets), np.int64)
    for cache, budget in enumerate(budgets):
        if rng.integers(2):
            prompt = np.sort(rng.choice(30, rng.integers(budget + 1), replace=False))
            attn = rng.integers(0, 4, (3, len(prompt))).astype(np.float32)
            hold.seed(cache, prompt, attn)
            loop.seed(cache, prompt.tolist(), attn)
            pos[cache] = 30
    for _ in range(25):
        pos += rng.integers(0, 3, len(pos))
        joins = rng.random(len(pos)) < 0.8
        weights = None
        slots = np.full((len(pos), 12), np.nan, np.float32)  # what holds nothing is not read
        if rng.random() < 0.9:
            weights = [{position: float(rng.integers(4)) for position in rows} for rows in loop.rows]
            for cache, rows in enumerate(loop.rows):
                slots[cache, : len(rows)] = [weights[cache][position] for position in rows]
        moves = hold.step(pos, None if weights is None else slots, joins)
        assert moves.dtype == np.uint32
        assert moves.tolist() == loop.step(pos, weights, joins)
        agrees(hold, loop)
        pos += joins
        if rng.random() < 0.2:
            hold = copy.deepcopy(hold)


def full(budgets=(3, 2), **windows):
    """Return caches at their budgets, and the next position."""
    hold = Hold(budgets, **(WINDOWS | windows))
    for cache, budget in enumerate(budgets):
        hold.seed(cache, range(budget))
    return hold, max(budgets)


def test_one_position_for_all_caches_is_one_for_each():
    first, pos = full()
    second = first.copy()
    weights = np.array([[0.5, 0.1, 0.2, 0], [0.3, 0.6, 0, 0]], np.float32)
    assert first.step(pos, weights).tolist() == second.step([pos, pos], weights.tolist()).tolist()
    assert first.kept(0).tolist() == second.kept(0).tolist()


@pytest.mark.parametrize(
    "convert",
    [
        lambda weights: weights.astype(np.float64),
        lambda weights: weights.astype(">f4"),
        lambda weights: np.asfortranarray(weights),
        lambda weights: np.repeat(weights, 2, axis=1)[:, ::2],
        lambda weights: weights.tolist(),
    ],
)
def test_weights_of_any_layout_and_dtype_are_read_as_what_they_are(convert):
    weights = np.array([[0.5, 0.125, 0.25, 0], [0.25, 0.625, 0, 0]], np.float32)
    first, pos = full()
    second, _ = full()
    assert first.step(pos, weights).tolist() == second.step(pos, convert(weights)).tolist()


def test_a_selection_goes_on_as_its_sources_and_apart_from_them():
    hold, pos = full((3, 2, 3))
    hold.step(pos, np.eye(3, 4, dtype=np.float32))
    before = [(hold.kept(cache).tolist(), hold.slots(cache).tolist()) for cache in range(3)]
    twin = hold.select([2, 2, 0, 1])
    assert twin.budgets.tolist() == [3, 3, 3, 2]
    twin.step(pos + 1, np.ones((4, 4), np.float32), [True, False, True, True])
    assert [(hold.kept(cache).tolist(), hold.slots(cache).tolist()) for cache in range(3)] == before
    assert twin.kept(1).tolist() == before[2][0]
    hold.step(pos + 1, np.ones((3, 4), np.float32))
    for cache, source in ((0, 2), (2, 0), (3, 1)):
        assert twin.kept(cache).tolist() == hold.kept(source).tolist()
        assert twin.slots(cache).tolist() == hold.slots(source).tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budgets": []}, ValueError, "budgets: has 0, must have one for each cache"),
        ({"budgets": [4, 1]}, ValueError, r"budgets\[1\] = 1: must be greater than recent_window = 1"),
        ({"budgets": [4, 0]}, ValueError, r"budgets\[1\] = 0: must be greater than 0"),
        ({"budgets": [4, 2**32 - 1]}, ValueError, r"budgets\[1\] = 4294967295: with .* does not fit"),
        ({"budgets": [4, 5.5]}, TypeError, "budgets: must be integers"),
        ({"budgets": [[4]]}, ValueError, "budgets: must have 1 dimension"),
        ({"obs_window": 0}, ValueError, "obs_window = 0: must be greater than 0"),
        ({"pool_kernel": 2}, ValueError, "pool_kernel = 2: must be odd"),
        ({"recent_window": 1.0}, TypeError, "recent_window = 1.0: must be an integer"),
    ],
)
def test_refused_parameters_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Hold(**({"budgets": [4]} | WINDOWS | arguments))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda h: h.step(2, np.ones((2, 4))), ValueError, "pos = 2: must be greater .* is 2 in cache 0"),
        (lambda h: h.step([9, 1], np.ones((2, 4))), ValueError, "pos = 1: must be greater .* is 1 in cache 1"),
        (lambda h: h.step([9], np.ones((2, 4))), ValueError, "pos: has 1 positions, must have one for each of 2"),
        (lambda h: h.step(-1, None), ValueError, "pos = -1: must be between 0"),
        (lambda h: h.step(3.5, None), TypeError, "pos = 3.5: must be an integer"),
        (
            lambda h: h.step(9, np.ones((3, 4))),
            ValueError,
            r"weights: has shape \(3, 4\), must have a row for each of 2",
        ),
        (lambda h: h.step(9, np.ones((2, 2))), ValueError, "must have a weight for each of the 3 slots"),
        (lambda h: h.step(9, np.ones(8)), ValueError, "weights: must have 2 dimensions"),
        (lambda h: h.step(9, [[1, 1, 1], [1, -1, 0]]), ValueError, r"weights\[1\]\[1\] = -1.0: every weight must be"),
        (lambda h: h.step(9, [[1, np.nan, 1], [1, 1, 0]]), ValueError, r"weights\[0\]\[1\] = nan"),
        (lambda h: h.step(9, None, [1, 1]), TypeError, "joins: must be booleans"),
        (lambda h: h.step(9, None, [True]), ValueError, r"joins: has shape \(1,\), must be \(2,\)"),
        (lambda h: h.seed(2, [0]), ValueError, "cache = 2: must be smaller than num_caches = 2"),
        (
            lambda h: h.seed(1, [0, 1, 2]),
            pb.CacheFullError,
            "positions: 3 of them, must be at most cache 1's budget of 2",
        ),
        (lambda h: h.seed(1, [1, 1]), ValueError, r"positions\[1\] = 1: must be greater than the one before it"),
        (lambda h: h.kept(5), ValueError, "cache = 5"),
        (lambda h: h.slots(-1), ValueError, "cache = -1"),
        (lambda h: h.select([]), ValueError, "caches: must have at least one"),
        (lambda h: h.select([0, 2]), ValueError, r"caches\[1\] = 2: must be smaller than num_caches = 2"),
        (
            lambda h: h.move(0, 0, 4, np.zeros(1, np.uint64), np.array([[0, 1, 0]], np.uint32)),
            ValueError,
            "moves: must be of one of 1 caches and lie within 0 bytes in rows of 4",
        ),
    ],
)
def test_a_refused_call_names_the_rule_and_changes_nothing(call, error, message):
    hold, _ = full()
    with pytest.raises(error, match=message):
        call(hold)
    assert [hold.kept(cache).tolist() for cache in range(2)] == [[0, 1, 2], [0, 1]]
    assert [hold.slots(cache).tolist() for cache in range(2)] == [[0, 1, 2], [0, 1]]


def test_it_says_what_it_is_and_is_not_pickled():
    hold, _ = full()
    assert repr(hold) == "<Hold: 2 caches, 5 kept, budgets of 5 together>"
    assert hold.num_caches == 2
    assert hold.memory_bytes > 0
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(hold)


def test_two_threads_at_once_are_refused():
    hold, pos = full()

    class Slow:
        def __array__(self, *args, **kwargs):
            return np.ones((2, 4), np.float32)

    hold._turn.clear()  # as if another thread's call were in progress
    errors = []

    def call():
        try:
            hold.step(pos, Slow())
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors
    assert errors[0].startswith("Hold is in use by another thread")


# ---- one layer of a model: rows in torch buffers ----


class Layer:
    """A layer's buffers and its holder, beside one SnapKV a head. A row is full of its position."""

    def __init__(self, torch, counts, budgets, device="cpu"):
        from pb_kvcache.transformers._hold import Holder

        self.torch = torch
        self.budgets = np.asarray(budgets)
        batch, heads = self.budgets.shape
        counts = np.minimum(self.budgets, np.asarray(counts)[:, None])
        capacity = int(self.budgets.max()) + 1
        columns = torch.arange(int(counts.max()), dtype=torch.int32).repeat(batch, heads, 1)
        self.keys = torch.zeros(batch, heads, capacity, 3)
        self.keys[:, :, : columns.shape[-1]] = columns[..., None].float()
        self.values = torch.zeros(batch, heads, capacity, 2, dtype=torch.bfloat16)
        self.values[:, :, : columns.shape[-1]] = columns[..., None].to(torch.bfloat16)
        rng = np.random.default_rng(3)
        seeds = [rng.random((heads, 4, int(count.max())), np.float32) for count in counts]
        asked = SimpleNamespace(selection=pb.Selection(window=1, kernel=3))
        self.holder = Holder(asked, self.budgets, columns, counts, [torch.from_numpy(seed) for seed in seeds])
        self.policies = [[pb.SnapKV(int(budget), 1, 1, 3) for budget in row] for row in self.budgets]
        for row, seed in enumerate(seeds):
            for head, policy in enumerate(self.policies[row]):
                policy.seed(range(counts[row, head]), seed[head, :, : counts[row, head]])

    def step(self, column, rng, are_tokens=None):
        torch = self.torch
        batch, heads = self.budgets.shape
        new = torch.full((batch, heads, 1, 3), float(column))
        self.holder.place(self.keys, self.values, new, new[..., :2].to(torch.bfloat16))
        slots = self.holder.slots
        mask = self.holder.mask(are_tokens, new.device, 2 * heads)
        joins = np.ones(batch, bool) if are_tokens is None else are_tokens
        weights = np.zeros((batch, heads, slots), np.float32)
        for row in range(batch):
            for head, policy in enumerate(self.policies[row]):
                seen = len(policy) + int(joins[row])
                visible = (
                    np.ones(slots, bool) if mask is None else mask.expand(batch, 2 * heads, 1, slots)[row, 2 * head, 0]
                )
                assert visible.tolist() == [True] * seen + [False] * (slots - seen)
                if not joins[row]:
                    continue
                attention = rng.random(len(policy), np.float32)
                held = self.keys[row, head, : len(policy), 0].long().tolist()
                assert sorted(held) == policy.kept.tolist()
                weights[row, head, : len(policy)] = [attention[policy.kept.tolist().index(one)] for one in held]
                policy.on_decode_step(column, attention)
                policy.evict()
        self.holder.step([self.keys, self.values], column, weights, are_tokens)

    def agrees(self):
        most = max(len(policy) for row in self.policies for policy in row)
        assert self.holder.length == most
        columns = self.holder.columns()
        for row, policies in enumerate(self.policies):
            for head, policy in enumerate(policies):
                count = len(policy)
                assert columns[row, head].tolist() == policy.kept.tolist() + [-1] * (most - count)
                for buffer in (self.keys, self.values):
                    held = buffer[row, head, :count].long()
                    assert sorted(held[:, 0].tolist()) == policy.kept.tolist()
                    assert (held == held[:, :1]).all()
        # By ascending position a slot's own position ascends. Slots that hold nothing stay behind.
        batch, heads, slots = *self.budgets.shape, self.holder.slots
        shown = self.keys[:, :, :slots, 0].repeat_interleave(2, dim=1)[:, :, None]
        ascending = self.holder.ascending(shown).view(batch, heads, 2, slots)
        for row, policies in enumerate(self.policies):
            for head, policy in enumerate(policies):
                assert ascending[row, head, :, : len(policy)].tolist() == [policy.kept.tolist()] * 2


@pytest.mark.parametrize(
    ("counts", "budgets"),
    [
        ([8, 8], [[8, 8], [8, 8]]),  # all full
        ([5, 3], [[8, 8], [6, 6]]),  # prompts that fill up
        ([90, 90], [[8, 3], [2, 5]]),  # heads of their own budgets
        ([2, 90], [[8, 3], [4, 5]]),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_holds_what_one_policy_per_head_keeps(counts, budgets, padded):
    torch = pytest.importorskip("torch")
    layer = Layer(torch, counts, budgets)
    rng = np.random.default_rng(5)
    for column in range(100, 130):
        layer.step(column, rng, rng.random(2) < 0.7 if padded else None)
        layer.agrees()


def test_reordered_sequences_of_a_layer_go_on_as_their_sources():
    torch = pytest.importorskip("torch")
    layer = Layer(torch, [90, 2], [[8, 3], [4, 5]])
    rng = np.random.default_rng(6)
    for column in range(100, 106):
        layer.step(column, rng)
    order = np.array([1, 0, 1])
    beams = copy.copy(layer)
    beams.holder = layer.holder.select(order)
    beams.budgets = layer.budgets[order]
    beams.keys, beams.values = layer.keys[order], layer.values[order]
    beams.policies = [[policy.copy() for policy in layer.policies[row]] for row in order]
    for column in range(106, 130):
        beams.step(column, rng)
    layer.agrees()  # the sources have not changed
    for row, policies in enumerate(beams.policies):
        for head, policy in enumerate(policies):
            assert beams.holder.columns()[row, head, : len(policy)].tolist() == policy.kept.tolist()
    assert beams.holder.nbytes > layer.holder.nbytes


def test_the_way_for_other_devices_moves_the_same_rows():
    torch = pytest.importorskip("torch")
    from pb_kvcache.transformers._hold import _move, _move_rows

    rows = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    moves = np.array([[0, 4, 1], [3, 4, 0], [5, 2, 2]], np.uint32)
    native, other = rows.clone(), rows.clone()
    offsets = np.arange(6, dtype=np.uint64) * np.uint64(5)
    _move(native, offsets, moves)
    _move_rows(other, offsets, moves)
    assert torch.equal(native, other)
    assert torch.equal(native[0, 0, 1], rows[0, 0, 4])
    assert torch.equal(native[1, 0, 0], rows[1, 0, 4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("masked", [False, True])
def test_decode_weights_are_the_models_attention_reduced_over_the_group(dtype, reduce, options, masked):
    torch = pytest.importorskip("torch")
    from pb_kvcache.transformers._selection import Scoring

    torch.manual_seed(0)
    query, buffer = torch.randn(2, 6, 1, 4), torch.randn(2, 3, 9, 4)
    query, buffer = (tensor.to(getattr(torch, dtype)) for tensor in (query, buffer))
    keys = buffer[:, :, :7]
    mask = (torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None] if masked else None
    sinks = torch.randn(6) if options else None
    scoring = Scoring(0.5, options.get("softcap"), sinks if "sinks" in options else None)
    got = scoring.decode_weights(query, keys, mask, reduce)
    logits = torch.einsum("bhd,bhnd->bhn", query[:, :, 0].double(), keys.double().repeat_interleave(2, dim=1)) * 0.5
    if "softcap" in options:
        logits = 2.0 * torch.tanh(logits / 2.0)
    if masked:
        logits = logits.masked_fill(~mask[:, :, 0], -torch.inf)
    exp = logits.exp()
    extra = 0 if "sinks" not in options else sinks.double().exp()[None, :, None]
    groups = (exp / (exp.sum(-1, keepdim=True) + extra)).unflatten(1, (3, 2))
    expected = {"mean": groups.mean(2), "max": groups.amax(2), "sum": groups.sum(2)}[reduce]
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-5)
    assert got.dtype == torch.float32
    assert got.shape == (2, 3, 7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("apart", [False, True])
def test_native_weights_are_those_of_torch(dtype, reduce, options, apart):
    torch = pytest.importorskip("torch")
    from pb_kvcache.transformers._selection import Scoring

    torch.manual_seed(0)
    counts, budgets = [90, 5], [[8, 3], [7, 6]]
    holder = Layer(torch, counts, budgets).holder
    heads, dim, slots = 2, 20, holder.slots
    query = torch.randn(2, 6, 1, dim).to(getattr(torch, dtype))
    buffer = torch.randn(2, heads, max(map(max, budgets)) + 1, dim).to(query.dtype)
    are_tokens = np.array([True, False])
    sinks = torch.randn(6) if "sinks" in options else None
    scoring = Scoring(0.5, options.get("softcap"), sinks)
    mask = holder.mask(are_tokens, buffer.device, 6)
    expected = scoring.decode_weights(query, buffer[:, :, :slots], mask, reduce)
    flat = buffer
    if apart:  # every cache at a place of its own in one buffer, the last one first
        offsets = np.array([[40, 21], [12, 0]])
        flat = torch.zeros(60, dim).to(query.dtype)
        for row in range(2):
            for head in range(heads):
                start = offsets[row, head]
                flat[start : start + buffer.shape[2]] = buffer[row, head]
        holder.lay_out(offsets)
    got = torch.from_numpy(holder.weigh(flat, query, scoring, reduce, are_tokens)).view(2, heads, -1)
    seen = mask.expand(2, 6, 1, slots)[:, ::3, 0]
    torch.testing.assert_close(got[:, :, :slots][seen], expected[seen], atol=1e-6, rtol=1e-5)
    flat[0] = torch.nan if apart else flat[0]
    if apart:
        with pytest.raises(ValueError, match=r"attention of a new token \(cache 3\): logits must not be NaN"):
            holder.weigh(flat, query, scoring, reduce, are_tokens)
    assert holder.weigh(flat.double(), query, scoring, reduce, are_tokens) is None
