"""Shapes of the full-diffusion models, their bytes and FLOPs, and the floors that follow from them.

Sizes are bytes of a token that live at once in one denoising step, so that the longest canvas of an arm is
(cap - weights - 1 GiB) / bytes per token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec

GIB = 1 << 30
RESERVE_BYTES = GIB
"""What context, workspaces and inputs may take, in the limit of L_max."""
ITEM_BYTES = 2
"""Bytes of a bf16 value."""

LLADA_8B: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12_288,
    "vocab_size": 126_464,
    "embedding_size": 126_464,
    "max_sequence_length": 4096,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "mask_token_id": 126_336,
    "rope": True,
    "layer_norm_type": "rms",
    "block_type": "llama",
    "activation_type": "silu",
    "weight_tying": False,
}
DREAM_7B: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "is_causal": False,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mask_token_id": 151_666,
    "tie_word_embeddings": False,
}
LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "num_hidden_layers": 16,
    "expert_intermediate_size": 1024,
    "dense_intermediate_size": 8192,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "qk_layernorm": True,
    "vocab_size": 157_184,
    "max_position_embeddings": 8192,
    "rope_theta": 50_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "mask_token_id": 156_895,
    "tie_word_embeddings": False,
}
TINY = {"d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "mlp_hidden_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada_8b": LLADA_8B,
    "dream_7b": DREAM_7B,
    "llada_moe": LLADA_MOE,
    # For runs on a CPU, which test the programs and not the models.
    "tiny": {**LLADA_8B, **TINY, "vocab_size": 128, "embedding_size": 128, "mask_token_id": 127},
}


def family_of(config: dict[str, Any]) -> type[Family]:
    """The product's family of a config."""
    return FAMILIES.get(config["architectures"][0])


def model_spec(name: str, *, num_layers: int | None = None) -> ModelSpec:
    """The spec of a model, with `num_layers` layers in place of its own."""
    spec = family_of(CONFIGS[name]).spec(CONFIGS[name])
    return spec if num_layers is None else replace(spec, num_layers=num_layers)


def is_shifted(name: str) -> bool:
    """Whether the row before a place predicts it."""
    return family_of(CONFIGS[name]).logit_shift


def num_masks(length: int, prompt_share: float) -> int:
    """Masks of a canvas whose first rows, `prompt_share` of them, are the prompt; at least one of each."""
    return min(length - 1, max(1, length - round(length * prompt_share)))


def layer_weights(spec: ModelSpec) -> int:
    """Parameters of one layer."""
    return attention_weights(spec) + _ffn_weights(spec, all_experts=True) + _small_weights(spec)


def total_weights(spec: ModelSpec) -> int:
    """Parameters of the model: layers, both tables and the last norm."""
    return spec.num_layers * layer_weights(spec) + 2 * spec.vocab_size * spec.width + spec.width


def attention_weights(spec: ModelSpec) -> int:
    """Parameters of the four projections of attention of one layer, without biases."""
    return spec.width * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)


def _ffn_weights(spec: ModelSpec, *, all_experts: bool) -> int:
    if spec.moe is None:
        return 3 * spec.width * spec.ffn_width
    moe = spec.moe
    experts = moe.num_experts if all_experts else moe.num_chosen
    return 3 * spec.width * moe.ffn_width * experts + spec.width * moe.num_experts


def _small_weights(spec: ModelSpec) -> int:
    biases = spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads) if spec.qkv_bias else 0
    return 2 * spec.width + biases + (2 * spec.head_dim if spec.qk_norm else 0)


def linear_flops(spec: ModelSpec, length: int, wanted: int) -> float:
    """FLOPs of all products with weights in one step: the layers for all rows, the head for wanted rows."""
    per_row = spec.num_layers * (attention_weights(spec) + _ffn_weights(spec, all_experts=False))
    return 2.0 * (per_row * length + spec.width * spec.vocab_size * wanted)


def attention_flops(spec: ModelSpec, length: int) -> float:
    """FLOPs of both products of attention in one step: every row sees all rows."""
    return 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * float(length) ** 2


def live_bytes_per_token(spec: ModelSpec, arm: str, prompt_share: float) -> float:
    """Bytes of a token that an arm has alive at once."""
    x = ITEM_BYTES * spec.width
    q = ITEM_BYTES * spec.num_heads * spec.head_dim
    kv = ITEM_BYTES * spec.num_kv_heads * spec.head_dim
    vocab, masks = spec.vocab_size, 1.0 - prompt_share
    # Gate, its activation and up; with experts, the sorted rows and what is computed from them.
    ffn = ITEM_BYTES * (3 * spec.ffn_width if spec.moe is None else 2 * spec.moe.num_chosen * spec.width)
    heads = {
        "native_fp64": (ITEM_BYTES + 8 + 8) * vocab,
        "native": 2 * ITEM_BYTES * vocab,
        "compile": ITEM_BYTES * vocab,
        "masked": masks * ITEM_BYTES * vocab,
    }
    head = heads.get("masked" if arm == "compile_masked" else arm)
    if head is not None:
        return 2 * x + max(head, ffn)
    planned = {
        "paper": 2 * x + 2 * q + 2 * kv,
        "mosaic": x + max(x, q) + q + 2 * kv,
        "ours": x + 2 * kv,
    }
    return float(planned[arm])


def length_floor(spec: ModelSpec, arm: str, prompt_share: float, cap_gib: float) -> int:
    """The longest canvas that the live bytes of an arm allow under a cap; at least 1."""
    free = cap_gib * GIB - ITEM_BYTES * total_weights(spec) - RESERVE_BYTES
    return max(1, math.floor(free / live_bytes_per_token(spec, arm, prompt_share)))
