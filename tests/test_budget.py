"""One layer's share, and all layers' shares."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pb_kvcache
from pb_kvcache import cli, pyramid_budget, pyramid_budgets

from . import reference

LARGEST = 2**32 - 1
uint32 = st.integers(0, LARGEST) | st.integers(LARGEST - 3, LARGEST) | st.integers(2**31 - 2, 2**31 + 2)


@given(budget=uint32, num_layers=uint32.filter(bool), ratio=uint32.filter(bool), data=st.data())
def test_every_share_is_exact(budget: int, num_layers: int, ratio: int, data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, num_layers - 1) | st.sampled_from([0, num_layers // 2, num_layers - 1]))
    exact = reference.share(budget, layer, num_layers, ratio)
    if exact <= LARGEST:
        assert pyramid_budget(budget, layer, num_layers, ratio) == exact
    else:
        with pytest.raises(ValueError, match=f"budget = {budget}: .*exceeds {LARGEST}"):
            pyramid_budget(budget, layer, num_layers, ratio)


@given(budget=st.integers(0, 5000), num_layers=st.integers(1, 130), ratio=st.integers(1, 60))
def test_all_shares_are_the_single_ones_and_lose_less_than_a_position_a_layer(
    budget: int, num_layers: int, ratio: int
) -> None:
    shares = pyramid_budgets(budget, num_layers, ratio)
    assert shares.dtype == np.uint32
    assert shares.tolist() == [pyramid_budget(budget, layer, num_layers, ratio) for layer in range(num_layers)]
    assert (np.diff(shares.astype(np.int64)) <= 0).all()
    assert 0 <= budget * num_layers - int(shares.sum()) <= num_layers - 1


def test_anchor() -> None:
    shares = pyramid_budgets(512, 32)
    assert (shares[0], shares[15], shares[31]) == (819, 521, 204)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((512, 32, 32), ValueError, "layer = 32: must be smaller than num_layers = 32"),
        ((512, 0, 0), ValueError, "num_layers = 0: must be greater than 0"),
        ((512, 0, 32, 0), ValueError, "pyramid_ratio = 0: must be greater than 0"),
        ((-1, 0, 32), ValueError, "budget = -1: must be between 0 and 4294967295"),
        ((2**32, 0, 32), ValueError, "budget = 4294967296: must be between 0 and 4294967295"),
        ((512, -1, 32), ValueError, "layer = -1: must be between"),
        ((512, 0, 32, 2**40), ValueError, "pyramid_ratio = 1099511627776: must be between"),
        ((512.0, 0, 32), TypeError, "budget = 512.0: must be an integer, not float"),
        (("512", 0, 32), TypeError, "budget = '512': must be an integer, not str"),
        ((True, 0, 32), TypeError, "budget = True: must be an integer, not a bool"),
        ((512, None, 32), TypeError, "layer = None: must be an integer, not NoneType"),
        (
            (3000000000, 0, 2),
            ValueError,
            "budget = 3000000000: with num_layers = 2 and pyramid_ratio = 4 a share exceeds",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pyramid_budget(*arguments)


def test_bad_arguments_of_all_shares_are_named() -> None:
    with pytest.raises(ValueError, match="num_layers = 0: must be greater than 0"):
        pyramid_budgets(512, 0)
    with pytest.raises(ValueError, match="pyramid_ratio = 0"):
        pyramid_budgets(512, 4, 0)
    with pytest.raises(ValueError, match="budget = 3000000000: with num_layers = 2"):
        pyramid_budgets(3000000000, 2)


def test_numpy_integers_are_integers() -> None:
    assert pyramid_budget(np.uint32(512), np.int64(15), np.uint8(32), np.int16(4)) == 521


def test_command_prints_shares_total_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["budget", "--layers", "32", "--budget", "512", "--ratio", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shares"] == pyramid_budgets(512, 32).tolist()
    assert answer["total"] + answer["lost_to_flooring"] == 512 * 32
    assert cli.main(["budget", "--layers", "32"]) == 0
    table = capsys.readouterr().out
    assert "819" in table
    assert "█" in table
    assert f"flooring loses {answer['lost_to_flooring']}" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers 0: must be"),
        (["--layers", "4", "--ratio", "0"], "--ratio 0: must be"),
        (["--layers", "4", "--budget", "-3"], "--budget -3: must be"),
        (["--layers", "2", "--budget", "3000000000"], "budget = 3000000000"),
    ],
)
def test_command_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["budget", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["budget", "--layer"], ["budget"], ["nonsense"], []])
def test_command_line_errors_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


def test_version_is_the_headers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pb-kvcache {pb_kvcache.__version__}\n"
