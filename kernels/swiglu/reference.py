"""The definition of the op, in fp32 or, for fp64 input, fp64. R rows, F ffn width."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_reference(gate_up_RE: Tensor) -> Tensor:
    """silu(gate) * up, [R, F], of [R, 2F]; not rounded."""
    dtype = torch.float64 if gate_up_RE.dtype == torch.float64 else torch.float32
    gate_RF, up_RF = gate_up_RE.to(dtype).chunk(2, dim=-1)
    return gate_RF * torch.sigmoid(gate_RF) * up_RF
