"""The Triton kernels of the state of blocks: one program for each sequence.

B sequences, R rows, W places of a block (SIZE, padded to BLOCK_W), Z lanes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_kernel(
    starts_Z,
    before_starts_Z,
    counts_Z4,
    is_new_Z,
    frozen_ZW,
    processed_ZW,
    before_frozen_ZW,
    frozen_ids_ZW,
    before_ids_ZW,
    lanes_B,
    starts_B,
    rows_BW,
    mask_BW,
    cu_rows_B1,
    slots_R,
    tokens_R,
    mine_B,
    evicts_B,
    mean_B,
    ids_BW,
    keep_R,
    OF_REQUEST: tl.constexpr,
    KEEPS_STORED: tl.constexpr,
    SHIFTED: tl.constexpr,
    PREFILLS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Turn to a new block if it begins, thaw what was edited, and flag the rows that are computed."""
    b = tl.program_id(0).to(tl.int64)
    lane, start = tl.load(lanes_B + b), tl.load(starts_B + b)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    at, at_lane = b * SIZE + w, lane * SIZE + w
    row = tl.load(rows_BW + at, mask=m_w, other=-1)
    is_mask = tl.load(mask_BW + at, mask=m_w, other=0) != 0
    num_left = tl.sum(is_mask.to(tl.int64), 0)
    mine = (tl.sum((row >= 0).to(tl.int32), 0) == SIZE) & (num_left > 0)
    tl.store(mine_B + b, mine)
    evicts = mine
    if PREFILLS:
        evicts = mine & (tl.load(is_new_Z + lane) == 0)
    tl.store(evicts_B + b, evicts)

    known = tl.load(starts_Z + lane)
    is_new = mine & (known != start)
    num_masks, num_passes = tl.load(counts_Z4 + lane * 4), tl.load(counts_Z4 + lane * 4 + 1)
    decoded, earlier = tl.load(counts_Z4 + lane * 4 + 2), tl.load(counts_Z4 + lane * 4 + 3)
    decoded += tl.where(is_new & (num_passes > 0), num_masks, 0)
    earlier += tl.where(is_new, num_passes, 0)
    num_passes = tl.where(is_new, 0, num_passes)
    # What passes that do not count have decided does not count either.
    num_masks = tl.where(mine & (num_passes == 0), num_left, num_masks)
    tl.store(counts_Z4 + lane * 4, num_masks)
    tl.store(counts_Z4 + lane * 4 + 1, num_passes)
    tl.store(counts_Z4 + lane * 4 + 2, decoded)
    tl.store(counts_Z4 + lane * 4 + 3, earlier)
    total = num_masks - num_left
    if OF_REQUEST:
        total += decoded
        num_passes += earlier
    mean = total.to(tl.float64) / tl.maximum(num_passes, 1).to(tl.float64)
    tl.store(mean_B + b, tl.maximum(mean, 1.0))

    frozen = tl.load(frozen_ZW + at_lane, mask=m_w, other=0) != 0
    ids = tl.load(frozen_ids_ZW + at_lane, mask=m_w, other=-1)
    if KEEPS_STORED:
        known_before = tl.where(is_new, known, tl.load(before_starts_Z + lane))
        before = tl.load(before_frozen_ZW + at_lane, mask=m_w, other=0) != 0
        before = tl.where(is_new, frozen, before)
        before_ids = tl.where(is_new, ids, tl.load(before_ids_ZW + at_lane, mask=m_w, other=-1))
        tl.store(before_starts_Z + lane, known_before)
        tl.store(before_frozen_ZW + at_lane, before, mask=m_w)
        tl.store(before_ids_ZW + at_lane, before_ids, mask=m_w)
    known = tl.where(is_new, start, known)
    tl.store(starts_Z + lane, known)
    processed = tl.load(processed_ZW + at_lane, mask=m_w, other=0) != 0
    tl.store(processed_ZW + at_lane, processed & (is_new == 0), mask=m_w)

    token = tl.load(tokens_R + tl.maximum(row, 0), mask=m_w, other=-2)
    tl.store(ids_BW + at, token, mask=m_w)
    frozen = frozen & (is_new == 0) & ((ids == token) | (mine == 0))
    tl.store(frozen_ZW + at_lane, frozen, mask=m_w)
    tl.store(keep_R + row, (frozen & mine) == 0, mask=row >= 0)
    if KEEPS_STORED:
        # Where nothing of the active block was decided, the block before is still the one in work.
        in_work = known == start - SIZE
        stays = (in_work & frozen) | ((in_work == 0) & before & (known_before == start - SIZE))
        # The last rows ahead of the block, which are those of the block before unless they end earlier.
        first, last = tl.load(cu_rows_B1 + b), tl.load(cu_rows_B1 + b + 1)
        num_before = last - first - tl.sum((row >= 0).to(tl.int64), 0)
        stored = first + num_before - SIZE + w
        has_row = m_w & (stored >= first)
        ends_here = tl.load(slots_R + first, mask=first < last, other=0) + num_before == start
        same = tl.load(tokens_R + stored, mask=has_row, other=-2) == tl.where(in_work, ids, before_ids)
        stays = stays & same & ends_here
        if SHIFTED:
            # The last row predicts the first place of the next block.
            stays = stays & (w < SIZE - 1)
        tl.store(keep_R + stored, stays == 0, mask=has_row)


@triton.jit
def finish_kernel(
    counts_Z4,
    is_new_Z,
    frozen_ZW,
    processed_ZW,
    frozen_ids_ZW,
    lanes_B,
    rows_BW,
    mask_BW,
    waits_B,
    mine_B,
    evicts_B,
    ids_BW,
    PREFILLS: tl.constexpr,
    FREEZES: tl.constexpr,
    BY_NEIGHBOUR: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Note what the pass has computed, unless the sequence waits."""
    b = tl.program_id(0).to(tl.int64)
    if (tl.load(mine_B + b) == 0) | (tl.load(waits_B + b) != 0):
        return
    lane = tl.load(lanes_B + b)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    at, at_lane = b * SIZE + w, lane * SIZE + w
    has_row = tl.load(rows_BW + at, mask=m_w, other=-1) >= 0
    processed = tl.load(processed_ZW + at_lane, mask=m_w, other=0) != 0
    tl.store(processed_ZW + at_lane, processed | has_row, mask=m_w)
    num_passes = tl.load(counts_Z4 + lane * 4 + 1)
    tl.store(counts_Z4 + lane * 4 + 1, num_passes + tl.load(evicts_B + b).to(tl.int64))
    if PREFILLS:
        tl.store(is_new_Z + lane, tl.zeros([], tl.int1))
    if FREEZES:
        is_decided = tl.load(mask_BW + at, mask=m_w, other=1) == 0
        if BY_NEIGHBOUR:
            is_decided = is_decided & (tl.load(mask_BW + at + 1, mask=w < SIZE - 1, other=0) == 0)
        frozen = tl.load(frozen_ZW + at_lane, mask=m_w, other=0) != 0
        tl.store(frozen_ZW + at_lane, frozen | is_decided, mask=m_w)
        tl.store(frozen_ids_ZW + at_lane, tl.load(ids_BW + at, mask=m_w), mask=m_w)
