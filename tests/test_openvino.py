"""A paged model whose layers keep their budgets, against the same decoder in NumPy with the evicted rows masked."""

from __future__ import annotations

import numpy as np
import pytest

ov = pytest.importorskip("openvino")

from pb_kvcache import HeadPlan, Selection, plan, save_plan  # noqa: E402
from pb_kvcache.openvino import PagedModel, _transform  # noqa: E402

from .openvino_model import SmallLlama  # noqa: E402
from .reference_select import pool, top  # noqa: E402

RULE = Selection(window=8, kernel=5)
UNEQUAL = plan(3, total=150, weights=[45, 70, 35])
LLAMA = SmallLlama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the small model."""
    path = tmp_path_factory.mktemp("small")
    ov.save_model(LLAMA.openvino_model(), path / "openvino_model.xml", compress_to_fp16=False)
    return path


@pytest.fixture(scope="module")
def paged(folder):
    """Return a function that makes a model of that folder."""

    def make(layer_plan=None, **options):
        options.setdefault("selection", RULE)
        return PagedModel(folder, layer_plan, properties={"INFERENCE_NUM_THREADS": 1}, **options)

    return make


@pytest.fixture(scope="module")
def unequal(paged):
    """Return a model with another budget in each layer, which the tests leave empty."""
    return paged(UNEQUAL)


@pytest.fixture(autouse=True)
def _left_empty(request):
    yield
    if "unequal" in request.fixturenames:
        model = request.getfixturevalue("unequal")
        for sequence in model.sequences:
            model.remove(sequence)


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LLAMA.vocab, count)


def masked(model: PagedModel, sequence: int, prompt: int, tokens: np.ndarray) -> np.ndarray:
    """Return NumPy's logits behind the last token, where what follows the prompt sees no evicted row."""
    seen = []
    for layer in range(LLAMA.layers):
        mask = np.ones((len(tokens), len(tokens)), bool)
        evicted = np.setdiff1d(np.arange(prompt), model.positions(sequence, layer))
        mask[prompt:, evicted] = False
        seen.append(mask)
    return LLAMA.run(tokens, seen)[0][-1]


@pytest.mark.parametrize("lengths", [[150], [150, 96, 67]])
def test_logits_are_those_of_a_model_with_the_evicted_rows_masked(unequal, lengths):
    texts = {unequal.add(tokens_of(i, n)): tokens_of(i, n + 70) for i, n in enumerate(lengths)}
    prompts = dict(zip(texts, lengths, strict=True))
    for sequence, text in texts.items():
        n = prompts[sequence]
        np.testing.assert_allclose(unequal.logits(sequence), LLAMA.run(text[:n])[0][-1], atol=1e-4)
        assert unequal.lengths(sequence).tolist() == unequal.budgets(n).tolist()
        assert unequal.lengths(sequence).sum() == min(150, 3 * n)
    for step in range(70):  # more than two blocks of 32 in every layer
        logits = unequal.step({sequence: int(text[prompts[sequence] + step]) for sequence, text in texts.items()})
        if step % 7 and step < 66:
            continue
        for sequence, text in texts.items():
            n = prompts[sequence]
            wanted = masked(unequal, sequence, n, text[: n + step + 1])
            np.testing.assert_allclose(logits[sequence], wanted, atol=1e-4)
    for sequence in texts:
        unequal_rows = unequal.lengths(sequence) - unequal.budgets(prompts[sequence])
        assert unequal_rows.tolist() == [70] * 3


def test_an_eviction_changes_the_logits(unequal):
    text = tokens_of(0, 160)
    sequence = unequal.add(text[:150])
    for token in text[150:]:
        logits = unequal.step({sequence: int(token)})[sequence]
    assert np.abs(logits - LLAMA.run(text)[0][-1]).max() > 1e-2  # else the masks of the tests above would test nothing


