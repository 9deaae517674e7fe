"""The launches of gated LoRA. R rows, D input width, E output width, X ranks of all parts, S shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from idlm.kernels.gated_lora.kernel import expand_kernel, shrink_kernel
from idlm.kernels.hopper import has_pdl

if TYPE_CHECKING:
    from idlm.kernels.gated_lora.op import LoraLaunch

SMALLEST = 16


def _is_aligned(weight: Tensor) -> bool:
    """Whether every row starts and ends at a multiple of 16 bytes, which a bulk prefetch needs."""
    item = weight.element_size()
    return all(number % 16 == 0 for number in (weight.shape[1] * item, weight.stride(0) * item))


def _common(dtype: torch.dtype, launch: LoraLaunch, weight: Tensor) -> dict[str, Any]:
    pdl = has_pdl(weight.device) if launch.pdl is None else launch.pdl
    return {
        "SPLITS": launch.splits,
        "BLOCK_R": launch.block_r,
        # fp32 tiles are twice as wide in memory and their products are made of fma: nothing to pipeline for.
        "STAGES": launch.stages if dtype.itemsize <= 2 else 1,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PREFETCH": launch.prefetch and _is_aligned(weight),
        "PDL": pdl,
        "num_warps": launch.warps,
        **({"launch_pdl": True} if pdl else {}),
    }


def run_shrink(
    x_RD: Tensor, is_mask_R: Tensor, a_XD: Tensor, partial_SRX: Tensor, launch: LoraLaunch
) -> None:
    """Write the MASK rows of `partial_SRX`."""
    num_rows, D = x_RD.shape
    X = len(a_XD)
    if num_rows == 0:
        return
    block_x = min(launch.block_x, max(SMALLEST, triton.next_power_of_2(X)))
    tiles = triton.cdiv(num_rows, launch.block_r) * triton.cdiv(X, block_x)
    shrink_kernel[(tiles * launch.splits,)](
        x_RD,
        is_mask_R,
        a_XD,
        partial_SRX,
        num_rows,
        X,
        D,
        x_RD.stride(0),
        a_XD.stride(0),
        BLOCK_X=block_x,
        BLOCK_D=min(launch.block_d, max(SMALLEST, triton.next_power_of_2(D))),
        **_common(x_RD.dtype, launch, a_XD),
    )


def run_expand(
    y_RE: Tensor,
    is_mask_R: Tensor,
    partial_SRX: Tensor,
    b_Er: Tensor,
    sizes: tuple[int, ...],
    scaling: float,
    launch: LoraLaunch,
) -> None:
    """Add to the MASK rows of `y_RE`."""
    num_rows = len(y_RE)
    if num_rows == 0:
        return
    rank = b_Er.shape[1]
    tiles = sum(triton.cdiv(size, launch.block_e) for size in sizes)
    first, second, third = (*sizes, 0, 0)[:3]
    expand_kernel[(triton.cdiv(num_rows, launch.block_r) * tiles,)](
        y_RE,
        is_mask_R,
        partial_SRX,
        b_Er,
        num_rows,
        partial_SRX.shape[2],
        first,
        second,
        third,
        rank,
        scaling,
        y_RE.stride(0),
        b_Er.stride(0),
        BLOCK_E=launch.block_e,
        BLOCK_K=min(launch.block_rank, max(SMALLEST, triton.next_power_of_2(rank))),
        **_common(y_RE.dtype, launch, b_Er),
    )
