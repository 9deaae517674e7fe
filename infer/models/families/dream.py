"""Dream-7B and DiffuCoder (arXiv 2508.15487): Qwen2.5's tensors, full diffusion, logits shifted.

`DreamForCausalLM`, a later model in blocks without shift, is another architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from idlm.infer.models.base import FAMILIES, Family, ModelSpec
from idlm.infer.models.config import UNBOUNDED, ConfigReader, dense_spec, standard

TRAINED_LENGTH = 2048
"""The config's `max_position_embeddings` is that of Qwen2.5."""


@FAMILIES.register("DreamModel")
class Dream(Family):
    """The row before a position predicts it, so the first position of a canvas must be known."""

    model_types: ClassVar[tuple[str, ...]] = ("Dream",)
    causality: ClassVar[str] = "full"
    logit_shift: ClassVar[bool] = True
    mask_token_id: ClassVar[int | None] = 151_666
    stop_token_ids: ClassVar[tuple[int, ...]] = (151_643, 151_645)
    """<|endoftext|> and <|im_end|>."""

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        """Biases as in Qwen2.5."""
        spec = dense_spec(ConfigReader(standard(config)), qkv_bias=True, o_bias=False)
        return replace(spec, trained_length=TRAINED_LENGTH, max_positions=UNBOUNDED)
