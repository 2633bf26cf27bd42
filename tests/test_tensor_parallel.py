"""Heads divided over two processes: every rank keeps the positions that the whole model keeps in its heads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_two_ranks_keep_what_the_whole_model_keeps(tmp_path: Path) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("tensor parallelism on a CPU is tried with transformers 5.24")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    ranks = [
        plain
        | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": str(r),
            "LOCAL_RANK": str(r),
        }
        for r in (0, 1)
    ]
    outputs = [tmp_path / "whole", tmp_path / "rank0", tmp_path / "rank1"]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path / "model", output],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for output, environment in zip(outputs, [plain, *ranks], strict=True)
    ]
    try:
        for program in running:
            said, _ = program.communicate(timeout=300)
            assert program.returncode == 0, said
    finally:
        for program in running:
            program.kill()
    whole, *parts = [json.loads(output.read_text()) for output in outputs]
    assert whole["memory"]["lengths"] == [[33, 33]] * 4
    assert whole["heads"]["lengths"] == [[33, 15], [12, 43], [28, 28], [51, 8]]
    assert whole["heads held"]["lengths"] == [[30, 12], [9, 40], [25, 25], [48, 5]]
    for layer in range(4):
        divided = whole["adakv"]["lengths"][layer]
        assert sum(divided) == 66
    assert any(first != second for first, second in whole["adakv"]["lengths"])
    for case, alone in whole.items():
        of_ranks = [part[case] for part in parts]
        assert [part["ranks"] for part in of_ranks] == [2, 2]
        assert np.concatenate([part["lengths"] for part in of_ranks], axis=1).tolist() == alone["lengths"], case
        for part in of_ranks:
            np.testing.assert_allclose(
                part["logits"], alone["logits"], rtol=0, atol=2e-4 if case == "merged" else 4e-6, err_msg=case
            )
        for layer in range(4):
            heads = [[pos for pos in head if pos >= 0] for part in of_ranks for head in part["positions"][layer]]
            assert heads == [[pos for pos in head if pos >= 0] for head in alone["positions"][layer]], case
