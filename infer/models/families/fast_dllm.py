"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's tensors, decoded in blocks of which every row predicts the next.

The first token of a block therefore comes from the last row of the clean block before it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from idlm.infer.models.base import FAMILIES, ModelSpec
from idlm.infer.models.blocks import block_contradictions, block_semantics
from idlm.infer.models.config import ConfigReader
from idlm.infer.models.families.qwen2 import Qwen2
from idlm.semantics import Semantics

MASK_TOKEN_ID = 151_665
"""Written |<MASK>|; in Qwen3's tokenizer this id is <tool_response>."""
STOP_TOKEN_ID = 151_645


@FAMILIES.register("Fast_dLLM_QwenForCausalLM")
class FastDllm(Qwen2):
    """`bd_size` is the block."""

    model_types: ClassVar[tuple[str, ...]] = ("Fast_dLLM_Qwen",)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.require("bd_size")
        reader.check()
        return super().spec(config)

    @classmethod
    def semantics(cls, config: dict[str, Any]) -> Semantics:
        return block_semantics(
            config,
            block_size=config["bd_size"],
            logit_shift=True,
            mask_token_id=MASK_TOKEN_ID,
            stop_token_ids=(STOP_TOKEN_ID,),
        )

    @classmethod
    def contradictions(cls, config: dict[str, Any], meaning: Semantics) -> list[str]:
        return block_contradictions(meaning, logit_shift=True)
