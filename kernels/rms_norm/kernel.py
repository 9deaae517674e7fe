"""The Triton kernel of residual addition and RMSNorm: one program per row, or per group of its columns, each
element read once.

R rows, D width."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x_RD, residual_RD, weight_D, normed_RD, strides, D, groups, eps, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    """normed = rms_norm(x + residual) * weight of one group of D columns of a row; the sum replaces the
    residual, if there is one. `strides`: of rows of x, the residual and the result."""
    stride_x, stride_residual, stride_normed = strides
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // groups).to(tl.int64)
    o_own = tl.arange(0, BLOCK_D)
    m_column = o_own < D
    o_column = tl.program_id(0) % groups * D + o_own
    weight = tl.load(weight_D + o_column, mask=m_column, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_RD + row * stride_x + o_column, mask=m_column, other=0.0)
    if residual_RD is not None:
        p_residual = residual_RD + row * stride_residual + o_column
        residual = tl.load(p_residual, mask=m_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(p_residual, x, mask=m_column)
    tl.store(normed_RD + row * stride_normed + o_column, norm_row(x, weight, D, eps), mask=m_column)


@triton.jit
def norm_row(x, weight, D, eps):
    """rms_norm(x) * weight of a row, in its dtype."""
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