def test_each_layer_keeps_what_the_window_attended_to_most(unequal):
    text = tokens_of(3, 140)
    sequence = unequal.add(text)
    for layer, attention in enumerate(LLAMA.run(text)[1]):
        scores = attention[:, -RULE.window :, : -RULE.window].sum(axis=(0, 1))
        budget = int(UNEQUAL.budgets[layer])
        best = top(pool(scores, RULE.kernel), budget - RULE.window)
        assert unequal.positions(sequence, layer).tolist() == [*best, *range(140 - RULE.window, 140)]


def test_fewer_positions_than_the_window_may_be_protected(paged):
    model = paged(budget=40, selection=Selection(window=8, kernel=1, protect=2, sinks=3))
    text = tokens_of(4, 120)
    sequence = model.add(text)
    for layer, attention in enumerate(LLAMA.run(text)[1]):
        scores = attention[:, -8:, :-2].sum(axis=(0, 1))
        scores[:3] = 1e9
        assert model.positions(sequence, layer).tolist() == [*top(scores, 38), 118, 119]


@pytest.mark.parametrize("chunk", [8, 50, 149])
def test_a_prompt_in_chunks_is_the_same_prompt(paged, unequal, chunk):
    text = tokens_of(0, 151)
    model = paged(UNEQUAL, chunk=chunk)
    whole, parts = unequal.add(text[:150]), model.add(text[:150])
    for layer in range(3):
        assert model.positions(parts, layer).tolist() == unequal.positions(whole, layer).tolist()
    np.testing.assert_allclose(model.logits(parts), unequal.logits(whole), atol=1e-4)
    after = [m.step({s: int(text[150])})[s] for m, s in ((model, parts), (unequal, whole))]
    np.testing.assert_allclose(*after, atol=1e-4)


def test_a_prompt_that_fits_is_answered_as_by_the_full_cache(paged):
    model = paged(budget=100)
    text = list(tokens_of(1, 100))
    answer = model.generate(text, 12)
    for _ in range(12):
        text.append(int(LLAMA.run(np.array(text))[0][-1].argmax()))
    assert answer == text[100:]


def test_what_a_layer_cannot_use_goes_to_the_others(unequal):
    assert unequal.budgets(60).tolist() == [51, 60, 39]
    assert unequal.budgets(50).tolist() == [50] * 3
    sequence = unequal.add(tokens_of(0, 60))
    assert unequal.lengths(sequence).tolist() == [51, 60, 39]
    assert unequal.positions(sequence, 1).tolist() == list(range(60))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_smaller_elements_take_half_the_bytes_and_nearly_the_same_answers(paged, unequal, dtype):
    try:
        model = paged(UNEQUAL, dtype=dtype)
    except (ValueError, RuntimeError) as error:  # a processor without it
        pytest.skip(str(error))
    text = tokens_of(0, 150)
    whole, half = unequal.add(text), model.add(text)
    unequal.trim(), model.trim()
    assert model.nbytes == unequal.nbytes / 2
    np.testing.assert_allclose(model.logits(half), unequal.logits(whole), atol=0.2)
    model.step({half: 1}), unequal.step({whole: 1})
    np.testing.assert_allclose(model.logits(half), unequal.logits(whole), atol=0.3)


