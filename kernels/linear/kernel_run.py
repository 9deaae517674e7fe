"""The launch of the skinny linear. R rows, D input width, E output width (F of a SwiGLU)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from idlm.kernels.backend import INTERPRETED, rounds_as_written
from idlm.kernels.gated_lora.op import GatedLora
from idlm.kernels.linear.kernel import linear_kernel
from idlm.kernels.linear.launch import (
    Launch,
    Workspace,
    adds_lora,
    columns_ahead,
    make_workspace,
    num_splits,
    workspace_size,
)


def run(
    x_RD: Tensor,
    weight_ED: Tensor,
    out_RE: Tensor,
    *,
    launch: Launch,
    scale_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    gated: bool = False,
    lora: GatedLora | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Write the linear of `x_RD` into `out_RE`, with `lora` added to MASK rows; returns it."""
    num_rows, D = x_RD.shape
    E = out_RE.shape[1]
    if num_rows == 0:
        return out_RE
    adapter = _arguments(x_RD, out_RE, launch, lora, gated)
    splits, rank = num_splits(launch, D), 0 if lora is None else lora.b_Er.shape[1]
    floats, tiles = workspace_size(launch, num_rows, E, D, gated=gated, rank=rank)
    if tiles and workspace is None:
        workspace = make_workspace(x_RD.device, num_floats=floats, num_tiles=tiles)
    if workspace is None:
        partials = counters = out_RE
    else:
        partials, counters = workspace.partials, workspace.counters
        assert tiles == 0 or (partials.numel() >= floats and counters.numel() >= tiles), f"{floats=} {tiles=}"
    block_d = min(launch.block_d, max(16, triton.next_power_of_2(D)))
    programs = triton.cdiv(E, launch.block_e) * triton.cdiv(num_rows, launch.block_r)
    programs += triton.cdiv(rank, launch.block_e)
    linear_kernel[(programs * (1 if launch.serial else splits),)](
        x_RD,
        weight_ED,
        out_RE,
        out_RE if scale_E is None else scale_E,
        out_RE if bias_E is None else bias_E,
        partials=partials,
        counters=counters,
        R=num_rows,
        E=E,
        D=D,
        stride_x=x_RD.stride(0),
        stride_w=weight_ED.stride(0),
        up_offset=E * weight_ED.stride(0),
        stride_y=out_RE.stride(0),
        splits=splits,
        GATED=gated,
        SCALED=scale_E is not None,
        HAS_BIAS=bias_E is not None,
        EVEN_D=D % block_d == 0,
        MANY=tiles > 0,
        SERIAL=launch.serial,
        BLOCK_E=launch.block_e,
        BLOCK_R=launch.block_r,
        BLOCK_D=block_d,
        STAGES=launch.stages,
        PRECISION="ieee" if x_RD.dtype == torch.float32 else "tf32",
        PDL=launch.pdl and not INTERPRETED,
        AHEAD=columns_ahead(launch, num_rows, D),
        num_warps=launch.warps,
        **adapter,
        **({"launch_pdl": True} if launch.pdl and not INTERPRETED else {}),
    )
    return out_RE


def _arguments(
    x_RD: Tensor, out_RE: Tensor, launch: Launch, lora: GatedLora | None, gated: bool
) -> dict[str, Any]:
    """What the kernel is told of an adapter, and the launch option that its rounding needs."""
    if lora is None:
        nothing = dict.fromkeys(("is_mask_R", "h_RX", "b_Er"), out_RE)
        return {
            **nothing,
            "rank": 0,
            "scaling": 1.0,
            "stride_b": 0,
            "LORA": False,
            "BLOCK_K": 16,
            "BLOCK_T": 1,
        }
    (num_rows, E), rank = out_RE.shape, lora.b_Er.shape[1]
    assert gated and lora.sizes == (E, E) and len(lora.b_Er) == 2 * E, f"{gated=} {lora.sizes=} {E=}"
    assert lora.is_mask_R.dtype == torch.bool and len(lora.is_mask_R) == num_rows, f"{lora.is_mask_R.shape=}"
    assert lora.b_Er.stride(1) == 1, f"{lora.b_Er.stride()=}"
    assert adds_lora(launch, num_rows, E, rank=rank), f"{launch=} {num_rows=} {E=} {rank=}"
    return {
        "is_mask_R": lora.is_mask_R,
        "h_RX": x_RD.new_empty(num_rows, 2 * rank),
        "b_Er": lora.b_Er,
        "rank": rank,
        "scaling": lora.scaling,
        "stride_b": lora.b_Er.stride(0),
        "LORA": True,
        "BLOCK_K": max(16, triton.next_power_of_2(rank)),
        "BLOCK_T": triton.next_power_of_2(E // launch.block_e),
        **(rounds_as_written() if x_RD.dtype.itemsize == 2 else {}),
    }
