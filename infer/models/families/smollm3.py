"""SmolLM3: Llama in which some layers, by default every fourth, do not rotate queries and keys (NoPE)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
        reader = ConfigReader({"tie_word_embeddings": True, **config})
        spec = dense_spec(reader, mlp_bias=bool(config.get("mlp_bias")), default_rope_theta=ROPE_THETA)
        still = _still_layers(reader, spec.num_layers)
        others = OtherLayers(numbers=still, rope_inv_freq=(0.0,) * (spec.head_dim // 2))
        return replace(spec, variant=Variant(others=others))


def _still_layers(reader: ConfigReader, num_layers: int) -> Collection[int]:
    """Numbers of the layers that do not rotate."""
    rotates, interval = reader.config.get("no_rope_layers"), reader.integer("no_rope_layer_interval", 4)
    if rotates is None:
        reader.check()
        return range(interval - 1, num_layers, interval)
    is_right = isinstance(rotates, list) and all(one in (0, 1) for one in rotates)
    if not is_right or len(rotates) < num_layers:
        reader.problems.append(f"no_rope_layers={rotates!r} (must be a list of {num_layers} times 0 or 1)")
    reader.check()
    return frozenset(number for number in range(num_layers) if not rotates[number])
