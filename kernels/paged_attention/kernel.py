"""The Triton kernel of paged attention: the walk over one item's blocks of slots.

A tile is up to ROWS rows of one sequence times the G query heads of one KV head, packed as the BLOCK_M rows
of the matrix products, so that keys and values are read once for all of them. An item is a share of a
tile's blocks, a part the result of one split of them. README.md has the reasons, planning.py the records.

R rows fed this pass, S physical KV slots, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_parts import store_part, store_sums, write_before
from idlm.kernels.paged_attention.kernel_plan import RECORD
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
    tensors,
    rows_of,
    items,
    scales,
    lists_BKC,
    before_out,
    parts,
    scale_log2,
    strides,
    stride_table,
    SHAPE: tl.constexpr,
    WALK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item of one KV head: the output if the tile has one item, else parts for the sum over its items.

    `scales`: of keys and values, None: they have none. `strides`: of rows and heads of the queries, of slots
    and heads of the caches, of rows and heads of the output."""
    q_RNH, k_cache_SKH, v_cache_SKH, o_RNH = tensors
    block_table, limits_R, branch_starts_R, own_slots_R, first_slots_R = rows_of
    stride_q_row, stride_q_head, stride_slot, stride_head, stride_o_row, stride_o_head = strides
    K: tl.constexpr = SHAPE.num_kv_heads
    G: tl.constexpr = SHAPE.group
    H: tl.constexpr = SHAPE.head_dim
    kv_head, item = tl.program_id(0) % K, tl.program_id(0) // K
    record = items + item * RECORD
    b, row, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if (count == 0) & (item > 0):
        # Of the items that the bounds allow, most may be empty. The first one waits for the kernels before.
        return
    walk, ends, low_limit, end_block = read_walk(record)
    low, high = tl.load(record + 10), tl.load(record + 11)
    num_items, my_part = tl.load(record + 15), tl.load(record + 16)

    m, columns = tl.arange(0, WALK.block_m), tl.arange(0, WALK.block_h)
    in_tile = m < count * G
    sees = in_tile & (end_block > 0)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    limits = tl.load(limits_R + rows, mask=sees, other=0).to(tl.int32)
    branches = tl.load(branch_starts_R + rows, mask=sees & (ends[1] < NO_SLOT), other=NO_SLOT).to(tl.int32)
    owns = tl.load(own_slots_R + rows, mask=sees, other=0).to(tl.int32)
    firsts, low_first = limits, 0
    if WALK.has_windows:
        firsts = tl.load(first_slots_R + rows, mask=sees, other=NO_SLOT).to(tl.int32)
        low_first = tl.min(firsts, 0)
    ends = (ends[0], ends[1], ends[2], low_first)
    table = block_table + b.to(tl.int64) * stride_table
    start, stop = low, high
    if WALK.split_blocks:
        start = split_start(low, WALK)
        stop = tl.minimum(split_start(high, WALK), end_block)
    # Page ids are read one block ahead: a load that depends on another one would be pipelined less deeply.
    before_start = tl.load(record + 19)
    last_before = (before_start + WALK.block_n - 1) // WALK.block_n - 1
    slot_list = lists_BKC
    if WALK.num_listed:
        slot_list += (b.to(tl.int64) * K + kv_head) * WALK.num_listed
    else:
        slots = slots_of(start, start, walk, WALK)
        pages = pages_of(table, slots, start, stop, ends, WALK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if WALK.early:
            tl.extra.cuda.gdc_launch_dependents()
    if count == 0:
        return

    in_head = (columns < H)[None, :]
    at_q = rows[:, None] * stride_q_row + heads[:, None] * stride_q_head + columns[None, :]
    q = tl.load(q_RNH + at_q, mask=sees[:, None] & in_head, other=0.0)
    if scales is not None:
        scale_log2 = scale_log2 * tl.load(scales[0] + kv_head)
    row_ends = tl.where(sees & (owns >= before_start), tl.minimum(limits, before_start), 0)
    if WALK.num_listed:
        # The layer before may have written the lists.
        listed = listed_of(slot_list, start, stop, walk, WALK)
        slots = slots_of(listed, start, walk, WALK)
        pages = pages_of(table, slots, start, stop, ends, WALK)
    caches = (k_cache_SKH + kv_head * stride_head, v_cache_SKH + kv_head * stride_head)
    memory, first, share = (caches, table, stride_slot), (slots, pages), (start, stop, low)
    step = (walk, ends, (limits, branches, owns, low_limit, firsts), (last_before, row_ends))
    target = (my_part, (in_tile, kv_head))
    acc, total, highest, before = walk_blocks(
        q, memory, slot_list, first, share, step, parts, target, scale_log2, SHAPE, WALK
    )
    if PDL and not WALK.early:
        tl.extra.cuda.gdc_launch_dependents()
    is_part = (WALK.split_blocks == 0) | (low == 0)
    if WALK.sums_before:
        if num_items == 1:
            write_before(before_out, rows, heads, in_tile, before[0], before[1], K * G)
        elif is_part:
            store_sums(parts.before, my_part, (in_tile, kv_head), before[0], before[1], K)
    if num_items == 1:
        # As in the sum of parts: divided first, then scaled.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if scales is not None:
            acc = acc * tl.load(scales[1] + kv_head)
        at_o = rows[:, None] * stride_o_row + heads[:, None] * stride_o_head + columns[None, :]
        tl.store(o_RNH + at_o, acc.to(o_RNH.dtype.element_ty), mask=in_tile[:, None] & in_head)
    elif is_part:
        store_part(parts, my_part, (in_tile, kv_head), acc, total, highest, K, H)
