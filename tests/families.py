"""Decoder families of transformers as small random models, and the reference that a compressed cache has to equal.

The reference is the untouched model with a stock ``DynamicCache`` that holds everything. Evicted positions are masked
in it, for each layer and KV head, so that it shares neither storage nor masks with the cache that is tested.

``python -m tests.families`` prints the table of docs/transformers.md: run it after a change and paste.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pb_kvcache.transformers import BudgetedCache, use
from pb_kvcache.transformers._layer import BudgetedLayer

from . import reference_select

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
WINDOW, KERNEL = 4, 3

#: Small sizes under every name that configs have for them. A config takes those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": 8,
    # of experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    # of compressed keys
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # of states without keys
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 8,
    "use_mamba_kernels": False,
    # other names
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "rotary_dim": 8,
    "ffn_dim": 96,
    "d_model": 64,
    "num_layers": 4,
    "attention_heads": 4,
    "word_embed_proj_dim": 64,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 256,
}


@dataclass(frozen=True)
class Family:
    """A decoder family: its config, and what becomes of it with the newest release that is tested."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    #: Of SIZES, what its config must not be given.
    without: tuple[str, ...] = ()
    #: Part of the reason that ``use`` gives. Empty: it is served.
    refused: str = ""
    #: Layers that are compressed. None: those that its layer types call full attention, or all four.
    compressed: int | None = None

    @property
    def expected(self) -> int:
        """Return how many layers are compressed."""
        if self.compressed is not None:
            return self.compressed
        types = self.options.get("layer_types", ["attention"] * 4)
        return sum(kind in ("full_attention", "attention") for kind in types)

    def config(self) -> Any:
        """Return the small config. KeyError where the release does not know the family."""
        made = transformers.models.auto.configuration_auto.CONFIG_MAPPING[self.model_type]
        default = made()
        sizes = {name: size for name, size in SIZES.items() if name not in self.without and hasattr(default, name)}
        return made(**{**sizes, **self.options})

    def build(self) -> Any:
        """Return the model, with weights that are large enough for attention to choose and for errors to show."""
        torch.manual_seed(7)
        config = self.config()
        if self.model_type == "mllama_text_model":  # has no class of the auto model
            model = transformers.MllamaForCausalLM(config).eval()
        else:
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in model.parameters():
                if float(parameter.std(correction=0)) < 0.05:  # weights of the default 0.02, and vectors of 0 or 1
                    scale = 0.15 if parameter.dim() >= 2 else 0.05
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return model


EVERY_SECOND = ["linear_attention", "full_attention"] * 2
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

NOT_INTERFACE = "does not go through transformers' attention interface"
NOT_READ = "does not read the keys that the cache returned"
MORE_STATE = "which keeps more than the keys and values of full attention"
NO_HEAD_DIM = ("head_dim",)

