"""Llama 1 to 3, and Mistral without a sliding window, which is the same computation."""

from __future__ import annotations

from typing import Any

from idlm.infer.models.base import FAMILIES, Family, ModelSpec
from idlm.infer.models.config import ConfigReader, dense_spec

EARLY_ROPE_THETA = 10_000.0


@FAMILIES.register("LlamaForCausalLM")
class Llama(Family):
    """Configs of the first two generations carry no `rope_theta`: it was the constant 10,000."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        # transformers computes no window here, other engines do: the file does not show which one is meant.
        if config.get("use_sliding_window") is not False:
            reader.allow("sliding_window", None)
        # To transformers it is a Llama, but its files have tensor names of their own.
        if config.get("model_type") == "exaone":
            reader.problems.append("model_type='exaone' (supported: models with the tensor names of Llama)")
        reader.check()
        has_bias = bool(config.get("attention_bias"))
        return dense_spec(
            config,
            qkv_bias=has_bias,
            o_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            default_rope_theta=EARLY_ROPE_THETA,
        )


@FAMILIES.register("MistralForCausalLM")
class Mistral(Family):
    """Only checkpoints whose every layer sees the whole context."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        # An absent field means the architecture's default window, so only an explicit null is full attention.
        if config.get("sliding_window", 4096) is not None:
            given = config.get("sliding_window", "(absent, which means 4096)")
            reader.problems.append(f"sliding_window={given} (supported: null)")
        reader.check()
        return dense_spec(config, qkv_bias=False, o_bias=False, default_rope_theta=EARLY_ROPE_THETA)
