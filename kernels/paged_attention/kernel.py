"""The Triton kernels of paged attention: the walk over one item's blocks of slots, and the sum over splits.

A tile is up to ROWS rows of one sequence times the G query heads of one KV head, packed as the BLOCK_M rows
of the matrix products, so that keys and values are read once for all of them. An item is a share of a
tile's blocks, a part what is left of one split of them. README.md has the reasons, launch.py the records.

R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(-1e30)
"""Maximum of no scores; finite, so that a row that has seen nothing yet makes exp2(-inf - it), not a NaN."""


@triton.jit
def _place(split, num_below, branch_block, end_block, SPLIT_BLOCKS: tl.constexpr):
    """Where a split starts in the walk, which leaves out the blocks between the two ranges."""
    block = split * SPLIT_BLOCKS
    in_branch = tl.minimum(tl.maximum(block - branch_block, 0), end_block - branch_block)
    return tl.minimum(block, num_below) + in_branch


@triton.jit
def _pages(
    table,
    i,
    stop,
    num_below,
    branch_block,
    high_limit,
    high_own,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Page id of each slot of block `i` of the walk; 0 behind the last that the tile sees."""
    slots = tl.where(i < num_below, i, i - num_below + branch_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (slots < tl.maximum(high_limit, high_own + 1)) & (i < stop)
    return tl.load(table + slots // PAGE, mask=exists, other=0)


@triton.jit
def _add_split(acc, total, highest, o, lse):
    """One more split into a running sum; splits in which a row sees nothing (lse -inf) change no bit of it.

    fma is spelt out because a compiler's choice would differ between the two kernels that do this.
    """
    new_highest = tl.maximum(highest, lse)
    shrink, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), o * weight[:, None])
    return acc, tl.fma(total, shrink, weight), new_highest


