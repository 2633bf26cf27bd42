"""How much is kept: positions, bytes and shares of a sequence come to the same plans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_kvcache import LayerPlan, plan

SOME = settings(max_examples=50, deadline=None)


@SOME
@given(
    layers=st.integers(1, 60),
    blocks=st.integers(1, 300),
    block=st.sampled_from([1, 8, 16]),
    length=st.integers(5000, 10000),
    heads=st.integers(1, 64),
    dim=st.sampled_from([64, 80, 128, 256]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
)
def test_positions_bytes_and_shares_agree(
    layers: int, blocks: int, block: int, length: int, heads: int, dim: int, dtype: str
) -> None:
    options = {"multiple_of": block, "maximum": length}
    by_positions = plan(layers, blocks * block, **options)
    size = by_positions.nbytes(heads, dim, dtype)
    one_more = by_positions.nbytes(heads, dim, dtype) // by_positions.total
    assert LayerPlan.from_memory(size, heads, dim, dtype, layers, **options) == by_positions
    assert LayerPlan.from_memory(size + one_more - 1, heads, dim, dtype, layers, **options) == by_positions
    assert LayerPlan.from_ratio(blocks * block / length, length, layers, multiple_of=block) == by_positions


def test_memory_is_never_exceeded() -> None:
    p = LayerPlan.from_memory(10**9, 8, 128, "float16", 32, multiple_of=16)
    assert 10**9 - 16 * 4096 < p.nbytes(8, 128, "float16") <= 10**9


def test_more_memory_than_the_sequence_needs() -> None:
    p = LayerPlan.from_memory(2**40, 8, 128, "float16", 32, maximum=1000)
    assert p.budgets.tolist() == [1000] * 32


def test_too_little_memory_says_how_much_is_needed() -> None:
    message = (
        r"nbytes = 1000000: holds 240 positions of 4096 bytes, and must be at least 512, the sum of the 32 "
        r"minimums, each rounded up to a multiple of 16.*, that is 2097152 bytes"
    )
    with pytest.raises(ValueError, match=message):
        LayerPlan.from_memory(10**6, 8, 128, "float16", 32, multiple_of=16)
    assert LayerPlan.from_memory(2097152, 8, 128, "float16", 32, multiple_of=16).total == 512


def test_a_small_share_says_how_much_is_needed() -> None:
    with pytest.raises(ValueError, match=r"fraction = 0.04: of 10 positions in 4 layers it is 2 in all, .* 0.1$"):
        LayerPlan.from_ratio(0.04, 10, 4)
    assert LayerPlan.from_ratio(0.1, 10, 4).budgets.tolist() == [1] * 4


def test_decimal_fractions_mean_what_they_say() -> None:
    assert LayerPlan.from_ratio(0.3, 1000, 1).total == 300
    assert LayerPlan.from_ratio(0.07, 100, 1).total == 7


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0.0, 10, 2), {}, ValueError, "fraction = 0.0: must be above 0 and at most 1"),
        ((1.5, 10, 2), {}, ValueError, "fraction = 1.5: must be above 0 and at most 1"),
        ((float("nan"), 10, 2), {}, ValueError, "fraction = nan"),
        (("half", 10, 2), {}, TypeError, "fraction = 'half'"),
        ((0.5, 0, 2), {}, ValueError, "sequence_length = 0: must be greater than 0"),
        ((0.5, 10, 0), {}, ValueError, "num_layers = 0: must be greater than 0"),
        ((0.5, 10, 2), {"total": 4}, ValueError, "fraction = 0.5, total = 4: only one of them can be given"),
        ((0.5, 10, 2), {"budget": 4}, ValueError, "fraction = 0.5, budget = 4: only one of them can be given"),
        ((0.5, 10, 2), {"multiple_of": 0}, ValueError, "multiple_of = 0: must be greater than 0"),
    ],
)
def test_bad_shares_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LayerPlan.from_ratio(*arguments, **options)


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (1.5, TypeError), ("1GiB", TypeError), (0, ValueError)]
)
def test_bad_memory_is_refused(nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="nbytes = "):
        LayerPlan.from_memory(nbytes, 8, 128, "float16", 2)
