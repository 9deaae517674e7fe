"""SDAR and the published I-DLM checkpoints: Qwen3's tensors, two ways to decode; and SDAR with experts.

I-DLM (arXiv 2604.11035) is token-causal with shifted logits; SDAR (arXiv 2510.06303) is block-causal and
predicts in place. Neither weights nor config distinguish them, so `idlm_config.json` or the caller must."""

from __future__ import annotations

from typing import ClassVar

from idlm.infer.models.base import FAMILIES
from idlm.infer.models.families.qwen import Qwen3, Qwen3Moe


@FAMILIES.register("SDARForCausalLM")
class Sdar(Qwen3):
    """Computes exactly what Qwen3 does for a given visibility."""

    unknown_semantics: ClassVar[str | None] = (
        "I-DLM checkpoints (token-causal, logits shifted) and SDAR checkpoints (block-causal, logits in "
        "place) share architecture and tensor names"
    )


@FAMILIES.register("SDARMoeForCausalLM")
class SdarMoe(Qwen3Moe):
    """Its router normalises, which the config must set: Qwen3-MoE's default would switch it off."""

    model_types: ClassVar[tuple[str, ...]] = ("sdar_moe",)
    required: ClassVar[tuple[str, ...]] = ("norm_topk_prob",)
    unknown_semantics: ClassVar[str | None] = (
        "SDAR checkpoints of all block sizes (4 unless the name ends in -b8, -b16, -b32 or -b64) share "
        "config and tensor names"
    )
