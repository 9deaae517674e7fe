"""LLaDA-MoE-7B-A1B (inclusionAI): norms on each head of queries and keys, experts in every layer.

The router does not normalise, whatever `norm_topk_prob` is: the published code ignores the field, and
`score_function` and `routed_scaling_factor` too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, MoeSpec
from idlm.infer.models.config import MAX_COUNT, UNBOUNDED, ConfigReader, dense_spec, standard

UNREAD = "the published code does not read it"
STANDARD_NAMES = {"intermediate_size": "dense_intermediate_size", "attention_bias": "use_qkv_bias"}


@FAMILIES.register("LLaDAMoEModelLM")
class LladaMoe(Family):
    """`model_type` is that of LLaDA-8B in the published config."""

    model_types: ClassVar[tuple[str, ...]] = ("llada", "lladamoe", "llada_moe")
    causality: ClassVar[str] = "full"
    logit_shift: ClassVar[bool] = False
    mask_token_id: ClassVar[int | None] = 156_895
    stop_token_ids: ClassVar[tuple[int, ...]] = (156_892, 156_900)
    """<|endoftext|> and <|role_end|>."""
    config_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "expert_intermediate_size"), READ),
        **dict.fromkeys(("moe_layer_freq", "moe_router_enable_expert_bias", "router_num_group"), READ),
        **dict.fromkeys(("norm_topk_prob", "score_function", "routed_scaling_factor"), UNREAD),
        **dict.fromkeys(
            ("moe_router_score_function", "router_topk_group", "shared_expert_intermediate_size"), READ
        ),
    }

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        ffn_width = config.get("expert_intermediate_size")
        own = {"rms_norm_eps": 1e-5, "intermediate_size": ffn_width}
        reader = ConfigReader({**own, **standard(config, STANDARD_NAMES)})
        reader.require("max_position_embeddings", "num_experts", "num_experts_per_tok")
        num_experts = reader.integer("num_experts", maximum=MAX_COUNT)
        frequency = config.get("moe_layer_freq")
        if frequency not in (None, 1) and not (isinstance(frequency, list) and set(frequency) == {1}):
            reader.problems.append(f"moe_layer_freq={frequency!r} (supported: 1 for every layer)")
        reader.allow("qk_layernorm", True)
        reader.allow("attention_bias", False, None)
        reader.allow("moe_router_enable_expert_bias", False, None)
        reader.allow("shared_expert_intermediate_size", 0, None)
        reader.allow("moe_router_score_function", "softmax", None)
        for name in ("router_num_group", "router_topk_group"):
            reader.allow(name, None, 1)
        reader.allow("partial_rotary_factor", 1, None)
        moe = MoeSpec(
            num_experts=num_experts,
            num_chosen=reader.integer("num_experts_per_tok", maximum=num_experts),
            ffn_width=reader.integer("expert_intermediate_size"),
            score="softmax",
            is_normalised=False,
        )
        spec = dense_spec(reader, qkv_bias=False, o_bias=False, qk_norm=True, moe=moe)
        return replace(spec, trained_length=spec.max_positions, max_positions=UNBOUNDED)
