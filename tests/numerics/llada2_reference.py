"""LLaDA2 in plain PyTorch, written from its published description; deliberately slow, row by row. With
`expert_capacity` in the config it is LLaDA2.2, whose blocks admit experts before their rows choose.

Shares nothing with the engine. `fault` plants one of the known misreadings of a checkpoint.
L sequence length, N query heads, K KV heads, H head dim, D width, V vocabulary, E experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

FAULTS = (
    "qkv_interleaved",
    "rotary_full",
    "theta_10000",
    "router_bias_in_weights",
    "router_softmax",
    "router_unscaled",
    "router_group_maximum",
    "router_ignores_groups",
    "router_not_normalised",
    "router_without_bias",
    "shared_scaled",
    "no_qk_norm",
)

BLOCK_FAULTS = (
    "capacity_ignored",
    "capacity_of_the_sequence",
    "capacity_without_bias",
    "capacity_by_the_mean",
    "capacity_and_groups",
    "capacity_one_more",
)
"""Misreadings of LLaDA2.2."""

CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "rms_norm_eps": 1e-6,
    "rope_theta": 600.0,
    "partial_rotary_factor": 2 / 3,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "use_qkv_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "mask_token_id": 90,
    "dtype": "float32",
}
CONFIG22 = CONFIG | {"expert_capacity": 5, "block_size": 4, "delete_token_id": 91, "split_token_id": 92}


def random_tensors(config: dict[str, Any], *, has_qk_norm: bool = True) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its published name; norms away from 1, expert biases away from 0."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int, std: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    width, head_dim, num_experts = config["hidden_size"], config["head_dim"], config["num_experts"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {
        "model.word_embeddings.weight": draw(config["vocab_size"], width, std=1.0),
        "model.norm.weight": norm(width),
        "lm_head.weight": draw(config["vocab_size"], width),
    }

    def mlp(prefix: str, ffn: int) -> None:
        found[f"{prefix}.gate_proj.weight"] = draw(ffn, width)
        found[f"{prefix}.up_proj.weight"] = draw(ffn, width)
        found[f"{prefix}.down_proj.weight"] = draw(width, ffn)

    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found[f"{layer}.input_layernorm.weight"] = norm(width)
        found[f"{layer}.post_attention_layernorm.weight"] = norm(width)
        found[f"{layer}.attention.query_key_value.weight"] = draw((heads + 2 * kv_heads) * head_dim, width)
        found[f"{layer}.attention.dense.weight"] = draw(width, heads * head_dim)
        if has_qk_norm:
            found[f"{layer}.attention.query_layernorm.weight"] = norm(head_dim) * 2
            found[f"{layer}.attention.key_layernorm.weight"] = norm(head_dim) * 2
        if config["use_qkv_bias"]:
            found[f"{layer}.attention.query_key_value.bias"] = draw((heads + 2 * kv_heads) * head_dim)
        if number < config["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        found[f"{layer}.mlp.gate.weight"] = draw(num_experts, width)
        found[f"{layer}.mlp.gate.expert_bias"] = draw(num_experts, std=0.2)
        for expert in range(num_experts):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"] * config["num_shared_experts"])
    return found


class Reference:
    """`__call__` gives the logits [L, V] of a whole sequence."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], fault: str = "") -> None:
        assert fault in ("", *FAULTS, *BLOCK_FAULTS)
        self.config, self.tensors, self.fault = config, tensors, fault

    def __call__(self, token_ids: list[int], visible_LL: Tensor) -> Tensor:
        x_LD = self.tensors["model.word_embeddings.weight"][token_ids]
        for number in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x_LD = x_LD + self.attention(layer, self.norm(x_LD, f"{layer}.input_layernorm"), visible_LL)
            normed_LD = self.norm(x_LD, f"{layer}.post_attention_layernorm")
            if number < self.config["first_k_dense_replace"]:
                x_LD = x_LD + self.mlp(f"{layer}.mlp", normed_LD)
            else:
                prefix = f"{layer}.mlp"
                rows = [
                    self.experts(prefix, row_D, self.admitted(prefix, normed_LD, index))
                    for index, row_D in enumerate(normed_LD)
                ]
                x_LD = x_LD + torch.stack(rows)
        return self.norm(x_LD, "model.norm") @ self.tensors["lm_head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = (x.pow(2).mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / size * self.tensors[f"{name}.weight"]

    def attention(self, layer: str, x_LD: Tensor, visible_LL: Tensor) -> Tensor:
        config, length = self.config, len(x_LD)
        heads, kv_heads, size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        name = f"{layer}.attention.query_key_value"
        fused = x_LD @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(1))
        fused = fused.view(length, heads + 2 * kv_heads, size)
        if self.fault == "qkv_interleaved":
            groups = fused.view(length, kv_heads, heads // kv_heads + 2, size)
            q, k, v = groups[:, :, :-2].reshape(length, heads, size), groups[:, :, -2], groups[:, :, -1]
        else:
            q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
        if f"{layer}.attention.query_layernorm.weight" in self.tensors and self.fault != "no_qk_norm":
            q = self.norm(q, f"{layer}.attention.query_layernorm")
            k = self.norm(k, f"{layer}.attention.key_layernorm")
        q, k = self.rotate(q), self.rotate(k)
        outputs = []
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores_LL = q[:, head] @ k[:, kv_head].T / size**0.5
            probs_LL = scores_LL.masked_fill(~visible_LL, float("-inf")).softmax(dim=-1)
            outputs.append(probs_LL @ v[:, kv_head])
        return torch.cat(outputs, dim=1) @ self.tensors[f"{layer}.attention.dense.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate-half on the leading dimensions of each head; the others pass."""
        rotary = self.config["head_dim"] if self.fault == "rotary_full" else self.config["rotary_dim"]
        theta = 10_000.0 if self.fault == "theta_10000" else self.config["rope_theta"]
        out = x.clone()
        for i in range(rotary // 2):
            angle_L1 = torch.arange(len(x))[:, None] * theta ** (-2 * i / rotary)
            a, b = x[:, :, i], x[:, :, i + rotary // 2]
            out[:, :, i] = a * angle_L1.cos() - b * angle_L1.sin()
            out[:, :, i + rotary // 2] = b * angle_L1.cos() + a * angle_L1.sin()
        return out

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def scores(self, prefix: str, x_D: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of all experts, and what experts are selected by."""
        logits_E = self.tensors[f"{prefix}.gate.weight"].float() @ x_D.float()
        scores_E = logits_E.softmax(dim=0) if self.fault == "router_softmax" else logits_E.sigmoid()
        bias_E = self.tensors[f"{prefix}.gate.expert_bias"]
        return scores_E, scores_E if self.fault == "router_without_bias" else scores_E + bias_E

    def admitted(self, prefix: str, x_LD: Tensor, index: int) -> list[int] | None:
        """The experts that the block of a position admits; None: the model has no such rule."""
        if "expert_capacity" not in self.config or self.fault == "capacity_ignored":
            return None
        size, capacity = self.config["block_size"], self.config["expert_capacity"]
        block = x_LD[index // size * size : (index // size + 1) * size]
        if self.fault == "capacity_of_the_sequence":
            block = x_LD
        is_plain = self.fault == "capacity_without_bias"
        scores_WE = torch.stack([self.scores(prefix, row_D)[0 if is_plain else 1] for row_D in block])
        best_E = scores_WE.mean(dim=0) if self.fault == "capacity_by_the_mean" else scores_WE.amax(dim=0)
        order = sorted(range(len(best_E)), key=lambda e: -float(best_E[e]))
        return order[: capacity + (self.fault == "capacity_one_more")]

    def experts(self, prefix: str, x_D: Tensor, admitted: list[int] | None) -> Tensor:
        config, fault = self.config, self.fault
        scores_E, selection_E = self.scores(prefix, x_D)
        per_group = config["num_experts"] // config["n_group"]
        group_of = [expert // per_group for expert in range(config["num_experts"])]
        quality = []
        for group in range(config["n_group"]):
            best = sorted(selection_E[group * per_group : (group + 1) * per_group].tolist(), reverse=True)
            quality.append(best[0] if fault == "router_group_maximum" else best[0] + best[1])
        kept = sorted(range(config["n_group"]), key=lambda g: -quality[g])[: config["topk_group"]]
        is_grouped = "expert_capacity" not in config or fault in ("capacity_ignored", "capacity_and_groups")
        if fault == "router_ignores_groups" or not is_grouped:
            kept = list(range(config["n_group"]))
        allowed = [expert for expert in range(config["num_experts"]) if group_of[expert] in kept]
        allowed = [expert for expert in allowed if admitted is None or expert in admitted]
        chosen = sorted(allowed, key=lambda e: -float(selection_E[e]))[: config["num_experts_per_tok"]]
        source_E = selection_E if fault == "router_bias_in_weights" else scores_E
        total = sum(float(source_E[e]) for e in chosen) + 1e-20
        total = 1.0 if fault == "router_not_normalised" else total
        scale = 1.0 if fault == "router_unscaled" else config["routed_scaling_factor"]
        routed_D = torch.zeros_like(x_D)
        for expert in chosen:
            weight = float(source_E[expert]) / total * scale
            routed_D = routed_D + weight * self.mlp(f"{prefix}.experts.{expert}", x_D)
        shared_D = self.mlp(f"{prefix}.shared_experts", x_D)
        return routed_D + shared_D * (scale if fault == "shared_scaled" else 1.0)
