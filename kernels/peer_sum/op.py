"""Sums of rows over ranks, residual addition and RMSNorm. Contract in README.md. R rows, D width."""

from __future__ import annotations

from torch import Tensor

from idlm.kernels.backend import has_pdl, pdl_options
from idlm.kernels.peer_sum.boxes import MAX_RANKS, PeerBoxes

NUM_WARPS = 8
ROUND_BYTES = 1 << 20
"""That a link sends in the time that a second round of writing and waiting takes."""


def num_rounds(num_bytes: int, size: int) -> int:
    """Rounds of a sum of so many bytes over `size` ranks. In one every rank sends all its rows to all others;
    in two it sends each row to one rank, which sends the sum back."""
    saved = (size - 1) * num_bytes - 2 * (size - 1) * num_bytes // size
    return 2 if saved > ROUND_BYTES else 1


def peer_sum_rms_norm(
    x_RD: Tensor,
    residual_RD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    boxes: PeerBoxes,
    rounds: int | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of `x_RD` over all ranks, which all call it with as many rows: (normed,
    residual), the residual IN PLACE, with the same bits on every rank.

    The sum is added in fp32 in the order of ranks and then rounded. `rounds` (None: `num_rounds`) changes no
    bit; all ranks give the same."""
    from idlm.kernels.peer_sum.kernel import peer_sum_rms_norm_kernel

    assert boxes.holds(x_RD) and x_RD.stride(1) == residual_RD.stride(1) == 1, f"{x_RD.shape=} {boxes=}"
    (num_rows, D), normed_RD = x_RD.shape, x_RD.new_empty(x_RD.shape)
    if rounds is None:
        rounds = num_rounds(x_RD.nbytes, boxes.size)
    if num_rows:
        peer_sum_rms_norm_kernel[(num_rows,)](
            *(x_RD, residual_RD, weight_D, normed_RD, boxes.turns),
            *boxes.addresses,
            *(0,) * (MAX_RANKS - boxes.size),
            boxes.stop,
            *(x_RD.stride(0), residual_RD.stride(0), normed_RD.stride(0), D, eps),
            *(boxes.num_slots, boxes.stride),
            EMPTY=boxes.empty,
            RANK=boxes.rank,
            SIZE=boxes.size,
            TWO_ROUNDS=rounds == 2,
            # Each thread has columns of its own: threads that read the same ones could differ in what has
            # arrived.
            BLOCK_D=max(NUM_WARPS * 32, 1 << (D - 1).bit_length()),
            num_warps=NUM_WARPS,
            **pdl_options(has_pdl(x_RD.device) if pdl is None else pdl),
        )
    return normed_RD, residual_RD
