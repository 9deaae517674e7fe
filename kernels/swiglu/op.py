"""silu(gate) * up. Contract in README.md. R rows, F ffn width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import has_pdl, pdl_options, runs_kernels

BLOCK = 1024


def swiglu(gate_up_RE: Tensor, *, out_RF: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [R, F], of [R, 2F] with the gate first; rounded as the two torch ops round.

    `out_RF` receives it; it may be the gate's columns."""
    assert gate_up_RE.stride(1) == 1 and gate_up_RE.shape[1] % 2 == 0, f"{gate_up_RE.shape=}"
    if not runs_kernels(gate_up_RE):
        gate_RF, up_RF = gate_up_RE.chunk(2, dim=-1)
        hidden_RF = F.silu(gate_RF).mul_(up_RF)
        return hidden_RF if out_RF is None else out_RF.copy_(hidden_RF)
    import triton

    from idlm.kernels.swiglu.kernel import swiglu_kernel

    if out_RF is None:
        out_RF = gate_up_RE.new_empty(len(gate_up_RE), gate_up_RE.shape[1] // 2)
    num_rows, width = out_RF.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    if num_rows:
        swiglu_kernel[(num_rows * triton.cdiv(width, block),)](
            *(gate_up_RE, out_RF, gate_up_RE.stride(0), out_RF.stride(0), width),
            BLOCK_F=block,
            num_warps=4,
            **pdl_options(has_pdl(gate_up_RE.device)),
        )
    return out_RF
