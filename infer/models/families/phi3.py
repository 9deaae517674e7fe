"""Phi-3 and Phi-4: Llama with fused projections, in some models a partly rotated head and LongRoPE.

LongRoPE has two sets of frequencies: one for contexts up to the length of the first training, one for longer
contexts. Keys are cached rotated, so the engine runs contexts of the first kind, up to
`original_max_position_embeddings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, TensorNames
from idlm.infer.models.config import LONG_ROPE, ConfigReader, dense_spec, in_windows, rotated_dims
from idlm.infer.models.families.llama import EARLY_ROPE_THETA

OWN_DEFAULTS = dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 4096)


@FAMILIES.register("Phi3ForCausalLM")
class Phi3(Family):
    tensor_names: ClassVar[TensorNames] = TensorNames(
        qkv="model.layers.{}.self_attn.qkv_proj", gate_up="model.layers.{}.mlp.gate_up_proj"
    )
    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    config_keys: ClassVar[Mapping[str, str]] = {"original_max_position_embeddings": READ}

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader({**OWN_DEFAULTS, **_current(config)})
        positions = reader.integer("max_position_embeddings", maximum=float("inf"))
        window = reader.integer("sliding_window", positions, maximum=float("inf"))
        width, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        rotary_dim = rotated_dims(reader, reader.integer("head_dim", max(1, width // heads)), 1.0)
        spec = dense_spec(
            reader,
            qkv_bias=False,
            o_bias=False,
            default_norm_eps=1e-5,
            default_rope_theta=EARLY_ROPE_THETA,
            rotary_dim=rotary_dim,
            reads=(LONG_ROPE,),
        )
        return in_windows(spec, int(window), range(spec.num_layers))


def _current(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the present name of LongRoPE, which was `su` and `yarn` when Phi-3 appeared."""
    config = {**config}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config[key] = {**rope, "rope_type": LONG_ROPE}
    return config
