"""The Triton kernels: attention inside a block by KV head, and the choice of its rows.

B sequences, W positions of a block (SIZE, padded to BLOCK_W), P parts of a sum. Sums are trees of fixed
shape: nothing depends on the order in which programs run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of_rank(
    keys,
    column,
    wanted,
    at,
    strides,
    last_slot,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Keys [h, c] of the positions that are key number `wanted` [c], 0 where there is none."""
    is_key, rank, count = column
    table_B, start, kv_head = at
    w, h = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_H)
    is_it = (rank[None, :] == wanted[:, None]) & is_key[None, :]
    index = tl.sum(tl.where(is_it, w[None, :], 0), 1)
    exists = (wanted >= 0) & (wanted < count)
    slot = tl.minimum(start + index, last_slot)
    page = tl.load(table_B + slot // PAGE, mask=exists, other=0).to(tl.int64)
    physical = page * PAGE + slot % PAGE
    address = physical[None, :] * strides[2] + kv_head * strides[3] + h[:, None]
    return tl.load(keys.keys_SKH + address, mask=exists[None, :] & (h < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def scores_of(q, k, scale):
    """q [w, h] times k [h, c], fp32. Eight-bit keys fit into the queries' dtype."""
    if k.dtype.primitive_bitwidth == 8:
        k = k.to(q.dtype)
    elif q.dtype != k.dtype:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    return tl.dot(q, k, input_precision="ieee") * scale


@triton.jit(do_not_specialize=["last_slot"])
def importance_kernel(
    q_RNH,
    rows_BW,
    keys,
    is_query_BW,
    is_key_BW,
    parts_BPW,
    strides,
    last_slot,
    scale,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The part of one sequence and KV head: the attention that positions get from its query heads.

    `strides`: of rows and heads of the queries, of slots and heads of the keys, of the block table."""
    b, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_parts = tl.num_programs(1)
    w, h = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_H)
    m_w = w < SIZE
    is_query = tl.load(is_query_BW + b * SIZE + w, mask=m_w, other=0) != 0
    is_key = tl.load(is_key_BW + b * SIZE + w, mask=m_w, other=0) != 0
    row = tl.load(rows_BW + b * SIZE + w, mask=is_query, other=0)
    start = tl.load(keys.starts_B + b)
    # Column c is the c-th key, so that its neighbours are the keys of columns c - 1 and c + 1.
    rank = tl.cumsum(is_key.to(tl.int32), 0) - 1
    count = tl.sum(is_key.to(tl.int32), 0)
    at, column = (keys.block_table_BP + b * strides[4], start, kv_head), (is_key, rank, count)
    k = keys_of_rank(keys, column, w, at, strides, last_slot, PAGE, HEAD_DIM, BLOCK_W, BLOCK_H)
    left = keys_of_rank(keys, column, w - 1, at, strides, last_slot, PAGE, HEAD_DIM, BLOCK_W, BLOCK_H)
    right = keys_of_rank(keys, column, w + 1, at, strides, last_slot, PAGE, HEAD_DIM, BLOCK_W, BLOCK_H)
    if keys.scale_K is not None:
        scale = scale * tl.load(keys.scale_K + kv_head)
    minimum = -3.4028234663852886e38
    is_column = w < count
    found = tl.zeros([BLOCK_W], tl.float32)
    for g in range(GROUP):
        head = (kv_head * GROUP + g) * strides[1]
        q = tl.load(
            q_RNH + row[:, None] * strides[0] + head + h[None, :],
            mask=is_query[:, None] & (h < HEAD_DIM)[None, :],
            other=0.0,
        )
        score = scores_of(q, k, scale)
        score_left = tl.where((w > 0)[None, :], scores_of(q, left, scale), minimum)
        score_right = tl.where((w + 1 < count)[None, :], scores_of(q, right, scale), minimum)
        pooled = tl.maximum(tl.maximum(score_left, score), score_right)
        pooled = tl.where(is_column[None, :], pooled, float("-inf"))
        weight = tl.exp(pooled - tl.max(pooled, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
        # NaN where there is no key, or a query of a failed model.
        is_counted = is_query[:, None] & is_column[None, :] & (weight == weight)
        found += tl.sum(tl.where(is_counted, weight, 0.0), 0)
    is_it = (rank[None, :] == w[:, None]) & is_key[None, :]
    index = tl.sum(tl.where(is_it, w[None, :], 0), 1)
    p_part = parts_BPW + (b * num_parts + kv_head) * SIZE
    tl.store(p_part + w, tl.zeros([BLOCK_W], tl.float32), mask=m_w & (is_key == 0))
    tl.store(p_part + index, found, mask=is_column)


@triton.jit
def gained(first_BPW, second_BPW, b, w, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Attention gained from the first layer to the second by each position."""
    p = tl.arange(0, BLOCK_P)
    at = (b * PARTS + p[:, None]) * SIZE + w[None, :]
    m_pw = (p < PARTS)[:, None] & (w < SIZE)[None, :]
    second = tl.sum(tl.load(second_BPW + at, mask=m_pw, other=0.0), 0)
    return second - tl.sum(tl.load(first_BPW + at, mask=m_pw, other=0.0), 0)


@triton.jit
def select_kernel(
    first_BPW,
    second_BPW,
    of,
    kept_BW,
    numbers_IB,
    B,
    ALPHA: tl.constexpr,
    SEES_PROCESSED: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Budget and choice of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    m_w, at = w < SIZE, b * SIZE + w
    delta = gained(first_BPW, second_BPW, b, w, PARTS, SIZE, BLOCK_P)
    is_mask = tl.load(of.is_mask_BW + at, mask=m_w, other=0) != 0
    is_open = is_mask & (tl.load(of.is_maskable_BW + at, mask=m_w, other=0) != 0)
    is_fed = tl.load(of.rows_BW + at, mask=m_w, other=-1) >= 0
    processed = tl.load(of.processed_ZW + tl.load(of.lanes_B + b) * SIZE + w, mask=m_w, other=0) != 0

    num_masks = tl.sum(is_mask.to(tl.int32), 0)
    count = tl.maximum(num_masks, 1).to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.where(is_mask, delta, 0.0), 0), count)
    squares = tl.where(is_mask, (delta - mean) * (delta - mean), 0.0)
    std = tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), count))
    num_strong = tl.sum((is_mask & (delta >= mean + std)).to(tl.int32), 0).to(tl.int64)
    # In fp64, so that multiples of the average round as they do on paper.
    by_history = tl.ceil(tl.full([], ALPHA, tl.float64) * tl.load(of.mean_decoded_B + b))
    by_history = tl.minimum(by_history, SIZE + 0.0).to(tl.int64)
    budget = tl.maximum(by_history, num_strong)
    evicts = (tl.load(of.is_mine_B + b) != 0) & (num_masks > budget)

    mine, other = delta[:, None], delta[None, :]
    is_before = (other > mine) | ((other == mine) & (w[None, :] < w[:, None]))
    rank = tl.sum((is_before & is_open[None, :]).to(tl.int32), 1)
    chosen = is_open & (rank < budget)
    kept = chosen | (is_fed & (is_mask == 0))
    has_chosen_right = tl.sum((chosen[None, :] & (w[None, :] == w[:, None] + 1)).to(tl.int32), 1) > 0
    kept = kept | (is_mask & has_chosen_right)
    last = tl.max(tl.where(kept, w, -1), 0)
    kept = kept | (is_mask & (processed == 0) & (w < last))
    kept = tl.where(evicts, kept, is_fed)
    seen = (kept | processed) if SEES_PROCESSED else kept
    end = tl.max(tl.where(seen, w + 1, 0), 0)
    tl.store(kept_BW + at, kept, mask=m_w)
    tl.store(numbers_IB + b, tl.where(evicts, end, SIZE).to(tl.int64))
    tl.store(numbers_IB + B + b, budget)
