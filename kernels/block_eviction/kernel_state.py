"""The Triton kernels of the state of blocks: one program for each sequence.

B sequences, R rows, W positions of a block (SIZE, padded to BLOCK_W), Z lanes."""

from __future__ import annotations

import triton
import triton.language as tl


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
    if RULES.keeps_stored:
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
    if RULES.keeps_stored:
        # Where nothing of the active block was decided, the block before is still the one in work.
        in_work = known == start - SIZE
        stays = (in_work & frozen) | ((in_work == 0) & before & (known_before == start - SIZE))
        # The last rows ahead of the block, which are those of the block before unless they end earlier.
        first, last = tl.load(fed.cu_rows_B1 + b), tl.load(fed.cu_rows_B1 + b + 1)
        num_before = last - first - tl.sum((row >= 0).to(tl.int64), 0)
        stored = first + num_before - SIZE + w
        has_row = m_w & (stored >= first)
        ends_here = tl.load(fed.slots_R + first, mask=first < last, other=0) + num_before == start
        same = tl.load(fed.token_ids_R + stored, mask=has_row, other=-2) == tl.where(in_work, ids, before_ids)
        stays = stays & same & ends_here
        if RULES.shifted:
            # The last row predicts the first place of the next block.
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
