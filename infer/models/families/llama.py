"""Llama 1 to 3; Mistral without a sliding window, which is the same computation; and K2-Horizon (IFM), whose
norms of the residual stream divide a row into groups, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, Variant
from idlm.infer.models.config import ConfigReader, dense_spec

EARLY_ROPE_THETA = 10_000.0
K2_MUST_BE_OFF = (
    "query_key_norm", "attention_bias", "mlp_bias", "num_experts", "num_shared_experts",
    "num_experts_per_tok", "mova_num_experts", "mova_num_experts_per_tok",
)  # fmt: skip
"""Fields of K2-Horizon that this engine does not compute."""


@FAMILIES.register("LlamaForCausalLM")
class Llama(Family):
    """Configs of the first two generations carry no `rope_theta`: it was the constant 10,000."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        # transformers computes no window here, other engines do: the file does not show which one is meant.
        if config.get("use_sliding_window") is not False:
            reader.allow("sliding_window", None)
        # To transformers it is a Llama, but its files have tensor names of their own.
        if config.get("model_type") == "exaone":
            reader.problems.append("model_type='exaone' (supported: models with the tensor names of Llama)")
        mlp_bias = bool(config.get("mlp_bias"))
        return dense_spec(reader, mlp_bias=mlp_bias, default_rope_theta=EARLY_ROPE_THETA)


@FAMILIES.register("MistralForCausalLM")
class Mistral(Family):
    """Only checkpoints whose every layer sees the whole context."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        # An absent field means the architecture's default window, so only an explicit null is full attention.
        if config.get("sliding_window", 4096) is not None:
            given = config.get("sliding_window", "(absent, which means 4096)")
            reader.problems.append(f"sliding_window={given} (supported: null)")
        return dense_spec(reader, qkv_bias=False, o_bias=False, default_rope_theta=EARLY_ROPE_THETA)


@FAMILIES.register("K2HorizonForCausalLM")
class K2Horizon(Family):
    """Dense checkpoints without a gate of attention; not those with experts or mixtures of values (MoVA). The
    groups have no default, because sizes differ in them."""

    model_types: ClassVar[tuple[str, ...]] = ("k2_horizon",)
    config_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (*K2_MUST_BE_OFF, "layernorm_num_groups", "rope_head_dim", "attention_gate_func"), READ
        ),
        **dict.fromkeys(("mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"), "no experts"),
        **dict.fromkeys(("moe_gate_bias", "norm_topk_prob"), "no experts"),
        **dict.fromkeys(("router_score_func", "router_scaling_factor"), "no experts"),
        "xllm_model_parallel_size": "of the training",
    }

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.require("layernorm_num_groups", "head_dim", "rms_norm_eps")
        for name in (*K2_MUST_BE_OFF, "use_sliding_window"):
            reader.allow(name, False, None)
        reader.allow("attention_gate_func", None)
        reader.allow("sliding_window", None)
        reader.allow("rope_head_dim", config.get("head_dim"), None)
        groups, width = reader.integer("layernorm_num_groups", 1), reader.integer("hidden_size")
        if width % groups:
            reader.problems.append(f"layernorm_num_groups={groups} does not divide hidden_size={width}")
        variant = Variant(norm_offset=0.0, norm_groups=groups)
        return dense_spec(reader, qkv_bias=False, o_bias=False, variant=variant)
