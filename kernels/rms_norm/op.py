"""Residual addition and RMSNorm. Contract in README.md. R rows, D width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import has_pdl, pdl_options, runs_kernels


def add_rms_norm(
    x_RD: Tensor,
    residual_RD: Tensor | None,
    weight_D: Tensor,
    *,
    eps: float,
    groups: int = 1,
    pdl: bool | None = None,
    out_RD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(normed, residual): the sum x + residual is written IN PLACE over `residual_RD` and returned.

    Each of `groups` equal parts of a row has a norm of its own.
    Without a residual `x_RD` itself is returned as the residual. Rounded as transformers does: the sum, the
    normed row to the dtype of the weight, its product with the weight. `out_RD` receives the normed rows; it
    may be `x_RD` itself. `pdl` (None: if the device supports it) is a launch parameter."""
    assert weight_D.shape == x_RD.shape[-1:], f"{x_RD.shape=} {weight_D.shape=}"
    assert x_RD.stride(1) == 1 and (residual_RD is None or residual_RD.stride(1) == 1), f"{x_RD.stride()=}"
    if not runs_kernels(x_RD):
        sum_RD = x_RD if residual_RD is None else residual_RD.add_(x_RD)
        if groups == 1 and x_RD.dtype == weight_D.dtype == torch.float32:
            # For few rows calls take longer than sums.
            normed_RD = F.rms_norm(sum_RD, weight_D.shape, weight_D, eps)
            return normed_RD if out_RD is None else out_RD.copy_(normed_RD), sum_RD
        parts = sum_RD.float().unflatten(1, (groups, -1))
        normed_RD = F.rms_norm(parts, parts.shape[2:], eps=eps).flatten(1).to(weight_D.dtype) * weight_D
        normed_RD = normed_RD.to(x_RD.dtype)
        return normed_RD if out_RD is None else out_RD.copy_(normed_RD), sum_RD
    import triton

    from idlm.kernels.rms_norm.kernel import add_rms_norm_kernel

    normed_RD = x_RD.new_empty(x_RD.shape) if out_RD is None else out_RD
    sum_RD = x_RD if residual_RD is None else residual_RD
    num_rows, D = x_RD.shape
    assert D % groups == 0, f"{D=} {groups=}"
    if num_rows:
        add_rms_norm_kernel[(num_rows * groups,)](
            *(x_RD, residual_RD, weight_D, normed_RD),
            *((x_RD.stride(0), sum_RD.stride(0), normed_RD.stride(0)), D // groups, groups, eps),
            BLOCK_D=triton.next_power_of_2(D // groups),
            num_warps=8,
            **pdl_options(has_pdl(x_RD.device) if pdl is None else pdl),
        )
    return normed_RD, sum_RD
