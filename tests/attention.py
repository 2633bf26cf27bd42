"""Attention of a window for the tests: shapes, logits, and probabilities whose sums are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 4))
    window = draw(st.integers(1, 9))
    n = window + draw(st.one_of(st.integers(1, 40), st.integers(1000, 1100)))
    return kv_heads, group, window, n


def logits_of(shape, seed, spread=4.0):
    kv_heads, group, window, n = shape
    return (np.random.default_rng(seed).normal(size=(kv_heads * group, window, n)) * spread).astype(np.float32)


def dyadic_of(shape, seed, levels=8):
    """Probabilities whose sums are exact in float32, with many ties."""
    kv_heads, group, window, n = shape
    weights = np.random.default_rng(seed).integers(0, levels, size=(kv_heads * group, window, n))
    return (weights / 64).astype(np.float32)


def as_kind(array, kind):
    if kind == "bfloat16":
        return array.astype(pytest.importorskip("ml_dtypes").bfloat16)
    return array.astype(kind)
