"""The Triton kernels: attention inside a block by KV head, and the choice of its rows.

B sequences, W positions of a block (SIZE, padded to BLOCK_W), P parts of a sum. Sums are trees of fixed
shape: nothing depends on the order in which programs run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of_rank(
    keys, column, wanted, at, strides, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Keys [h, c] of the positions that are key number `wanted` [c], 0 where there is none."""
    is_key, rank, count = column
    table_B, start, last_slot, kv_head = at
    w, h = tl.arange(0, wanted.shape[0]), tl.arange(0, BLOCK_H)
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
    at, column = (keys.block_table_BP + b * strides[4], start, last_slot, kv_head), (is_key, rank, count)
    k = keys_of_rank(keys, column, w, at, strides, PAGE, HEAD_DIM, BLOCK_H)
    left = keys_of_rank(keys, column, w - 1, at, strides, PAGE, HEAD_DIM, BLOCK_H)
    right = keys_of_rank(keys, column, w + 1, at, strides, PAGE, HEAD_DIM, BLOCK_H)
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
    retained_BW,
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
    tl.store(retained_BW + at, kept, mask=m_w)
    tl.store(numbers_IB + b, tl.where(evicts, end, SIZE).to(tl.int64))
    tl.store(numbers_IB + B + b, budget)


