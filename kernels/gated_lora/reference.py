"""The definition of the op, in fp32 or, for fp64 input, fp64, row by row. Formula in README.md.

R rows, D input width, E output width, r rank, P parts of a fused projection.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_lora_reference(
    y_RE: Tensor,
    x_RD: Tensor,
    is_mask_R: Tensor,
    a_PrD: Tensor,
    b_Er: Tensor,
    *,
    sizes: tuple[int, ...],
    scaling: float,
) -> Tensor:
    """y + scaling * B A x in MASK rows, y elsewhere; not rounded."""
    dtype = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    result_RE = y_RE.to(dtype).clone()
    for row in range(len(x_RD)):
        if is_mask_R[row]:
            parts = zip(a_PrD.to(dtype), b_Er.to(dtype).split(sizes), strict=True)
            gain = torch.cat([b_er @ (a_rD @ x_RD[row].to(dtype)) for a_rD, b_er in parts])
            result_RE[row] += scaling * gain
    return result_RE
