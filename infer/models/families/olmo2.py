"""OLMo 2: norms after attention and after the feed-forward part, none before them, and norms of
queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec, Variant
from idlm.infer.models.config import ConfigReader, dense_spec


@FAMILIES.register("Olmo2ForCausalLM")
class Olmo2(Family):
    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        variant = Variant(
            is_qk_norm_whole=True, has_input_norms=False, has_output_norms=True, norm_offset=0.0
        )
        return dense_spec(ConfigReader(config), qk_norm=True, default_norm_eps=1e-5, variant=variant)
