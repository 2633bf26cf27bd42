"""The tour runs as a newcomer runs it: every cell, in order, in a fresh kernel, with the package alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from .conftest import ROOT

TOUR = ROOT / "examples" / "tour.ipynb"


def test_the_tour_is_stored_without_outputs() -> None:
    for cell in json.loads(TOUR.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs"), cell["id"]
        assert cell.get("execution_count") is None, cell["id"]


def test_the_tour_runs_and_says_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    notebook = nbformat.read(TOUR, as_version=4)
    with warnings.catch_warnings():  # those of Jupyter's own libraries say nothing of the notebook
        warnings.simplefilter("ignore")
        client = nbclient.NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )
        client.execute()  # an error in a cell is raised here
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "total 16384" in said
    assert "of the heavy ones 8 of 8" in said
    assert "(2, 256) (2, 256, 64) True" in said
    assert "total 5760 positions in 30 layers of 3 KV heads" in said
    assert "pyramidkv:4    29 0.709 0.413" in said
