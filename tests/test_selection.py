"""A selection rule as a whole: what it says, its names, and that every function reads it as it reads its parts."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pb_kvcache as pb
from pb_kvcache import Selection

from .attention import logits_of

KV_HEADS, WINDOW, N, DIM = 2, 5, 60, 8
ATTN = logits_of((KV_HEADS, 2, WINDOW, N), 1)
WEIGHTS = np.random.default_rng(2).random((KV_HEADS, N), np.float32) * np.array([[1], [4]], np.float32)
OPTIONS = {"num_kv_heads": KV_HEADS, "from_logits": True}
RULES = [
    {},
    {"kernel": 3, "pooling": "avg", "edge": "kernel", "reduce": "max"},
    {"kernel": 1, "protect": 2},
    {"protect": 8, "sinks": 3, "reduce": "sum"},
]


def test_names_are_the_published_rules():
    assert (
        Selection.named("snapkv") == Selection() == Selection(32, "max", 7, None, 0, False, "mean", "count", "window")
    )
    assert Selection.named("output") == Selection(kernel=1, protect=8, value_weight=True)
    assert Selection.named("mixed") == Selection(kernel=1, protect=8, value_weight=True, score="mixed")
    assert [Selection.named(name).name for name in Selection.NAMES] == ["snapkv", "output", "mixed"]
    assert Selection.of("output") == Selection.named("output")
    rule = Selection(window=4)
    assert Selection.of(rule) is rule
    assert rule.name is None


def test_no_pooling_has_two_spellings_and_one_rule():
    assert Selection(pooling=None) == Selection(kernel=1) == Selection(pooling="avg", kernel=1)
    assert Selection(pooling=None, kernel=9).kernel == 1
    assert hash(Selection(pooling=None)) == hash(Selection(kernel=1))


def test_what_is_always_kept():
    assert (Selection().protected, Selection().always_kept) == (32, 32)
    rule = Selection(protect=8, sinks=np.int64(4))
    assert (rule.protected, rule.always_kept) == (8, 12)
    assert type(rule.sinks) is int


@pytest.mark.parametrize("fields", [*RULES, {"value_weight": True, "score": "repeat"}])
def test_fields_go_through_a_file(fields):
    rule = Selection(**fields)
    assert Selection.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
    assert Selection.from_dict(fields) == rule


def test_words():
    assert str(Selection(window=16)) == "window 16, score window, max of 7, last 16 kept, mean over a group"
    assert str(Selection(kernel=5, pooling="avg", sinks=4, protect=1)).endswith(
        "avg of 5 divided by the count, last 1 kept, first 4 kept, mean over a group"
    )
    assert str(Selection()).startswith("snapkv (window 32, ")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"window": 0}, ValueError, "window = 0: must be at least 1"),
        ({"window": 2.0}, TypeError, "window = 2.0: must be an integer"),
        ({"kernel": 2}, ValueError, "kernel = 2: must be odd"),
        ({"pooling": "mean"}, ValueError, "pooling = 'mean': must be one of max, avg"),
        ({"protect": 0}, ValueError, "protect = 0: must be at least 1"),
        ({"protect": True}, TypeError, "protect = True: must be an integer"),
        ({"sinks": -1}, ValueError, "sinks = -1: must be at least 0"),
        ({"value_weight": 1}, TypeError, "value_weight = 1: must be True or False"),
        ({"reduce": "min"}, ValueError, "reduce = 'min': must be one of mean, max, sum"),
        ({"edge": "zero"}, ValueError, "edge = 'zero': must be one of count, kernel"),
        ({"score": "keys"}, ValueError, "score = 'keys': must be one of window, expected, mixed, keydiff, repeat"),
    ],
)
def test_bad_fields_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        Selection(**fields)


def test_what_is_no_rule_is_named():
    with pytest.raises(ValueError, match=r"selection = 'snap': must be a Selection or one of snapkv, output, mixed"):
        Selection.of("snap")
    with pytest.raises(TypeError, match=r"selection = 7: must be a Selection or one of .*, not int"):
        Selection.of(7)
    with pytest.raises(ValueError, match=r"selection: has an unknown field 'kernels', must have window, pooling"):
        Selection.from_dict({"kernels": 3})
    with pytest.raises(TypeError, match="selection: must be a mapping of fields, not list"):
        Selection.from_dict([])


def functions(fields):
    """Return calls of every function that takes a rule: by name, with what it reads of the rule's parts."""
    given = {"window": WINDOW, **fields}
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2 * KV_HEADS, WINDOW, DIM)).astype(np.float32)
    k = rng.normal(size=(KV_HEADS, N, DIM)).astype(np.float32)
    protect = fields.get("protect", WINDOW)
    scores = rng.random((KV_HEADS, N - protect), np.float32)
    scoring = {name: fields[name] for name in ("reduce", "protect") if name in fields}
    choosing = {name: given[name] for name in ("kernel", "pooling", "edge", "sinks") if name in given}
    return {
        "window_scores": (lambda **options: pb.window_scores(ATTN, **OPTIONS, **options), scoring),
        "select": (lambda **options: pb.select(ATTN, 20, weights=WEIGHTS, **OPTIONS, **options), given),
        "scores_from_qk": (lambda **options: pb.scores_from_qk(q, k, **options), scoring),
        "select_from_scores": (
            lambda **options: pb.select_from_scores(scores, 20, weights=WEIGHTS, **options),
            {**choosing, "protect": protect},
        ),
        "adakv_budgets": (
            lambda **options: pb.adakv_budgets(scores, 20, weights=WEIGHTS, **options),
            {**choosing, "protect": protect},
        ),
    }


