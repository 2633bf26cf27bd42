"""The vectors hold in Python and in C, and are what the references say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pb_kvcache import cli, vectors

from .conftest import ROOT, Run
from .generate_vectors.all import files

CASES = list(vectors.cases(ROOT / "vectors"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file}:{case.name}")
def test_case_holds_in_python(case: vectors.Case) -> None:
    case.run()


def test_c_runs_the_same_cases(c_build: Path, run: Run) -> None:
    done = run(c_build / "vectors", *sorted((ROOT / "vectors").glob("*.json")))
    assert done.stdout.splitlines()[-1] == f"{len(CASES)} passed, 0 failed"


def test_files_are_what_the_references_say() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "vectors").glob("*.json")}
    assert written == files()


def test_names_are_unique_within_a_file() -> None:
    names = [(case.file, case.name) for case in CASES]
    assert len(names) == len(set(names))


def test_readme_states_every_kind() -> None:
    readme = (ROOT / "vectors" / "README.md").read_text(encoding="utf-8")
    assert (
        set(re.findall(r"^## `(\w+)`", readme, re.MULTILINE)) == {case.kind for case in CASES} == set(vectors.RUNNERS)
    )


@pytest.mark.parametrize("kind", sorted(vectors.RUNNERS))
def test_a_wrong_value_fails_in_both_languages(kind: str, tmp_path: Path, c_build: Path, run: Run) -> None:
    """A runner that checked nothing would pass: change an answer in a case, and both must notice."""
    file, changed = _changed(kind)
    path = tmp_path / file
    path.write_text(json.dumps(changed), encoding="utf-8")
    done = run(c_build / "vectors", path, status=1)
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"
    assert cli.main(["vectors", str(tmp_path)]) == 1


#: A kind's answers that are numbers or lists of them: the members of a case, at any depth.
ANSWERS = {
    "pyramid_budget": "share",
    "plan": "budgets",
    "policy": "victims",
    "stack": "victims",
    "select": "kept",
    "compact": "front",
    "blocks": "freed",
    "hold": "slots",
    "decode_weights": "weights",
}


def _changed(kind: str) -> tuple[str, dict[str, object]]:
    """Return a file of one case in which one answer is wrong: a number is one larger, or a status another."""
    for case in (c for c in CASES if c.kind == kind):
        text = json.dumps(case.case)
        if kind in ANSWERS:
            changed = re.sub(
                rf'("{ANSWERS[kind]}": \[*)(\d+)', lambda found: found[1] + str(int(found[2]) + 1), text, count=1
            )
        else:
            changed = re.sub(r'"status": "\w+"', '"status": "full"', text)
        if changed != text:
            return case.file, {"kind": kind, "cases": [json.loads(changed)]}
    raise AssertionError(f"kind {kind} has no case with an answer to change; see ANSWERS")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a vector file"),
        ("[]", "is not a vector file"),
        ('{"kind": "policy"}', "is not a vector file"),
        ('{"kind": "policy", "cases": [{}]}', "is not a vector file"),
        ('{"kind": "nonsense", "cases": []}', "unknown kind 'nonsense'; known are"),
    ],
)
def test_foreign_files_are_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "case.json").write_text(text, encoding="utf-8")
    assert cli.main(["vectors", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_vectors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vectors", str(tmp_path)]) == 2
    assert "has no .json file" in capsys.readouterr().err


def test_installed_vectors_are_the_shared_ones() -> None:
    assert [case.case for case in vectors.cases()] == [case.case for case in CASES]
