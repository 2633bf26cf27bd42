"""Which models and options the caches of mlx-lm serve, and how they refuse the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pb_kvcache import HeadPlan, Selection, plan

# isort: split
# First: where mlx is missing it skips this module.
from .small_mlx import SMALL, VOCABULARY, close, read, tiny, tokens

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models import gemma2, gpt_oss, llama

from pb_kvcache.mlx import make_prompt_cache, unuse, use

from .conftest import Run


@pytest.fixture
def model() -> Iterator[Any]:
    made = use(tiny())
    yield made
    unuse(made)


def test_other_caches_and_models_compute_what_they_did() -> None:
    prompt, plain = tokens(40), llama.scaled_dot_product_attention
    model, other = tiny(), tiny()
    before = np.array(read(model, prompt, stock.make_prompt_cache(model)))
    use(model)
    use(use(other))
    assert llama.scaled_dot_product_attention is not plain
    np.testing.assert_array_equal(before, np.array(read(model, prompt, stock.make_prompt_cache(model))))
    close(before, model(prompt)[:, -1:])  # without a cache
    unuse(model)
    unuse(model)
    assert llama.scaled_dot_product_attention is not plain
    assert make_prompt_cache(other)
    unuse(other)
    assert llama.scaled_dot_product_attention is plain


def test_a_model_that_is_not_used_is_refused_and_one_no_longer_used_fails() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"call pb_kvcache\.mlx\.use\(model\) first"):
        make_prompt_cache(model)
    caches = make_prompt_cache(use(model), budget=40)
    unuse(model)
    model(tokens(60), cache=caches)
    with pytest.raises(RuntimeError, match="layer 0: the attention of the last step did not reach its cache"):
        model(tokens(1), cache=caches)


def test_a_layer_that_cannot_be_served_is_named() -> None:
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    capped = gemma2.Model(
        gemma2.ModelArgs(
            model_type="gemma2", head_dim=16, rms_norm_eps=1e-5, vocab_size=9, num_key_value_heads=2, **args
        )
    )
    with pytest.raises(ValueError, match="none of its modules calls mlx-lm's scaled_dot_product_attention"):
        use(capped)
    with pytest.raises(TypeError, match=r"model: must be an mlx\.nn\.Module"):
        use("a model")


class Changed(llama.Attention):
    """An attention that does one thing that a compressed cache cannot follow."""

    how = ""

    def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is None:
            return super().__call__(x, mask, cache)
        batch, new, _ = x.shape
        queries, keys, values = (
            part(x).reshape(batch, new, heads, -1).transpose(0, 2, 1, 3)
            for part, heads in ((self.q_proj, 4), (self.k_proj, 2), (self.v_proj, 2))
        )
        offset = cache.offset if self.how != "rows" or cache.empty() else cache.held
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        if self.how == "rows":
            cache.held = keys.shape[2]
        if self.how == "keys":
            keys = keys * 1.0
        if self.how == "bias":
            mask = mx.zeros((new, keys.shape[2]))
        options = {"cache": cache, "scale": self.scale, "mask": mask}
        if self.how == "none":
            output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        else:
            output = llama.scaled_dot_product_attention(queries, keys, values, **options)
        if self.how == "twice":
            output = llama.scaled_dot_product_attention(queries, keys, values, **options)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, new, -1))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("rows", "the number of rows is taken for a position"),
        ("keys", "layer 2: it changes keys or values between its cache and its attention"),
        ("bias", "layer 2: its attention has a mask of its own"),
        ("none", "layer 2: its attention does not go through"),
        ("twice", "layer 2: its attention runs more often than its cache is written"),
    ],
)
def test_the_probe_finds_what_cannot_be_followed(how: str, reason: str) -> None:
    model, plain = tiny(), llama.scaled_dot_product_attention
    model.layers[2].self_attn.__class__ = type("Other", (Changed,), {"how": how})
    with pytest.raises(ValueError, match=reason):
        use(model)
    assert llama.scaled_dot_product_attention is plain
    model.layers[2].self_attn.__class__ = type("Same", (Changed,), {"how": "same"})
    unuse(use(model))


def test_a_model_with_sinks_and_sliding_windows_is_served() -> None:
    mx.random.seed(0)
    args = gpt_oss.ModelArgs(
        model_type="gpt_oss",
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
    )
    model = use(gpt_oss.Model(args))
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    assert [type(cache).__name__ for cache in caches] == ["RotatingKVCache", "BudgetedKVCache"] * 2
    close(read(model, tokens(60), caches), read(model, tokens(60), stock.make_prompt_cache(model)))
    assert [caches[1].rows, caches[3].rows] == [20, 20]
    unuse(model)


def test_layers_with_a_sliding_window_keep_their_own_cache() -> None:
    model = use(tiny(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=16))
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    assert [type(cache).__name__ for cache in caches] == ["BudgetedKVCache", "RotatingKVCache"] * 2
    close(read(model, tokens(60), caches), read(model, tokens(60), stock.make_prompt_cache(model)))
    assert [caches[0].rows, caches[2].rows] == [20, 20]
    unuse(model)


# ---- what is refused ----


def test_without_mlx_the_error_names_the_extra(run: Run) -> None:
    script = """
import sys
sys.modules["mlx_lm"] = None
try:
    import pb_kvcache.mlx
except ImportError as error:
    print(error)
"""
    assert "pip install 'pb-kvcache[mlx]'" in run(sys.executable, "-c", script).stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": HeadPlan([[20, 20]] * 4)}, r"plan: is a HeadPlan.*equal rows in all heads.*plan\.layer_plan\(\)"),
        ({"plan": plan(3, 40)}, "plan: has 3 layers, the model has 4"),
        ({"budget": 32}, "budget = 32: must be at least window"),
        ({"selection": "mixed"}, "selection: has score = 'mixed'"),
        ({"selection": Selection(second_hop=0.5)}, r"second_hop = 0\.5, which needs all queries"),
        ({"selection": "best"}, "selection = 'best'"),
        ({"prompt_length": 0}, "prompt_length = 0: must be greater than 0"),
        ({"budget": 40, "fraction": 0.5}, "only one of them"),
        ({"weights": [1, 2]}, "weights: has shape"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_prompt_cache(model, **given)


def test_a_plan_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="plan: must be a LayerPlan"):
        make_prompt_cache(model, plan=[40, 40, 40, 40])


def test_another_batch_and_quantised_rows_are_refused(model: Any) -> None:
    caches = make_prompt_cache(model, budget=40)
    read(model, tokens(60), caches)
    with pytest.raises(ValueError, match="layer 0: the cache holds a batch of 1 and meets one of 2"):
        model(tokens(1, batch=2), cache=caches)
    assert {cache.offset for cache in caches} == {60}
    with pytest.raises(NotImplementedError, match="kv_bits"):
        list(generate_step(tokens(60)[0], model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0))


def test_a_step_that_failed_between_two_layers_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_prompt_cache(model, budget=40)
    read(model, tokens(60), caches)

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(caches[2], "update_and_fetch", fail)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(1), cache=caches)
    with pytest.raises(RuntimeError, match="layer 2 has seen 60 tokens and the first layer 61"):
        model(tokens(1), cache=caches)


def test_attention_that_is_not_finite_names_its_layer(model: Any) -> None:
    model.layers[2].self_attn.k_proj.weight = model.layers[2].self_attn.k_proj.weight * mx.nan
    caches = make_prompt_cache(model, budget=20, selection=SMALL)
    with pytest.raises(ValueError, match="layer 2: q and k"):
        read(model, tokens(60), caches)
