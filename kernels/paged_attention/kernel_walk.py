"""The blocks of a walk: their slots, what rows see of them, and the loop over them.

R rows fed this pass, S physical KV slots, K KV heads, H head dim; README.md has the reasons."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_parts import NOTHING, add_split, add_sums, store_part, store_sums

NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)
UNITS: tl.constexpr = tl.constexpr(96.0)
"""A float32 of this size is a multiple of 2^-17, and so is the rest when it is taken away again."""


@triton.jit
def read_walk(record):
    """The walk of a tile, ends of what its rows see, their lowest limit and the end of its blocks."""
    walk = tl.load(record + 3), tl.load(record + 4), tl.load(record + 17), tl.load(record + 18)
    ends = tl.load(record + 7), tl.load(record + 8), tl.load(record + 9)
    return walk, ends, tl.load(record + 6), tl.load(record + 5)


@triton.jit
def listed_of(slot_list, i, stop, walk, WALK: tl.constexpr):
    """What the list holds for block `i` of the walk; -1 after the list."""
    indices = i * WALK.block_n + tl.arange(0, WALK.block_n)
    is_listed = (indices < WALK.num_listed) & (i < tl.minimum(stop, walk[2]))
    return tl.load(slot_list + indices, mask=is_listed, other=-1)


@triton.jit
def is_list_full(slot_list, i, walk, WALK: tl.constexpr):
    """Whether block `i` of the walk is one of the list with a slot in every position; it ascends to its
    -1s."""
    last = i * WALK.block_n + WALK.block_n - 1
    return tl.load(slot_list + last, mask=(last < WALK.num_listed) & (i < walk[2]), other=-1) >= 0


@triton.jit
def slots_of(listed, i, walk, WALK: tl.constexpr):
    """Slots of block `i` of the walk: `listed` by the list (-1: nothing), or in a row."""
    num_below, branch_block, num_list_blocks, shift = walk
    block = tl.where(i < num_below, i, i - num_below + branch_block)
    slots = block * WALK.block_n + tl.arange(0, WALK.block_n)
    if WALK.num_listed:
        slots = tl.where(i < num_list_blocks, listed, slots + shift)
    if WALK.has_windows:
        slots += shift
    return slots


@triton.jit
def is_seen(slots, ends, WALK: tl.constexpr):
    """Whether some row of the tile sees the slot."""
    high_limit, low_branch, high_own, low_first = ends
    below = slots < high_limit
    if WALK.has_windows:
        below &= slots >= low_first
    if WALK.num_listed:
        below &= slots >= 0
    return below | ((slots >= low_branch) & (slots <= high_own))


@triton.jit
def pages_of(table, slots, i, stop, ends, WALK: tl.constexpr):
    """Page id of each slot of block `i` of the walk; 0 after the last slot that the tile sees."""
    exists = (slots.to(tl.uint32) < tl.maximum(ends[0], ends[2] + 1).to(tl.uint32)) & (i < stop)
    return tl.load(table + (slots.to(tl.uint32) // WALK.page_size).to(tl.int32), mask=exists, other=0)


@triton.jit
def hide(scores, slots, limits, branches, owns, firsts, WALK: tl.constexpr):
    """Scores with -inf where a row does not see a slot."""
    below = slots[None, :] < limits[:, None]
    if WALK.has_windows:
        below &= slots[None, :] >= firsts[:, None]
    branch = (slots[None, :] >= branches[:, None]) & (slots[None, :] <= owns[:, None])
    return tl.where(below | branch, scores, float("-inf"))


@triton.jit
def sum_of(weights, IS_EXACT: tl.constexpr):
    """Sum of the weights of each row. IS_EXACT: of weights rounded to multiples of 2^-17, of which a float32
    holds the sum of 128, so that it is the same in any order, and in any tile."""
    if IS_EXACT:
        weights = (weights + UNITS) - UNITS
    return tl.sum(weights, 1)


@triton.jit
def with_slots_before(scores, slots, row_ends, total, highest, scale_log2):
    """Sum and maximum of each row so far, with those slots of this block that lie before its end."""
    scores = tl.where(slots[None, :] < row_ends[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    return total * tl.exp2(highest - new_highest) + tl.sum(weights, 1), new_highest


@triton.jit
def sums_before(before, total, highest, is_whole, row_ends):
    """Sums before the block of a share: all of it if it ends before the block, else what was stored.

    Rows before the block, which see its slots too, have none."""
    total, highest = tl.where(is_whole, total, before[0]), tl.where(is_whole, highest, before[1])
    return tl.where(row_ends > 0, total, 0.0), tl.where(row_ends > 0, highest, NOTHING)


@triton.jit
def split_start(split, WALK: tl.constexpr):
    """First block of a split: 2 `octave` splits of `split_blocks` blocks, `octave` of twice as many, ..."""
    octave = tl.maximum(split // WALK.octave - 1, 0)
    return ((split - octave * WALK.octave) << octave) * WALK.split_blocks


@triton.jit
def walk_blocks(
    q,
    memory,
    slot_list,
    first,
    share,
    step,
    parts,
    target,
    scale_log2,
    SHAPE: tl.constexpr,
    WALK: tl.constexpr,
):
    """The walk block by block: sum of values, sum of weights, maximum, and the sums before the block.

    With fixed splits, writes a part for each, but for those of the first item of a tile, which it adds up."""
    caches, table, stride_slot = memory
    slots, pages = first
    start, stop, low = share
    walk, ends, bounds, before_ends = step
    num_below, branch_block, num_list_blocks, shift = walk
    limits, branches, owns, low_limit, firsts = bounds
    last_before, row_ends = before_ends
    my_part, of_tile = target
    K: tl.constexpr = SHAPE.num_kv_heads
    H: tl.constexpr = SHAPE.head_dim
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = WALK.block_n
    BLOCK_H: tl.constexpr = q.shape[1]
    # Products of float32 follow the tile, and rows of them have one tile.
    IS_EXACT: tl.constexpr = (WALK.split_blocks > 0) & (q.dtype != tl.float32)
    tl.static_assert(not IS_EXACT or BLOCK_N <= 128)
    columns = tl.arange(0, BLOCK_H)
    in_head = (columns < H)[None, :]
    listed, is_full = slots, False
    if WALK.num_listed:
        listed = listed_of(slot_list, start + 1, stop, walk, WALK)
        is_full = is_list_full(slot_list, start, walk, WALK)
    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    if WALK.split_blocks:
        split, sum_o, sum_total, sum_highest = low, acc, total, highest
        split_end = split_start(low + 1, WALK)
    before = total, highest
    sum_before = total, highest
    for i in tl.range(start, stop, num_stages=WALK.stages):
        if not WALK.num_listed:
            slots = slots_of(listed, i, walk, WALK)
        is_read = is_seen(slots, ends, WALK)
        physical = pages.to(tl.int32) * WALK.page_size + (slots.to(tl.uint32) % WALK.page_size).to(tl.int32)
        # Nothing of an iteration waits for what it loads: lists are read two blocks ahead, and page ids one.
        slots = slots_of(listed, i + 1, walk, WALK)
        pages = pages_of(table, slots, i + 1, stop, ends, WALK)
        mask = is_read[:, None] if H == BLOCK_H else is_read[:, None] & in_head
        at = physical.to(tl.int64)[:, None] * stride_slot + columns[None, :]
        k = tl.load(caches[0] + at, mask=mask, other=0.0)
        scores = tl.dot(q, k.to(q.dtype).T, input_precision=WALK.precision)
        block = tl.where(i < num_below, i, i - num_below + branch_block)
        first_slot = block * BLOCK_N + shift
        is_list = i < num_list_blocks
        if ((first_slot + BLOCK_N > low_limit) | is_list | WALK.has_windows) & (not is_full):
            indices = first_slot + tl.arange(0, BLOCK_N)
            if WALK.num_listed:
                # All rows see what is listed.
                here = listed_of(slot_list, i, stop, walk, WALK)
                indices = tl.where(is_list, tl.where(here >= 0, 0, NO_SLOT), indices)
            scores = hide(scores, indices, limits, branches, owns, firsts, WALK)
        if WALK.sums_before:  # noqa: SIM102
            if i == last_before:
                indices = first_slot + tl.arange(0, BLOCK_N)
                before = with_slots_before(scores, indices, row_ends, total, highest, scale_log2)
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + sum_of(weights, IS_EXACT)
        acc = acc * shrink[:, None]
        v = tl.load(caches[1] + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=WALK.precision)
        highest = new_highest
        if WALK.num_listed:
            listed = listed_of(slot_list, i + 2, stop, walk, WALK)
            is_full = is_list_full(slot_list, i + 1, walk, WALK)
        if WALK.split_blocks:
            is_last = (i + 1 == split_end) | (i + 1 == stop)
            if is_last:
                if low == 0:
                    sum_o, sum_total, sum_highest = add_split(
                        sum_o, sum_total, sum_highest, acc, total, highest
                    )
                else:
                    store_part(parts, my_part + split, of_tile, acc, total, highest, K, H)
                if WALK.sums_before:
                    before = sums_before(before, total, highest, i < last_before, row_ends)
                    if low == 0:
                        sum_before = add_sums(sum_before, before)
                    else:
                        store_sums(parts.before, my_part + split, of_tile, before[0], before[1], K)
                acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
                if WALK.sums_before:
                    before = total, highest
                split += 1
                split_end = split_start(split + 1, WALK)
    before = sums_before(before, total, highest, stop <= last_before, row_ends)
    if WALK.split_blocks:
        acc, total, highest, before = sum_o, sum_total, sum_highest, sum_before
    return acc, total, highest, before
