"""The Triton kernel of paged attention: the walk over one item's blocks of slots.

A tile is up to ROWS rows of one sequence times the G query heads of one KV head, packed as the BLOCK_M rows
of the matrix products, so that keys and values are read once for all of them. An item is a share of a
tile's blocks, a part the result of one split of them. README.md has the reasons, planning.py the records.

R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_parts import store_part, store_sums, write_before
from idlm.kernels.paged_attention.kernel_walk import (
    NO_SLOT,
    listed_of,
    pages_of,
    read_walk,
    slots_of,
    split_start,
    walk_blocks,
)


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
    lists_BKC,
    highest_RN,
    totals_RN,
    partial_o,
    partial_sums,
    partial_before,
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
    NUM_LISTED: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """One item of one KV head: the output if the tile has one item, else parts for the sum over its items.

    EARLY: the sum may launch as soon as this kernel has, else after its loop. NUM_LISTED: width of the lists,
    0 if the layer has none. BEFORE: also leave maximum and sum over the slots before the block."""
    kv_head, item = tl.program_id(0) % K, tl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if (count == 0) & (item > 0):
        # Of the items that the bounds allow, most may be empty. The first one waits for the kernels before.
        return
    walk, ends, low_limit, end_block = read_walk(record)
    low, high = tl.load(record + 10), tl.load(record + 11)
    num_items, my_part = tl.load(record + 15), tl.load(record + 16)

    m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    in_tile = m < count * G
    sees = in_tile & (end_block > 0)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    limits = tl.load(limits_R + rows, mask=sees, other=0).to(tl.int32)
    branches = tl.load(branch_starts_R + rows, mask=sees & (ends[1] < NO_SLOT), other=NO_SLOT).to(tl.int32)
    owns = tl.load(own_slots_R + rows, mask=sees, other=0).to(tl.int32)
    table = block_table + b.to(tl.int64) * stride_table
    start, stop = low, high
    if SPLIT_BLOCKS:
        start = split_start(low, SPLIT_BLOCKS, OCTAVE)
        stop = tl.minimum(split_start(high, SPLIT_BLOCKS, OCTAVE), end_block)
    # Page ids are read one block ahead: a load that depends on another one would be pipelined less deeply.
    before_start = tl.load(record + 19)
    last_before = (before_start + BLOCK_N - 1) // BLOCK_N - 1
    slot_list = lists_BKC
    if NUM_LISTED:
        slot_list += (b.to(tl.int64) * K + kv_head) * NUM_LISTED
    else:
        slots = slots_of(start, start, walk, 0, BLOCK_N)
        pages = pages_of(table, slots, start, stop, ends, PAGE)
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
    row_ends = tl.where(sees & (owns >= before_start), tl.minimum(limits, before_start), 0)
    if NUM_LISTED:
        # The layer before may have written the lists.
        listed = listed_of(slot_list, start, stop, walk, NUM_LISTED, BLOCK_N)
        slots = slots_of(listed, start, walk, NUM_LISTED, BLOCK_N)
        pages = pages_of(table, slots, start, stop, ends, PAGE)
    caches = (k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head)
    acc, total, highest, before = walk_blocks(
        q,
        caches,
        table,
        slot_list,
        (slots, pages),
        (start, stop, low),
        (walk, ends, (limits, branches, owns, low_limit), (last_before, row_ends)),
        partial_o,
        partial_sums,
        partial_before,
        (my_part, in_tile, kv_head),
        scale_log2,
        stride_slot,
        K,
        H,
        PAGE,
        BLOCK_N,
        SPLIT_BLOCKS,
        OCTAVE,
        STAGES,
        PRECISION,
        NUM_LISTED,
        BEFORE,
    )
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    is_part = (SPLIT_BLOCKS == 0) | (low == 0)
    if BEFORE:
        if num_items == 1:
            write_before(highest_RN, totals_RN, rows, heads, in_tile, before, K * G)
        elif is_part:
            store_sums(partial_before, my_part, in_tile, kv_head, before, K)
    if num_items == 1:
        # As in the sum of parts: divided first, then scaled.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if SCALED:
            acc = acc * tl.load(v_scale_K + kv_head)
        at_o = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
        tl.store(o_RNH + at_o, acc.to(o_RNH.dtype.element_ty), mask=in_tile[:, None] & in_head)
    elif is_part:
        store_part(partial_o, partial_sums, my_part, in_tile, kv_head, acc, total, highest, K, H)
