"""Launches of both kernels. Nothing here waits for the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.page_bounds.kernel import bounds_kernel, score_kernel
from idlm.kernels.page_bounds.types import Bounds, PagedSlots, Pieces

BLOCK_M, BLOCK_P, TILES = 32, 32, 8
"""Queries and pages of a tile; tiles of pages of a program, which reads the queries once for them."""


def write_bounds(
    keys_SKH: Tensor,
    k_scale_K: Tensor | None,
    bounds: Bounds,
    pieces: Pieces,
    ends_B: Tensor,
    slots: PagedSlots,
) -> None:
    """See `op.write_bounds`."""
    num_kv_heads, head_dim = keys_SKH.shape[1:]
    assert keys_SKH.stride(2) == 1 and bounds.least_CKH[0].is_contiguous(), f"{keys_SKH.stride()=}"
    bounds_kernel[(len(pieces.slots_I), num_kv_heads)](
        *(keys_SKH, k_scale_K, bounds.least_CKH, bounds.largest_CKH),
        *(pieces.sequences_I, pieces.slots_I, pieces.is_piece_I, ends_B, slots.block_table_BP),
        *(*keys_SKH.stride()[:2], bounds.least_CKH.stride(0), slots.block_table_BP.stride(0)),
        H=head_dim,
        PAGE=slots.page_size,
        SIZE=bounds.size,
        SCALED=k_scale_K is not None,
        BLOCK_F=triton.next_power_of_2(bounds.size),
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def page_scores(
    q_RNH: Tensor,
    rows_BW: Tensor,
    bounds: Bounds,
    starts_B: Tensor,
    slots: PagedSlots,
    *,
    page: int,
    num_pages: int,
) -> Tensor:
    """See `op.page_scores`."""
    (num_sequences, num_places), (num_heads, head_dim) = rows_BW.shape, q_RNH.shape[1:]
    num_kv_heads = bounds.least_CKH.shape[1]
    assert q_RNH.stride(2) == 1 and rows_BW.is_contiguous(), f"{q_RNH.stride()=} {rows_BW.stride()=}"
    assert slots.page_size % bounds.size == page % bounds.size == 0, (
        f"{slots.page_size=} {page=} {bounds.size=}"
    )
    scores_BKP = q_RNH.new_empty(num_sequences, num_kv_heads, num_pages, dtype=torch.float32)
    score_kernel[(triton.cdiv(num_pages, BLOCK_P * TILES), num_sequences, num_kv_heads)](
        *(q_RNH, rows_BW, bounds.least_CKH, bounds.largest_CKH, starts_B, slots.block_table_BP, scores_BKP),
        *(num_pages, *q_RNH.stride()[:2], bounds.least_CKH.stride(0), slots.block_table_BP.stride(0)),
        W=num_places,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        H=head_dim,
        PAGE=slots.page_size,
        SIZE=bounds.size,
        PIECES=page // bounds.size,
        TILES=TILES,
        BLOCK_W=triton.next_power_of_2(num_places),
        BLOCK_M=BLOCK_M,
        BLOCK_P=BLOCK_P,
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return scores_BKP
