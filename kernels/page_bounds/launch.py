"""Launches of the kernels of page_bounds; nothing waits for the device.

B sequences, I pieces of a pass, R rows, W places of a block, S physical slots, X pieces of the cache, P pages
that are scored, C listed pages, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.page_bounds.kernel import bounds_kernel, list_kernel, queries_kernel, scores_kernel
from idlm.kernels.page_bounds.types import PageLayout

PAGES_PER_PROGRAM = 32
SLOTS_PER_PROGRAM = 1024


def write_bounds(
    keys_SKH: Tensor,
    k_scale_K: Tensor | None,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    first_slots_I: Tensor,
    sequences_I: Tensor,
    ends_B: Tensor,
    layout: PageLayout,
) -> None:
    """See `op.write_bounds`."""
    num_kv_heads, head_dim = keys_SKH.shape[1:]
    assert least_XKH.is_contiguous() and largest_XKH.is_contiguous() and keys_SKH.stride(2) == 1
    assert first_slots_I.is_contiguous() and sequences_I.is_contiguous()
    if not len(first_slots_I):
        return
    bounds_kernel[(len(first_slots_I), num_kv_heads)](
        keys_SKH,
        k_scale_K,
        least_XKH,
        largest_XKH,
        first_slots_I,
        sequences_I,
        ends_B,
        layout.block_table_BP,
        *keys_SKH.stride()[:2],
        layout.block_table_BP.stride(0),
        K=num_kv_heads,
        H=head_dim,
        PAGE_SIZE=layout.page_size,
        PIECE=layout.piece,
        BLOCK_F=triton.next_power_of_2(layout.piece),
        BLOCK_H=triton.next_power_of_2(head_dim),
        SCALED=k_scale_K is not None,
        num_warps=1,
    )


def page_scores(
    q_RNH: Tensor,
    rows_BW: Tensor,
    least_XKH: Tensor,
    largest_XKH: Tensor,
    starts_B: Tensor,
    num_pages: int,
    layout: PageLayout,
) -> Tensor:
    """See `op.page_scores`."""
    (num_sequences, num_places), (num_kv_heads, head_dim) = rows_BW.shape, least_XKH.shape[1:]
    assert least_XKH.is_contiguous() and largest_XKH.is_contiguous() and rows_BW.is_contiguous()
    assert q_RNH.stride(2) == 1, f"{q_RNH.stride()=}"
    parts_2BKH = q_RNH.new_empty(2, num_sequences, num_kv_heads, head_dim, dtype=torch.float32)
    queries_kernel[(num_sequences, num_kv_heads)](
        q_RNH,
        rows_BW,
        parts_2BKH,
        num_sequences,
        *q_RNH.stride()[:2],
        W=num_places,
        K=num_kv_heads,
        G=q_RNH.shape[1] // num_kv_heads,
        H=head_dim,
        BLOCK_W=triton.next_power_of_2(num_places),
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    scores_BKP = q_RNH.new_empty(num_sequences, num_kv_heads, num_pages, dtype=torch.float32)
    scores_kernel[(triton.cdiv(num_pages, PAGES_PER_PROGRAM), num_kv_heads, num_sequences)](
        parts_2BKH,
        least_XKH,
        largest_XKH,
        scores_BKP,
        starts_B,
        layout.block_table_BP,
        num_sequences,
        num_pages,
        layout.block_table_BP.stride(0),
        K=num_kv_heads,
        H=head_dim,
        PAGE_SIZE=layout.page_size,
        PIECE=layout.piece,
        PAGE=layout.page,
        BLOCK_P=PAGES_PER_PROGRAM,
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return scores_BKP


def list_slots(pages_BKC: Tensor, starts_B: Tensor, page: int) -> Tensor:
    """See `op.list_slots`."""
    num_sequences, num_kv_heads, num_listed = pages_BKC.shape
    assert pages_BKC.is_contiguous() and pages_BKC.dtype == torch.int32, f"{pages_BKC.dtype=}"
    slots_BKX = pages_BKC.new_empty(num_sequences, num_kv_heads, num_listed * page)
    num_slots = num_listed * page
    list_kernel[(triton.cdiv(num_slots, SLOTS_PER_PROGRAM), num_sequences * num_kv_heads)](
        pages_BKC,
        starts_B,
        slots_BKX,
        num_slots,
        K=num_kv_heads,
        PAGE=page,
        NOT_LISTED=-1,
        BLOCK=SLOTS_PER_PROGRAM,
    )
    return slots_BKX
