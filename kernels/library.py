"""Products of rows by torch's library, of which no row reaches another.

R rows, D input width, E output width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_BYTES = 64
"""Of a row in a tile register of AMX."""


def library_linear(
    x_RD: Tensor, weight_ED: Tensor, *, bias_E: Tensor | None = None, out_RE: Tensor | None = None
) -> Tensor:
    """x W^T (+ bias) by torch, [R, E]; with `out_RE` (contiguous) nothing else is allocated.

    A row that is not finite changes no other. On a CPU, 16-bit rows of odd widths are looked at for that, and
    copied if they have gaps or one is not finite."""
    if _reads_the_next_row(x_RD):
        x_RD = x_RD.contiguous()
        is_broken_R1 = ~x_RD.isfinite().all(dim=1, keepdim=True)
        if is_broken_R1.any():
            whole_RE = _product(x_RD.masked_fill(is_broken_R1, 0), weight_ED, bias_E, out_RE)
            return whole_RE.masked_fill_(is_broken_R1, torch.nan)
    return _product(x_RD, weight_ED, bias_E, out_RE)


def _reads_the_next_row(x_RD: Tensor) -> bool:
    """Whether the library may fill the last tile of a row with what follows in memory, which it multiplies by
    zero: a NaN there is NaN here too. oneDNN does so with bfloat16 on AMX."""
    return x_RD.device.type == "cpu" and x_RD.itemsize == 2 and x_RD.shape[1] * 2 % TILE_BYTES != 0


def _product(x_RD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, out_RE: Tensor | None) -> Tensor:
    if out_RE is None:
        return F.linear(x_RD, weight_ED, bias_E)
    if bias_E is None:
        return torch.mm(x_RD, weight_ED.T, out=out_RE)
    return torch.addmm(bias_E, x_RD, weight_ED.T, out=out_RE)