@triton.jit
def _sum_parts(
    partial_o,
    partial_lse,
    first_m,
    num_parts,
    in_tile,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output [BLOCK_M, BLOCK_H] of rows of a tile from its parts, in their order, STRIDE rows apart."""
    columns = tl.arange(0, BLOCK_H)
    mask = in_tile[:, None] & (columns < H)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for i in tl.range(0, num_parts, num_stages=STAGES):
        at = first_m + i * STRIDE
        # Other multiprocessors wrote these: .cg reads past this one's L1 cache.
        lse = tl.load(partial_lse + at, mask=in_tile, other=float("-inf"), cache_modifier=".cg")
        at_o = at[:, None] * H + columns[None, :]
        o = tl.load(partial_o + at_o, mask=mask, other=0.0, cache_modifier=".cg")
        acc, total, highest = _add_split(acc, total, highest, o, lse)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["stride_table"])
def attend_kernel(
    q_RNH,
    k_cache_SKH,
    v_cache_SKH,
    o_RNH,
    items,
    block_table,
    limits_R,
    branch_starts_R,
    own_slots_R,
    k_scale_K,
    v_scale_K,
    partial_o,
    partial_lse,
    counters,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_slot,
    stride_head,
    stride_o_row,
    stride_o_head,
    stride_table,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
    LAST_ADDS: tl.constexpr,
    SUM_STAGES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item of one KV head: the output where a tile has one item, else parts for the sum over its items.

    LAST_ADDS: the item of a tile that finishes last adds the parts up, instead of `combine_kernel`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, item = tl.program_id(0) % K, tl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    num_below, branch_block, end_block = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    low_limit, high_limit = tl.load(record + 6), tl.load(record + 7)
    low_branch, high_own = tl.load(record + 8), tl.load(record + 9)
    low, high = tl.load(record + 10), tl.load(record + 11)
    first_part, num_parts = tl.load(record + 12), tl.load(record + 13)
    tile, num_items = tl.load(record + 14), tl.load(record + 15)
    if count == 0:
        return

    m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    in_head = (columns < H)[None, :]
    in_tile = m < count * G
    sees = in_tile & (end_block > 0)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    limits = tl.load(limits_R + rows, mask=sees, other=0).to(tl.int32)
    branches = tl.load(branch_starts_R + rows, mask=sees, other=1).to(tl.int32)
    owns = tl.load(own_slots_R + rows, mask=sees, other=0).to(tl.int32)
    at_q = rows[:, None] * stride_q_row + heads[:, None] * stride_q_head + columns[None, :]
    q = tl.load(q_RNH + at_q, mask=sees[:, None] & in_head, other=0.0)
    table = block_table + b.to(tl.int64) * stride_table
    k_cache, v_cache = k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head
    if SCALED:
        scale_log2 = scale_log2 * tl.load(k_scale_K + kv_head)

    sum_o = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    sum_total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sum_lse = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for split in range(low if SPLIT_BLOCKS else 0, high if SPLIT_BLOCKS else 1):
        start, stop = low, high
        if SPLIT_BLOCKS:
            start = _place(split, num_below, branch_block, end_block, SPLIT_BLOCKS)
            stop = _place(split + 1, num_below, branch_block, end_block, SPLIT_BLOCKS)
        acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
        # Page ids are read one block ahead: a load that waits for another one would not be pipelined as deep.
        pages = _pages(table, start, stop, num_below, branch_block, high_limit, high_own, PAGE, BLOCK_N)
        for i in tl.range(start, stop, num_stages=STAGES):
            block = tl.where(i < num_below, i, i - num_below + branch_block)
            slots = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_seen = (slots < high_limit) | ((slots >= low_branch) & (slots <= high_own))
            physical = pages.to(tl.int64) * PAGE + slots % PAGE
            pages = _pages(table, i + 1, stop, num_below, branch_block, high_limit, high_own, PAGE, BLOCK_N)
            mask = is_seen[:, None] & in_head
            at = physical[:, None] * stride_slot + columns[None, :]
            k = tl.load(k_cache + at, mask=mask, other=0.0)
            scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
            if block * BLOCK_N + BLOCK_N > low_limit:
                below = slots[None, :] < limits[:, None]
                branch = (slots[None, :] >= branches[:, None]) & (slots[None, :] <= owns[:, None])
                scores = tl.where(below | branch, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            v = tl.load(v_cache + at, mask=mask, other=0.0)
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
            highest = new_highest
        divisor = tl.where(total > 0, total, 1.0)
        o = acc / divisor[:, None]
        lse = tl.where(total > 0, highest + tl.log2(divisor), float("-inf"))
        if num_items > 1:
            part = first_part + split if SPLIT_BLOCKS else item
            at_part = (part.to(tl.int64) * K + kv_head) * BLOCK_M + m
            tl.store(partial_lse + at_part, lse, mask=in_tile)
            at_o = at_part[:, None] * H + columns[None, :]
            tl.store(partial_o + at_o, o, mask=in_tile[:, None] & in_head)
        if SPLIT_BLOCKS:
            sum_o, sum_total, sum_lse = _add_split(sum_o, sum_total, sum_lse, o, lse)
        else:
            sum_o = o

    is_done = num_items == 1
    if is_done:
        if SPLIT_BLOCKS:
            sum_o = sum_o / tl.where(sum_total > 0, sum_total, 1.0)[:, None]
    elif LAST_ADDS:
        tl.debug_barrier()
        counter = counters + tile * K + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_items - 1:
            tl.store(counter, 0)
            is_done = True
            at_part = (first_part.to(tl.int64) * K + kv_head) * BLOCK_M + m
            STRIDE: tl.constexpr = K * BLOCK_M
            sum_o = _sum_parts(
                partial_o, partial_lse, at_part, num_parts, in_tile, STRIDE, H, BLOCK_M, BLOCK_H, SUM_STAGES
            )
    if is_done:
        if SCALED:
            sum_o = sum_o * tl.load(v_scale_K + kv_head)
        at_o = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
        tl.store(o_RNH + at_o, sum_o.to(o_RNH.dtype.element_ty), mask=in_tile[:, None] & in_head)


@triton.jit
def combine_kernel(
    o_RNH,
    tiles,
    v_scale_K,
    partial_o,
    partial_lse,
    stride_o_row,
    stride_o_head,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    RECORD: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of BLOCK_M of the TILE_M packed rows of one tile and KV head that was split into items."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, tile = tl.program_id(0) % K, tl.program_id(0) // K
    record = tiles + tile * RECORD
    count, num_items = tl.load(record + 2), tl.load(record + 15)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = m < count * G
    if (tl.program_id(1) * BLOCK_M >= count * G) | (num_items <= 1):
        return
    row, first_part, num_parts = tl.load(record + 1), tl.load(record + 12), tl.load(record + 13)
    at_part = (first_part.to(tl.int64) * K + kv_head) * TILE_M + m
    STRIDE: tl.constexpr = K * TILE_M
    o = _sum_parts(partial_o, partial_lse, at_part, num_parts, in_tile, STRIDE, H, BLOCK_M, BLOCK_H, STAGES)
    if SCALED:
        o = o * tl.load(v_scale_K + kv_head)
    columns = tl.arange(0, BLOCK_H)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    at = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
    mask = in_tile[:, None] & (columns < H)[None, :]
    tl.store(o_RNH + at, o.to(o_RNH.dtype.element_ty), mask=mask)