def owned(model: PagedModel) -> list[list[int]]:
    """Return each layer's blocks that sequences hold, after checking that the pool knows of these and no others."""
    held = []
    for index, layer in enumerate(model._engine.layers):
        blocks = [int(block) for sequence in model._sequences.values() for block in sequence.tables[index]]
        assert len(set(blocks)) == len(blocks), "a block has two owners"
        assert layer.pool.used == len(blocks), "a block is taken and nobody's"
        assert all(block < layer.pool.capacity for block in blocks)
        for sequence in model._sequences.values():
            assert len(sequence.tables[index]) == -(-int(sequence.lengths[index]) // 32)
        held.append(blocks)
    return held


def test_blocks_are_neither_shared_nor_leaked_over_a_thousand_arrivals_and_departures(unequal):
    rng = np.random.default_rng(0)
    events = {"come": 0, "go": 0}
    while sum(events.values()) < 1000:
        held = unequal.sequences
        if held and (len(held) > 5 or rng.random() < 0.45):
            unequal.remove(held[rng.integers(len(held))])
            events["go"] += 1
        else:
            unequal.add(rng.integers(0, LLAMA.vocab, rng.integers(1, 130)))
            events["come"] += 1
        if rng.random() < 0.3:
            unequal.step({sequence: 1 for sequence in unequal.sequences if rng.random() < 0.7})
        owned(unequal)
    assert min(events.values()) > 300
    for sequence in unequal.sequences:
        unequal.remove(sequence)
    unequal.trim()
    assert unequal.nbytes == 0


def test_what_an_eviction_frees_serves_the_next_prompt(unequal):
    unequal.add(tokens_of(0, 150))
    before = unequal.nbytes
    unequal.add(tokens_of(1, 60))
    assert unequal.nbytes == before


def test_memory_beyond_the_plan_goes_back_before_the_first_step(unequal):
    sequence = unequal.add(tokens_of(0, 150))
    block = 2 * 32 * LLAMA.kv_heads * LLAMA.head_dim * 4
    assert unequal.nbytes == 3 * 5 * block  # of the whole prompt
    unequal.step({sequence: 1})
    assert unequal.nbytes == sum(-(-rows // 32) + 1 for rows in UNEQUAL.budgets.tolist()) * block


def test_a_sequence_does_not_notice_that_others_come_and_go(unequal):
    text = tokens_of(0, 190)
    alone = unequal.add(text[:150])
    wanted = [unequal.step({alone: int(token)})[alone] for token in text[150:]]
    unequal.remove(alone)
    one = unequal.add(text[:150])
    others = []
    for index, token in enumerate(text[150:]):
        if index % 5 == 0:
            others.append(unequal.add(tokens_of(index, 40 + index)))
        if index % 7 == 6:
            unequal.remove(others.pop(0))
        logits = unequal.step({**dict.fromkeys(others, 3), one: int(token)})
        np.testing.assert_allclose(logits[one], wanted[index], atol=1e-4)


class Failing:
    """A request that fails where it would run."""

    def __init__(self, request):
        self._request = request

    def __getattr__(self, name):
        return getattr(self._request, name)

    def infer(self, **_):
        raise RuntimeError("no memory")


def test_a_step_that_fails_leaves_everything_as_it_was(unequal, monkeypatch):
    text = tokens_of(0, 170)
    sequence = unequal.add(text[:150])
    for token in text[150:169]:
        wanted = unequal.step({sequence: int(token)})[sequence]
    assert unequal.lengths(sequence)[0] == 64  # the next row needs a block
    blocks = owned(unequal)
    with monkeypatch.context() as patch:
        patch.setattr(unequal._engine, "_request", Failing(unequal._engine._request))
        with pytest.raises(RuntimeError, match="no memory"):
            unequal.step({sequence: 5})
        with pytest.raises(RuntimeError, match="no memory"):
            unequal.add(text)
    assert unequal.sequences == (sequence,)
    assert owned(unequal) == blocks
    np.testing.assert_array_equal(unequal.logits(sequence), wanted)
    logits = unequal.step({sequence: int(text[169])})[sequence]
    np.testing.assert_allclose(logits, masked(unequal, sequence, 150, text), atol=1e-4)


def test_a_plan_may_be_a_file(paged, folder, unequal):
    save_plan(folder / "plan.json", UNEQUAL)
    assert paged(folder / "plan.json").budgets(150).tolist() == unequal.budgets(150).tolist()


def test_a_head_plan_is_taken_by_its_layers(paged):
    heads = HeadPlan([[40, 50], [80, 60], [30, 40]])
    assert paged(heads.layer_plan()).budgets(150).tolist() == [45, 70, 35]
    with pytest.raises(TypeError, match=r"all KV heads of a layer; give its layer_plan\(\)"):
        paged(heads)


def test_the_default_budget_and_rule_are_those_of_the_transformers_caches(folder):
    model = PagedModel(folder)
    assert model.selection == Selection()
    assert model.budgets(2000).tolist() == [512] * 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 8}, ValueError, "budget = 8: must be at least window . 1 = 9"),
        ({"budget": 60.0}, TypeError, "budget = 60.0: must be an integer"),
        ({"budget": 60, "layer_plan": UNEQUAL}, ValueError, "plan, budget = 60: only one of them"),
        ({"layer_plan": plan(4, 60)}, ValueError, "plan: has 4 layers, the model has 3"),
        ({"layer_plan": plan(3, total=30, weights=[20, 5, 5])}, ValueError, "gives layer 1 a budget of 5"),
        ({"layer_plan": [60, 60, 60]}, TypeError, "plan: must be a LayerPlan .* not list"),
        ({"selection": "output"}, ValueError, "selection: has value_weight"),
        ({"selection": "mixed"}, ValueError, "selection: has score = 'mixed'"),
        ({"selection": Selection(reduce="max")}, ValueError, "selection: has reduce = 'max'"),
        ({"selection": Selection(second_hop=0.5)}, ValueError, "selection: has second_hop"),
        ({"block": 16}, ValueError, "block = 16: must be 32"),
        ({"chunk": 7}, ValueError, "chunk = 7: must be at least 8"),
        ({"dtype": "int8"}, ValueError, "dtype = 'int8': must be one of float32"),
        ({"ir": "somewhere"}, ValueError, "ir: is for a GGUF file"),
    ],
)
def test_bad_arguments_are_refused(paged, options, error, message):
    with pytest.raises(error, match=message):
        paged(**options)


