"""Gated LoRA of a fused projection: y += scaling * B h in MASK rows, where h = A x. Contract in README.md.

R rows, E output width, F half of it for a SwiGLU, r rank, P parts of the projection, X ranks of all (P r)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import library_linear, runs_kernels

MAX_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLora:
    """Gated LoRA of a projection, the end of whose weight holds the A of all parts; `sizes` as in
    `expand_add`."""

    b_Er: Tensor
    is_mask_R: Tensor
    sizes: tuple[int, ...]
    scaling: float

    @property
    def num_ranks(self) -> int:
        """X, the ranks of all parts."""
        return len(self.sizes) * self.b_Er.shape[1]


def expand_add(
    y_RE: Tensor, is_mask_R: Tensor, h_RX: Tensor, b_Er: Tensor, *, sizes: tuple[int, ...], scaling: float
) -> Tensor:
    """Add scaling * B h to the MASK rows of `y_RE`, in place; other rows do not change. Returns `y_RE`.

    `sizes` are the parts' output widths, at most three, in the order of the rows of `b_Er`; `h_RX` holds A x
    of each part in turn, with any content in other rows."""
    _check(y_RE, is_mask_R, h_RX, b_Er, sizes)
    if runs_kernels(y_RE):
        from idlm.kernels.gated_lora.kernel import run_expand

        run_expand(y_RE, is_mask_R, h_RX, b_Er, sizes, scaling)
        return y_RE
    return y_RE.copy_(_sum(y_RE, is_mask_R, h_RX, b_Er, sizes, scaling))


def expand_swiglu(y_RE: Tensor, is_mask_R: Tensor, h_RX: Tensor, b_Er: Tensor, *, scaling: float) -> Tensor:
    """silu(gate) * up, [R, F], of the gate and up that `expand_add` would give; `y_RE` does not change."""
    sizes = (y_RE.shape[1] // 2,) * 2
    _check(y_RE, is_mask_R, h_RX, b_Er, sizes)
    if runs_kernels(y_RE):
        from idlm.kernels.gated_lora.kernel import run_expand

        out_RF = y_RE.new_empty(len(y_RE), sizes[0])
        run_expand(y_RE, is_mask_R, h_RX, b_Er, sizes, scaling, out_RF=out_RF)
        return out_RF
    gate_RF, up_RF = _sum(y_RE, is_mask_R, h_RX, b_Er, sizes, scaling).chunk(2, dim=-1)
    return F.silu(gate_RF) * up_RF


def _sum(
    y_RE: Tensor, is_mask_R: Tensor, h_RX: Tensor, b_Er: Tensor, sizes: tuple[int, ...], scaling: float
) -> Tensor:
    parts = zip(h_RX.split(b_Er.shape[1], dim=1), b_Er.split(sizes), strict=True)
    gain_RE = torch.cat([library_linear(h_Rr, b_er) for h_Rr, b_er in parts], dim=1) * scaling
    return torch.where(is_mask_R[:, None], y_RE + gain_RE, y_RE)


def _check(y_RE: Tensor, is_mask_R: Tensor, h_RX: Tensor, b_Er: Tensor, sizes: tuple[int, ...]) -> None:
    assert len(sizes) <= MAX_PARTS and sum(sizes) == len(b_Er) == y_RE.shape[1], f"{sizes=} {b_Er.shape=}"
    assert h_RX.shape == (len(y_RE), len(sizes) * b_Er.shape[1]), f"{h_RX.shape=} {sizes=} {b_Er.shape=}"
    assert y_RE.stride(1) == b_Er.stride(1) == h_RX.stride(1) == 1, f"{y_RE.stride()=} {h_RX.stride()=}"
    assert is_mask_R.dtype == torch.bool and len(is_mask_R) == len(y_RE), f"{is_mask_R.shape=}"
