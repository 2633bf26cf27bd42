"""What a type checker says of the array functions' results, for arrays and for tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Run

pytest.importorskip("mypy")

USER = """
from typing import Any
import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import assert_type
import pb_kvcache as pb

def use(attn: GIVEN, scores: GIVEN, kv: GIVEN, rows: list[list[int]]) -> None:
    assert_type(pb.window_scores(attn, num_kv_heads=2, reduce="max", threads=2), SCORES)
    assert_type(pb.pool_scores(scores, 5, "avg"), SCORES)
    assert_type(pb.select_top(scores, 9), KEPT)
    assert_type(pb.scores_from_qk(kv, kv, scale=None), SCORES)
    assert_type(pb.expected_scores(kv, kv, kv, kv, kv, scale=0.5), SCORES)
    assert_type(pb.mixed_scores(scores, scores), SCORES)
    assert_type(pb.keydiff_scores(kv), SCORES)
    assert_type(pb.repeat_scores(kv, kv, own=3, out=scores), SCORES)
    assert_type(pb.block_select(scores, 64, block_size=16, window=8), KEPT)
    kept = pb.select(attn, 9, num_kv_heads=2, window=3, kernel=5, from_logits=True, scale=0.5)
    assert_type(kept, KEPT)
    assert_type(pb.select(attn, [9, 8], num_kv_heads=2, window=3), list[Any])
    assert_type(pb.select(attn, 9, num_kv_heads=2, window=3, valid=[40]), KEPT | list[KEPT])
    assert_type(pb.select_from_scores(scores, 9, 3, nan="lowest"), KEPT)
    assert_type(pb.select_from_scores(scores, (9, 8), 3), list[Any])
    rule = pb.Selection(window=3, protect=2)
    assert_type(pb.select(attn, 9, num_kv_heads=2, selection=rule, weights=scores), KEPT)
    assert_type(pb.select(attn, 9, num_kv_heads=2, protect=2, sinks=1), KEPT)
    assert_type(pb.select_from_scores(scores, 9, selection="output", weights=scores), KEPT)
    assert_type(pb.window_scores(attn, num_kv_heads=2, selection=rule), SCORES)
    assert_type(pb.scores_from_qk(kv, kv, protect=2), SCORES)
    assert_type(pb.adakv_budgets(scores, 9, selection=rule, weights=scores), npt.NDArray[np.int64])
    assert_type(pb.compact(kv, kept), GIVEN)
    assert_type(pb.compact(kv, rows), GIVEN | list[Any])
    assert_type(pb.merge(kv, kv, kept, kv, protect=3), tuple[GIVEN, GIVEN, SCORES])
    assert_type(pb.to_mask(kept, 40), npt.NDArray[np.bool_])

def misuse(attn: GIVEN) -> None:
    pb.select(attn, 9, num_kv_heads=2, window=3, kernels=5)
    pb.pool_scores([1.0, 2.0])
"""


@pytest.mark.parametrize(
    ("given", "scores", "kept"),
    [
        ("npt.NDArray[np.float32]", "npt.NDArray[np.float32]", "npt.NDArray[np.uint32]"),
        ("Tensor", "Tensor", "Tensor"),
    ],
)
def test_results_have_the_types_that_are_documented(
    given: str, scores: str, kept: str, tmp_path: Path, run: Run
) -> None:
    user = USER.replace("GIVEN", given).replace("SCORES", scores).replace("KEPT", kept)
    (tmp_path / "user.py").write_text(user)
    # Only the class: mypy would read all of torch for a minute.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text("class Tensor: ...\n")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {tmp_path}:{ROOT}\n[mypy-pb_kvcache.*]\nignore_errors = true\n"
    )
    done = run(sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py", status=1, cwd=tmp_path)
    last = user.splitlines().index("    pb.pool_scores([1.0, 2.0])") + 1
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    wrong = {line.partition(" error:")[0] for line in errors}
    assert wrong == {f"user.py:{last - 1}:", f"user.py:{last}:"}, done.stdout
    assert all("[call-overload]" in line for line in errors), done.stdout
