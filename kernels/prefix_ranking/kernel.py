"""The Triton kernel of attention shares: one more read of the keys, with the products transposed.

A tile is BLOCK_N slots of a sequence, layer and KV head. Keys are the left operand, so that the sum over
queries runs along the columns of a product, which a thread mostly holds itself. Tiles of all layers and
sequences that rank are numbered, and the programs of a KV head divide them into equal ranges.

L layers, R rows of a pass, B sequences, W positions, S physical KV slots, N query heads, K KV heads, G = N /
K, H head dim."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _queries(
    q_RNH, max_RN, sum_RN, rows_W, kv_head, part, stride_row, stride_head,
    W: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, BLOCK_H] of one part of a block, and what to subtract from their scores so that
    exp2 gives shares of the mean: +inf for queries that there are not."""
    o_index, o_m, o_column = (
        tl.arange(0, BLOCK_W),
        part * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_H),
    )
    num_fed = tl.sum((tl.load(rows_W + o_index, mask=o_index < W, other=-1) >= 0).to(tl.int32), 0)
    row = tl.load(rows_W + o_m // G, mask=o_m < W * G, other=-1).to(tl.int64)
    m_fed = row >= 0
    head = kv_head * G + o_m % G
    at_q = row[:, None] * stride_row + head[:, None] * stride_head + o_column[None, :]
    q = tl.load(q_RNH + at_q, mask=m_fed[:, None] & (o_column < H)[None, :], other=0.0)
    at = row * (K * G) + head
    highest = tl.load(max_RN + at, mask=m_fed, other=float("inf"))
    total = tl.load(sum_RN + at, mask=m_fed, other=1.0) * (tl.maximum(num_fed, 1) * G).to(tl.float32)
    return q, highest + tl.log2(total)


@triton.jit
def _pages(table, tile, start, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of each slot of a tile; 0 from the block on."""
    slots = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(table + slots.to(tl.uint32) // PAGE, mask=slots < start, other=0)


@triton.jit
def _store_shares(shares, scores, factor, b_offset, tile, first, start, ADDS: tl.constexpr):
    """Store the shares of a tile, or add to those stored, from scores [BLOCK_N, BLOCK_M]."""
    BLOCK_N: tl.constexpr = scores.shape[0]
    o_slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_slot = (o_slot < start) & (tile >= first)
    b_share = tl.sum(tl.exp2(scores * factor - b_offset[None, :]), 1)
    if ADDS:
        b_share += tl.load(shares + o_slot, mask=m_slot, other=0.0)
    tl.store(shares + o_slot, b_share, mask=m_slot)


@triton.jit(do_not_specialize=["num_layers", "num_sequences", "num_slots", "stride_table"])
def share_kernel(
    q_LRNH, max_LRN, sum_LRN, keys_LSKH, k_scale_LK, block_table, rows_BW, starts_B, ranks_B, shares_LBKS,
    scale_log2, num_layers, num_sequences, num_slots,
    stride_q_layer, stride_q_row, stride_q_head, stride_sums, stride_layer, stride_slot, stride_head,
    stride_table,
    W: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr,
    SCALED: tl.constexpr, PARTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, IS_NARROW: tl.constexpr,
):  # fmt: skip
    """Shares of the slots before the blocks of sequences that rank; nothing else is written.

    PARTS: parts of BLOCK_M queries, whose sums are added up in memory, in order. IS_NARROW: positions of a
    layer's keys fit 32 bits."""
    kv_head, worker = tl.program_id(0) % K, (tl.program_id(0) // K).to(tl.int64)
    num_workers = tl.num_programs(0) // K
    o_sequence = tl.arange(0, BLOCK_B)
    m_sequence = o_sequence < num_sequences
    b_ranks = tl.load(ranks_B + o_sequence, mask=m_sequence, other=0) != 0
    b_starts = tl.load(starts_B + o_sequence, mask=m_sequence & b_ranks, other=0).to(tl.int32)
    b_ends = tl.cumsum((b_starts + BLOCK_N - 1) // BLOCK_N, 0)
    tiles = tl.max(b_ends, 0)
    at, stop = worker * tiles * num_layers // num_workers, (worker + 1) * tiles * num_layers // num_workers
    while at < stop:
        layer = at // tiles
        within = (at - layer * tiles).to(tl.int32)
        is_past = b_ends <= within
        b = tl.sum(is_past.to(tl.int32), 0)
        before = tl.max(tl.where(is_past, b_ends, 0), 0)
        start = tl.load(starts_B + b).to(tl.int32)
        first = within - before
        end = tl.minimum(tl.cdiv(start, BLOCK_N), (first + stop - at).to(tl.int32))
        table = block_table + b.to(tl.int64) * stride_table
        keys = keys_LSKH + layer * stride_layer + kv_head * stride_head
        shares = shares_LBKS + ((layer * num_sequences + b) * K + kv_head) * num_slots
        o_column = tl.arange(0, BLOCK_H)
        factor = scale_log2
        if SCALED:
            factor = scale_log2 * tl.load(k_scale_LK + layer * K + kv_head)
        for part in tl.static_range(PARTS):
            if part > 0:
                # What one thread stored, another one adds to.
                tl.debug_barrier()
            q, b_offset = _queries(
                q_LRNH + layer * stride_q_layer, max_LRN + layer * stride_sums, sum_LRN + layer * stride_sums,
                rows_BW + b * W, kv_head, part, stride_q_row, stride_q_head,
                W, K, G, H, BLOCK_W, BLOCK_M, BLOCK_H,
            )  # fmt: skip
            # Page ids are read one tile ahead: loads that depend on another one are pipelined less deeply.
            pages = _pages(table, first, start, PAGE, BLOCK_N)
            # The scores of a tile become shares in the next turn, so that keys are ordered before that.
            scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for tile in tl.range(first, end, num_stages=STAGES):
                _store_shares(shares, scores, factor, b_offset, tile - 1, first, start, part > 0)
                o_slot = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
                physical = pages.to(tl.int32) * PAGE + (o_slot % PAGE).to(tl.int32)
                pages = _pages(table, tile + 1, start, PAGE, BLOCK_N)
                # From the block on page 0 is read, whatever it holds: a slot's share is its own.
                o_key = (physical if IS_NARROW else physical.to(tl.int64)) * stride_slot
                p_k = keys + o_key[:, None] + o_column[None, :]
                k = tl.load(p_k) if H == BLOCK_H else tl.load(p_k, mask=(o_column < H)[None, :], other=0.0)
                scores = tl.dot(k.to(q.dtype), q.T, input_precision=PRECISION)
            _store_shares(shares, scores, factor, b_offset, end - 1, first, start, part > 0)
        at += end - first
