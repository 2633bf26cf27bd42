"""An evaluation's files: whole, readable by others, and harmless whatever a model says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache.lab import evaluation_files
from pb_kvcache.lab.evaluation_files import _cell, _yaml
from pb_kvcache.lab.verdict import summarise

from .evaluation_rows import HEADER, row, run


def written(folder: Path, rows: list[dict[str, Any]], header: dict[str, Any] = HEADER) -> dict[str, str]:
    paths = evaluation_files.write(rows, header, summarise(rows), folder)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_the_files_tell_of_the_run(tmp_path: Path) -> None:
    rows = run({"plan.json": 0.5}, prompts=8)
    files = written(tmp_path / "new" / "folder", rows)
    assert list(files) == ["results.json", "predictions.csv", "metrics.json", "config.yaml"]
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(files)

    results = json.loads(files["results.json"])
    assert results["model"] == HEADER["model"]
    assert results["settings"] == HEADER["settings"]
    assert results["sentences"] == summarise(rows).sentences()

    scored = [r for r in rows if r["task"] == "retrieval"]
    lines = list(csv.DictReader(files["predictions.csv"].splitlines()))
    assert list(lines[0]) == list(evaluation_files.COLUMNS)
    assert len(lines) == len(scored)
    for line, r in zip(lines, scored, strict=True):
        assert (line["prompt"], line["press_name"]) == (r["prompt"], r["variant"])
        assert line["predicted_answer"] == r["prediction"]
        assert json.loads(line["answer"]) == ["7"]
        assert float(line["compression_ratio"]) == pytest.approx(1 - r["rows"] / 100)
        assert line["budget"] == ("" if r["budget"] is None else r["budget_asked"])

    metrics = json.loads(files["metrics.json"])
    for variant, budget in (("uniform", "16"), ("plan.json", "50%")):
        right = [r["score"] for r in scored if r["variant"] == variant and r["budget_asked"] == budget]
        assert metrics[variant][budget] == {"retrieval": {"score": 100 * sum(right) / 8, "prompts": 8}}
    full = [r["score"] for r in scored if r["variant"] == "full"]
    assert metrics["full"]["retrieval"]["score"] == 100 * sum(full) / 8


def test_config_is_yaml_with_the_names_of_kvpress(tmp_path: Path) -> None:
    text = written(tmp_path, run({"plan.json": 0.5}, prompts=1))["config.yaml"]
    assert text.splitlines() == [
        'dataset: "retrieval, text"',
        'model: "tiny"',
        'press_name: "uniform, plan.json"',
        "compression_ratio: null",
        "query_aware: true",
        'budgets: "16, 50%"',
        'question: "seen"',
        "length: 100",
        "seed: 0",
        'tasks: ["text", "retrieval"]',
    ]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(), SCALARS), max_size=5))
def test_yaml_reads_back(values: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
    assert (yaml.safe_load(_yaml(values)) or {}) == values


@pytest.mark.parametrize("name", ["yes", "no", "on", "off", "y", "n", "true", "null", "a: b", "~", "", "- x", "#"])
def test_yaml_keys_stay_strings(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
    assert yaml.safe_load(_yaml({name: 1e-05})) == {name: 1e-05}


@pytest.mark.parametrize("length", [3, 1000, 1022, 1023, 1024, 5000])
def test_yaml_keys_of_any_length(length: int) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
    for letter in "a\N{SNOWMAN}":
        values = {letter * length: 1, "paths": {letter * length: 2, "other": 3}}
        assert yaml.safe_load(_yaml(values)) == values


@given(st.text())
def test_predictions_read_back_whatever_a_model_says(said: str) -> None:
    r = row("retrieval-0", task="retrieval", prediction=said, answers=[said], score=0.0)
    lines = list(csv.reader(io.StringIO(evaluation_files._predictions([r]), newline=""), strict=True))
    assert len(lines) == 2
    found = dict(zip(*lines, strict=True))
    assert found["predicted_answer"] in (said.replace("\0", r"\x00"), "'" + said.replace("\0", r"\x00"))
    assert json.loads(found["answer"]) == [said]


@pytest.mark.parametrize("said", ["=1+1", "@SUM(A1)", "-2+3+cmd|' /C calc'!A0", "+cmd", "\tx", "\r=1"])
def test_a_formula_becomes_text(said: str) -> None:
    assert _cell(said) == "'" + said


@pytest.mark.parametrize("said", ["", "-5", "+1.5", "7", "a=b", " =1"])
def test_other_text_stays(said: str) -> None:
    assert _cell(said) == said


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    rows = [row("retrieval-0", "full", None, task="retrieval", prediction="\ud800", answers=["\udfff"], score=0.0)]
    header = HEADER | {"model": {"name": "\ud800"}}
    assert r"\ud800" in written(tmp_path, rows, header)["predictions.csv"]


def test_what_stood_there_stays_where_a_value_is_no_json(tmp_path: Path) -> None:
    before = written(tmp_path, run({"a": 0.5}, prompts=1))
    with pytest.raises(ValueError, match="JSON"):
        written(tmp_path, run({"a": 0.7}, prompts=1), HEADER | {"settings": {"x": float("nan")}})
    assert {p.name: p.read_text(encoding="utf-8") for p in tmp_path.iterdir()} == before
