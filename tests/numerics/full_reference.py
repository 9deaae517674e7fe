"""Full-diffusion families as their papers and published code define them: slow, fp32, one canvas at a time.

Written from the tensors of a checkpoint by their true names, with no code of the product. Shapes: L
positions, D width, N heads, H head dim, V vocabulary."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
KV = list[tuple[Tensor, Tensor]]
"""Of every layer the keys and values [L, K, H] of all positions, as the last pass over each has left them."""
LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "vocab_size": 44,
    "embedding_size": 48,
    "max_sequence_length": 64,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "mask_token_id": 47,
    "eos_token_id": 5,
    "rope": True,
    "rope_full_precision": True,
    "layer_norm_type": "rms",
    "block_type": "llama",
    "activation_type": "silu",
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "scale_logits": False,
    "weight_tying": False,
    "block_group_size": 1,
}
DREAM: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "is_causal": False,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 48,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mask_token_id": 47,
    "eos_token_id": 5,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "expert_intermediate_size": 24,
    "dense_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_layer_freq": [1, 1],
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "qk_layernorm": True,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "mask_token_id": 47,
    "eos_token_id": 5,
    "tie_word_embeddings": False,
}
CONFIGS = {"llada": LLADA, "dream": DREAM, "llada_moe": LLADA_MOE}


def random_tensors(kind: str, *, seed: int = 0, sharpness: float = 3.0) -> Tensors:
    """All tensors of a checkpoint of the family, under the names of the published ones."""
    config, generator = CONFIGS[kind], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    def gain(size: int) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=generator)

    width = config.get("d_model") or config["hidden_size"]
    heads = config.get("n_heads") or config["num_attention_heads"]
    kv_heads = config.get("n_kv_heads") or config["num_key_value_heads"]
    head_dim, rows = width // heads, config.get("embedding_size") or config["vocab_size"]
    layers = config.get("n_layers") or config["num_hidden_layers"]
    tensors: Tensors = {}
    if kind == "llada":
        root, ffn = "model.transformer.", config["mlp_hidden_size"]
        tensors[f"{root}wte.weight"] = torch.randn(rows, width, generator=generator)
        for number in range(layers):
            block = f"{root}blocks.{number}."
            tensors[f"{block}attn_norm.weight"] = gain(width)
            tensors[f"{block}ff_norm.weight"] = gain(width)
            for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
                tensors[f"{block}{name}.weight"] = 2 * normal(width, width)
            for name in ("ff_proj", "up_proj"):
                tensors[f"{block}{name}.weight"] = 2 * normal(ffn, width)
            tensors[f"{block}ff_out.weight"] = 2 * normal(width, ffn)
        tensors[f"{root}ln_f.weight"] = gain(width)
        tensors[f"{root}ff_out.weight"] = sharpness * normal(rows, width)
        return tensors
    tensors["model.embed_tokens.weight"] = torch.randn(rows, width, generator=generator)
    for number in range(layers):
        layer = f"model.layers.{number}."
        tensors[f"{layer}input_layernorm.weight"] = gain(width)
        tensors[f"{layer}post_attention_layernorm.weight"] = gain(width)
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = 2 * normal(size * head_dim, width)
            if kind == "dream":
                tensors[f"{layer}self_attn.{name}_proj.bias"] = normal(size * head_dim)
        tensors[f"{layer}self_attn.o_proj.weight"] = 2 * normal(width, heads * head_dim)
        if kind == "llada_moe":
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}self_attn.{name}.weight"] = gain(head_dim)
            tensors[f"{layer}mlp.gate.weight"] = 3 * normal(config["num_experts"], width)
            ffn = config["expert_intermediate_size"]
            prefixes = [f"{layer}mlp.experts.{expert}." for expert in range(config["num_experts"])]
        else:
            ffn, prefixes = config["intermediate_size"], [f"{layer}mlp."]
        for prefix in prefixes:
            for name in ("gate_proj", "up_proj"):
                tensors[f"{prefix}{name}.weight"] = 2 * normal(ffn, width)
            tensors[f"{prefix}down_proj.weight"] = 2 * normal(width, ffn)
    tensors["model.norm.weight"] = gain(width)
    tensors["lm_head.weight"] = sharpness * normal(rows, width)
    return tensors


def logits(
    kind: str,
    tensors: Tensors,
    token_ids: list[int],
    *,
    fed: list[int] | None = None,
    kv: KV | None = None,
    normalises: bool = False,
) -> Tensor:
    """Logits [L, V] of all positions of a canvas, each of which sees all others; not shifted.

    `fed`: only these positions are computed; they see, of the others, the keys and values in `kv`, which the
    pass updates in place (an empty one needs a pass over all positions). Logits of the others are NaN.
    `normalises`: the planted mistake of a router that divides its weights by their sum."""
    fed = list(range(len(token_ids))) if fed is None else fed
    moe = partial(_llada_moe, normalises=normalises)
    compute = {"llada": _llada, "dream": _dream, "llada_moe": moe}[kind]
    fed_R = torch.tensor(fed)
    found_RV = compute(tensors, torch.tensor(token_ids)[fed_R], fed_R, [] if kv is None else kv)
    logits_LV = torch.full((len(token_ids), found_RV.shape[1]), torch.nan)
    logits_LV[fed_R] = found_RV
    return logits_LV


def _stored(kv: KV, number: int, fed_L: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions, after those of the fed ones are stored."""
    if len(kv) == number:
        kv.append((k_LKH.clone(), v_LKH.clone()))
    for all_LKH, new_LKH in zip(kv[number], (k_LKH, v_LKH), strict=True):
        for row, index in enumerate(fed_L.tolist()):
            all_LKH[index] = new_LKH[row]
    return kv[number]