@triton.jit
def begin_kernel(state, fed, started, RULES: tl.constexpr, SIZE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Turn to a new block if it begins, thaw what was edited, and flag the rows that are computed."""
    b = tl.program_id(0).to(tl.int64)
    lane, start = tl.load(fed.lanes_B + b), tl.load(fed.starts_B + b)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    at, at_lane = b * SIZE + w, lane * SIZE + w
    row = tl.load(fed.rows_BW + at, mask=m_w, other=-1)
    is_mask = tl.load(fed.is_mask_BW + at, mask=m_w, other=0) != 0
    num_left = tl.sum(is_mask.to(tl.int64), 0)
    mine = (tl.sum((row >= 0).to(tl.int32), 0) == SIZE) & (num_left > 0)
    tl.store(started.mine_B + b, mine)
    evicts = mine
    if RULES.prefills:
        evicts = mine & (tl.load(state.is_new_Z + lane) == 0)
    tl.store(started.evicts_B + b, evicts)

    known = tl.load(state.starts_Z + lane)
    is_new = mine & (known != start)
    num_masks, num_passes = tl.load(state.counts_Z4 + lane * 4), tl.load(state.counts_Z4 + lane * 4 + 1)
    decoded, earlier = tl.load(state.counts_Z4 + lane * 4 + 2), tl.load(state.counts_Z4 + lane * 4 + 3)
    decoded += tl.where(is_new & (num_passes > 0), num_masks, 0)
    earlier += tl.where(is_new, num_passes, 0)
    num_passes = tl.where(is_new, 0, num_passes)
    # What passes that do not count have decided does not count either.
    num_masks = tl.where(mine & (num_passes == 0), num_left, num_masks)
    tl.store(state.counts_Z4 + lane * 4, num_masks)
    tl.store(state.counts_Z4 + lane * 4 + 1, num_passes)
    tl.store(state.counts_Z4 + lane * 4 + 2, decoded)
    tl.store(state.counts_Z4 + lane * 4 + 3, earlier)
    total = num_masks - num_left
    if RULES.of_request:
        total += decoded
        num_passes += earlier
    mean = total.to(tl.float64) / tl.maximum(num_passes, 1).to(tl.float64)
    tl.store(started.mean_decoded_B + b, tl.maximum(mean, 1.0))

    frozen = tl.load(state.frozen_ZW + at_lane, mask=m_w, other=0) != 0
    ids = tl.load(state.frozen_ids_ZW + at_lane, mask=m_w, other=-1)
    if RULES.retains_stored:
        known_before = tl.where(is_new, known, tl.load(state.before_starts_Z + lane))
        before = tl.load(state.before_frozen_ZW + at_lane, mask=m_w, other=0) != 0
        before = tl.where(is_new, frozen, before)
        before_ids = tl.where(is_new, ids, tl.load(state.before_ids_ZW + at_lane, mask=m_w, other=-1))
        tl.store(state.before_starts_Z + lane, known_before)
        tl.store(state.before_frozen_ZW + at_lane, before, mask=m_w)
        tl.store(state.before_ids_ZW + at_lane, before_ids, mask=m_w)
    known = tl.where(is_new, start, known)
    tl.store(state.starts_Z + lane, known)
    processed = tl.load(state.processed_ZW + at_lane, mask=m_w, other=0) != 0
    tl.store(state.processed_ZW + at_lane, processed & (is_new == 0), mask=m_w)

    token = tl.load(fed.token_ids_R + tl.maximum(row, 0), mask=m_w, other=-2)
    tl.store(started.token_ids_BW + at, token, mask=m_w)
    frozen = frozen & (is_new == 0) & ((ids == token) | (mine == 0))
    tl.store(state.frozen_ZW + at_lane, frozen, mask=m_w)
    tl.store(started.keep_R + row, (frozen & mine) == 0, mask=row >= 0)
    if RULES.retains_stored:
        # Where nothing of the active block was decided, the block before is still the one in work.
        in_work = known == start - SIZE
        stays = (in_work & frozen) | ((in_work == 0) & before & (known_before == start - SIZE))
        # The last rows before the block, which are those of the block before unless they end earlier.
        first, last = tl.load(fed.cu_rows_B1 + b), tl.load(fed.cu_rows_B1 + b + 1)
        num_before = last - first - tl.sum((row >= 0).to(tl.int64), 0)
        stored = first + num_before - SIZE + w
        has_row = m_w & (stored >= first)
        ends_here = tl.load(fed.slots_R + first, mask=first < last, other=0) + num_before == start
        same = tl.load(fed.token_ids_R + stored, mask=has_row, other=-2) == tl.where(in_work, ids, before_ids)
        stays = stays & same & ends_here
        if RULES.shifted:
            # The last row predicts the first position of the next block.
            stays = stays & (w < SIZE - 1)
        tl.store(started.keep_R + stored, stays == 0, mask=has_row)


@triton.jit
def finish_kernel(
    state, fed, started, rows_BW, waits_B, RULES: tl.constexpr, SIZE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Note what the pass has computed, unless the sequence waits."""
    b = tl.program_id(0).to(tl.int64)
    if (tl.load(started.mine_B + b) == 0) | (tl.load(waits_B + b) != 0):
        return
    lane = tl.load(fed.lanes_B + b)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    at, at_lane = b * SIZE + w, lane * SIZE + w
    has_row = tl.load(rows_BW + at, mask=m_w, other=-1) >= 0
    processed = tl.load(state.processed_ZW + at_lane, mask=m_w, other=0) != 0
    tl.store(state.processed_ZW + at_lane, processed | has_row, mask=m_w)
    num_passes = tl.load(state.counts_Z4 + lane * 4 + 1)
    tl.store(state.counts_Z4 + lane * 4 + 1, num_passes + tl.load(started.evicts_B + b).to(tl.int64))
    if RULES.prefills:
        tl.store(state.is_new_Z + lane, tl.zeros([], tl.int1))
    if RULES.stability != "off":
        is_decided = tl.load(fed.is_mask_BW + at, mask=m_w, other=1) == 0
        if RULES.stability == "neighbour":
            is_decided = is_decided & (tl.load(fed.is_mask_BW + at + 1, mask=w < SIZE - 1, other=0) == 0)
        frozen = tl.load(state.frozen_ZW + at_lane, mask=m_w, other=0) != 0
        tl.store(state.frozen_ZW + at_lane, frozen | is_decided, mask=m_w)
        tl.store(state.frozen_ids_ZW + at_lane, tl.load(started.token_ids_BW + at, mask=m_w), mask=m_w)
