"""The Triton kernel of SwiGLU: element by element. R rows, F ffn width."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_swiglu(gate, up, dtype):
    """silu(gate) * up of fp32 values, in fp32; the silu is rounded before it is multiplied, as torch does.

    Linears, experts and gated LoRA call it too, so that all of them give a row the same bits."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def swiglu_kernel(gate_up_RE, out_RF, stride_in, stride_out, F, BLOCK_F: tl.constexpr, PDL: tl.constexpr):
    """SwiGLU of a block of one row."""
    blocks = tl.cdiv(F, BLOCK_F)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o_column = tl.program_id(0) % blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    m_column = o_column < F
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_gate = gate_up_RE + row * stride_in + o_column
    gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    up = tl.load(p_gate + F, mask=m_column, other=0.0).to(tl.float32)
    dtype = out_RF.dtype.element_ty
    out = rounded_swiglu(gate, up, dtype)
    tl.store(out_RF + row * stride_out + o_column, out.to(dtype), mask=m_column)
