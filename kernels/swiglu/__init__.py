"""silu(gate) * up of a fused projection's output; contract in README.md."""

from idlm.kernels.swiglu.op import swiglu
