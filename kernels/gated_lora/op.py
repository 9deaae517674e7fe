"""Gated LoRA of a fused projection: y += scaling * B h in MASK rows, where h = A x. Contract in README.md.

R rows, E output width (of B: those of all adapters), F half of it for a SwiGLU, r rank, P parts of the
projection, L adapters, X ranks of all parts and adapters (L P r), or of
the parts of one, whose rows are M and whose outputs e."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import library_linear, one_thread, runs_kernels
from idlm.kernels.gated_lora.types import Gate, gate_of, num_adapters_of, rows_of

MAX_PARTS, FEW_ROWS = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLora:
    """Gated LoRA of a projection, the end of whose weight holds the A of all adapters, of all parts each, or
    where no kernel runs, `a_XD`, so that it is computed for MASK rows alone; fields as in `expand_add`."""

    a_XD: Tensor | None = None
    b_Er: Tensor
    gate: Gate
    sizes: tuple[int, ...]
    scaling: float | Tensor

    @property
    def num_ranks(self) -> int:
        """X, the ranks of all parts and adapters."""
        return len(self.b_Er) // sum(self.sizes) * len(self.sizes) * self.b_Er.shape[1]


def expand_add(
    y_RE: Tensor,
    gate: Gate,
    h_RX: Tensor,
    b_Er: Tensor,
    *,
    sizes: tuple[int, ...],
    scaling: float | Tensor,
) -> Tensor:
    """Add scaling * B h to the MASK rows of `y_RE`, in place; other rows do not change. Returns `y_RE`.

    `sizes` are the parts' output widths, at most three, in the order of the rows of `b_Er`; `h_RX` holds A x
    of each part in turn, with any content in other rows. `gate` (bool): MASK rows. Of several adapters
    `gate` are `RowGroups`, `h_RX` and `b_Er` hold those of each in turn, and `scaling` is a tensor [L]
    (fp64)."""
    _check(y_RE, gate, h_RX, b_Er, sizes, scaling)
    if runs_kernels(y_RE):
        from idlm.kernels.gated_lora.kernel import run_expand

        run_expand(y_RE, gate, h_RX, b_Er, sizes, scaling)
        return y_RE
    lora = GatedLora(b_Er=b_Er, gate=gate, sizes=sizes, scaling=scaling)
    rows = rows_of(gate)
    for number, (rows_M, own_RX) in enumerate(zip(rows, h_RX.chunk(len(rows), 1), strict=True)):
        h_MX = own_RX[rows_M]
        if len(h_MX):
            _add(y_RE, rows_M, number, h_MX, lora)
    return y_RE


def add_low_rank(y_RE: Tensor, x_RD: Tensor, lora: GatedLora) -> Tensor:
    """`expand_add` where no kernel runs, of an adapter whose A are not in the projection's weight."""
    assert lora.a_XD is not None and not runs_kernels(y_RE), f"{lora.a_XD=} {y_RE.device=}"
    rows = rows_of(lora.gate)
    for number, (rows_M, a_XD) in enumerate(zip(rows, lora.a_XD.chunk(len(rows)), strict=True)):
        x_MD = x_RD[rows_M]
        if len(x_MD):
            with one_thread(is_few=len(x_MD) <= FEW_ROWS):
                _add(y_RE, rows_M, number, library_linear(x_MD, a_XD), lora)
    return y_RE


def expand_swiglu(y_RE: Tensor, gate: Gate, h_RX: Tensor, b_Er: Tensor, *, scaling: float | Tensor) -> Tensor:
    """silu(gate) * up, [R, F], of the gate and up that `expand_add` would give; `y_RE` does not change."""
    sizes = (y_RE.shape[1] // 2,) * 2
    _check(y_RE, gate, h_RX, b_Er, sizes, scaling)
    if runs_kernels(y_RE):
        from idlm.kernels.gated_lora.kernel import run_expand

        out_RF = y_RE.new_empty(len(y_RE), sizes[0])
        run_expand(y_RE, gate, h_RX, b_Er, sizes, scaling, out_RF=out_RF)
        return out_RF
    gate_RF, up_RF = expand_add(y_RE.clone(), gate, h_RX, b_Er, sizes=sizes, scaling=scaling).chunk(2, dim=-1)
    return F.silu(gate_RF).mul_(up_RF)


def _add(y_RE: Tensor, rows_M: slice | Tensor, number: int, h_MX: Tensor, lora: GatedLora) -> None:
    """Add scaling * B h of an adapter, by the library, to its rows of `y_RE`."""
    rank, scaling = lora.b_Er.shape[1], lora.scaling
    b_er = lora.b_Er.unflatten(0, (-1, y_RE.shape[1]))[number]
    parts = zip(h_MX.split(rank, dim=1), b_er.split(lora.sizes), strict=True)
    gains = [library_linear(h_Mr, b_er) for h_Mr, b_er in parts]
    gain_ME = gains[0] if len(gains) == 1 else torch.cat(gains, dim=1)
    gain_ME.mul_(scaling[number] if isinstance(scaling, Tensor) else scaling)
    if isinstance(rows_M, slice):
        y_RE[rows_M].add_(gain_ME)
    else:
        y_RE.index_add_(0, rows_M, gain_ME)


def _check(
    y_RE: Tensor,
    gate: Gate,
    h_RX: Tensor,
    b_Er: Tensor,
    sizes: tuple[int, ...],
    scaling: float | Tensor,
) -> None:
    num, gate_R = num_adapters_of(gate), gate_of(gate)
    assert len(sizes) <= MAX_PARTS and sum(sizes) == y_RE.shape[1], f"{sizes=} {y_RE.shape=}"
    assert num * sum(sizes) == len(b_Er), f"{num=} {sizes=} {b_Er.shape=}"
    assert h_RX.shape == (len(y_RE), num * len(sizes) * b_Er.shape[1]), (
        f"{h_RX.shape=} {sizes=} {b_Er.shape=}"
    )
    assert y_RE.stride(1) == b_Er.stride(1) == h_RX.stride(1) == 1, f"{y_RE.stride()=} {h_RX.stride()=}"
    assert gate_R.dtype == (torch.uint8 if num > 1 else torch.bool), f"{gate_R.dtype=} {num=}"
    assert len(gate_R) == len(y_RE), f"{gate_R.shape=}"
    assert not isinstance(scaling, Tensor) if num == 1 else isinstance(scaling, Tensor), f"{scaling=} {num=}"
