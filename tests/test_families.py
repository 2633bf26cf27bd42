"""Every decoder family: a compressed cache computes what the whole one does with its evicted positions masked."""

from __future__ import annotations

import dataclasses
import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from .conftest import ROOT  # noqa: E402
from .families import FAMILIES, VERSION, Compared, compare, reason, row  # noqa: E402

#: The release that the table of docs/transformers.md is of. Others know fewer families, and refuse other ones.
NEWEST = VERSION >= (5, 24)
#: Of the largest logit: rounding of float32. Compression itself moves logits by more than a tenth of it.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compared(name: str) -> Compared:
    """Return what becomes of a family. Skipped where an older release cannot build it."""
    family = FAMILIES[name]
    try:
        family.build()
    except Exception as error:
        if NEWEST:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build it: {type(error).__name__}")
    try:
        return compare(family)
    except ValueError as error:
        if NEWEST or "with a compressed cache pass the 2-D padding mask" not in str(error):
            raise
        return Compared(name, refused=str(error))  # makes its mask itself: noticed at the first prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_the_masked_whole_cache_or_is_refused(name):
    if name == "jamba" and VERSION < (5, 0):
        pytest.skip("asks its cache for states that only a class of its own has, which fails at the first prompt")
    found = compared(name)
    family = FAMILIES[name]
    if NEWEST:
        assert family.refused in found.refused if family.refused else not found.refused, found.refused
        assert found.compressed == (0 if family.refused else family.expected)
    if found.refused:
        return
    assert found.worst <= TOLERANCE * found.scale
    assert found.at_once <= TOLERANCE * found.scale + 2 * min(found.stock_at_once, 1e-4)
    assert found.positions_agree
    assert found.chosen == 0
    assert found.short == 0  # bit for bit
    if found.compressed:
        assert found.moved > 0.1 * found.scale  # else the comparison would show nothing


def test_a_bidirectional_model_is_refused():
    refused = compare(dataclasses.replace(FAMILIES["bert"], options={"is_decoder": False})).refused
    assert ("its mask says more than causality" if NEWEST else "cannot be served") in refused


def test_the_table_of_the_documentation_has_every_family():
    page = ROOT / "docs" / "transformers.md"
    if not page.exists():
        pytest.skip("the tests were copied without the documentation")
    text = page.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([a-z0-9_-]+) \| \w+ \| (served|works|refused)\b", text, flags=re.MULTILINE))
    assert rows == {
        name: "refused" if family.refused else "served" if family.expected else "works"
        for name, family in FAMILIES.items()
    }


@pytest.mark.skipif(not NEWEST, reason="of the release that the documentation names")
def test_the_models_whose_states_start_anew_are_those_of_the_documentation():
    """A second turn of several tokens is another text to these, with any cache."""
    restarts = {
        name for name in ("bamba", "jamba", "lfm2", "qwen3_next") if compare(FAMILIES[name]).stock_at_once > 0.1
    }
    assert restarts == {"bamba", "jamba"}


def test_the_lines_of_the_table():
    refusal = "model: X cannot be served: layer 3: its keys are read by 2 attentions a forward, must be one"
    assert reason(refusal) == "layer 3: its keys are read by 2 attentions a forward, must be one"
    assert row("x", Compared("X", refused=refusal)) == f"| x | X | refused: {reason(refusal)} | | | |"
    served = Compared("X", compressed=2, num_layers=4, worst=1.2e-6, scale=4.04)
    assert row("x", served) == "| x | X | served | 2 of 4 | 1.2e-06 | 4.0 |"
    assert "| works, nothing to compress | 0 of 4 |" in row("x", Compared("X", num_layers=4))