def test_a_property_that_dtype_says_is_refused(folder):
    with pytest.raises(ValueError, match="properties: has KV_CACHE_PRECISION, which dtype says"):
        PagedModel(folder, properties={"KV_CACHE_PRECISION": "u8"})


def test_a_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such folder or file"):
        PagedModel(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no openvino_model\.xml"):
        PagedModel(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a folder with openvino_model\.xml, or a \.gguf file"):
        PagedModel(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: model.add([]), ValueError, "prompt: has shape"),
        (lambda model: model.add([[1, 2]]), ValueError, "prompt: has shape"),
        (lambda model: model.add([1, 48]), ValueError, r"prompt\[1\] = 48: must be between 0 and 47"),
        (lambda model: model.add([1.5]), TypeError, "prompt: must be integers"),
        (lambda model: model.step({99: 1}), ValueError, "sequence = 99: is not held"),
        (lambda model: model.step([1]), TypeError, "tokens: must map sequences"),
        (lambda model: model.remove(99), ValueError, "sequence = 99: is not held"),
        (lambda model: model.budgets(0), ValueError, "length = 0: must be at least 1"),
        (lambda model: model.positions(model.add([1]), 3), ValueError, "layer = 3: must be between 0 and 2"),
        (lambda model: model.step({model.add([1]): -1}), ValueError, r"tokens\[.*\]\[0\] = -1"),
    ],
)
def test_bad_calls_are_refused(unequal, call, error, message):
    with pytest.raises(error, match=message):
        call(unequal)


def test_a_second_thread_is_refused(unequal):
    del unequal._turn[0]  # as while a call is in progress
    with pytest.raises(RuntimeError, match="PagedModel is in use by another thread"):
        unequal.add([1])
    unequal._turn.append(None)


# --- answers ---


class Letters:
    """A tokenizer as transformers has them: token i is the i-th letter, and token 0 has no text alone."""

    eos_token_id = 3
    letters = "#" + "".join(chr(ord("A") + i) for i in range(47))

    def __call__(self, text):
        return {"input_ids": [self.letters.index(letter) for letter in text]}

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        text = "".join(self.letters[token] for token in tokens if token != self.eos_token_id)
        return text[:-1] + "\N{REPLACEMENT CHARACTER}" if text.endswith("#") else text


PROMPTS = [tokens_of(i, n).tolist() for i, n in enumerate((150, 40, 97, 64))]


@pytest.mark.parametrize("parallel", [1, 3])
def test_answers_do_not_depend_on_what_is_decoded_together(unequal, parallel):
    alone = [unequal.generate(prompt, 9, eos=[]) for prompt in PROMPTS]
    assert unequal.generate(PROMPTS, 9, eos=[], parallel=parallel) == alone
    assert [len(answer) for answer in alone] == [9] * 4
    assert unequal.sequences == ()


