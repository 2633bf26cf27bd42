"""A plan is not judged on the text that it was measured on, nor on a part of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pb_kvcache import CurveSet
from pb_kvcache.lab import _own_text
from pb_kvcache.lab.tasks import Item

DRAW = random.Random(5)
TEXT = [DRAW.randrange(50_000) for _ in range(1000)]
OTHER = [DRAW.randrange(50_000) for _ in range(1000)]
KNOWN = _own_text.marks([TEXT])


def item(context: list[int], name: str = "text-0") -> Item:
    return Item(
        name=name, task="text", kind="prose", context=tuple(context), question=(), answers=(), continuation=(1,),
        metric="", chance=0.0, max_new_tokens=1,
    )  # fmt: skip


def test_a_prefix_a_middle_and_the_whole_are_known_wherever_they_stand() -> None:
    assert _own_text.common_part(KNOWN, TEXT) == 1
    for part in (TEXT[:100], TEXT[437:600], TEXT[-63:]):
        assert _own_text.common_part(KNOWN, part) > 0.9
        with pytest.raises(ValueError, match=r"judge = x\.txt: was measured on \d+ % of the text of text-0 \(prose\)"):
            _own_text.refuse("judge = x.txt", KNOWN, [item(OTHER[:50]), item(part)])
    assert _own_text.common_part(KNOWN, OTHER[:300] + TEXT[100:400]) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("start", range(0, 900, 97))
def test_any_run_of_63_tokens_leaves_a_mark(start: int) -> None:
    run = TEXT[start : start + _own_text.RUN + _own_text.WINDOW - 1]
    assert _own_text.common_part(KNOWN, [*OTHER[:200], *run, *OTHER[200:400]]) > 0


def test_other_text_and_a_short_header_are_allowed() -> None:
    assert _own_text.common_part(KNOWN, OTHER) == 0
    assert _own_text.common_part(KNOWN, TEXT[: _own_text.RUN - 1]) == 0
    _own_text.refuse("judge", KNOWN, [item(OTHER), item([*TEXT[:80], *OTHER]), item([])])
    _own_text.refuse("judge", "", [item(TEXT)])


def test_marks_have_a_limit_and_still_tell_texts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_own_text, "_MOST", 20)
    known = _own_text.marks([TEXT])
    assert len(known) == 20 * 8
    assert _own_text.common_part(known, TEXT[:500]) == 1
    assert _own_text.common_part(known, OTHER) == 0


@pytest.mark.parametrize("kind", ["curves", "plan", "plans"])
def test_marks_travel_in_curve_and_plan_files(tmp_path: Path, kind: str) -> None:
    measured = {_own_text.FIELD: KNOWN}
    path = tmp_path / ("c.npz" if kind == "curves" else "p.json")
    if kind == "curves":
        CurveSet([8, 16], [[[2.0, 1.0]]], measured).save(path)
    else:
        entry = {"budgets": [[4]], "measured": measured}
        path.write_text(json.dumps([entry, entry] if kind == "plans" else entry))
    assert _own_text.measured_marks(str(path)) == KNOWN


@pytest.mark.parametrize(
    "content", [{}, {"measured": None}, {"measured": {}}, {"measured": {_own_text.FIELD: "x" * 8}}, []]
)
def test_a_file_without_marks_says_nothing(tmp_path: Path, content: object) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    assert _own_text.measured_marks(str(path)) == ""
