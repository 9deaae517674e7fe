"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's tensors, decoded in blocks; every row predicts the next token.

The last row of the clean block before therefore predicts the first token of a block."""

from __future__ import annotations

from typing import Any, ClassVar

from idlm.infer.models.base import FAMILIES, ModelSpec
from idlm.infer.models.config import ConfigReader
from idlm.infer.models.families.qwen import Qwen2


@FAMILIES.register("Fast_dLLM_QwenForCausalLM")
class FastDllm(Qwen2):
    """The config's `bd_size` is the block size."""

    model_types: ClassVar[tuple[str, ...]] = ("Fast_dLLM_Qwen",)
    causality: ClassVar[str] = "block"
    mask_token_id: ClassVar[int | None] = 151_665
    """Written |<MASK>|; in Qwen3's tokenizer this id is <tool_response>."""
    stop_token_ids: ClassVar[tuple[int, ...]] = (151_645,)

    @classmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        reader = ConfigReader(config)
        reader.require("bd_size")
        reader.check()
        return super().spec(config)

    @classmethod
    def block_size(cls, config: dict[str, Any]) -> int:
        size: int = config["bd_size"]
        return size
