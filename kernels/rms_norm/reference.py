"""The definition of the op, in fp32 or, for fp64 input, fp64. Formula in README.md. R rows, D width."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm_reference(
    x_RD: Tensor, residual_RD: Tensor | None, weight_D: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(normed, residual), neither rounded."""
    dtype = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    sum_RD = x_RD.to(dtype) if residual_RD is None else x_RD.to(dtype) + residual_RD.to(dtype)
    size_R1 = sum_RD.square().mean(dim=-1, keepdim=True)
    return sum_RD / (size_R1 + eps).sqrt() * weight_D.to(dtype), sum_RD
