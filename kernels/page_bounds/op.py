"""Bounds of the keys of pieces of pages, and the scores of pages by them. Contract in README.md.

B sequences, I pieces, F slots of a piece, R rows, W positions of a block, P pages, C pieces of all pages,
N query heads, K KV heads, G = N / K, H head dim, S physical KV slots."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from idlm.kernels.backend import FP8, KERNEL_DTYPES, computes, read_slots, runs_kernels

BLOCK_M, BLOCK_P, TILES = 32, 32, 8
"""Queries and pages of a tile; tiles of pages of a program, which reads the queries once for them."""


class PagedSlots(NamedTuple):
    """Where the slots of sequences are: `block_table_BP` (int64) has their pages of `page_size` slots."""

    block_table_BP: Tensor
    page_size: int

    def physical(self, slots_bX: Tensor, sequences_b: Tensor) -> Tensor:
        """Physical slots [b, X] of slots that the sequences own; for other slots, any that exist."""
        slots_bX = slots_bX.clamp(0, self.block_table_BP.shape[1] * self.page_size - 1)
        pages_bX = self.block_table_BP[sequences_b[:, None], slots_bX // self.page_size]
        return pages_bX * self.page_size + slots_bX % self.page_size


class Bounds(NamedTuple):
    """Least and largest key per channel [C + 1, K, H] of pieces of `size` slots, which divides the pages of
    the engine. The last piece takes what is to be dropped."""

    min_CKH: Tensor
    largest_CKH: Tensor
    size: int


class Pieces(NamedTuple):
    """Pieces of which a pass stores keys: `slots_I` (int64) is the first slot that it stores, of sequence
    `sequences_I`; where not `is_piece_I` (bool) there is none."""

    sequences_I: Tensor
    slots_I: Tensor
    is_piece_I: Tensor


@torch.inference_mode()
def write_bounds(
    keys_SKH: Tensor,
    k_scale_K: Tensor | None,
    bounds: Bounds,
    pieces: Pieces,
    ends_B: Tensor,
    slots: PagedSlots,
) -> None:
    """Write the bounds of pieces over their slots below `ends_B`; those whose first stored slot is not below
    it are left alone. fp8 keys are multiplied by `k_scale_K`. Nothing waits for the device."""
    if not (runs_kernels(keys_SKH) and bounds.min_CKH.dtype in KERNEL_DTYPES):
        ends_I1 = ends_B[pieces.sequences_I, None]
        first_I1 = (pieces.slots_I // bounds.size * bounds.size)[:, None]
        slots_IF = first_I1 + torch.arange(bounds.size, device=keys_SKH.device)
        is_final_IF11 = (slots_IF < ends_I1)[:, :, None, None]
        k_IFKH = read_slots(keys_SKH, slots.physical(slots_IF, pieces.sequences_I))
        k_IFKH = k_IFKH.float() if keys_SKH.dtype == FP8 else k_IFKH
        if k_scale_K is not None:
            k_IFKH = k_IFKH * k_scale_K[:, None]
        is_written_I = pieces.is_piece_I & (pieces.slots_I < ends_I1[:, 0])
        nowhere = len(bounds.min_CKH) - 1
        physical_I = slots.physical(first_I1, pieces.sequences_I)[:, 0] // bounds.size
        physical_I = torch.where(is_written_I, physical_I, nowhere)
        min_IKH = torch.where(is_final_IF11, k_IFKH, math.inf).amin(1)
        largest_IKH = torch.where(is_final_IF11, k_IFKH, -math.inf).amax(1)
        bounds.min_CKH[physical_I] = min_IKH.to(bounds.min_CKH.dtype)
        bounds.largest_CKH[physical_I] = largest_IKH.to(bounds.largest_CKH.dtype)
        return
    import triton

    from idlm.kernels.page_bounds.kernel import bounds_kernel

    num_kv_heads, head_dim = keys_SKH.shape[1:]
    assert keys_SKH.stride(2) == 1 and bounds.min_CKH[0].is_contiguous(), f"{keys_SKH.stride()=}"
    bounds_kernel[(len(pieces.slots_I), num_kv_heads)](
        *(keys_SKH, k_scale_K, bounds, pieces, ends_B, slots.block_table_BP),
        (*keys_SKH.stride()[:2], bounds.min_CKH.stride(0)),
        slots.block_table_BP.stride(0),
        H=head_dim,
        PAGE=slots.page_size,
        SIZE=bounds.size,
        BLOCK_F=triton.next_power_of_2(bounds.size),
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@torch.inference_mode()
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
    """Upper bounds [B, K, P] (fp32; fp64 of fp64) of the products of queries with the keys of pages of `page`
    slots, a multiple of the bounds' pieces; averaged over the rows at `rows_BW` (-1: none) and the heads of a
    KV head. Pieces from `starts_B` on do not count; pages from there on have any score.

    The bound is a sum over channels of q * largest where q > 0 and q * least elsewhere: linear in the
    positive and negative parts of queries, which are averaged first."""
    if not computes(q_RNH):
        return _plain_scores(q_RNH, rows_BW, bounds, starts_B, slots, page, num_pages)
    import triton

    from idlm.kernels.page_bounds.kernel import score_kernel

    (num_sequences, num_positions), (num_heads, head_dim) = rows_BW.shape, q_RNH.shape[1:]
    num_kv_heads = bounds.min_CKH.shape[1]
    assert q_RNH.stride(2) == 1 and rows_BW.is_contiguous(), f"{q_RNH.stride()=} {rows_BW.stride()=}"
    assert slots.page_size % bounds.size == page % bounds.size == 0, (
        f"{slots.page_size=} {page=} {bounds.size=}"
    )
    scores_BKP = q_RNH.new_empty(num_sequences, num_kv_heads, num_pages, dtype=torch.float32)
    score_kernel[(triton.cdiv(num_pages, BLOCK_P * TILES), num_sequences, num_kv_heads)](
        *(q_RNH, rows_BW, bounds, starts_B, slots.block_table_BP, scores_BKP, num_pages),
        (*q_RNH.stride()[:2], bounds.min_CKH.stride(0)),
        slots.block_table_BP.stride(0),
        W=num_positions,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        H=head_dim,
        PAGE=slots.page_size,
        SIZE=bounds.size,
        PIECES=page // bounds.size,
        TILES=TILES,
        BLOCK_W=triton.next_power_of_2(num_positions),
        BLOCK_M=BLOCK_M,
        BLOCK_P=BLOCK_P,
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return scores_BKP


def _plain_scores(
    q_RNH: Tensor,
    rows_BW: Tensor,
    bounds: Bounds,
    starts_B: Tensor,
    slots: PagedSlots,
    page: int,
    num_pages: int,
) -> Tensor:
    wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    num_kv_heads = bounds.min_CKH.shape[1]
    is_fed_BW = rows_BW >= 0
    q_BWNH = torch.where(is_fed_BW[:, :, None, None], q_RNH[rows_BW.clamp(min=0)].to(wide), 0)
    q_BWKGH = q_BWNH.unflatten(2, (num_kv_heads, -1))
    num_queries_B11 = (is_fed_BW.sum(-1).clamp(min=1) * q_BWKGH.shape[3])[:, None, None]
    up_BKH = q_BWKGH.clamp(min=0).sum((1, 3)) / num_queries_B11
    down_BKH = q_BWKGH.clamp(max=0).sum((1, 3)) / num_queries_B11
    sequences_B = torch.arange(len(rows_BW), device=q_RNH.device)
    first_C = torch.arange(num_pages * (page // bounds.size), device=q_RNH.device) * bounds.size
    slots_BC = first_C.expand(len(rows_BW), -1)
    is_stored_BC11 = (slots_BC < starts_B[:, None])[:, :, None, None]
    pieces_BC = slots.physical(slots_BC, sequences_B) // bounds.size
    # Pieces that hold nothing yet have the bounds of an earlier owner.
    min_BCKH = torch.where(is_stored_BC11, bounds.min_CKH[pieces_BC].to(wide), math.inf)
    largest_BCKH = torch.where(is_stored_BC11, bounds.largest_CKH[pieces_BC].to(wide), -math.inf)
    is_any_BP11 = is_stored_BC11.unflatten(1, (num_pages, -1)).any(2)
    min_BPKH = torch.where(is_any_BP11, min_BCKH.unflatten(1, (num_pages, -1)).amin(2), 0)
    largest_BPKH = torch.where(is_any_BP11, largest_BCKH.unflatten(1, (num_pages, -1)).amax(2), 0)
    return torch.einsum("bkh,bpkh->bkp", up_BKH, largest_BPKH) + torch.einsum(
        "bkh,bpkh->bkp", down_BKH, min_BPKH
    )
