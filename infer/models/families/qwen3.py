"""Qwen3 dense: per-head norms on queries and keys, head_dim independent of the width."""

from __future__ import annotations

from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec
from idlm.infer.models.config import dense_spec


@FAMILIES.register("Qwen3ForCausalLM")
class Qwen3(Family):
    """`attention_bias` covers all four attention projections."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        has_bias = bool(config.get("attention_bias"))
        return dense_spec(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, default_head_dim=128)
