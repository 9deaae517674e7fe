"""Granite 3: Llama with factors of embeddings, scores and residual additions, and a divisor of logits."""

from __future__ import annotations

from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec, Variant
from idlm.infer.models.config import ConfigReader, dense_spec
from idlm.infer.models.families.llama import EARLY_ROPE_THETA

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
"""1 where a config has none, also `attention_multiplier`, which takes the place of head_dim ** -0.5."""


@FAMILIES.register("GraniteForCausalLM")
class Granite(Family):
    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        embed, residual, score, divisor = (reader.positive_float(name, 1.0) for name in MULTIPLIERS)
        return dense_spec(
            reader,
            mlp_bias=bool(config.get("mlp_bias")),
            default_rope_theta=EARLY_ROPE_THETA,
            variant=Variant(
                embed_scale=embed, residual_scale=residual, score_scale=score, logit_divisor=divisor
            ),
            reads=MULTIPLIERS,
        )
