"""Qwen2 and Qwen2.5 (biases on queries, keys and values, always), Qwen3 (norms on each head of queries and
keys, `head_dim` independent of the width), Qwen3 with experts (softmax router), and Fast-dLLM v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, MoeSpec
from idlm.infer.models.config import MAX_COUNT, ConfigReader, dense_spec


@FAMILIES.register("Qwen2ForCausalLM")
class Qwen2(Family):
    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        return dense_spec(ConfigReader(config), qkv_bias=True, o_bias=False)


@FAMILIES.register("Fast_dLLM_QwenForCausalLM")
class FastDllm(Qwen2):
    """Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's tensors, decoded in blocks of the config's `bd_size`; every
    row predicts the next token, the last row of the clean block before the first token of a block."""

    model_types: ClassVar[tuple[str, ...]] = ("Fast_dLLM_Qwen",)
    causality: ClassVar[str] = "block"
    mask_token_id: ClassVar[int | None] = 151_665
    """Written |<MASK>|; in Qwen3's tokenizer this id is <tool_response>."""
    stop_token_ids: ClassVar[tuple[int, ...]] = (151_645,)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        ConfigReader(config).require("bd_size")
        return super().spec(config)

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int:
        size: int = config["bd_size"]
        return size


@FAMILIES.register("Qwen3ForCausalLM")
class Qwen3(Family):
    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        return dense_spec(ConfigReader(config), qk_norm=True, default_head_dim=128)


@FAMILIES.register("Qwen3MoeForCausalLM")
class Qwen3Moe(Family):
    """Without `norm_topk_prob` it is off, without `head_dim` width / heads, both as in transformers."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    config_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), READ),
        **dict.fromkeys(("moe_intermediate_size", "norm_topk_prob"), READ),
    }
    required: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.require(*cls.required)
        return dense_spec(reader, qk_norm=True, moe=_experts(reader))


def _experts(reader: ConfigReader) -> MoeSpec:
    # transformers 5 writes the field under its second name.
    num_experts = reader.integer("num_experts", reader.config.get("num_local_experts"), maximum=MAX_COUNT)
    reader.allow("num_local_experts", num_experts, None)
    only_dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(only_dense, list):
        reader.problems.append(f"mlp_only_layers={only_dense!r} (must be a list of layer numbers)")
        only_dense = []
    return MoeSpec(
        num_experts=num_experts,
        num_chosen=reader.integer("num_experts_per_tok", maximum=num_experts),
        ffn_width=reader.integer("moe_intermediate_size"),
        dense_layers=tuple(only_dense),
        layer_step=reader.integer("decoder_sparse_step", 1),
        score="softmax",
        is_normalised=reader.flag("norm_topk_prob"),
    )