def test_an_answer_ends_with_an_end_token(unequal):
    whole = unequal.generate(PROMPTS, 9)
    ends = whole[0][4]
    for answer, cut in zip(whole, unequal.generate(PROMPTS, 9, eos=ends), strict=True):
        assert cut == (answer[: answer.index(ends) + 1] if ends in answer else answer)


def test_tokens_are_told_as_they_come_and_true_ends_an_answer(unequal):
    told = {0: [], 1: []}

    def stream(index, token):
        told[index].append(token)
        return index == 1 and len(told[1]) == 2

    answers = unequal.generate(PROMPTS[:2], 5, stream=stream)
    assert [len(answer) for answer in answers] == [5, 2]
    assert list(told.values()) == answers


def test_text_comes_out_as_text_and_in_whole_letters(paged):
    model = paged(UNEQUAL, tokenizer=Letters())
    texts = ["".join(Letters.letters[token] for token in prompt) for prompt in PROMPTS]
    told: list[list[str]] = [[] for _ in texts]
    answers = model.generate(texts, 30, stream=lambda index, text: told[index].append(text))
    assert ["".join(pieces) for pieces in told] == answers
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for pieces in told for piece in pieces[:-1])
    assert any("#" in answer for answer in answers)  # a token that has no text alone, in the middle
    tokens = model.generate(PROMPTS, 30)
    assert answers == [Letters().decode(answer, skip_special_tokens=True) for answer in tokens]
    assert model.generate(texts[0], 30) == answers[0]
    assert all(answer.index(3) == len(answer) - 1 for answer in tokens if 3 in answer)


def test_a_prompt_fails_alone_and_nothing_stays(unequal):
    with pytest.raises(ValueError, match="must be between 0 and 47"):
        unequal.generate([[1, 2, 3], [99]], 5)
    assert unequal.sequences == ()


def test_draws_are_those_of_transformers_processors_and_of_the_prompt_alone(unequal):
    pytest.importorskip("transformers")
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5, "eos": []}
    drawn = unequal.generate(PROMPTS, 12, **options)
    assert unequal.generate(PROMPTS, 12, parallel=2, **options) == drawn
    assert unequal.generate(PROMPTS[0], 12, **options) == drawn[0]
    assert unequal.generate(PROMPTS, 12, **{**options, "seed": 6}) != drawn
    twice = unequal.generate([PROMPTS[0]] * 2, 12, **options)
    assert twice[0] == drawn[0] != twice[1]
    likeliest = unequal.generate(PROMPTS, 12, eos=[])
    assert drawn != likeliest
    assert unequal.generate(PROMPTS, 12, do_sample=True, top_k=1, eos=[]) == likeliest


def test_a_processor_of_ones_own_is_applied_to_the_likeliest_token_too(unequal):
    transformers = pytest.importorskip("transformers")
    first = unequal.generate(PROMPTS[0], 1)
    never = transformers.SuppressTokensLogitsProcessor(first, device="cpu")
    assert unequal.generate(PROMPTS[0], 1, logits_processor=[never]) != first
    seen = []

    def note(tokens, scores):
        seen.append(tokens[0].tolist())
        return scores

    answer = unequal.generate(PROMPTS[0], 3, logits_processor=[note])
    assert seen == [PROMPTS[0] + answer[:count] for count in range(3)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens = 0: must be at least 1"),
        ({"parallel": 0}, ValueError, "parallel = 0: must be at least 1"),
        ({"temperature": 0.5}, ValueError, "temperature = 0.5: is for do_sample=True"),
        ({"do_sample": 1}, TypeError, "do_sample = 1: must be True or False"),
        ({"stream": 3}, TypeError, "stream: must be a function"),
        ({"eos": "x"}, TypeError, "eos = 'x': must be an integer"),
        ({"prompts": 5}, TypeError, "prompts: must be a text, a vector of tokens or a list"),
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\]: must have one token or more"),
        ({"prompts": [[1], 5]}, TypeError, r"prompts\[1\]: must be a text or a vector"),
        ({"prompts": [1.5]}, TypeError, r"prompts\[0\] = 1.5: must be an integer"),
        ({"prompts": "text"}, ValueError, "prompts: text needs a tokenizer"),
    ],
)
def test_bad_options_of_answers_are_refused(unequal, options, error, message):
    with pytest.raises(error, match=message):
        unequal.generate(**{"prompts": PROMPTS, "max_new_tokens": 3, **options})
    assert unequal.sequences == ()


