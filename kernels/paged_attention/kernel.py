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
def split_start(split, SPLIT_BLOCKS: tl.constexpr, OCTAVE: tl.constexpr):
    """First block of a split: 2 OCTAVE of SPLIT_BLOCKS blocks, then OCTAVE of twice that, then of 4 times."""
    octave = tl.maximum(split // OCTAVE - 1, 0)
    return ((split - octave * OCTAVE) << octave) * SPLIT_BLOCKS


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
def _hide(scores, slots, limits, branches, owns):
    """-inf where a row does not see a slot."""
    below = slots[None, :] < limits[:, None]
    branch = (slots[None, :] >= branches[:, None]) & (slots[None, :] <= owns[:, None])
    return tl.where(below | branch, scores, float("-inf"))


@triton.jit
def _add_split(acc, total, highest, o, o_total, o_highest):
    """One more split into a running sum; splits in which a row sees nothing change no bit of it.

    fma is spelt out because a compiler's choice would differ between the two kernels that do this.
    """
    new_highest = tl.maximum(highest, o_highest)
    shrink, weight = tl.exp2(highest - new_highest), tl.exp2(o_highest - new_highest)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), o * weight[:, None])
    return acc, tl.fma(total, shrink, o_total * weight), new_highest


@triton.jit
def _store_part(
    partial_o, partial_sums, part, in_tile, kv_head, acc, total, highest, K: tl.constexpr, H: tl.constexpr
):
    """`partial_sums` holds the sum of weights and the maximum of each row, side by side."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    columns = tl.arange(0, acc.shape[1])
    at = (part.to(tl.int64) * K + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(partial_sums + at * 2, total, mask=in_tile)
    tl.store(partial_sums + at * 2 + 1, highest, mask=in_tile)
    tl.store(
        partial_o + at[:, None] * H + columns[None, :], acc, mask=in_tile[:, None] & (columns < H)[None, :]
    )


@triton.jit
def _sum_in_order(
    partial_o,
    partial_sums,
    first_m,
    num_parts,
    in_tile,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output [BLOCK_M, BLOCK_H] of rows of a tile from its parts, one by one, STRIDE rows apart."""
    columns = tl.arange(0, BLOCK_H)
    mask = in_tile[:, None] & (columns < H)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for i in tl.range(0, num_parts, num_stages=STAGES):
        at = first_m + i * STRIDE
        # Other multiprocessors wrote these: .cg reads past this one's L1 cache.
        o_total = tl.load(partial_sums + at * 2, mask=in_tile, other=0.0, cache_modifier=".cg")
        o_highest = tl.load(partial_sums + at * 2 + 1, mask=in_tile, other=NOTHING, cache_modifier=".cg")
        at_o = at[:, None] * H + columns[None, :]
        o = tl.load(partial_o + at_o, mask=mask, other=0.0, cache_modifier=".cg")
        acc, total, highest = _add_split(acc, total, highest, o, o_total, o_highest)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _sum_at_once(
    partial_o,
    partial_sums,
    first_m,
    num_parts,
    in_tile,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The same sum in another order: PARTS parts at a time, which are waited for together."""
    columns = tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        parts = first + tl.arange(0, PARTS)
        at = first_m[None, :] + parts[:, None] * STRIDE
        mask = in_tile[None, :] & (parts < num_parts)[:, None]
        o_total = tl.load(partial_sums + at * 2, mask=mask, other=0.0, cache_modifier=".cg")
        o_highest = tl.load(partial_sums + at * 2 + 1, mask=mask, other=NOTHING, cache_modifier=".cg")
        at_o = at[:, :, None] * H + columns[None, None, :]
        mask_o = mask[:, :, None] & (columns < H)[None, None, :]
        o = tl.load(partial_o + at_o, mask=mask_o, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(o_highest, 0))
        shrink, weight = tl.exp2(highest - new_highest), tl.exp2(o_highest - new_highest[None, :])
        acc = acc * shrink[:, None] + tl.sum(o * weight[:, :, None], 0)
        total = total * shrink + tl.sum(o_total * weight, 0)
        highest = new_highest
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
    partial_sums,
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
    OCTAVE: tl.constexpr,
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
    kv_head, item = tl.program_id(0) % K, tl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    num_below, branch_block, end_block = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    low_limit, high_limit = tl.load(record + 6), tl.load(record + 7)
    low_branch, high_own = tl.load(record + 8), tl.load(record + 9)
    low, high = tl.load(record + 10), tl.load(record + 11)
    first_part, num_parts = tl.load(record + 12), tl.load(record + 13)
    tile, num_items, my_part = tl.load(record + 14), tl.load(record + 15), tl.load(record + 16)

    m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    in_tile = m < count * G
    sees = in_tile & (end_block > 0)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    limits = tl.load(limits_R + rows, mask=sees, other=0).to(tl.int32)
    branches = tl.load(branch_starts_R + rows, mask=sees, other=1).to(tl.int32)
    owns = tl.load(own_slots_R + rows, mask=sees, other=0).to(tl.int32)
    table = block_table + b.to(tl.int64) * stride_table
    start, stop = low, high
    if SPLIT_BLOCKS:
        start = split_start(low, SPLIT_BLOCKS, OCTAVE)
        stop = tl.minimum(split_start(high, SPLIT_BLOCKS, OCTAVE), end_block)
    # Page ids are read one block ahead: a load that waits for another one would not be pipelined as deep.
    pages = _pages(table, start, stop, num_below, branch_block, high_limit, high_own, PAGE, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count == 0:
        return

    in_head = (columns < H)[None, :]
    at_q = rows[:, None] * stride_q_row + heads[:, None] * stride_q_head + columns[None, :]
    q = tl.load(q_RNH + at_q, mask=sees[:, None] & in_head, other=0.0)
    k_cache, v_cache = k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head
    if SCALED:
        scale_log2 = scale_log2 * tl.load(k_scale_K + kv_head)

    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    if SPLIT_BLOCKS:
        split, sum_o, sum_total, sum_highest = low, acc, total, highest
        split_end = split_start(low + 1, SPLIT_BLOCKS, OCTAVE)
    for i in tl.range(start, stop, num_stages=STAGES):
        block = tl.where(i < num_below, i, i - num_below + branch_block)
        slots = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (slots < high_limit) | ((slots >= low_branch) & (slots <= high_own))
        physical = pages.to(tl.int32) * PAGE + slots % PAGE
        pages = _pages(table, i + 1, stop, num_below, branch_block, high_limit, high_own, PAGE, BLOCK_N)
        mask = is_seen[:, None] if H == BLOCK_H else is_seen[:, None] & in_head
        at = physical.to(tl.int64)[:, None] * stride_slot + columns[None, :]
        k = tl.load(k_cache + at, mask=mask, other=0.0)
        scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        if block * BLOCK_N + BLOCK_N > low_limit:
            scores = _hide(scores, slots, limits, branches, owns)
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = tl.load(v_cache + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest
        if SPLIT_BLOCKS:
            is_last = (i + 1 == split_end) | (i + 1 == stop)
            if is_last:
                if low == 0:
                    sum_o, sum_total, sum_highest = _add_split(
                        sum_o, sum_total, sum_highest, acc, total, highest
                    )
                else:
                    part = my_part + split
                    _store_part(partial_o, partial_sums, part, in_tile, kv_head, acc, total, highest, K, H)
                acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
                split += 1
                split_end = split_start(split + 1, SPLIT_BLOCKS, OCTAVE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT_BLOCKS:
        acc, total, highest = sum_o, sum_total, sum_highest

    is_done = num_items == 1
    has_part = num_items > 1
    if SPLIT_BLOCKS:
        has_part = has_part & (low == 0)
    if has_part:
        _store_part(partial_o, partial_sums, my_part, in_tile, kv_head, acc, total, highest, K, H)
    if is_done:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    elif LAST_ADDS:
        tl.debug_barrier()
        counter = counters + tile * K + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_items - 1:
            tl.store(counter, 0)
            is_done = True
            at = (first_part.to(tl.int64) * K + kv_head) * BLOCK_M + m
            STRIDE: tl.constexpr = K * BLOCK_M
            acc = _sum_in_order(
                partial_o, partial_sums, at, num_parts, in_tile, STRIDE, H, BLOCK_M, BLOCK_H, SUM_STAGES
            )
    if is_done:
        if SCALED:
            acc = acc * tl.load(v_scale_K + kv_head)
        at_o = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
        tl.store(o_RNH + at_o, acc.to(o_RNH.dtype.element_ty), mask=in_tile[:, None] & in_head)


@triton.jit
def combine_kernel(
    o_RNH,
    tiles,
    v_scale_K,
    partial_o,
    partial_sums,
    stride_o_row,
    stride_o_head,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    RECORD: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of BLOCK_M of the TILE_M packed rows of one tile and KV head that was split into items.

    PARTS: how many parts are added at once; 1 adds them in order, which is what fixed splits are for.
    """
    kv_head, tile = tl.program_id(0) % K, tl.program_id(0) // K
    record = tiles + tile * RECORD
    count, num_items = tl.load(record + 2), tl.load(record + 15)
    row, first_part, num_parts = tl.load(record + 1), tl.load(record + 12), tl.load(record + 13)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: a large product behind it would be spread over what the walk has left free.
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = m < count * G
    if (tl.program_id(1) * BLOCK_M >= count * G) | (num_items <= 1):
        return
    at = (first_part.to(tl.int64) * K + kv_head) * TILE_M + m
    STRIDE: tl.constexpr = K * TILE_M
    if PARTS > 1:
        o = _sum_at_once(partial_o, partial_sums, at, num_parts, in_tile, STRIDE, H, PARTS, BLOCK_M, BLOCK_H)
    else:
        o = _sum_in_order(
            partial_o, partial_sums, at, num_parts, in_tile, STRIDE, H, BLOCK_M, BLOCK_H, STAGES
        )
    if SCALED:
        o = o * tl.load(v_scale_K + kv_head)
    columns = tl.arange(0, BLOCK_H)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    at = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
    mask = in_tile[:, None] & (columns < H)[None, :]
    tl.store(o_RNH + at, o.to(o_RNH.dtype.element_ty), mask=mask)
