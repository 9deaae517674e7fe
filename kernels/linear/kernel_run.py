"""The launch of the skinny linear. R rows, D input width, E output width (F of a SwiGLU)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.hopper import INTERPRETED
from idlm.kernels.linear.kernel import linear_kernel
from idlm.kernels.linear.launch import Launch, Workspace, make_workspace, num_splits, workspace_size


def run(
    x_RD: Tensor,
    weight_ED: Tensor,
    out_RE: Tensor,
    *,
    launch: Launch,
    scale_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    gated: bool = False,
    workspace: Workspace | None = None,
) -> Tensor:
    """Write the linear of `x_RD` into `out_RE`; returns it."""
    num_rows, D = x_RD.shape
    E = out_RE.shape[1]
    if num_rows == 0:
        return out_RE
    splits = num_splits(launch, D)
    floats, tiles = workspace_size(launch, num_rows, E, D, gated=gated)
    if tiles and workspace is None:
        workspace = make_workspace(x_RD.device, num_floats=floats, num_tiles=tiles)
    if workspace is None:
        partials = counters = out_RE
    else:
        partials, counters = workspace.partials, workspace.counters
        assert tiles == 0 or (partials.numel() >= floats and counters.numel() >= tiles), f"{floats=} {tiles=}"
    block_d = min(launch.block_d, max(16, triton.next_power_of_2(D)))
    programs = triton.cdiv(E, launch.block_e) * triton.cdiv(num_rows, launch.block_r)
    linear_kernel[(programs * (1 if launch.serial else splits),)](
        x_RD,
        weight_ED,
        out_RE,
        out_RE if scale_E is None else scale_E,
        out_RE if bias_E is None else bias_E,
        partials,
        counters,
        num_rows,
        E,
        D,
        x_RD.stride(0),
        weight_ED.stride(0),
        E * weight_ED.stride(0),
        out_RE.stride(0),
        splits,
        GATED=gated,
        SCALED=scale_E is not None,
        HAS_BIAS=bias_E is not None,
        EVEN_D=D % block_d == 0,
        MANY=splits > 1 and not launch.serial,
        SERIAL=launch.serial,
        BLOCK_E=launch.block_e,
        BLOCK_R=launch.block_r,
        BLOCK_D=block_d,
        STAGES=launch.stages,
        PRECISION="ieee" if x_RD.dtype == torch.float32 else "tf32",
        PDL=launch.pdl and not INTERPRETED,
        num_warps=launch.warps,
        **({"launch_pdl": True} if launch.pdl and not INTERPRETED else {}),
    )
    return out_RE
