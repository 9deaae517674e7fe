"""SmolLM3: Llama in which some layers, by default every fourth, do not rotate queries and keys (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from idlm.checkpoint import READ
from idlm.infer.models.base import FAMILIES, Family, ModelSpec, OtherLayers, Variant
from idlm.infer.models.config import ConfigReader, dense_spec

ROPE_THETA = 2_000_000.0
"""Of configs without `rope_theta`, and transformers' other defaults of the family."""


@FAMILIES.register("SmolLM3ForCausalLM")
class SmolLM3(Family):
    """`no_rope_layers` holds a 1 for each layer that rotates and a 0 for each other one."""

    config_keys: ClassVar[Mapping[str, str]] = {"no_rope_layer_interval": READ, "no_rope_layers": READ}

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        has_bias = bool(config.get("attention_bias"))
        spec = dense_spec(
            {"tie_word_embeddings": True, **config},
            qkv_bias=has_bias,
            o_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            default_rope_theta=ROPE_THETA,
        )
        reader = ConfigReader(config)
        interval, rotates = reader.integer("no_rope_layer_interval", 4), config.get("no_rope_layers")
        if rotates is None:
            rotates = [int((number + 1) % interval != 0) for number in range(spec.num_layers)]
        if (
            not isinstance(rotates, list)
            or len(rotates) < spec.num_layers
            or any(one not in (0, 1) for one in rotates)
        ):
            shown = f"no_rope_layers={rotates!r}"
            reader.problems.append(
                f"{shown} (must be a list with a 0 or 1 for each of {spec.num_layers} layers)"
            )
        reader.check()
        still = frozenset(number for number in range(spec.num_layers) if not rotates[number])
        none = OtherLayers(numbers=still, rope_inv_freq=(0.0,) * (spec.head_dim // 2))
        return replace(spec, variant=Variant(others=none)) if still else spec
