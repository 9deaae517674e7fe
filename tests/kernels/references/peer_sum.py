"""The definition of a sum over ranks with residual addition and RMSNorm. Formula in the README of peer_sum.

N ranks, R rows, D width."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.references.trunk import add_rms_norm_reference


def peer_sum_reference(
    x_NRD: Tensor, residual_RD: Tensor, weight_D: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(normed, residual) of the sum over ranks, in fp32, or fp64 for such input; not rounded."""
    dtype = torch.promote_types(x_NRD.dtype, torch.float32)
    total_RD = torch.zeros_like(x_NRD[0], dtype=dtype)
    for x_RD in x_NRD:
        total_RD = total_RD + x_RD.to(dtype)
    return add_rms_norm_reference(total_RD, residual_RD.to(dtype), weight_D.to(dtype), eps=eps)
