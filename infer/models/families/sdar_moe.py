"""SDAR with experts (arXiv 2510.06303): Qwen3-MoE's tensors, decoded in blocks."""

from __future__ import annotations

from typing import ClassVar

from idlm.infer.models.base import FAMILIES
from idlm.infer.models.families.qwen3_moe import Qwen3Moe


@FAMILIES.register("SDARMoeForCausalLM")
class SdarMoe(Qwen3Moe):
    """Its router normalises, which the config must say: Qwen3-MoE's default would switch it off."""

    model_types: ClassVar[tuple[str, ...]] = ("sdar_moe",)
    required: ClassVar[tuple[str, ...]] = ("norm_topk_prob",)
    unknown_semantics: ClassVar[str | None] = (
        "SDAR checkpoints of all block sizes (4 unless the name ends in -b8, -b16, -b32 or -b64) share "
        "config and tensor names"
    )