@pytest.mark.parametrize("fields", RULES)
@pytest.mark.parametrize("name", functions({}))
def test_a_rule_says_what_its_parts_say(name, fields):
    call, parts = functions(fields)[name]
    rule = Selection(window=WINDOW, **fields)
    np.testing.assert_array_equal(call(selection=rule), call(**parts))


@pytest.mark.parametrize("name", functions({}))
def test_a_rule_and_its_parts_together_are_refused(name):
    call, parts = functions(RULES[3])[name]
    rule = Selection(window=WINDOW, protect=8, sinks=3, reduce="sum")
    for part, value in parts.items():
        with pytest.raises(ValueError, match=f"selection and {part}: a selection says all of its rule"):
            call(selection=rule, **{part: value})
    default = "reduce" if "reduce" in parts else "edge"  # also one that is what the rule says
    with pytest.raises(ValueError, match=f"selection and {default}: "):
        call(selection=rule, **{default: getattr(rule, default)})


def test_a_rule_that_weighs_values_needs_weights_and_others_use_what_is_given():
    rule = Selection(window=WINDOW, kernel=1, protect=2, value_weight=True)
    scores = pb.window_scores(ATTN, selection=rule, **OPTIONS)
    calls = [
        lambda **options: pb.select(ATTN, 20, **OPTIONS, **options),
        lambda **options: pb.select_from_scores(scores, 20, **options),
        lambda **options: pb.adakv_budgets(scores, 20, **options),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"weights: must be given, as the selection has value_weight=True"):
            call(selection=rule)
        plain = Selection(window=WINDOW, kernel=1, protect=2)
        given = call(selection=rule, weights=WEIGHTS)
        np.testing.assert_array_equal(call(selection=plain, weights=WEIGHTS), given)
        assert not np.array_equal(call(selection=plain), given)


def test_a_score_that_is_made_elsewhere_is_refused_where_attention_is_all_there_is():
    rule = Selection(window=WINDOW, kernel=1, protect=2, score="mixed")
    with pytest.raises(ValueError, match=r"selection: has score = 'mixed', must have 'window'.*select_from_scores"):
        pb.select(ATTN, 20, selection=rule, **OPTIONS)
    scores = pb.window_scores(ATTN, selection=rule, **OPTIONS)  # the window's part of it
    assert pb.select_from_scores(scores, 20, selection=rule).shape == (KV_HEADS, 20)


def test_the_window_of_a_rule_is_the_number_of_queries_or_the_whole_of_a_shorter_prompt():
    with pytest.raises(ValueError, match="selection: has a window of 32, must be the number of queries, 5"):
        pb.select(ATTN, 20, selection="snapkv", **OPTIONS)
    short = logits_of((KV_HEADS, 2, 20, 20), 3)
    rule = Selection(protect=8, kernel=1)
    kept = pb.select(short, 12, selection=rule, **OPTIONS)
    np.testing.assert_array_equal(kept, pb.select(short, 12, window=20, protect=8, kernel=1, **OPTIONS))
    with pytest.raises(ValueError, match="window = 32: must be greater than 0 and smaller than n = 20"):
        pb.select(short, 12, selection="snapkv", **OPTIONS)


def test_without_a_rule_the_scores_say_nothing_about_what_follows_them():
    with pytest.raises(TypeError, match="protect: must be given, or a selection"):
        pb.select_from_scores(np.zeros((2, 9), np.float32), 5)
    with pytest.raises(TypeError, match="protect: must be given, or a selection"):
        pb.adakv_budgets(np.zeros((2, 9), np.float32), 5)
    with pytest.raises(ValueError, match="pooling = None: must be one of max, avg"):  # None is a Selection's word
        pb.select(ATTN, 20, pooling=None, **OPTIONS)
