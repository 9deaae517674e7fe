"""Shapes of models with experts, for `harness.random_model`: their architecture and config."""

from __future__ import annotations

from typing import Any

LLADA2: dict[str, Any] = {
    "architecture": "LLaDA2MoeModelLM",
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
}
MOE_MODELS: dict[str, dict[str, Any]] = {
    # Released with 131,072 positions; the frequencies do not change the time.
    "llada22_mini": LLADA2
    | {
        "num_hidden_layers": 20,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 157_184,
        "max_position_embeddings": 131_072,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "topk_group": 4,
        "expert_capacity": 48,
        "block_size": 32,
    },
    "tiny_llada22": LLADA2
    | {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "expert_capacity": 4,
        "block_size": 8,
    },
}
