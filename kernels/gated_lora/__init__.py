"""Low-rank addition to MASK rows only; contract in README.md."""

from idlm.kernels.gated_lora.op import GatedLora, expand_add, expand_swiglu
