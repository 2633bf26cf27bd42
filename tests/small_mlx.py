"""A small random model of mlx-lm, and what reads a prompt with it. Skips a module of tests where mlx is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pb_kvcache import Selection

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

SMALL = Selection(window=8, kernel=3)
VOCABULARY = 97


def tiny(**changes: Any) -> Any:
    """Return a random Llama of four layers whose attention is far from even."""
    mx.random.seed(0)
    options: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,  # or every token would be followed by itself
    }
    model = llama.Model(llama.ModelArgs(**{**options, **changes}))
    for layer in model.layers:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight * 4
        layer.self_attn.v_proj.weight = layer.self_attn.v_proj.weight * 8
    mx.eval(model.parameters())
    return model


def tokens(length: int, seed: int = 0, batch: int = 1) -> Any:
    return mx.array(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)))


def read(model: Any, prompt: Any, caches: list[Any], step: int = 10_000) -> Any:
    """Read a prompt as mlx-lm does: its last token apart. Return the logits of that."""
    for start in range(0, prompt.shape[1] - 1, step):
        model(prompt[:, start : min(start + step, prompt.shape[1] - 1)], cache=caches)
    return model(prompt[:, -1:], cache=caches)


def generated(model: Any, prompt: Any, caches: list[Any] | None, count: int = 12, **options: Any) -> list[int]:
    steps = generate_step(prompt, model, max_tokens=count, prompt_cache=caches, **options)
    return [int(token) for token, _ in steps]


def close(one: Any, other: Any) -> None:
    one, other = np.array(one), np.array(other)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())