# --- models that cannot be served ---


def test_a_model_without_attention_is_refused():
    ids = ov.opset13.parameter([-1, -1], ov.Type.i64, name="input_ids")
    model = ov.Model([ov.opset13.result(ids)], [ids], "none")
    with pytest.raises(ValueError, match=r"(?s)path: openvino cannot give .* a paged cache: .*stateful"):
        _transform.to_paged(model)


def test_an_openvino_with_other_private_parts_is_refused(monkeypatch):
    def other(model):
        """Have fewer options: use_block_indices_inputs alone."""

    monkeypatch.setattr("openvino._offline_transformations.paged_attention_transformation", other)
    with pytest.raises(ImportError, match=r"has no use_score_outputs\); it works with openvino 2026\.4\.1"):
        _transform.to_paged(LLAMA.openvino_model())
    monkeypatch.delattr("openvino._offline_transformations.paged_attention_transformation")
    with pytest.raises(ImportError, match=r"it works with openvino 2026\.4\.1"):
        _transform.to_paged(LLAMA.openvino_model())


class Operation:
    """A paged-attention operation with a sliding window or a bias."""

    def __init__(self, **values):
        self._values = {10: np.int32(0), 11: np.zeros(0, np.float32), **{int(k[1:]): v for k, v in values.items()}}

    def input_value(self, place):
        return ov.opset13.constant(np.array(self._values[place])).output(0)


def test_attention_that_counts_rows_is_refused():
    _transform._check_rows_are_alike(0, Operation())
    with pytest.raises(ValueError, match="layer 2 of the model has a sliding window, which counts rows"):
        _transform._check_rows_are_alike(2, Operation(_10=np.int32(64)))
    with pytest.raises(ValueError, match="layer 1 of the model has a bias by distance"):
        _transform._check_rows_are_alike(1, Operation(_11=np.ones(4, np.float32)))


def test_other_inputs_than_those_of_text_are_refused():
    def parameter(name, shape=(-1,)):
        return ov.opset13.parameter(list(shape), ov.Type.i64, name=name)

    text = [parameter("input_ids"), parameter("position_ids")]
    _transform._check_inputs(text)
    with pytest.raises(ValueError, match="has an input token_type_ids, which nothing is known of"):
        _transform._check_inputs([*text, parameter("token_type_ids")])
    with pytest.raises(ValueError, match="a position of the model has several parts"):
        _transform._check_inputs([text[0], parameter("position_ids", (3, -1))])
    with pytest.raises(ValueError, match="the model has no input position_ids"):
        _transform._check_inputs(text[:1])


def test_a_model_that_reads_how_much_is_held_is_refused(monkeypatch):
    """The layers hold different numbers of rows, so there is no such number."""
    transformation = _transform._transformation()

    def with_reader(model, **options):
        transformation(model, **options)
        (lengths,) = (p for p in model.get_parameters() if p.get_friendly_name() == "past_lens")
        model.add_results([ov.opset13.result(ov.opset13.relu(lengths))])

    monkeypatch.setattr(_transform, "_transformation", lambda: with_reader)
    with pytest.raises(ValueError, match="of the model reads past_lens, which layers here do not have in common"):
        _transform.to_paged(LLAMA.openvino_model())


def test_an_operation_with_other_inputs_is_refused(monkeypatch):
    transformation = _transform._transformation()
    monkeypatch.setattr(_transform, "_transformation", lambda: transformation)
    monkeypatch.setitem(_transform._EXPECTED, 6, "something_else")
    with pytest.raises(ImportError, match=r"input 6 of the operation is .*, not something_else\)"):
        _transform.to_paged(LLAMA.openvino_model())
