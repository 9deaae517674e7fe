"""config.json of released models: the keys that published files have, compact, with values where the loader
looks at them.
"""

from __future__ import annotations

from typing import Any

STOCK: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": False,
    "vocab_size": 151936,
}
WINDOWS: dict[str, Any] = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
QWEN: dict[str, Any] = STOCK | WINDOWS | {"bos_token_id": 151643, "eos_token_id": 151645}
SDAR: dict[str, Any] = {
    "attention_bias": False,
    "attn_implementation": "flex_attention",
    "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
    "debug": False,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "micro_forward": False,
    "skip_checkpoint": False,
    "use_deepep": False,
}
QWEN_EXPERTS: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA3: dict[str, Any] = STOCK | {
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLADA20_MINI: dict[str, Any] = STOCK | {
    "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "max_window_layers": 28,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "topk_group": 4,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": 157184,
}
RELEASED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2.5-7B-Instruct": ("Qwen2ForCausalLM", "qwen2", QWEN | {"sliding_window": 131072}),
    "Qwen3-8B": ("Qwen3ForCausalLM", "qwen3", QWEN | {"head_dim": 128, "attention_bias": False}),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", "qwen3_moe", QWEN | QWEN_EXPERTS),
    "Llama-3.1-8B-Instruct": ("LlamaForCausalLM", "llama", LLAMA3),
    "Mistral-7B-v0.3": ("MistralForCausalLM", "mistral", STOCK | {"bos_token_id": 1, "sliding_window": None}),
    "SDAR-8B-Chat": (
        "SDARForCausalLM",
        "sdar",
        QWEN | SDAR | {"block_size": 4, "mask_token_id": 151669},
    ),
    "SDAR-30B-A3B-Chat": ("SDARMoeForCausalLM", "sdar_moe", QWEN | SDAR | QWEN_EXPERTS),
    "Fast_dLLM_v2_7B": ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", QWEN | {"bd_size": 32}),
    "LLaDA2.0-mini": ("LLaDA2MoeModelLM", "llada2_moe", LLADA20_MINI),
    "LLaDA2.1-mini": ("LLaDA2MoeModelLM", "llada2_moe", LLADA20_MINI | {"sliding_window": 4096}),
    "DMax-Math-16B": ("LLaDA2MoeModelLM", "llada2_moe", LLADA20_MINI | {"_moe_implementation": "fused"}),
}
"""Architecture string, model_type and the other keys, by the model's name."""
