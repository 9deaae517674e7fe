"""Low-rank addition to MASK rows only; contract in README.md."""

from idlm.kernels.gated_lora.op import GatedLora, expand_add, expand_swiglu
from idlm.kernels.gated_lora.reference import gated_lora_reference
