"""``pb-kvcache calibrate`` on a tiny model in a folder: what it writes, when it writes nothing, and what it refuses."""

from __future__ import annotations

import json
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from pb_kvcache import CurveSet, cli, load_plan  # noqa: E402
from pb_kvcache.lab import calibrate  # noqa: E402

from .test_transformers import SIZES, _one_thread  # noqa: E402, F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model of random weights, a tokenizer of letters, and texts."""
    path = tmp_path_factory.mktemp("tiny")
    letters = "abcdefghijklmnopqrstuvwxyz .\n?"
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?").save_pretrained(path / "model")
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():  # heads whose attention is not flat
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(30)
    model.save_pretrained(path / "model")
    draw = random.Random(1)
    for name in ("one", "two", "other"):
        (path / f"{name}.txt").write_text("".join(draw.choice(letters[:27]) for _ in range(3000)))
    return path


def arguments(folder, tmp_path, **changes):
    """Return the arguments of a small run. None leaves one out."""
    given = {
        "--model": folder / "model",
        "--text": [folder / "one.txt", folder / "two.txt"],
        "--prompts": 2,
        "--judge-prompts": 2,
        "--length": 120,
        "--budget": [36, 60],
        "-o": tmp_path / "plan.json",
        "--curves": tmp_path / "curves.npz",
    } | {"--" + name.replace("_", "-") if len(name) > 1 else "-" + name: value for name, value in changes.items()}
    words = ["calibrate"]
    for name, value in given.items():
        if value is not None:
            words += [name, *map(str, value if isinstance(value, list) else [] if value is True else [value])]
    return words


def test_plans_are_judged_and_written_with_how_they_were_made(folder, tmp_path, capsys):
    assert cli.main(arguments(folder, tmp_path, force=True)) == 0
    curves = CurveSet.load(tmp_path / "curves.npz")
    for budget in (36, 60):
        assert load_plan(tmp_path / "plan.json", budget) == curves.plan(budget)
    entries = json.loads((tmp_path / "plan.json").read_text())
    for entry in entries:
        assert entry["measured"]["texts"] == "one.txt, two.txt"
        assert entry["measured"]["selection"] == "mixed"
        assert (entry["measured"]["prompts"], entry["measured"]["length"]) == (2, 120)
        assert set(entry["judged"]) == {"uniform", "uniform mixed", "pyramid:4 mixed", "calibrated.npz mixed"}
        assert entry["judged"]["calibrated.npz mixed"]["prompts"] == 2
    out = capsys.readouterr().out
    assert "measured on 2 prompts of 120 tokens from one.txt, two.txt" in out
    assert "judged on 2 others from the same texts" in out
    assert "calibrated.npz mixed" in out


def test_other_texts_judge_where_they_are_given(folder, tmp_path, capsys):
    changes = {"judge": [folder / "other.txt"], "budget": [40], "no_outcome": True, "force": True, "curves": None}
    assert cli.main(arguments(folder, tmp_path, **changes)) == 0
    assert "judged on 2 others from other.txt" in capsys.readouterr().out
    entry = json.loads((tmp_path / "plan.json").read_text())
    assert entry["measured"]["what"] == "output error"
    assert load_plan(tmp_path / "plan.json").total == 40 * 8
    assert not (tmp_path / "curves.npz").exists()


def test_plans_that_do_not_win_are_not_written(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate.Judgement, "losses", lambda self: ["At 16 it loses."])
    assert cli.main(arguments(folder, tmp_path)) == 1
    assert not list(tmp_path.iterdir())
    out, err = capsys.readouterr()
    assert "At 16 it loses." in out
    assert "nothing is written (--force writes them)" in err


def test_a_judgement_says_where_a_plan_does_not_win():
    from pb_kvcache.lab.verdict import summarise

    from .evaluation_rows import kl_rows

    rows = kl_rows([0.4] * 8, {"uniform mixed": [0.3] * 8, "pyramid:4 mixed": [0.5] * 8, "mine": [0.2] * 8})
    found = calibrate.Judgement(summarise(rows), "mine", ("uniform mixed", "pyramid:4 mixed"))
    assert found.wins
    rows = kl_rows([0.4] * 8, {"uniform mixed": [0.3] * 8, "pyramid:4 mixed": [0.5] * 8, "mine": [0.35] * 8})
    found = calibrate.Judgement(summarise(rows), "mine", ("uniform mixed", "pyramid:4 mixed"))
    assert found.losses() == ["At 64 the calibrated plan's KL is 0.3500, and that of uniform mixed 0.3000."]
    assert not found.wins
    assert found.to_dict()["64"]["mine"]["kl"] == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o": "plan.txt"}, "output = plan.txt: must end in .json"),
        ({"curves": "curves.json"}, "curves = curves.json: must end in .npz"),
        ({"o": "nowhere/plan.json"}, "output: there is no folder"),
        ({"model": "nowhere"}, "model: there is no file or folder"),
        ({"prompts": 0}, "--prompts 0: must be a whole number of 1 or more"),
        ({"judge_prompts": 0}, "--judge-prompts 0: must be a whole number of 1 or more"),
        ({"text": ["nowhere.txt"]}, "nowhere.txt"),
        ({"select": "snapkv", "length": 100}, "prompts: have 100 tokens, must have 132 or more"),
        ({"length": 2900}, "the texts have 2 parts of 2933 tokens"),
        ({"budget": [32]}, "budget = 32: must be at least 33"),
        ({"budget": [40, 120]}, "budget = 120: must be at least 33"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(folder, tmp_path, capsys, changes, message):
    assert cli.main(arguments(folder, tmp_path, **changes)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_text_is_not_judged_on_its_own_beginning(folder, tmp_path, capsys):
    whole = (folder / "one.txt").read_text()
    (tmp_path / "beginning.txt").write_text(whole[:1500])
    judge = {"text": [folder / "one.txt"], "judge": [tmp_path / "beginning.txt"], "prompts": 15, "judge_prompts": 4}
    assert cli.main(arguments(folder, tmp_path, **judge)) == 2
    err = capsys.readouterr().err
    assert "beginning.txt: was measured on" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["beginning.txt"]


def test_evaluate_refuses_a_plan_on_the_text_that_it_was_measured_on(folder, tmp_path, capsys):
    changes = {"budget": [40], "no_outcome": True, "force": True}
    assert cli.main(arguments(folder, tmp_path, **changes)) == 0
    capsys.readouterr()
    common = ["evaluate", "--model", str(folder / "model"), "--prompts", "2", "--length", "120", "--budget", "40"]
    for plan in ("plan.json", "curves.npz"):
        own = ["--text", str(folder / "one.txt"), str(folder / "two.txt"), "--plan", str(tmp_path / plan)]
        assert cli.main([*common, *own, "-o", str(tmp_path / "out")]) == 2
        assert f"{plan}: was measured on 100 % of the text of text-0 (one)" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    other = ["--text", str(folder / "other.txt"), "--plan", str(tmp_path / "plan.json"), "--select", "mixed"]
    assert cli.main([*common, *other, "-o", str(tmp_path / "out")]) == 0
