"""The Triton kernels of bounds of keys, and of the scores of pages by them.

B sequences, I pieces, R rows, W positions, P pages, C pieces of all pages, N query heads, K KV heads, G = N /
K, H head dim, S physical KV slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride_table"])
def bounds_kernel(
    keys_SKH, k_scale_K, bounds, pieces, ends_B, block_table, strides, stride_table,
    H: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Bounds of one piece and KV head over its slots below the end of what is final. `strides`: of slots and
    heads of the keys, of pieces."""
    stride_slot, stride_head, stride_piece = strides
    piece, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, slot = tl.load(pieces.sequences_I + piece), tl.load(pieces.slots_I + piece)
    end = tl.load(ends_B + sequence)
    if (tl.load(pieces.is_piece_I + piece) == 0) | (slot >= end):
        return
    first = slot // SIZE * SIZE
    page = tl.load(block_table + sequence.to(tl.int64) * stride_table + first // PAGE).to(tl.int64)
    physical = page * PAGE + first % PAGE
    o_slot, o_column = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_H)
    m_final = ((o_slot < SIZE) & (first + o_slot < end))[:, None]
    at = (physical + o_slot)[:, None] * stride_slot + kv_head * stride_head + o_column[None, :]
    m_key = m_final & (o_column < H)[None, :]
    b_key = tl.load(keys_SKH + at, mask=m_key, other=0.0).to(tl.float32)
    if k_scale_K is not None:
        b_key = b_key * tl.load(k_scale_K + kv_head)
    at_bound = physical // SIZE * stride_piece + kv_head * H + o_column
    b_min = tl.min(tl.where(m_final, b_key, float("inf")), 0)
    b_largest = tl.max(tl.where(m_final, b_key, float("-inf")), 0)
    dtype = bounds.min_CKH.dtype.element_ty
    tl.store(bounds.min_CKH + at_bound, b_min.to(dtype), mask=o_column < H)
    tl.store(bounds.largest_CKH + at_bound, b_largest.to(dtype), mask=o_column < H)


@triton.jit(do_not_specialize=["num_pages", "stride_table"])
def score_kernel(
    q_RNH, rows_BW, bounds, starts_B, block_table, scores_BKP, num_pages, strides, stride_table,
    W: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Scores of TILES tiles of pages of one sequence and KV head. SIZE: slots of a piece; PAGE: of a page of
    the engine; PIECES: pieces of a page that is scored. `strides`: of rows and heads of the queries, of
    pieces."""
    stride_row, stride_head, stride_piece = strides
    sequence, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(starts_B + sequence).to(tl.int32)
    first_page = tl.program_id(0) * (TILES * BLOCK_P)
    if first_page * (PIECES * SIZE) >= start:
        return
    o_index, o_column = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_H)
    b_rows = tl.load(rows_BW + sequence * W + o_index, mask=o_index < W, other=-1)
    num_queries = tl.maximum(tl.sum((b_rows >= 0).to(tl.int32), 0), 1) * G
    b_up = tl.zeros([BLOCK_H], tl.float32)
    b_down = tl.zeros([BLOCK_H], tl.float32)
    for part in range(tl.cdiv(W * G, BLOCK_M)):
        o_m = part * BLOCK_M + tl.arange(0, BLOCK_M)
        b_row = tl.load(rows_BW + sequence * W + o_m // G, mask=o_m < W * G, other=-1).to(tl.int64)
        at = b_row[:, None] * stride_row + (kv_head * G + o_m % G)[:, None] * stride_head + o_column[None, :]
        b_q = tl.load(q_RNH + at, mask=(b_row >= 0)[:, None] & (o_column < H)[None, :], other=0.0)
        b_up += tl.sum(tl.maximum(b_q.to(tl.float32), 0.0), 0)
        b_down += tl.sum(tl.minimum(b_q.to(tl.float32), 0.0), 0)
    b_up = b_up / num_queries
    b_down = b_down / num_queries
    for tile in range(TILES):
        o_page = first_page + tile * BLOCK_P + tl.arange(0, BLOCK_P)
        b_min = tl.full([BLOCK_P, BLOCK_H], float("inf"), tl.float32)
        b_largest = tl.full([BLOCK_P, BLOCK_H], float("-inf"), tl.float32)
        for piece in tl.static_range(PIECES):
            slot = (o_page * PIECES + piece) * SIZE
            m_stored = slot < start
            b_page = tl.load(block_table + sequence * stride_table + slot // PAGE, mask=m_stored, other=0)
            physical = b_page.to(tl.int64) * (PAGE // SIZE) + slot % PAGE // SIZE
            at = physical[:, None] * stride_piece + kv_head * H + o_column[None, :]
            m_bound = m_stored[:, None] & (o_column < H)[None, :]
            b_one = tl.load(bounds.min_CKH + at, mask=m_bound, other=float("inf")).to(tl.float32)
            b_min = tl.minimum(b_min, b_one)
            b_one = tl.load(bounds.largest_CKH + at, mask=m_bound, other=float("-inf")).to(tl.float32)
            b_largest = tl.maximum(b_largest, b_one)
        m_page = ((o_page * PIECES * SIZE < start)[:, None]) & (o_column < H)[None, :]
        b_bound = b_up[None, :] * b_largest + b_down[None, :] * b_min
        b_score = tl.sum(tl.where(m_page, b_bound, 0.0), 1)
        at_score = (sequence * K + kv_head) * num_pages + o_page
        tl.store(scores_BKP + at_score, b_score, mask=o_page < num_pages)
