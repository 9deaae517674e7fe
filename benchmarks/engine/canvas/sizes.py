"""Bytes and FLOPs of full-diffusion models, and the floors that follow from them.

Sizes are bytes of a token that live at once in one denoising step, so that the longest canvas of an arm is
(cap - weights - 1 GiB) / bytes per token."""

from __future__ import annotations

import math

from idlm.infer.models.base import ModelSpec

GIB = 1 << 30
RESERVE_BYTES = GIB
"""What context, workspaces and inputs may take, in the limit of L_max."""
ITEM_BYTES = 2
"""Bytes of a bf16 value."""


def num_masks(length: int, prompt_share: float) -> int:
    """Masks of a canvas whose first rows, `prompt_share` of them, are the prompt; at least one of each."""
    return min(length - 1, max(1, length - round(length * prompt_share)))


def layer_weights(spec: ModelSpec) -> int:
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
