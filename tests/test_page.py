"""The benchmark's page: whole, harmless, and with nothing to fetch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pb_kvcache import plan
from pb_kvcache._policies import label
from pb_kvcache.lab import bench, page, traces
from pb_kvcache.lab.findings import findings

from .html_page import Page


def test_the_page_stands_on_its_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    results = bench.run(budgets=["10%", "20%"])
    path = page.write(results, tmp_path / "new" / "folder", "pb-kvcache bench")
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]
    shown = Page(path.read_text(encoding="utf-8"))
    assert shown.open == []
    words = " ".join(shown.words)
    for sentence in findings(results):
        assert sentence in words
    for r in results.reports:
        assert label(r.policy) in words
        assert f"{r.retained_mass:.4f}" in words
    assert "Apache-2.0" in words
    assert "public domain" in words
    shown.check(figures=5)
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    "policies", [["full"], ["tova"], ["snapkv"], ["pyramidkv:3", "pyramidkv:1/3"], ["full", "h2o"]]
)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_choice_of_policies_makes_a_page(policies: list[str], layers: int) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    results = bench.run(traces.funnel(layers, 60), [12, 20, 30], policies)
    Page(page.page(results, "x")).check(
        figures=2 if layers == 1 else 5 if len(policies) > 1 and "snapkv" in policies else 4
    )


def test_a_traces_words_do_not_become_markup() -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    evil = "<script>alert(1)</script>&"
    trace = traces.pack(evil, np.full((2, 40, 40), 0.01), {"about": evil, "model": {"source": evil, "licence": evil}})
    text = page.page(bench.run(trace, [9], ["snapkv"]), evil)
    assert "<script>alert" not in text
    assert "".join(Page(text).words).count(evil) >= 5


def test_the_page_shows_a_plan_by_its_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    path = tmp_path / "p.json"
    path.write_text(json.dumps(plan(4, 12, ratio=3, minimum=10).to_dict()), encoding="utf-8")
    text = page.page(bench.run(traces.funnel(4, 100), policies=["full", "snapkv", f"plan:{path}"]), "x")
    assert "SnapKV, p.json" in text
    assert "Budgets by layer" in text