#: By model_type. The reasons are those of transformers 5.24.
FAMILIES = {
    family.model_type: family
    for family in (
        Family("afmoe", SLIDING),
        Family("apertus"),
        Family("arcee"),
        Family("aria_text"),
        Family("bamba", {"attn_layer_indices": [1, 3]}, compressed=2),
        Family("bert", {"is_decoder": True}),
        Family("biogpt"),
        Family("bitnet"),
        Family("bloom", refused=NOT_INTERFACE),
        Family("codegen"),
        Family("cohere"),
        Family("cohere2", SLIDING),
        Family("ctrl"),
        Family(
            "dbrx",
            {
                "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
                "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
            },
        ),
        Family("deepseek_v2", {"first_k_dense_replace": 2}, without=NO_HEAD_DIM, refused=NOT_READ),
        Family("deepseek_v3", {"first_k_dense_replace": 2}, without=NO_HEAD_DIM, refused=NOT_READ),
        Family("deepseek_v32", without=NO_HEAD_DIM, refused=MORE_STATE),
        Family("diffllama", refused="its keys are read by 2 attentions a forward"),
        Family("doge", {"sliding_window": None}, refused="its mask says more than causality"),
        Family("dots1", {"n_shared_experts": 1, "sliding_window": None}),
        Family("ernie4_5"),
        Family("ernie4_5_moe"),
        Family("exaone4", SLIDING),
        Family("falcon", without=NO_HEAD_DIM, refused=NOT_READ),
        Family("falcon_h1", {"mamba_d_ssm": 128}, refused=MORE_STATE),
        Family("flex_olmo"),
        Family("gemma"),
        Family("gemma2", SLIDING),
        Family("gemma3_text", SLIDING),
        Family(
            "gemma3n_text",
            {
                **SLIDING,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 128,
                "hidden_size_per_layer_input": 8,
                "activation_sparsity_pattern": None,
            },
            refused="its keys are read by 2 attentions a forward",
        ),
        Family(
            "gemma4_text",
            {
                **SLIDING,
                "vocab_size_per_layer_input": 128,
                "hidden_size_per_layer_input": 8,
                "num_global_key_value_heads": 2,
                "global_head_dim": 16,
            },
            without=NO_HEAD_DIM,
        ),
        Family("glm"),
        Family("glm4"),
        Family("glm4_moe"),
        Family("gpt2"),
        Family("gpt_bigcode"),
        Family("gpt_neo", {"attention_types": [[["global", "local"], 2]], "window_size": 8}, refused=NOT_INTERFACE),
        Family("gpt_neox"),
        Family("gpt_neox_japanese", refused=NOT_INTERFACE),
        Family("gpt_oss", SLIDING),
        Family("gptj"),
        Family("granite"),
        Family("granitemoe"),
        Family("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}),
        Family("helium"),
        Family("hunyuan_v1_dense"),
        Family("hunyuan_v1_moe"),
        Family("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, compressed=2),
        Family("jetmoe", refused=NOT_READ),
        Family(
            "kimi_linear",
            {"layer_types": EVERY_SECOND, "num_experts": 4, "linear_head_dim": 8, "linear_num_heads": 2},
            refused=NOT_READ,
        ),
        Family("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
        Family("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2}),
        Family("llama"),
        Family("llama4_text", {"layer_types": ["chunked_attention", "full_attention"] * 2}),
        Family(
            "longcat_flash",
            {
                "head_dim": 8,
                "num_hidden_layers": 2,
                "ffn_hidden_size": 96,
                "zero_expert_num": 2,
                "expert_ffn_hidden_size": 32,
                "moe_topk": 2,
            },
            without=("num_hidden_layers",),
            refused=NOT_READ,
        ),
        Family("mamba", refused=NOT_INTERFACE),
        Family("minicpm3", without=NO_HEAD_DIM, refused=NOT_READ),
        Family("minimax", refused="MiniMax uses cache of its own"),
        Family("minimax_m2"),
        Family("ministral", SLIDING),
        Family("ministral3", {"sliding_window": None}),
        Family("mistral", {"sliding_window": None}),
        Family("mixtral", {"sliding_window": None}),
        Family(
            "mllama_text_model",
            {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            compressed=3,
        ),
        Family("modernbert-decoder", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        Family("mpt", refused=NOT_INTERFACE),
        Family("nanochat"),
        Family("nemotron"),
        Family(
            "nemotron_h",
            {
                "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
                "n_groups": 1,
                "moe_shared_expert_intermediate_size": 32,
            },
        ),
        Family("olmo"),
        Family("olmo2"),
        Family("olmo3", SLIDING),
        Family("olmo_hybrid", {"layer_types": EVERY_SECOND}),
        Family("olmoe"),
        Family("openai-gpt", refused=NOT_INTERFACE),
        Family("opt"),
        Family("persimmon"),
        Family("phi"),
        Family("phi3", {"sliding_window": None}),
        Family("phimoe", {"sliding_window": None}),
        Family("qwen2"),
        Family("qwen2_moe"),
        Family("qwen3"),
        Family("qwen3_5_moe_text", {"layer_types": EVERY_SECOND}),
        Family("qwen3_5_text", {"layer_types": EVERY_SECOND}),
        Family("qwen3_moe"),
        Family("qwen3_next", {"layer_types": EVERY_SECOND}),
        Family("recurrent_gemma", compressed=0),
        Family("seed_oss"),
        Family("smollm3"),
        Family("stablelm"),
        Family("starcoder2", {"sliding_window": None}),
        Family("vaultgemma", SLIDING),
        Family("xglm", refused=NOT_INTERFACE),
        Family("youtu", without=NO_HEAD_DIM, refused=NOT_READ),
        Family(
            "zamba",
            {
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
                "attention_hidden_size": 128,
                "attention_head_dim": 32,
                "mamba_expand": 2,
            },
            without=("layer_types",),
            refused=MORE_STATE,
        ),
        Family(
            "zamba2",
            {
                "layer_types": ["linear_attention", "hybrid"] * 2,
                "mamba_headdim": 32,
                "mamba_ngroups": 1,
                "n_mamba_heads": 4,
                "attention_head_dim": 32,
            },
            refused=MORE_STATE,
        ),
    )
}


# ---- the reference ----


class Whole(DynamicCache):
    """The stock cache, which notes the layer that attention is about to read, and what of it is masked."""

    reading: Whole | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layer = -1
        #: Columns that every KV head may read, ``(batch, kv_heads, columns)``, for each layer that is compressed.
        self.kept: dict[int, torch.Tensor] = {}
        #: What the prompt's last queries gave to every column, ``(batch, heads, WINDOW, columns)``, by eager attention.
        self.weights: dict[int, torch.Tensor] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _masked(stock: Any, additive: bool) -> Any:
    """Return an attention function that masks what the cache in reading says, over the mask that the model gives."""

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        mask = attention_mask
        kept = Whole.reading.kept.get(Whole.reading.layer) if Whole.reading is not None else None
        if kept is None:
            output = stock(module, query, key, value, mask, **kwargs)
            if additive and Whole.reading is not None:
                Whole.reading.weights[Whole.reading.layer] = output[1][:, :, -WINDOW:]
            return output
        new, columns = query.shape[2], key.shape[2]
        allowed = kept.repeat_interleave(query.shape[1] // kept.shape[1], dim=1)[:, :, None]
        if mask is None:
            mask = torch.ones(new, columns, dtype=torch.bool).tril_(columns - new)[None, None]
            mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min) if additive else mask
        if mask.dtype == torch.bool:
            mask = mask & allowed
        else:
            mask = mask.expand(-1, allowed.shape[1], -1, -1).masked_fill(~allowed, torch.finfo(query.dtype).min)
        kwargs.pop("is_causal", None)
        return stock(module, query, key, value, mask, **kwargs)

    return forward


@contextlib.contextmanager
def _reading(model: Any, cache: Whole) -> Iterator[None]:
    """Let the untouched model's own attention read `cache` with its masks."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = sys.modules[type(model).__module__]
    eager = getattr(module, "eager_attention_forward", None)
    Whole.reading = cache
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _masked(sdpa, additive=False)
    if eager is not None:
        module.eager_attention_forward = _masked(eager, additive=True)
    try:
        yield
    finally:
        Whole.reading = None
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
        if eager is not None:
            module.eager_attention_forward = eager


def forward(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits after each of `ids`, ``(batch, new, vocabulary)``."""
    given: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if not bool(mask.all()):
        positions = mask.cumsum(dim=1).sub(1).clamp(min=0)
        given |= {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return model(ids, **given).logits


@dataclass
class Pair:
    """A model with a compressed cache and its untouched twin with a whole one, which go through the same tokens."""

    model: Any
    twin: Any
    cache: BudgetedCache
    whole: Whole
    mask: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # of the tokens seen so far
    worst: float = 0.0
    scale: float = 0.0

    def kept(self, new: int) -> dict[int, torch.Tensor]:
        """Return what every head may read in a call with `new` tokens: what it holds, and these."""
        seen = self.mask.shape[1]
        padding = seen - self.mask.sum(dim=1).numpy()
        found = {}
        for layer in self.cache.compressed_layers:
            positions = self.cache.positions(layer)
            kept = np.zeros((*positions.shape[:2], seen + new), bool)
            row, head, slot = np.nonzero(positions >= 0)
            kept[row, head, positions[row, head, slot] + padding[row]] = True
            kept[:, :, seen:] = True
            found[layer] = torch.from_numpy(kept)
        return found

    def call(self, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens through both, note how far their next tokens' logits are apart, and return the compressed ones."""
        self.whole.kept = self.kept(ids.shape[1])
        self.mask = torch.cat([self.mask, torch.ones(ids.shape, dtype=torch.long)], dim=1)
        return self._both(ids)

    def prompt(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the prompt through both. Only the logits after it count."""
        self.mask = mask
        return self._both(ids, last=1)

    def _both(self, ids: torch.Tensor, last: int = 0) -> torch.Tensor:
        own = forward(self.model, ids, self.cache, self.mask)[:, -last:]
        with _reading(self.twin, self.whole):
            asked = forward(self.twin, ids, self.whole, self.mask)[:, -last:]
        self.worst = max(self.worst, float((own - asked).abs().max()))
        self.scale = max(self.scale, float(asked.abs().max()))
        return own


# ---- the comparison ----


@dataclass
class Compared:
    """What became of a family."""

    class_name: str
    #: Why it is refused. Empty: it is served.
    refused: str = ""
    #: Layers that are compressed, of how many.
    compressed: int = 0
    num_layers: int = 0
    #: Largest difference of a next token's logits from the masked whole cache, and the largest logit.
    worst: float = 0.0
    scale: float = 0.0
    #: Largest difference between a call with several tokens and one token at a time, under hold.
    at_once: float = 0.0
    #: The same in the untouched model, where it has states: some start anew, and then there is nothing to compare.
    stock_at_once: float = 0.0
    #: Largest difference from DynamicCache where everything fits.
    short: float = 0.0
    #: How far compression itself moves the logits: what the comparison could miss.
    moved: float = 0.0
    positions_agree: bool = True
    #: Heads that did not keep what the model's own attention weights choose.
    chosen: int = 0


def compare(family: Family) -> Compared:
    """Run a family through every case."""
    twin = family.build()
    model = copy.deepcopy(twin)
    found = Compared(type(model).__name__)
    try:
        use(model)
    except ValueError as error:
        found.refused = str(error)
        return found
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(2, 100, (2, 60), generator=generator)
    for padding in ([0], [9, 0]):
        batch = ids[: len(padding)]
        mask = (torch.arange(60) >= torch.tensor(padding)[:, None]).long()
        for decode in ("grow", "hold"):
            options: dict[str, Any] = {"window": WINDOW, "kernel": KERNEL, "decode": decode}
            pair = Pair(model, twin, BudgetedCache(model.config, budget=14, ratio=2.5, **options), Whole(twin.config))
            found.compressed, found.num_layers = len(pair.cache.compressed_layers), len(pair.cache.layers)
            _longer(found, pair, batch, mask)
        _shorter(found, model, twin, batch, mask)
    return found


def _longer(found: Compared, pair: Pair, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Run a prompt of 40 tokens, three generated ones, a second turn of four, another one."""
    pair.prompt(ids[:, :40], mask[:, :40])
    if not pair.cache._budgets.hold:
        _chosen(found, pair, ids[:, :40], mask[:, :40])
    if not found.moved:
        whole = copy.deepcopy(pair.whole)
        one_more = mask[:, :41]
        found.moved = float(
            (
                forward(pair.twin, ids[:, 40:41], whole, one_more)
                - forward(pair.model, ids[:, 40:41], pair.cache.copy(), one_more)
            )
            .abs()
            .max()
        )
    for column in (40, 41, 42):
        pair.call(ids[:, column : column + 1])
    turn = ids[:, 43:47]
    if pair.cache._budgets.hold:
        # What is held changes with every token, so the reference takes them one by one.
        at_once = pair.cache.copy()
        one_by_one = torch.cat([pair.call(turn[:, i : i + 1]) for i in range(4)], dim=1)
        _restarts(found, pair, ids[:, :47], mask[:, :47])
        if found.compressed and found.stock_at_once < 1e-4:
            together = forward(pair.model, turn, at_once, mask[:, :47])
            found.at_once = max(found.at_once, float((together - one_by_one).abs().max()))
            found.positions_agree &= all(
                np.array_equal(at_once.positions(layer), pair.cache.positions(layer))
                for layer in pair.cache.compressed_layers
            )
    else:
        pair.call(turn)
    pair.call(ids[:, 47:48])
    found.worst, found.scale = max(found.worst, pair.worst), max(found.scale, pair.scale)


def _restarts(found: Compared, pair: Pair, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Note what a call with several tokens changes in the untouched model: some states start anew with each call."""
    if not found.compressed or all(isinstance(layer, (DynamicLayer, BudgetedLayer)) for layer in pair.cache.layers):
        return
    stock = DynamicCache(config=pair.twin.config)
    forward(pair.twin, ids[:, :43], stock, mask[:, :43])
    other = copy.deepcopy(stock)
    together = forward(pair.twin, ids[:, 43:], stock, mask)
    one_by_one = [forward(pair.twin, ids[:, i : i + 1], other, mask[:, : i + 1]) for i in range(43, 47)]
    found.stock_at_once = max(found.stock_at_once, float((together - torch.cat(one_by_one, dim=1)).abs().max()))


def _chosen(found: Compared, pair: Pair, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Choose once more, slowly, from what the untouched model's own eager attention gave to the prompt."""
    eager = copy.deepcopy(pair.twin)
    eager.set_attn_implementation("eager")
    whole = Whole(eager.config)
    with _reading(eager, whole):
        forward(eager, ids, whole, mask)
    for layer in pair.cache.compressed_layers:
        positions = pair.cache.positions(layer)
        budgets = pair.cache.layers[layer].decided
        for row, weights in enumerate(whole.weights[layer]):
            own = weights[:, :, mask[row].bool()].numpy()
            asked = reference_select.select(own, int(budgets[row]), positions.shape[1], WINDOW, KERNEL)
            for head, expected in enumerate(asked):
                kept = positions[row, head]
                found.chosen += not np.array_equal(kept[kept >= 0], expected)


def _shorter(found: Compared, model: Any, twin: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Run a prompt of 20 tokens that every budget holds, and two generated ones."""
    cache = BudgetedCache(model.config, budget=24, window=WINDOW, kernel=KERNEL)
    stock = DynamicCache(config=twin.config)
    for first, end in ((0, 20), (20, 21), (21, 22)):
        own, asked = (
            forward(one, ids[:, first:end], held, mask[:, :end])[:, -1] for one, held in ((model, cache), (twin, stock))
        )
        found.short = max(found.short, float((own - asked).abs().max()))


def reason(refused: str) -> str:
    """Return the part of a refusal that says why."""
    text = refused.removeprefix("model: ").split("cannot be served: ")[-1].split("; a newer")[0]
    return text.split("TypeError: ")[-1].split("ValueError: ")[-1].split(". use(model")[0].rstrip(".")


def row(name: str, found: Compared) -> str:
    """Return a family's line of the table."""
    if found.refused:
        return f"| {name} | {found.class_name} | refused: {reason(found.refused)} | | | |"
    outcome = "served" if found.compressed else "works, nothing to compress"
    layers = f"{found.compressed} of {found.num_layers}"
    return f"| {name} | {found.class_name} | {outcome} | {layers} | {found.worst:.1e} | {found.scale:.1f} |"


def main() -> None:
    """Print the table, and the worst figures."""
    print("| family | class | outcome | layers compressed | largest difference | largest logit |")
    print("|---|---|---|---|---|---|")
    served, worst = 0, 0.0
    for name, family in FAMILIES.items():
        try:
            found = compare(family)
        except Exception as error:  # of a release that does not know it, or of ours: the table shows it
            text = " ".join(str(error).split())[:120]
            print(f"| {name} | | {type(error).__name__}: {text} | | | |", flush=True)
            continue
        print(row(name, found), flush=True)
        served += found.compressed > 0
        worst = max(worst, found.worst / (found.scale or 1))
    version = transformers.__version__
    print(f"\n{served} served, largest difference {worst:.2g} of the largest logit, transformers {version}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()
