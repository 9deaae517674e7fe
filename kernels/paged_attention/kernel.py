"""The Triton kernel of paged attention: the walk over one item's blocks of slots.

A tile is up to ROWS rows of one sequence times the G query heads of one KV head, packed as the BLOCK_M rows
of the matrix products, so that keys and values are read once for all of them. An item is a share of a
tile's blocks, a part the result of one split of them. README.md has the reasons, launch.py the records.

R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_parts import NOTHING, add_split, store_part


@triton.jit
def split_start(split, SPLIT_BLOCKS: tl.constexpr, OCTAVE: tl.constexpr):
    """First block of a split: 2 OCTAVE splits of SPLIT_BLOCKS blocks, OCTAVE of twice as many, and so on."""
    octave = tl.maximum(split // OCTAVE - 1, 0)
    return ((split - octave * OCTAVE) << octave) * SPLIT_BLOCKS


@triton.jit
def _pages(table, i, stop, walk, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of each slot of block `i` of the walk; 0 after the last slot that the tile sees."""
    num_below, branch_block, high_limit, high_own = walk
    slots = tl.where(i < num_below, i, i - num_below + branch_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (slots < tl.maximum(high_limit, high_own + 1)) & (i < stop)
    return tl.load(table + slots // PAGE, mask=exists, other=0)


@triton.jit
def _hide(scores, slots, limits, branches, owns):
    """Scores with -inf where a row does not see a slot."""
    below = slots[None, :] < limits[:, None]
    branch = (slots[None, :] >= branches[:, None]) & (slots[None, :] <= owns[:, None])
    return tl.where(below | branch, scores, float("-inf"))


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
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One item of one KV head: the output if the tile has one item, else parts for the sum over its items.

    EARLY: the sum may launch as soon as this kernel has, else after its loop.
    """
    kv_head, item = tl.program_id(0) % K, tl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    num_below, branch_block, end_block = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    low_limit, high_limit = tl.load(record + 6), tl.load(record + 7)
    low_branch, high_own = tl.load(record + 8), tl.load(record + 9)
    low, high = tl.load(record + 10), tl.load(record + 11)
    num_items, my_part = tl.load(record + 15), tl.load(record + 16)

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
    # Page ids are read one block ahead: a load that depends on another one would be pipelined less deeply.
    walk = (num_below, branch_block, high_limit, high_own)
    pages = _pages(table, start, stop, walk, PAGE, BLOCK_N)
    k_cache, v_cache = k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    if count == 0:
        return

    in_head = (columns < H)[None, :]
    at_q = rows[:, None] * stride_q_row + heads[:, None] * stride_q_head + columns[None, :]
    q = tl.load(q_RNH + at_q, mask=sees[:, None] & in_head, other=0.0)
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
        pages = _pages(table, i + 1, stop, walk, PAGE, BLOCK_N)
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
                    sum_o, sum_total, sum_highest = add_split(
                        sum_o, sum_total, sum_highest, acc, total, highest
                    )
                else:
                    part = my_part + split
                    store_part(partial_o, partial_sums, part, in_tile, kv_head, acc, total, highest, K, H)
                acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
                split += 1
                split_end = split_start(split + 1, SPLIT_BLOCKS, OCTAVE)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT_BLOCKS:
        acc, total, highest = sum_o, sum_total, sum_highest

    if num_items == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if SCALED:
            acc = acc * tl.load(v_scale_K + kv_head)
        at_o = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
        tl.store(o_RNH + at_o, acc.to(o_RNH.dtype.element_ty), mask=in_tile[:, None] & in_head)
    elif (SPLIT_BLOCKS == 0) | (low == 0):
        store_part(partial_o, partial_sums, my_part, in_tile, kv_head, acc, total, highest, K, H)
