"""GLM-4: half of each head rotates, in pairs of neighbours; gate and up are one module. The later checkpoints
(GLM-4-0414) also have norms of what attention and the feed-forward part add to the residual."""

from __future__ import annotations

from typing import Any, ClassVar

from idlm.infer.models.base import FAMILIES, Family, ModelSpec, TensorNames, Variant
from idlm.infer.models.config import ConfigReader, dense_spec, rotated_dims
from idlm.infer.models.families.llama import EARLY_ROPE_THETA

GATE_UP = "model.layers.{}.mlp.gate_up_proj"
NORM_EPS = 1.5625e-7
"""Of configs without `rms_norm_eps`."""


@FAMILIES.register("GlmForCausalLM")
class Glm(Family):
    """`attention_bias`, on by default, covers queries, keys and values."""

    tensor_names: ClassVar[TensorNames] = TensorNames(gate_up=GATE_UP)
    model_types: ClassVar[tuple[str, ...]] = ("glm",)
    variant: ClassVar[Variant] = Variant(is_interleaved=True)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        rotary_dim = rotated_dims(reader, reader.integer("head_dim", 128), 0.5)
        bias = config.get("attention_bias")
        return dense_spec(
            reader,
            qkv_bias=bias is None or bool(bias),
            o_bias=False,
            default_norm_eps=NORM_EPS,
            default_head_dim=128,
            default_rope_theta=EARLY_ROPE_THETA,
            rotary_dim=rotary_dim,
            variant=cls.variant,
        )


@FAMILIES.register("Glm4ForCausalLM")
class Glm4(Glm):
    tensor_names: ClassVar[TensorNames] = TensorNames(
        gate_up=GATE_UP,
        attention_out_norm="model.layers.{}.post_self_attn_layernorm.weight",
        mlp_out_norm="model.layers.{}.post_mlp_layernorm.weight",
    )
    model_types: ClassVar[tuple[str, ...]] = ("glm4",)
    variant: ClassVar[Variant] = Variant(is_interleaved=True, has_output_norms=True)
