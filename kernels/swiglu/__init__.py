"""silu(gate) * up of a fused projection's output; contract in README.md."""

from idlm.kernels.swiglu.op import swiglu
from idlm.kernels.swiglu.reference import swiglu_reference
