"""Numbers that callers give: what is one, what fits, and an error that names the argument."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import pb_kvcache as pb
from pb_kvcache._amount import Amount
from pb_kvcache._model_config import read_config

from .attention import dyadic_of

ATTENTION = dyadic_of((1, 2, 3, 40), 1)

FLOATS = {
    "scale": lambda value: pb.window_scores(ATTENTION, num_kv_heads=1, from_logits=True, scale=value),
    "ratio": lambda value: pb.plan(4, total=400, ratio=value),
    "beta": lambda value: pb.plan(4, total=400, beta=value),
    "fraction": lambda value: Amount.of("fraction", value),
}


def given(call):
    """Return what a call returns, as something to compare."""
    result = call()
    if isinstance(result, Amount):
        return result.value
    return result.tolist() if isinstance(result, np.ndarray) else result.budgets.tolist()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "kind",
    [
        Fraction,
        Decimal,
        np.float64,
        np.float32,
        np.float16,
        np.longdouble,
        lambda v: np.array(v),
        lambda v: np.array(v, ">f4"),
    ],
)
def test_a_number_of_any_real_type_is_taken(name, kind):
    assert given(lambda: FLOATS[name](kind(0.75))) == given(lambda: FLOATS[name](0.75))


BEYOND = {
    "int": 10**400,
    "negative": -(10**400),
    "int of too many digits": 10**5000,
    "fraction": Fraction(10**400),
    "fraction of too many digits": Fraction(1, 10**5000),
    "decimal": Decimal("1e400"),
    "signalling": Decimal("sNaN"),
    "inf": np.inf,
    "nan": np.nan,
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", BEYOND)
def test_a_number_out_of_range_is_refused_by_name(name, kind):
    with pytest.raises(ValueError, match=rf"^{name} = .*: must "):
        FLOATS[name](BEYOND[kind])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", ["1", b"1", True, np.True_, 1j, [1.0], np.array([1.0]), np.array(1j), np.array("1"), object()]
)
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name}\b.*: must be a"):
        FLOATS[name](value)


@pytest.mark.parametrize("value", ["false", "true", 1, 0, 1.0, [], {}])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_configuration_that_says_true_or_false_otherwise_is_refused(value, family, tmp_path):
    config = {"model_type": family, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "use_sliding_window": value}))
    with pytest.raises(ValueError, match=r"use_sliding_window = .*: must be true or false"):
        read_config(file)


@pytest.mark.parametrize(("value", "windows"), [(True, (None, 8)), (False, (None, None)), (None, (None, None))])
def test_a_configuration_says_whether_its_layers_slide(value, windows, tmp_path):
    config = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    file = tmp_path / "config.json"
    slides = {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": value}
    file.write_text(json.dumps({**config, **slides}))
    assert tuple(layer.window for layer in read_config(file).layers) == windows


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "sliding_window"]
)
@pytest.mark.parametrize("value", ["4", "false", True, 4.0, [4], {}, -1, 0, 2**40])
def test_a_number_of_a_configuration_is_a_number(key, value, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match=f"{key} = "):
        read_config(file)
