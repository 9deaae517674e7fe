"""The Triton kernels of page_bounds.

B sequences, I pieces of a pass, R rows, W places of a block, S physical slots, X pieces of the cache, P pages
that are scored, C listed pages, N query heads, K KV heads, G = N / K, H head dim.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds_kernel(
    keys_SKH,
    k_scale_K,
    least_XKH,
    largest_XKH,
    first_slots_I,
    sequences_I,
    ends_B,
    block_table,
    stride_slot,
    stride_head,
    stride_table,
    K: tl.constexpr,
    H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Bounds of one piece and KV head."""
    i, kv_head = tl.program_id(0), tl.program_id(1)
    first, b = tl.load(first_slots_I + i), tl.load(sequences_I + i)
    end = tl.load(ends_B + b)
    if first >= end:
        return
    begin = first // PIECE * PIECE
    page = tl.load(block_table + b * stride_table + begin // PAGE_SIZE)
    physical = page * PAGE_SIZE + begin % PAGE_SIZE
    places, columns = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_H)
    is_final = ((places < PIECE) & (begin + places < end))[:, None] & (columns < H)[None, :]
    at = (physical + places)[:, None] * stride_slot + kv_head * stride_head + columns[None, :]
    k = tl.load(keys_SKH + at, mask=is_final, other=0.0).to(tl.float32)
    if SCALED:
        k = k * tl.load(k_scale_K + kv_head)
    least = tl.min(tl.where(is_final, k, float("inf")), 0)
    largest = tl.max(tl.where(is_final, k, float("-inf")), 0)
    at_bounds = (physical // PIECE * K + kv_head) * H + columns
    tl.store(least_XKH + at_bounds, least.to(least_XKH.dtype.element_ty), mask=columns < H)
    tl.store(largest_XKH + at_bounds, largest.to(largest_XKH.dtype.element_ty), mask=columns < H)


@triton.jit
def queries_kernel(
    q_RNH,
    rows_BW,
    parts_2BKH,
    num_sequences,
    stride_row,
    stride_head,
    W: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Mean positive and mean negative part of the queries of one sequence and KV head."""
    b, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places, columns = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_H)
    rows = tl.load(rows_BW + b * W + places, mask=places < W, other=-1)
    is_fed = (rows >= 0)[:, None] & (columns < H)[None, :]
    up = tl.zeros([BLOCK_H], dtype=tl.float32)
    down = tl.zeros([BLOCK_H], dtype=tl.float32)
    for g in range(G):
        at = rows[:, None] * stride_row + (kv_head * G + g) * stride_head + columns[None, :]
        q = tl.load(q_RNH + at, mask=is_fed, other=0.0).to(tl.float32)
        up += tl.sum(tl.maximum(q, 0.0), 0)
        down += tl.sum(tl.minimum(q, 0.0), 0)
    num_queries = tl.maximum(tl.sum((rows >= 0).to(tl.int32), 0), 1) * G
    at = (b * K + kv_head) * H + columns
    tl.store(parts_2BKH + at, up / num_queries, mask=columns < H)
    tl.store(parts_2BKH + num_sequences * K * H + at, down / num_queries, mask=columns < H)


@triton.jit
def scores_kernel(
    parts_2BKH,
    least_XKH,
    largest_XKH,
    scores_BKP,
    starts_B,
    block_table,
    num_sequences,
    num_pages,
    stride_table,
    K: tl.constexpr,
    H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Scores of BLOCK_P pages of one sequence and KV head; programs from the block on end at once."""
    kv_head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pages = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    start = tl.load(starts_B + b)
    if tl.program_id(0) * BLOCK_P * PAGE >= start:
        return
    columns = tl.arange(0, BLOCK_H)
    least = tl.full([BLOCK_P, BLOCK_H], float("inf"), dtype=tl.float32)
    largest = tl.full([BLOCK_P, BLOCK_H], float("-inf"), dtype=tl.float32)
    for j in range(PAGE // PIECE):
        slots = pages * PAGE + j * PIECE
        is_stored = slots < start
        page = tl.load(block_table + b * stride_table + slots // PAGE_SIZE, mask=is_stored, other=0)
        pieces = page * (PAGE_SIZE // PIECE) + slots % PAGE_SIZE // PIECE
        at = (pieces[:, None] * K + kv_head) * H + columns[None, :]
        mask = is_stored[:, None] & (columns < H)[None, :]
        least = tl.minimum(least, tl.load(least_XKH + at, mask=mask, other=float("inf")).to(tl.float32))
        largest = tl.maximum(
            largest, tl.load(largest_XKH + at, mask=mask, other=float("-inf")).to(tl.float32)
        )
    is_any = (pages * PAGE < start)[:, None] & (columns < H)[None, :]
    at = (b * K + kv_head) * H + columns
    up = tl.load(parts_2BKH + at, mask=columns < H, other=0.0)
    down = tl.load(parts_2BKH + num_sequences * K * H + at, mask=columns < H, other=0.0)
    bounds = tl.where(is_any, up[None, :] * largest + down[None, :] * least, 0.0)
    at = (b * K + kv_head) * num_pages + pages
    tl.store(scores_BKP + at, tl.sum(bounds, 1), mask=(pages < num_pages) & (pages * PAGE < start))


@triton.jit
def list_kernel(
    pages_BKC,
    starts_B,
    slots_BKX,
    num_slots,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    NOT_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK of the `num_slots` slots of the pages of one sequence and KV head."""
    of_head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_B + of_head // K)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_slots
    page = tl.load(pages_BKC + of_head * (num_slots // PAGE) + places // PAGE, mask=inside, other=-1)
    slots = page * PAGE + places % PAGE
    slots = tl.where((page >= 0) & (slots < start), slots, NOT_LISTED)
    tl.store(slots_BKX + of_head * num_slots + places, slots, mask=inside)
