"""``pb-kvcache evaluate``: its figures against caches run by hand, on a small random model; and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from pb_kvcache import CurveSet, HeadPlan, Selection, cli, save_plan  # noqa: E402
from pb_kvcache._curves import RULE_PREFIX, SHIPPED  # noqa: E402
from pb_kvcache.lab import evaluate as module  # noqa: E402
from pb_kvcache.lab._progress_file import ProgressFile, append  # noqa: E402
from pb_kvcache.lab._variants import rule_named  # noqa: E402
from pb_kvcache.lab.evaluate import evaluate, make_variants  # noqa: E402
from pb_kvcache.lab.tasks import Item  # noqa: E402
from pb_kvcache.transformers import BudgetedCache, repetition_scores, use  # noqa: E402

from .test_transformers import CACHE, SIZES, _one_thread  # noqa: E402, F401

TIMES = ("decode_ms",)
ANSWER = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small random model and a tokenizer of 101 words."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)
            if "lm_head" in name:
                parameter.mul_(30)  # a model that is sure of something, so that divergences are no rounding
    model.save_pretrained(path)
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{index}": index for index in range(100)} | {"[UNK]": 100}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pair(folder: Path):
    return module.load(folder)


def item(number: int, *, answers: tuple[str, ...] = ("w7",), question: int = 5, context: int = 90) -> Item:
    draw = np.random.default_rng(number)
    ids = [int(i) for i in draw.integers(2, 99, size=context + question + 4)]
    return Item(
        name=f"made-{number}",
        task="retrieval" if answers else "text",
        kind="some",
        context=tuple(ids[:context]),
        question=tuple(ids[context : context + question]),
        answers=answers,
        continuation=tuple(ids[context + question :]),
        metric="contains" if answers else "",
        chance=0.1,
        max_new_tokens=4,
    )


ITEMS = [item(0), item(1, answers=(), question=0)]


def untimed(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def read(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "runs.jsonl").read_text().splitlines()]


def run(pair, directory, items=ITEMS, budgets=("48",), variants=(), **options):
    return evaluate(pair, items, budgets=budgets, variants=variants, directory=directory, answer=ANSWER, **options)


@torch.no_grad()
def by_hand(pair, held, fed, answer, cache):
    """Return what a model says after each token, with a cache that reads the prompt itself."""
    model = pair[0]
    if held:
        model(torch.tensor([held]), use_cache=True, **{CACHE: cache})
    logits = model(torch.tensor([[*fed, *answer[:-1]]]), use_cache=True, **{CACHE: cache}).logits[0]
    return logits[-len(answer) :].double().log_softmax(-1)


@torch.no_grad()
def own_answer(pair, held, fed, count=ANSWER):
    cache, tokens, ids = DynamicCache(), [], [*held, *fed]
    for _ in range(count):
        tokens.append(int(pair[0](torch.tensor([ids]), use_cache=True, **{CACHE: cache}).logits[0, -1].argmax()))
        ids = tokens[-1:]
    return tokens


# --- figures


@pytest.mark.parametrize(
    ("plan", "select", "merge", "options"),
    [
        ("uniform", "snapkv", "none", {}),
        ("pyramid:4", "output", "none", {"ratio": 4, "selection": "output"}),
        ("adakv", "snapkv", "nearest", {"heads": "adakv", "merge": "nearest"}),
        ("pyramid:1/2", "expected", "fitted", {"ratio": 0.5, "merge": "fitted"}),
    ],
)
@pytest.mark.parametrize("question", ["seen", "hidden"])
def test_figures_are_those_of_a_cache_that_reads_the_prompt_itself(
    pair, tmp_path, plan, select, merge, options, question
):
    one = ITEMS[0]
    rows = run(pair, tmp_path, [one], variants=make_variants([plan], [select], [merge]), question=question)
    whole = [*one.context, *one.question]
    length = len(one.context) if question == "hidden" else len(whole) - 1
    held, fed = whole[:length], whole[length:]
    if select == "expected":
        options = options | {"selection": Selection(kernel=1, protect=8, score="expected", value_weight=True)}
    cache = BudgetedCache(pair[0].config, budget=48, **options)
    answer = own_answer(pair, held, fed)
    expected = by_hand(pair, held, fed, answer, DynamicCache())
    copies = [copy.deepcopy(cache) for _ in range(2)]
    found = by_hand(pair, held, fed, answer, cache)
    row = rows[-1]
    kl = (expected.exp() * (expected - found)).sum(-1)
    assert kl.max() > 1e-3, "a cache that changes nothing shows nothing"
    assert row["kl"] == pytest.approx(kl.tolist(), rel=1e-3, abs=1e-5)
    assert row["same"] == pytest.approx((expected.argmax(-1) == found.argmax(-1)).double().mean().item())
    true = list(one.continuation)
    logprobs = by_hand(pair, held, fed, true, copies[0])
    assert row["nll"] == pytest.approx(-sum(float(logprobs[i, t]) for i, t in enumerate(true)) / len(true), rel=1e-3)
    assert row["rows"] == pytest.approx(48)
    assert (row["budget"], row["budget_asked"], row["tokens"]) == (48, "48", len(whole))
    assert row["prediction"] is not None
    assert row["score"] == float("w7" in row["prediction"].split())


def test_the_full_cache_has_the_figures_of_a_plain_cache(pair, tmp_path):
    for row, one in zip((r for r in run(pair, tmp_path) if r["variant"] == "full"), ITEMS, strict=True):
        whole = [*one.context, *one.question]
        true = list(one.continuation)
        logprobs = by_hand(pair, whole[:-1], whole[-1:], true, DynamicCache())
        wanted = -sum(float(logprobs[index, token]) for index, token in enumerate(true)) / len(true)
        assert row["nll"] == pytest.approx(wanted, rel=1e-4)
        assert row["rows"] == len(whole) - 1
        # 4 layers, 2 KV heads of 8 elements, keys and values, 4 bytes each.
        assert row["bytes"] == (len(whole) - 1) * 4 * 2 * 8 * 2 * 4
        assert (row["budget"], row["kl"], row["kept"]) == (None, None, None)
        assert (row["prediction"] is None) == (row["score"] is None) == (not one.answers)


@pytest.mark.parametrize("plan", ["uniform", "pyramid:4", "adakv", "prompt"])
def test_a_budget_that_covers_the_prompt_changes_nothing(pair, tmp_path, plan):
    rows = run(pair, tmp_path, budgets=["100%"], variants=make_variants([plan]))
    assert len(rows) == 2 * (2 if plan == "uniform" else 3)
    for row in rows:
        if row["variant"] != "full":
            assert row["kl"] == [0.0] * ANSWER
            assert row["same"] == 1


def test_kept_positions_are_those_of_the_first_prompt_alone(pair, tmp_path):
    rows = run(pair, tmp_path)
    kept = rows[1]["kept"]
    assert [len(layer) for layer in kept] == [2] * 4
    held = len(ITEMS[0].context) + len(ITEMS[0].question) - 1
    for layer in kept:
        for head in layer:
            assert len(head) == 48
            assert head[-32:] == list(range(held - 32, held))
    assert rows[3]["kept"] is None


def test_a_percentage_is_of_what_is_held(pair, tmp_path):
    rows = run(pair, tmp_path, budgets=["50%", "40"], question="hidden")
    assert [(row["budget_asked"], row["budget"]) for row in rows] == [
        (None, None), ("50%", 45), ("40", 40),
        (None, None), ("50%", 44), ("40", 40),
    ]  # fmt: skip


def test_repeat_chooses_by_what_the_model_looks_at_while_it_repeats(pair, tmp_path):
    rows = run(pair, tmp_path, ITEMS[:1], variants=make_variants(["pyramid:2"], ["repeat"]), question="hidden")
    held = list(ITEMS[0].context)
    context = DynamicCache()
    with torch.no_grad():
        pair[0](torch.tensor([held]), use_cache=True, **{CACHE: context})
    request = pair[1](module.REQUEST, add_special_tokens=False)["input_ids"]
    scores = repetition_scores(pair[0], context, held, request=request)
    rule = Selection(kernel=1, protect=8, score="repeat")
    cache = BudgetedCache.filled(pair[0].config, context, scores, budget=48, ratio=2, selection=rule)
    kept = [[head.tolist() for head in cache.positions(layer)[0]] for layer in range(4)]
    assert rows[-1]["kept"] == kept
    assert rows[-1]["variant"] == "pyramid:2 repeat"


def test_plan_files_and_curve_files_are_plans(pair, tmp_path):
    budgets = np.full((4, 2), 48)
    budgets[0], budgets[3] = 40, 56
    save_plan(tmp_path / "plan.json", HeadPlan(budgets))
    losses = np.linspace(1, 0, 3) * np.arange(1, 9).reshape(4, 2, 1)
    CurveSet([33, 48, 90], losses).save(tmp_path / "curves.npz")
    variants = make_variants([str(tmp_path / "plan.json"), str(tmp_path / "curves.npz")])
    rows = run(pair, tmp_path / "out", ITEMS[:1], variants=variants)
    assert [row["variant"] for row in rows] == ["full", "uniform", "plan.json", "curves.npz"]
    assert [[len(head) for head in layer] for layer in rows[2]["kept"]] == budgets.tolist()
    assert [row["rows"] for row in rows[1:]] == [48] * 3
    save_plan(tmp_path / "plan.json", HeadPlan(np.full((4, 2), 48)))
    with pytest.raises(
        ValueError, match=r"was made with another plan\.json; choose another folder, or rename the plan"
    ):
        run(pair, tmp_path / "out", ITEMS[:1], variants=make_variants([str(tmp_path / "plan.json")]))


# --- the file


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_an_interrupted_run_continues_and_gives_the_same_file(pair, tmp_path, done):
    def stop(count, total):
        assert total == 6
        if count == done:
            raise KeyboardInterrupt

    variants = make_variants(["pyramid:2"])
    whole = run(pair, tmp_path / "whole", variants=variants)
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path / "cut", variants=variants, progress=stop)
    assert len(read(tmp_path / "cut")) == 1 + done
    assert untimed(run(pair, tmp_path / "cut", variants=variants)) == untimed(whole)
    assert untimed(read(tmp_path / "cut")) == untimed(read(tmp_path / "whole"))
    assert untimed(read(tmp_path / "whole")[1:]) == untimed(whole)


def test_a_finished_run_does_nothing_and_other_budgets_are_added(pair, tmp_path, monkeypatch):
    rows = run(pair, tmp_path)
    before = (tmp_path / "runs.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_judged", None)
        assert run(pair, tmp_path) == rows
    assert (tmp_path / "runs.jsonl").read_bytes() == before
    more = run(pair, tmp_path, budgets=["40", "48"])
    assert [row["budget"] for row in more] == [None, 40, 48] * 2
    assert (tmp_path / "runs.jsonl").read_bytes().startswith(before)


def test_a_torn_last_line_is_dropped(pair, tmp_path):
    rows = run(pair, tmp_path)
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert untimed(run(pair, tmp_path)) == untimed(rows)
    assert len(read(tmp_path)) == 1 + len(rows)


def test_jobs_measure_the_same(folder, tmp_path):
    pytest.importorskip("joblib", reason="needs the bench extra")
    one, two = (
        evaluate(folder, ITEMS, budgets=["48"], directory=tmp_path / str(jobs), answer=ANSWER, jobs=jobs)
        for jobs in (1, 2)
    )
    for row, other in zip(untimed(one), untimed(two), strict=True):
        assert (row["kl"] is None) == (other["kl"] is None)
        # The number of threads, which joblib divides among workers, may change a sum's last bits.
        assert (row.pop("kl") or []) == pytest.approx(other.pop("kl") or [], rel=1e-4, abs=1e-6)
        assert row.pop("nll") == pytest.approx(other.pop("nll"), rel=1e-4)
        assert row == other
    assert len(read(tmp_path / "2")) == 5


def test_a_file_is_left_as_it_is_where_it_is_refused(tmp_path):
    header = {"format": "pb_kvcache evaluation", "version": 1, "settings": {"answer": 32}}
    path = tmp_path / "runs.jsonl"
    ProgressFile.open(path, header, ["version", "settings"])
    append(path, {"a": 1})
    assert ProgressFile.open(path, header, ["version", "settings"]).rows == [{"a": 1}]
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"another settings\.answer: 32, and now it is 8; choose another folder"):
        ProgressFile.open(path, header | {"settings": {"answer": 8}}, ["version", "settings"])
    with pytest.raises(ValueError, match="another version: 1, and now it is 2"):
        ProgressFile.open(path, header | {"version": 2}, ["version", "settings"])
    assert path.read_bytes() == before
    path.write_bytes(before + b"torn\n" + b'{"b": 2}\n')
    with pytest.raises(ValueError, match="line 3: not JSON"):
        ProgressFile.open(path, header, ["version", "settings"])
    for other in (b'{"format": "other"}\n', b"\x00\x01"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="is no pb_kvcache evaluation; choose another folder"):
            ProgressFile.open(path, header, ["version"])
        assert path.read_bytes() == other


# --- what is refused


def test_another_model_question_or_prompt_is_refused_and_nothing_is_overwritten(pair, folder, tmp_path):
    run(pair, tmp_path, ITEMS[:1])
    before = (tmp_path / "runs.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"another settings\.question: 'seen', and now it is 'hidden'"):
        run(pair, tmp_path, ITEMS[:1], question="hidden")
    other = copy.deepcopy(pair[0])
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"another model\.sha256"):
        run((other, pair[1]), tmp_path, ITEMS[:1])
    with pytest.raises(ValueError, match="another prompt 'made-0', of another length, seed or text"):
        run(pair, tmp_path, [item(0, context=80)])
    assert (tmp_path / "runs.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": ["2000"]}, r"budget = 2000: prompt 'made-0' holds 94 positions; .* or longer prompts"),
        ({"budgets": ["8"]}, r"uniform at 8: budget = 8: must be at least window \+ 1 = 33"),
        ({"budgets": ["5 %x"]}, "must be a whole number of positions of 1 or more, or a percentage"),
        ({"budgets": []}, "budgets: none given"),
        ({"items": []}, "items: none given"),
        ({"items": [ITEMS[0], ITEMS[0]]}, "items: two are called 'made-0'"),
        (
            {"items": [item(0, context=250)]},
            r"has 255 tokens and 9 after it, .* the model 256 .* at most 247",
        ),
        ({"items": [item(0, context=1, question=0)]}, "has 1 tokens, must have at least 2"),
        ({"question": "asked"}, "question = 'asked': must be one of seen, hidden"),
        ({"jobs": 2}, "jobs = 2: workers load the model themselves; give its path"),
        ({"variants": make_variants(["uniform"], ["repeat"], ["fitted"])}, "selection 'repeat' and merge"),
        ({"variants": make_variants(["prompt"], ["repeat"])}, "selection 'repeat' and plan 'prompt'"),
    ],
)
def test_what_is_refused_is_refused_before_any_work(pair, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(pair, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_one_budget_is_no_list_of_them(pair, tmp_path):
    with pytest.raises(TypeError, match="budgets = '48': must be a list of them, not one"):
        run(pair, tmp_path, budgets="48")


def test_a_model_without_use_is_refused(pair, tmp_path):
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with pytest.raises(ValueError, match=r"call pb_kvcache.transformers.use\(model, attention='sdpa'\) with it first"):
        run((stock, pair[1]), tmp_path)


def test_a_plan_file_without_the_budget_is_refused(pair, tmp_path):
    save_plan(tmp_path / "plan.json", HeadPlan(np.full((4, 2), 40)))
    variants = make_variants([str(tmp_path / "plan.json")])
    for budget, said in (("48", "48"), ("50%", "a percentage")):
        with pytest.raises(ValueError, match=rf"has plans of 40 positions .*, and the budget is {said}; a curve"):
            run(pair, tmp_path / "out", budgets=[budget], variants=variants)
    assert not (tmp_path / "out").exists()


def test_shipped_curves_are_a_plan_by_their_name_under_their_own_rule(tmp_path, monkeypatch):
    variants = make_variants(["smollm2", "smollm2-snapkv"])[1:]
    assert [variant.label for variant in variants] == ["smollm2 mixed", "smollm2-snapkv"]
    for name, variant in zip(SHIPPED, variants, strict=True):
        assert variant.is_file
        assert variant.options(64)["curves"] == name
        assert variant.rule == CurveSet.load(name).selection
        variant.check(None)  # curves have every budget
    assert make_variants(["smollm2"], ["output"])[1].label == "smollm2 output"
    # A file of that name comes first, and what is no curve file is refused.
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_text("no plan")
    with pytest.raises(ValueError, match="smollm2"):
        make_variants(["smollm2"])


def measured_under(rule):
    return {RULE_PREFIX + name: value for name, value in rule.to_dict().items()}


@pytest.mark.parametrize("name", ["snapkv", "output", "mixed", "keydiff", "expected"])
def test_a_file_is_judged_under_the_rule_that_it_was_measured_under(tmp_path, name):
    curves = CurveSet([33, 90], np.ones((4, 2, 2)), measured_under(rule_named(name)))
    curves.save(tmp_path / "curves.npz")
    plan = curves.plan(40).to_dict() | {"measured": curves.measured}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "plans.json").write_text(json.dumps([plan, curves.plan(50).to_dict() | {"measured": curves.measured}]))
    files = [str(tmp_path / file) for file in ("curves.npz", "plan.json", "plans.json")]
    variants = make_variants(["pyramid:2", *files])[1:]
    assert [variant.selection for variant in variants] == ["snapkv", name, name, name]
    assert [variant.selection for variant in make_variants(files, ["output", "mixed"])[1:]] == ["output", "mixed"] * 3


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (measured_under(Selection(window=16)), "was measured under .*, a rule without a name; say which one ranks"),
        ({"selection.windows": 16}, "the rule that it was measured under: selection: has an unknown field 'windows'"),
        ({"selection.window": "16"}, "the rule that it was measured under: window"),
    ],
)
def test_a_rule_that_cannot_be_named_must_be_said(tmp_path, measured, message):
    file = str(tmp_path / "curves.npz")
    CurveSet([33, 90], np.ones((4, 2, 2)), measured).save(file)
    with pytest.raises(ValueError, match=message):
        make_variants([file])
    assert make_variants([file], ["snapkv"])[1].selection == "snapkv"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["pyramid:x"],), "plan = 'pyramid:x': the ratio must be a number or a fraction above 0"),
        ((["pyramid:0"],), "the ratio must be a number or a fraction above 0"),
        ((["unifrom"],), "plan = 'unifrom': is neither a file nor one of .*; did you mean uniform?"),
        (
            (["uniform"], ["snap"]),
            "selection = 'snap': must be one of snapkv, output, mixed, expected, keydiff, repeat",
        ),
        ((["uniform"], ["snapkv"], ["mean"]), "merge = 'mean': must be one of none, nearest, fitted, macro"),
    ],
)
def test_names_that_are_not_known_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_variants(*arguments)


def test_two_plan_files_of_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_plan(tmp_path / name / "plan.json", HeadPlan(np.full((4, 2), 40)))
    with pytest.raises(ValueError, match=r"are both called 'plan\.json'; rename one"):
        make_variants([str(tmp_path / name / "plan.json") for name in ("a", "b")])


def test_a_model_that_says_no_number_is_refused(pair, tmp_path):
    broken = copy.deepcopy(pair[0])
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the model gives nan, where a number is needed"):
        run((use(broken), pair[1]), tmp_path)


# --- the command


def test_the_command_joins_everything(folder, tmp_path, capsys, monkeypatch):
    made = []

    def make(name, tokenizer, *, count, length, seed, filler, texts):
        made.append((name, count, length, seed, filler, list(texts)))
        return [item(n, answers=()) for n in range(count)] if name == "text" else [item(100 + n) for n in range(count)]

    monkeypatch.setattr("pb_kvcache.lab.tasks.make", make)
    out = tmp_path / "out"
    command = ["evaluate", "--model", str(folder), "--text", "a.txt", "--task", "retrieval", "--budget", "40", "50%"]
    command += ["--plan", "pyramid:4", "--prompts", "2", "--length", "95", "-o", str(out)]
    assert cli.main(command) == 0
    assert made == [("text", 2, 95, 0, None, [Path("a.txt")]), ("retrieval", 2, 95, 0, None, [])]
    printed = capsys.readouterr()
    assert printed.out.index("full cache") < printed.out.index("budget 40")
    assert "pyramid:4" in printed.out
    assert {path.name for path in out.iterdir()} == {
        "runs.jsonl", "results.json", "predictions.csv", "metrics.json", "config.yaml"
    }  # fmt: skip
    assert len(read(out)) == 1 + 4 * 5
    assert cli.main([*command, "--question", "hidden"]) == 2
    assert "another settings.question: 'seen', and now it is 'hidden'" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_go_on(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pb_kvcache.lab.tasks.make", lambda name, tokenizer, **options: [item(0)])

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_judged", interrupt)
    arguments = ["evaluate", "--model", str(folder), "--budget", "40", "-o", str(tmp_path / "out")]
    assert cli.main(arguments) == 130
    assert "interrupted; what is done is in" in capsys.readouterr().err  # after what transformers says of loading


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    assert cli.main(["evaluate", "--model", str(tmp_path / "none"), "--budget", "40", "-o", str(tmp_path / "out")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
