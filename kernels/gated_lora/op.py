"""Gated LoRA of a fused projection: y += scaling * B A x in MASK rows. Contract in README.md.

R rows, D input width, E output width, r rank, P parts of the projection, X ranks of all of them (P r),
S shares of the width.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLaunch:
    """How both kernels are launched. `splits` is part of the arithmetic, so it must not follow the rows."""

    block_r: int = 16
    block_x: int = 32
    """Ranks of a tile of the shrink."""
    block_d: int = 256
    splits: int = 8
    """Shares of the width, added in their order by the expand."""
    block_e: int = 64
    block_rank: int = 128
    warps: int = 4
    stages: int = 3
    pdl: bool | None = None
    """None: where the device can."""
    prefetch: bool = False
    """Ask for the weights before waiting for the kernel before (pdl only); wasted where no row is a MASK."""


DEFAULT = LoraLaunch()


def shrink(x_RD: Tensor, is_mask_R: Tensor, a_XD: Tensor, *, launch: LoraLaunch = DEFAULT) -> Tensor:
    """Shares of A x of the MASK rows, [S, R, X] fp32; other rows of it are undefined.

    Reads nothing but its arguments, so it may run on a side stream beside the projection itself.
    """
    assert x_RD.stride(1) == a_XD.stride(1) == 1, f"{x_RD.stride()=} {a_XD.stride()=}"
    assert is_mask_R.dtype == torch.bool and len(is_mask_R) == len(x_RD), f"{is_mask_R.shape=}"
    splits = launch.splits if _runs_kernels(x_RD) else 1
    partial_SRX = torch.empty(splits, len(x_RD), len(a_XD), dtype=torch.float32, device=x_RD.device)
    if _runs_kernels(x_RD):
        from idlm.kernels.gated_lora.launch import run_shrink

        run_shrink(x_RD, is_mask_R, a_XD, partial_SRX, launch)
    else:
        partial_SRX[0] = F.linear(x_RD, a_XD)
    return partial_SRX


def expand_add(
    y_RE: Tensor,
    is_mask_R: Tensor,
    partial_SRX: Tensor,
    b_Er: Tensor,
    *,
    sizes: tuple[int, ...],
    scaling: float,
    launch: LoraLaunch = DEFAULT,
) -> Tensor:
    """Add scaling * B h to the MASK rows of `y_RE`, in place; other rows keep their bits. Returns `y_RE`.

    `sizes` are the parts' output widths, at most three, in the order of the rows of `b_Er`.
    """
    rank = b_Er.shape[1]
    assert len(sizes) <= MAX_PARTS and sum(sizes) == len(b_Er) == y_RE.shape[1], f"{sizes=} {b_Er.shape=}"
    assert partial_SRX.shape[2] == len(sizes) * rank, f"{partial_SRX.shape=} {sizes=} {rank=}"
    assert y_RE.stride(1) == b_Er.stride(1) == 1, f"{y_RE.stride()=} {b_Er.stride()=}"
    if _runs_kernels(y_RE):
        from idlm.kernels.gated_lora.launch import run_expand

        run_expand(y_RE, is_mask_R, partial_SRX, b_Er, sizes, scaling, launch)
        return y_RE
    h_RX = partial_SRX.sum(dim=0).to(y_RE.dtype)
    parts = zip(h_RX.split(rank, dim=1), b_Er.split(sizes), strict=True)
    gain_RE = torch.cat([F.linear(h_Rr, b_er) for h_Rr, b_er in parts], dim=1) * scaling
    return y_RE.copy_(torch.where(is_mask_R[:, None], y_RE + gain_RE, y_RE))


def gated_lora_add(
    y_RE: Tensor,
    x_RD: Tensor,
    is_mask_R: Tensor,
    a_XD: Tensor,
    b_Er: Tensor,
    *,
    sizes: tuple[int, ...],
    scaling: float,
    launch: LoraLaunch = DEFAULT,
) -> Tensor:
    """`shrink`, then `expand_add`: y += scaling * B A x in MASK rows, in place."""
    partial_SRX = shrink(x_RD, is_mask_R, a_XD, launch=launch)
    return expand_add(y_RE, is_mask_R, partial_SRX, b_Er, sizes=sizes, scaling=scaling, launch=launch)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda or INTERPRETED