def _llada(tensors: Tensors, ids_L: Tensor, fed_L: Tensor, kv: KV) -> Tensor:
    root = "model.transformer."
    x_LD = tensors[f"{root}wte.weight"][ids_L]
    for number in range(LLADA["n_layers"]):
        one = {
            name.removeprefix(f"{root}blocks.{number}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{root}blocks.{number}.")
        }
        normed_LD = _norm(x_LD, one["attn_norm.weight"], 1e-5)
        q_LNH, k_LNH, v_LNH = (
            (normed_LD @ one[f"{name}_proj.weight"].T).view(len(ids_L), 4, 8) for name in ("q", "k", "v")
        )
        q_LNH, k_LNH = _rotate(q_LNH, fed_L, 5e5), _rotate(k_LNH, fed_L, 5e5)
        k_LNH, v_LNH = _stored(kv, number, fed_L, k_LNH, v_LNH)
        x_LD = x_LD + _attention(q_LNH, k_LNH, v_LNH) @ one["attn_out.weight"].T
        normed_LD = _norm(x_LD, one["ff_norm.weight"], 1e-5)
        x_LD = x_LD + _swiglu(normed_LD, one["ff_proj.weight"], one["up_proj.weight"], one["ff_out.weight"])
    return _norm(x_LD, tensors[f"{root}ln_f.weight"], 1e-5) @ tensors[f"{root}ff_out.weight"].T


def _dream(tensors: Tensors, ids_L: Tensor, fed_L: Tensor, kv: KV) -> Tensor:
    x_LD = tensors["model.embed_tokens.weight"][ids_L]
    for number in range(DREAM["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        normed_LD = _norm(x_LD, tensors[f"{layer}input_layernorm.weight"], 1e-6)

        def project(name: str, heads: int, normed_LD: Tensor = normed_LD, layer: str = layer) -> Tensor:
            weight, bias = (tensors[f"{layer}self_attn.{name}_proj.{part}"] for part in ("weight", "bias"))
            return (normed_LD @ weight.T + bias).view(len(normed_LD), heads, 8)

        q_LNH, k_LKH, v_LKH = project("q", 4), project("k", 2), project("v", 2)
        k_LKH, v_LKH = _stored(kv, number, fed_L, _rotate(k_LKH, fed_L, 1e6), v_LKH)
        k_LNH, v_LNH = (each_LKH.repeat_interleave(2, dim=1) for each_LKH in (k_LKH, v_LKH))
        attended = _attention(_rotate(q_LNH, fed_L, 1e6), k_LNH, v_LNH)
        x_LD = x_LD + attended @ tensors[f"{layer}self_attn.o_proj.weight"].T
        normed_LD = _norm(x_LD, tensors[f"{layer}post_attention_layernorm.weight"], 1e-6)
        weights = (tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x_LD = x_LD + _swiglu(normed_LD, *weights)
    return _norm(x_LD, tensors["model.norm.weight"], 1e-6) @ tensors["lm_head.weight"].T


def _llada_moe(tensors: Tensors, ids_L: Tensor, fed_L: Tensor, kv: KV, *, normalises: bool) -> Tensor:
    x_LD = tensors["model.embed_tokens.weight"][ids_L]
    for number in range(LLADA_MOE["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        normed_LD = _norm(x_LD, tensors[f"{layer}input_layernorm.weight"], 1e-5)
        q_LNH, k_LNH, v_LNH = (
            (normed_LD @ tensors[f"{layer}self_attn.{name}_proj.weight"].T).view(len(ids_L), 4, 8)
            for name in ("q", "k", "v")
        )
        q_LNH = _rotate(_norm(q_LNH, tensors[f"{layer}self_attn.q_norm.weight"], 1e-5), fed_L, 5e4)
        k_LNH = _rotate(_norm(k_LNH, tensors[f"{layer}self_attn.k_norm.weight"], 1e-5), fed_L, 5e4)
        k_LNH, v_LNH = _stored(kv, number, fed_L, k_LNH, v_LNH)
        x_LD = x_LD + _attention(q_LNH, k_LNH, v_LNH) @ tensors[f"{layer}self_attn.o_proj.weight"].T
        normed_LD = _norm(x_LD, tensors[f"{layer}post_attention_layernorm.weight"], 1e-5)
        probs_LE = (normed_LD @ tensors[f"{layer}mlp.gate.weight"].T).softmax(-1)
        weights_LC, experts_LC = probs_LE.topk(LLADA_MOE["num_experts_per_tok"], dim=-1)
        if normalises:
            weights_LC = weights_LC / weights_LC.sum(-1, keepdim=True)
        out_LD = torch.zeros_like(x_LD)
        for index in range(len(ids_L)):
            for weight, expert in zip(weights_LC[index], experts_LC[index].tolist(), strict=True):
                prefix = f"{layer}mlp.experts.{expert}."
                parts = (tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
                out_LD[index] += weight * _swiglu(normed_LD[index], *parts)
        x_LD = x_LD + out_LD
    return _norm(x_LD, tensors["model.norm.weight"], 1e-5) @ tensors["lm_head.weight"].T


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def _rotate(x_LNH: Tensor, positions_L: Tensor, theta: float) -> Tensor:
    half = x_LNH.shape[-1] // 2
    angles = positions_L[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_LNH[..., :half], x_LNH[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attention(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor) -> Tensor:
    scores = torch.einsum("qnh,knh->nqk", q_LNH, k_LNH) / math.sqrt(q_LNH.shape[-1])
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v_LNH).flatten(1)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
