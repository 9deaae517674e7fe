"""Qwen2 and Qwen2.5 dense: biases on queries, keys and values, always."""

from __future__ import annotations

from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec
from idlm.infer.models.config import dense_spec


@FAMILIES.register("Qwen2ForCausalLM")
class Qwen2(Family):
    """The biases are part of the architecture; no config field switches them."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        return dense_spec(config, qkv_bias=True, o_bias=False)
