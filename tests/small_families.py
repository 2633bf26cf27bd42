"""Small models of many families, and what each of their layers caches, worked out by hand from the configuration.

``(elements of a position, window)`` a layer, ``NONE`` for a layer that holds no keys and values of the prompt. Two KV
heads of 16 elements, keys and values: 64.
"""

from __future__ import annotations

from typing import Any

B: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
GEMMA4 = B | {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 16,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
}
NONE = (0, None)
HALF = (64, None)

FAMILIES: dict[str, tuple[dict[str, Any], list[tuple[int, int | None]]]] = {
    # One KV head whatever num_kv_heads says, or all of them.
    "falcon, multi-query": (B | {"model_type": "falcon", "multi_query": True}, [(32, None)] * 4),
    "falcon, multi-head": (B | {"model_type": "falcon", "multi_query": False}, [(128, None)] * 4),
    "gpt_bigcode": (
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        [(32, None)] * 2,
    ),
    # Latent attention: the latent vector of 16, and a rotary key of 8 for all heads.
    "deepseek_v3": (B | EXPERTS | LATENT | {"model_type": "deepseek_v3"}, [(24, None)] * 4),
    # And an index key of 16.
    "deepseek_v32": (
        B
        | EXPERTS
        | LATENT
        | {"model_type": "deepseek_v32", "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
        [(40, None)] * 4,
    ),
    # Hybrids.
    "lfm2": (B | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}, [NONE, HALF] * 2),
    "jamba": (B | EXPERTS | {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}, [NONE, HALF] * 2),
    "bamba": (B | MAMBA | {"model_type": "bamba", "attn_layer_indices": [1, 3]}, [NONE, HALF] * 2),
    "granitemoehybrid": (
        B | EXPERTS | MAMBA | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2},
        [NONE, HALF] * 2,
    ),
    "qwen3_next": (B | EXPERTS | {"model_type": "qwen3_next", "head_dim": 16}, [NONE] * 3 + [HALF]),
    "nemotron_h": (
        B | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M", "head_dim": 16},
        [NONE, HALF, NONE, NONE],
    ),
    "falcon_h1": (
        B
        | {
            "model_type": "falcon_h1",
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        [HALF] * 4,
    ),
    "recurrent_gemma": (
        B | {"model_type": "recurrent_gemma", "attention_window_size": 16, "lru_width": 64},
        [NONE, NONE, (64, 16), NONE],
    ),
    # Layers that share keys and values, and a member that is there and shares nothing.
    "gemma4, sharing none": (GEMMA4 | {"num_kv_shared_layers": 0}, [(64, 8), (128, None)] * 2),
    "gemma4, sharing two": (GEMMA4 | {"num_kv_shared_layers": 2}, [(64, 8), (128, None), NONE, NONE]),
    "gemma3n": (
        B
        | {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "sliding_window": 8,
            "intermediate_size": [128] * 5,
            "activation_sparsity_pattern": [0.5] * 5,
        },
        [(64, 8), HALF, (64, 8), NONE, NONE],
    ),
    # A cross-attention layer never sees the prompt.
    "mllama": (
        {
            "model_type": "mllama",
            "text_config": B | {"model_type": "mllama_text_model", "cross_attention_layers": [1]},
            "vision_config": VISION,
        },
        [HALF, NONE, HALF, HALF],
    ),
    # Windows and chunks.
    "gpt_oss": (
        B | EXPERTS | {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 16},
        [(64, 16), HALF] * 2,
    ),
    "cohere2": (B | {"model_type": "cohere2", "sliding_window": 16}, [(64, 16)] * 3 + [HALF]),
    "llama4": (
        B | EXPERTS | {"model_type": "llama4_text", "head_dim": 16, "attention_chunk_size": 16},
        [(64, 16)] * 3 + [HALF],
    ),
    # Other names of the same members.
    "opt": (
        {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
        | {"word_embed_proj_dim": 64, "vocab_size": 128},
        [(128, None)] * 2,
    ),
    "bloom": (
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        [(128, None)] * 2,
    ),
    "mpt": ({"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128}, [(128, None)] * 2),
    "gpt_neox": (B | {"model_type": "gpt_neox"}, [(128, None)] * 4),
    # Plain ones.
    "stablelm": (B | {"model_type": "stablelm"}, [HALF] * 4),
    "olmo2": (B | {"model_type": "olmo2"}, [HALF] * 4),
    "qwen2_moe": (B | EXPERTS | {"model_type": "qwen2_moe"}, [HALF] * 4),
    "glm4_moe": (B | EXPERTS | {"model_type": "glm4_moe", "head_dim": 16}, [HALF] * 4),
}
