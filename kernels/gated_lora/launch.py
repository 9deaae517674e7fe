"""The launch of gated LoRA. R rows, E output width, F half of it for a SwiGLU, X ranks of all parts."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.backend import has_pdl, rounds_as_written
from idlm.kernels.gated_lora.kernel import expand_kernel

BLOCK_E = 64
MAX_RANKS = 128
ROWS = (16, 32, 64)
WARPS = 8


def run_expand(
    y_RE: Tensor,
    is_mask_R: Tensor,
    h_RX: Tensor,
    b_Er: Tensor,
    sizes: tuple[int, ...],
    scaling: float,
    *,
    out_RF: Tensor | None = None,
) -> None:
    """Add to the MASK rows of `y_RE`; or, with `out_RF`, keep it and store the SwiGLU of all rows."""
    num_rows, rank = len(y_RE), b_Er.shape[1]
    if num_rows == 0:
        return
    gated = out_RF is not None
    first, second, third = (sizes[0], 0, 0) if gated else (*sizes, 0, 0)[:3]
    block_r = next((rows for rows in ROWS if num_rows <= rows), ROWS[-1])
    tiles = sum(triton.cdiv(size, BLOCK_E) for size in (first, second, third))
    block_k = min(MAX_RANKS, max(16, triton.next_power_of_2(rank)))
    pdl = has_pdl(y_RE.device)
    expand_kernel[(triton.cdiv(num_rows, block_r) * tiles,)](
        y_RE,
        y_RE if out_RF is None else out_RF,
        is_mask_R,
        h_RX,
        b_Er,
        num_rows,
        first,
        second,
        third,
        rank,
        scaling,
        y_RE.stride(0),
        0 if out_RF is None else out_RF.stride(0),
        h_RX.stride(0),
        b_Er.stride(0),
        GATED=gated,
        BLOCK_E=BLOCK_E,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        IS_WIDE=rank > block_k,
        PRECISION="ieee" if y_RE.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=WARPS,
        **(rounds_as_written() if y_RE.dtype.itemsize == 2 else {}),
        **({"launch_pdl": True} if pdl else {}),
    )
