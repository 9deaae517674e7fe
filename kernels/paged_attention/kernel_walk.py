"""The blocks of a walk: their slots, what rows see of them, and the loops over them.

R rows fed this pass, S physical KV slots, K KV heads, H head dim; README.md has the reasons.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_parts import NOTHING, add_split, add_sums, store_part, store_sums

NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def slots_of(slot_list, i, stop, walk, NUM_LISTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of block `i` of the walk: of the list, or in a row; -1 if nothing is listed."""
    num_below, branch_block, num_list_blocks, shift = walk
    block = tl.where(i < num_below, i, i - num_below + branch_block)
    places = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if NUM_LISTED:
        is_listed = (places < NUM_LISTED) & (i < tl.minimum(stop, num_list_blocks))
        listed = tl.load(slot_list + places, mask=is_listed, other=-1)
        places = tl.where(i < num_list_blocks, listed, places + shift)
    return places


@triton.jit
def is_seen(slots, ends):
    """Whether some row of the tile sees the slot."""
    high_limit, low_branch, high_own = ends
    return ((slots >= 0) & (slots < high_limit)) | ((slots >= low_branch) & (slots <= high_own))


@triton.jit
def pages_of(table, slots, i, stop, ends, PAGE: tl.constexpr):
    """Page id of each slot of block `i` of the walk; 0 where no row of the tile sees it."""
    return tl.load(table + slots // PAGE, mask=is_seen(slots, ends) & (i < stop), other=0)


@triton.jit
def hide(scores, slots, limits, branches, owns):
    """Scores with -inf where a row does not see a slot."""
    below = slots[None, :] < limits[:, None]
    branch = (slots[None, :] >= branches[:, None]) & (slots[None, :] <= owns[:, None])
    return tl.where(below | branch, scores, float("-inf"))


@triton.jit
def with_slots_before(scores, slots, row_ends, total, highest, scale_log2):
    """Sum and maximum of each row so far, with those slots of this block that lie before its end."""
    scores = tl.where(slots[None, :] < row_ends[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    return total * tl.exp2(highest - new_highest) + tl.sum(weights, 1), new_highest


@triton.jit
def sums_before(before, total, highest, is_whole, row_ends):
    """Sums before the block of a share: all of it if it ends ahead of the block, else what was kept.

    Rows before the block, which see its slots too, have none.
    """
    total, highest = tl.where(is_whole, total, before[0]), tl.where(is_whole, highest, before[1])
    return tl.where(row_ends > 0, total, 0.0), tl.where(row_ends > 0, highest, NOTHING)


@triton.jit
def split_start(split, SPLIT_BLOCKS: tl.constexpr, OCTAVE: tl.constexpr):
    """First block of a split: 2 OCTAVE splits of SPLIT_BLOCKS blocks, OCTAVE of twice as many, and so on."""
    octave = tl.maximum(split // OCTAVE - 1, 0)
    return ((split - octave * OCTAVE) << octave) * SPLIT_BLOCKS


@triton.jit
def walk_blocks(
    q,
    caches,
    table,
    slot_list,
    first,
    state,
    share,
    step,
    partial_o,
    partial_sums,
    partial_before,
    target,
    scale_log2,
    stride_slot,
    K: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    OCTAVE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_LISTED: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """The walk block by block: sum of values, sum of weights, maximum, and the sums before the block.

    `state`: the first three so far. With fixed splits, writes a part for each, but for those of the first
    item of a tile, which it adds up.
    """
    slots, pages = first
    start, stop, low = share
    walk, ends, bounds, before_ends = step
    num_below, branch_block, num_list_blocks, shift = walk
    limits, branches, owns, low_limit = bounds
    last_before, row_ends = before_ends
    my_part, in_tile, kv_head = target
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_H: tl.constexpr = q.shape[1]
    columns = tl.arange(0, BLOCK_H)
    in_head = (columns < H)[None, :]
    next_slots = slots_of(slot_list, start + 1, stop, walk, NUM_LISTED, BLOCK_N)
    acc, total, highest = state
    if SPLIT_BLOCKS:
        split, sum_o, sum_total, sum_highest = low, acc, total, highest
        split_end = split_start(low + 1, SPLIT_BLOCKS, OCTAVE)
    before = total, highest
    sum_before = total, highest
    for i in tl.range(start, stop, num_stages=STAGES):
        if not NUM_LISTED:
            slots = slots_of(slot_list, i, stop, walk, 0, BLOCK_N)
            next_slots = slots_of(slot_list, i + 1, stop, walk, 0, BLOCK_N)
        is_read = is_seen(slots, ends)
        physical = pages.to(tl.int32) * PAGE + slots % PAGE
        pages = pages_of(table, next_slots, i + 1, stop, ends, PAGE)
        mask = is_read[:, None] if H == BLOCK_H else is_read[:, None] & in_head
        at = physical.to(tl.int64)[:, None] * stride_slot + columns[None, :]
        k = tl.load(caches[0] + at, mask=mask, other=0.0)
        scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        block = tl.where(i < num_below, i, i - num_below + branch_block)
        if (block * BLOCK_N + BLOCK_N + shift > low_limit) | (i < num_list_blocks):
            places = slots
            if NUM_LISTED:
                # All rows see what is listed.
                places = tl.where(i < num_list_blocks, tl.where(slots >= 0, 0, NO_SLOT), slots)
            scores = hide(scores, places, limits, branches, owns)
        if BEFORE:  # noqa: SIM102
            if i == last_before:
                before = with_slots_before(scores, slots, row_ends, total, highest, scale_log2)
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = tl.load(caches[1] + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest
        if NUM_LISTED:
            # Triton does not pipeline a loop that passes a value on unchanged.
            slots = tl.where(i + 1 < stop, next_slots, -1)
            next_slots = slots_of(slot_list, i + 2, stop, walk, NUM_LISTED, BLOCK_N)
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
                if BEFORE:
                    before = sums_before(before, total, highest, i < last_before, row_ends)
                    if low == 0:
                        sum_before = add_sums(sum_before, before)
                    else:
                        store_sums(partial_before, my_part + split, in_tile, kv_head, before, K)
                acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
                if BEFORE:
                    before = total, highest
                split += 1
                split_end = split_start(split + 1, SPLIT_BLOCKS, OCTAVE)
    before = sums_before(before, total, highest, stop <= last_before, row_ends)
    if SPLIT_BLOCKS:
        acc, total, highest, before = sum_o, sum_total, sum_highest, sum_before
    return acc, total, highest, before


@triton.jit
def walk_ahead(
    q,
    caches,
    table,
    pages,
    start,
    stop,
    scale_log2,
    stride_slot,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The walk over blocks `[start, stop)`, of which all rows see all, with scores computed ahead.

    Iteration i adds the values of block i - 1, starts the scores of block i + 1, and takes the softmax of
    block i meanwhile. Triton lets a product go on that the iteration does not read, and waits for it with the
    sum of values at the head of the next one; so nothing here reads or hides scores that are under way.
    `pages`: page ids of the slots of block `start`.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_H: tl.constexpr = q.shape[1]
    columns = tl.arange(0, BLOCK_H)
    in_head = (columns < H)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    scores = tl.full([BLOCK_M, BLOCK_N], float("-inf"), dtype=tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # Physical slots of blocks i - 1 and i; -1 outside the walk.
    behind = tl.full([BLOCK_N], -1, dtype=tl.int32)
    here = tl.full([BLOCK_N], -1, dtype=tl.int32)
    for i in tl.range(start - 1, tl.where(start < stop, stop + 1, start - 1), num_stages=STAGES):
        slots = (i + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
        ahead = tl.where(i + 1 < stop, pages.to(tl.int32) * PAGE + slots % PAGE, -1)
        exists = (slots >= 0) & (i + 2 < stop)
        pages = tl.load(table + (slots + BLOCK_N) // PAGE, mask=exists, other=0)
        mask = (behind >= 0)[:, None] if H == BLOCK_H else (behind >= 0)[:, None] & in_head
        at = behind.to(tl.int64)[:, None] * stride_slot + columns[None, :]
        v = tl.load(caches[1] + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
        mask = (ahead >= 0)[:, None] if H == BLOCK_H else (ahead >= 0)[:, None] & in_head
        at = ahead.to(tl.int64)[:, None] * stride_slot + columns[None, :]
        k = tl.load(caches[0] + at, mask=mask, other=0.0)
        next_scores = tl.dot(q, k.to(q.dtype).T)
        # After the last block there are no scores, and nothing adds the weights.
        largest = tl.where(i < stop, tl.max(scores, 1) * scale_log2, NOTHING)
        new_highest = tl.maximum(highest, largest)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.where(i < stop, tl.sum(weights, 1), 0.0)
        acc = acc * shrink[:, None]
        highest, scores = new_highest, next_scores
        # Triton does not pipeline a loop that passes a value on unchanged.
        behind, here = tl.where(i < stop, here, -1), ahead
    return acc, total, highest
