"""The definition of the op, in fp32 or, for fp64 input, fp64. Formula in README.md.

R rows, D input width, E output width, F half of it for a SwiGLU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_reference(x_RD: Tensor, weight_ED: Tensor, *, bias_E: Tensor | None = None) -> Tensor:
    """x W^T + bias, [R, E], not rounded."""
    dtype = torch.promote_types(x_RD.dtype, torch.float32)
    y_RE = x_RD.to(dtype) @ weight_ED.to(dtype).T
    return y_RE if bias_E is None else y_RE + bias_E.to(dtype)


def linear_swiglu_reference(x_RD: Tensor, weight_ED: Tensor, *, bias_E: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [R, F]; the first F rows of the weight are the gate's."""
    gate_RF, up_RF = linear_reference(x_RD, weight_ED, bias_E=bias_E).chunk(2, dim=-1)
    return gate_RF * torch.sigmoid(gate_RF) * up_RF


def dequantised(values_ED: Tensor, scale_E: Tensor) -> Tensor:
    """The fp32 weight that an fp8 weight represents."""
    return values_ED.to(torch.float32) * scale_E[:, None]
