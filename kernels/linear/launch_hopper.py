"""The launch of the product of many rows for Hopper: which tensors it serves, and its tiles.

R rows, D input width, E output width."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from idlm.kernels.backend import gpu_of, has_gluon, num_multiprocessors, pdl_options
from idlm.kernels.linear.groups import OUTPUTS, STEP, Groups
from idlm.kernels.linear.kernel_hopper import LOADER_REGISTERS, REGISTERS, many_rows_kernel

ALIGNED_BYTES = 16
"""Of the first element and the rows of a tensor that a descriptor describes."""


def serves(x_RD: Tensor, weight_ED: Tensor, out_RE: Tensor) -> bool:
    """Whether the kernel computes these tensors on their device."""
    is_described = all(
        each.data_ptr() % ALIGNED_BYTES == 0 == each.stride(0) * each.itemsize % ALIGNED_BYTES
        for each in (x_RD, weight_ED, out_RE)
    )
    return x_RD.itemsize == 2 == weight_ED.itemsize and is_described and has_gluon(gpu_of(x_RD.device))


def run_many_rows(
    x_RD: Tensor,
    weight_ED: Tensor,
    out_RE: Tensor,
    bias_E: Tensor | None,
    *,
    groups: Groups,
    splits: int,
    gated: bool,
    pdl: bool,
) -> None:
    """Write the linear of `x_RD`, in so many shares, into `out_RE`."""
    (num_rows, D), E = x_RD.shape, out_RE.shape[1]
    tiles = triton.cdiv(num_rows, groups.rows) * triton.cdiv(E, OUTPUTS * groups.num)
    rows_of = ((x_RD, groups.rows), (weight_ED, OUTPUTS), (out_RE, groups.rows))
    many_rows_kernel[(min(tiles, num_multiprocessors(x_RD.device)),)](
        *(_described(each, rows) for each, rows in rows_of),
        *(bias_E, num_rows, E, D, splits),
        GROUPS=groups.num,
        GATED=gated,
        IS_SPLIT=splits > 1,
        STAGES=groups.stages(gated=gated),
        REGISTERS=REGISTERS[groups.num],
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        **pdl_options(pdl),
    )


def _described(x: Tensor, rows: int) -> Any:
    """A descriptor of tiles of `rows` rows and the columns of a stage."""
    block = [rows, STEP]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
