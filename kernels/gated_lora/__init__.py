"""Low-rank addition to MASK rows only; contract in README.md."""

from idlm.kernels.gated_lora.op import LoraLaunch, expand_add, gated_lora_add, shrink
from idlm.kernels.gated_lora.reference import gated_lora_reference

__all__ = ["LoraLaunch", "expand_add", "gated_lora_add", "gated_lora_reference", "shrink"]
