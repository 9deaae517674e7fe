"""The Triton kernels of a block-diffusion pass: its rows and its decisions. Small integers, few launches.

Every program sums the rows of all sequences to locate its own, so programs exchange nothing. B sequences, b
some of them, R rows, X wanted rows, W positions of a block, Z lanes, L columns of the token table."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.block_step.types import PASSES_BITS

STEP_BITS: tl.constexpr = tl.constexpr(PASSES_BITS)


@triton.jit
def open_positions(decided_bw, known_b, samples_b, opens_b, w, SHAPE: tl.constexpr):
    """Masks that may be decided, [b, w]; `decided_bw` holds in positions beyond the block."""
    is_open = (w[None, :] >= (known_b % SHAPE.size)[:, None]) & (decided_bw == 0) & samples_b[:, None]
    is_open = is_open & ((w[None, :] == 0) | (opens_b[:, None] == 0))
    if SHAPE.part_size < SHAPE.size:
        part = (w // SHAPE.part_size)[None, :]
        is_open = is_open & (part == tl.min(tl.where(is_open, part, SHAPE.size), 1)[:, None])
    return is_open


@triton.jit
def editable_positions(decided_bw, known_b, samples_b, opens_b, w, SHAPE: tl.constexpr):
    """Decided positions that may be edited, [b, w]. Inside a shifted block no row predicts the first
    position."""
    has_row = (w < SHAPE.size) & (w >= (1 if SHAPE.shifted else 0))
    is_mine = samples_b & (opens_b == 0)
    return decided_bw & (w[None, :] >= (known_b % SHAPE.size)[:, None]) & has_row[None, :] & is_mine[:, None]


@triton.jit
def positions_of(
    lanes, blocks, lanes_B, b, m_b, samples_b, opens_b, SHAPE: tl.constexpr, EDITS: tl.constexpr
):
    """Of sequences `b`: the masks that may be decided, and the positions that need a wanted row, [b,
    w]."""
    w = tl.arange(0, SHAPE.padded_size)
    lane = tl.load(lanes_B + b, mask=m_b, other=0)
    known = tl.load(lanes.num_known_Z + lane)
    m_bw = m_b[:, None] & (w < SHAPE.size)[None, :]
    decided = tl.load(blocks.is_decided_ZW + lane[:, None] * SHAPE.size + w[None, :], mask=m_bw, other=1) != 0
    is_open = open_positions(decided, known, samples_b, opens_b, w, SHAPE)
    is_due = is_open
    if EDITS:
        is_due = is_open | editable_positions(decided, known, samples_b, opens_b, w, SHAPE)
    return is_open, is_due


@triton.jit
def store_wanted(wanted_IX, number_BW, X, i, lanes, mine, rows, w, SIZE: tl.constexpr):
    """Store the wanted rows of sequence `i`, numbered from `first`; the last sequence stores padding too."""
    lane, first_lane = lanes
    first, num, is_due, waits, is_last = mine
    is_wanted = is_due & (waits == 0)
    number = first + tl.cumsum(is_due.to(tl.int32), 0) - 1
    tl.store(number_BW + i * SIZE + w, tl.where(is_wanted, number, -1), mask=w < SIZE)
    tl.store(wanted_IX + number, rows, mask=is_wanted)
    tl.store(wanted_IX + X + number, (i * SIZE + w).to(tl.int64), mask=is_wanted)
    tl.store(wanted_IX + 2 * X + number, tl.zeros_like(rows) + lane, mask=is_wanted)
    # All after the first that waits wait too.
    end = tl.where(waits, first, first + num)
    BLOCK: tl.constexpr = 512
    if (waits | is_last) & (end <= X):
        for start in range(end, X, BLOCK):
            x = start + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], tl.int64)
            tl.store(wanted_IX + x, zero, mask=x < X)
            tl.store(wanted_IX + X + x, zero, mask=x < X)
            tl.store(wanted_IX + 2 * X + x, zero + first_lane, mask=x < X)


@triton.jit
def first_open(blocks, lane, known, m_b, SHAPE: tl.constexpr):
    """The leftmost position of each sequence that is neither known nor decided, else the last position."""
    w = tl.arange(0, SHAPE.padded_size)
    m_bw = m_b[:, None] & (w < SHAPE.size)[None, :]
    decided = tl.load(blocks.is_decided_ZW + lane[:, None] * SHAPE.size + w[None, :], mask=m_bw, other=1) != 0
    is_open = m_bw & (w[None, :] >= (known % SHAPE.size)[:, None]) & (decided == 0)
    return tl.min(tl.where(is_open, w[None, :], SHAPE.size - 1), 1)


@triton.jit
def sequence_rows(
    lanes, blocks, columns, B, R, SHAPE: tl.constexpr, LIMITED: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Per sequence: whether it advances, is to decode and denoises; the number of known tokens that it
    stores; the first position that it computes of its active block; its first slot and its number of rows."""
    lanes_B, feed_B, samples_B = columns
    b = tl.arange(0, BLOCK_B)
    m_b = b < B
    lane = tl.load(lanes_B + b, mask=m_b, other=0)
    known = tl.load(lanes.num_known_Z + lane)
    computed = tl.load(lanes.num_computed_Z + lane)
    num_counted = tl.load(feed_B + b, mask=m_b, other=0)
    decodes = tl.load(samples_B + b, mask=m_b, other=0) != 0
    advances = (known < tl.load(lanes.ends_Z + lane)) & m_b
    wants = decodes & advances
    feed = tl.where(decodes, known // SHAPE.size * SHAPE.size - computed, num_counted)
    feed = tl.where(advances, feed, 0)
    denoises = wants
    if not SHAPE.fuses or SHAPE.shifted:
        denoises = wants & (feed == 0)
    elif LIMITED:
        uncounted = tl.where(m_b, tl.maximum(feed - num_counted, 0), 0)
        num_free = R - B * SHAPE.size - tl.sum(tl.where(m_b, tl.minimum(feed, num_counted), 0), 0)
        denoises = wants & ((uncounted == 0) | (tl.cumsum(uncounted, 0) <= num_free))
    first = feed * 0
    num = first + SHAPE.size
    if SHAPE.reuses:
        index = first_open(blocks, lane, known, m_b, SHAPE)
        part = (index // SHAPE.part_size).to(tl.int64)
        is_whole = (tl.load(blocks.whole_part_Z + lane) != part) | (feed > 0)
        if SHAPE.shifted:
            is_whole = is_whole | (index % SHAPE.part_size == 0)
        first = tl.where(is_whole, 0, part * SHAPE.part_size)
        num = tl.where(is_whole, SHAPE.size, SHAPE.part_size).to(tl.int64)
    count = tl.where(m_b, feed + tl.where(denoises, num, 0), 0)
    first_slot = computed + tl.where(denoises, first, 0)
    return advances, wants, denoises, feed, first, first_slot, count


@triton.jit(do_not_specialize=["B", "R", "X", "L"])
def pack_blocks_kernel(
    lanes,
    blocks,
    steps_Z,
    columns,
    out,
    B,
    R,
    X,
    L,
    SHAPE: tl.constexpr,
    LIMITED: tl.constexpr,
    EDITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of rows, or (in the programs after those) the wanted rows and numbers of one sequence."""
    lanes_B, feed_B = columns[0], columns[1]
    cu_rows_B1, ints_IB, bools_IB, rows_IR, is_mask_R, wanted_IX, number_BW, is_maskable_BW = out
    b = tl.arange(0, BLOCK_B)
    advances, wants, denoises, feed, first, first_slot, count = sequence_rows(
        lanes, blocks, columns, B, R, SHAPE, LIMITED, BLOCK_B
    )
    end = tl.cumsum(count, 0)
    num_blocks = tl.cdiv(R, BLOCK)
    if tl.program_id(0) >= num_blocks:
        i = tl.program_id(0) - num_blocks
        is_mine = b == i
        my_end = tl.sum(tl.where(is_mine, end, 0), 0)
        my_start = my_end - tl.sum(tl.where(is_mine, count, 0), 0)
        my_feed = tl.sum(tl.where(is_mine, feed, 0), 0)
        my_first = tl.sum(tl.where(is_mine, first, 0), 0)
        samples = wants if SHAPE.shifted else denoises
        opens = samples & (feed > 0) & SHAPE.shifted
        lane = tl.load(lanes_B + i)
        known, passes = tl.load(lanes.num_known_Z + lane), tl.load(blocks.num_passes_Z + lane)
        w = tl.arange(0, SHAPE.padded_size)
        m_w = w < SHAPE.size
        _, due = positions_of(lanes, blocks, lanes_B, b, b < B, samples, opens, SHAPE, EDITS)
        num_due = tl.sum(due.to(tl.int32), 1)
        # Room in the order of waiting; an opened block, which needs one row, always has it.
        waited = tl.load(blocks.num_waits_Z + tl.load(lanes_B + b, mask=b < B, other=0), mask=b < B, other=-1)
        key = waited + tl.where(opens, 1 << 40, 0)
        my_key = tl.sum(tl.where(is_mine, key, 0), 0)
        is_before = (key > my_key) | ((key == my_key) & (b < i))
        first_wanted = tl.sum(tl.where(is_before, num_due, 0), 0)
        num_wanted = tl.sum(tl.where(is_mine, num_due, 0), 0)
        waits = (num_wanted > 0) & (first_wanted + num_wanted > X)
        is_last = tl.sum(((is_before == 0) & (is_mine == 0) & (b < B)).to(tl.int32), 0) == 0

        mine = i + tl.zeros([1], tl.int32)
        my_samples = tl.sum(tl.where(is_mine & samples, 1, 0), 0) > 0
        my_opens = tl.sum(tl.where(is_mine & opens, 1, 0), 0) > 0
        one = tl.full([1], 1, tl.int1)
        is_open, is_due = positions_of(
            lanes, blocks, lanes_B, mine, one, one & my_samples, one & my_opens, SHAPE, EDITS
        )
        is_open = tl.reshape(is_open, [SHAPE.padded_size])
        is_due = tl.reshape(is_due, [SHAPE.padded_size])
        tl.store(is_maskable_BW + i * SHAPE.size + w, is_open & (waits == 0), mask=m_w)
        row = my_start + my_feed - my_first + w - (1 if SHAPE.shifted else 0)
        row = tl.minimum(tl.maximum(row, my_start), my_end - 1)
        row = tl.minimum(tl.maximum(row, 0), R - 1)
        wanted = (first_wanted, num_wanted, is_due, waits, is_last)
        store_wanted(wanted_IX, number_BW, X, i, (lane, tl.load(lanes_B)), wanted, row, w, SHAPE.size)
        if i == 0:
            tl.store(cu_rows_B1, tl.zeros([], tl.int64))
        tl.store(cu_rows_B1 + 1 + i, my_end)
        tl.store(bools_IB + i, my_samples & (waits == 0))
        tl.store(bools_IB + B + i, tl.sum(tl.where(is_mine & advances, 1, 0), 0) > 0)
        tl.store(bools_IB + 2 * B + i, waits)
        # A sequence that waits has stored what the host scheduled, on which the host counts.
        num_counted = tl.minimum(my_feed, tl.load(feed_B + i))
        tl.store(ints_IB + i, first_wanted.to(tl.int64))
        tl.store(ints_IB + B + i, tl.where(waits, num_counted, my_feed))
        tl.store(ints_IB + 2 * B + i, known // SHAPE.size * SHAPE.size)
        tl.store(ints_IB + 3 * B + i, passes)
        tl.store(ints_IB + 4 * B + i, tl.load(steps_Z + lane))
        step = (known // SHAPE.size << STEP_BITS) + tl.where((my_feed > 0) & SHAPE.shifted, 0, 1 + passes)
        tl.store(ints_IB + 5 * B + i, step)
        tl.store(ints_IB + 6 * B + i, num_wanted.to(tl.int64))
        return

    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < R
    is_fed = row < tl.sum(count, 0)
    sequence = tl.sum(((end[None, :] <= row[:, None]) & (b < B)[None, :]).to(tl.int32), 1)
    sequence = tl.minimum(sequence, B - 1)
    is_mine = sequence[:, None] == b[None, :]
    base = first_slot - (end - count)
    slot = tl.where(is_fed, row + tl.sum(tl.where(is_mine, base[None, :], 0), 1), 0)
    lane = tl.load(lanes_B + sequence)
    index = slot % SHAPE.size
    is_known = slot < tl.load(lanes.num_known_Z + lane)
    is_decided = tl.load(blocks.is_decided_ZW + lane * SHAPE.size + index) != 0
    known_token = tl.load(lanes.tokens_ZL + lane * L + tl.minimum(slot, L - 1))
    token = tl.where(is_decided, tl.load(blocks.tokens_ZW + lane * SHAPE.size + index), SHAPE.mask_token_id)
    tl.store(rows_IR + row, sequence.to(tl.int64), mask=m_row)
    tl.store(rows_IR + R + row, tl.where(is_known, known_token, token), mask=m_row)
    tl.store(rows_IR + 2 * R + row, slot, mask=m_row)
    tl.store(rows_IR + 3 * R + row, slot - index + SHAPE.size, mask=m_row)
    tl.store(is_mask_R + row, is_fed & (is_known == 0) & (is_decided == 0), mask=m_row)


@triton.jit
def ranks(keys, is_open, w):
    """Rank of each position among the open ones: larger keys first, the left one of equal keys first."""
    mine, other = keys[:, None], keys[None, :]
    is_before = (other > mine) | ((other == mine) & (w[None, :] < w[:, None]))
    return tl.sum((is_before & is_open[None, :]).to(tl.int32), 1)


@triton.jit
def chosen_positions(is_open, confidence, entropy, quota, threshold, bound, w, RULE: tl.constexpr):
    """Which open masks are decided, by rule number RULE of `RULES`."""
    if RULE == 0:
        return is_open & (tl.cumsum(is_open.to(tl.int32), 0) <= quota)
    if RULE == 3:
        rank = ranks(-entropy, is_open, w)
        is_counted = (rank[None, :] <= rank[:, None]) & is_open[None, :]
        sums = tl.sum(tl.where(is_counted, entropy[None, :], 0.0), 1)
        return is_open & ((sums < bound) | (rank == 0))
    best = is_open & (ranks(confidence, is_open, w) < quota)
    if RULE == 1:
        return best
    passes = is_open & (confidence > threshold)
    minimum = tl.minimum(quota, tl.sum(is_open.to(tl.int32), 0))
    has_enough = tl.sum(passes.to(tl.int32), 0) >= minimum
    return (passes & has_enough) | (best & (has_enough == 0))


@triton.jit(do_not_specialize=["L"])
def decide_kernel(
    lanes, steps_Z, blocks, limits, given, proposals, out, stride, L, RULE: tl.constexpr, SHAPE: tl.constexpr
):
    """Decide, edit and commit the active block of one sequence. `stride`: between entropies."""
    out_BW, emitted_B = out
    b = tl.program_id(0)
    lane, feed = tl.load(given.lanes_B + b), tl.load(given.num_feed_B + b)
    samples = tl.load(given.samples_B + b) != 0
    known, passes = tl.load(lanes.num_known_Z + lane), tl.load(blocks.num_passes_Z + lane)
    opens = (feed > 0) & SHAPE.shifted
    num_fixed, start = known % SHAPE.size, known // SHAPE.size * SHAPE.size
    w = tl.arange(0, SHAPE.padded_size)
    m_w = w < SHAPE.size
    at, mine = lane * SHAPE.size + w, b * SHAPE.size + w
    decided = tl.load(blocks.is_decided_ZW + at, mask=m_w, other=1) != 0
    tokens = tl.load(blocks.tokens_ZW + at, mask=m_w, other=0)
    is_fixed = w < num_fixed
    is_open = tl.load(given.is_maskable_BW + mine, mask=m_w, other=0) != 0
    if given.has_logits_BW is not None:
        has_logits = tl.load(given.has_logits_BW + mine, mask=m_w, other=0) != 0
        is_open = is_open & has_logits
    looks = is_open
    if limits.max_clean_passes is not None:
        # Inside a shifted block no row predicts the first position.
        can_edit = m_w & decided & (w >= num_fixed) & samples & (opens == 0)
        if SHAPE.shifted:
            can_edit = can_edit & (w > 0)
        if given.has_logits_BW is not None:
            can_edit = can_edit & has_logits
        looks = looks | can_edit
    # Proposals for closed positions may be anything.
    proposed = tl.load(proposals.token_ids_BW + mine, mask=looks, other=0)
    confidence = tl.load(proposals.confidence_BW + mine, mask=looks, other=0.0)
    entropy = confidence
    if RULE == 3:
        entropy = tl.load(proposals.entropy_BW + mine * stride, mask=is_open, other=0.0)
    if limits.quota_B is not None:
        quota = tl.load(limits.quota_B + b)
    else:
        steps = tl.load(limits.steps_Z + lane)
        quota = SHAPE.size // steps + tl.where(passes < SHAPE.size % steps, 1, 0)
    threshold, bound = tl.load(limits.threshold_Z + lane), tl.load(limits.entropy_bound_Z + lane)
    chosen = chosen_positions(is_open, confidence, entropy, quota, threshold, bound, w, RULE)
    chosen = tl.where(opens, is_open, chosen)
    num_masks = tl.sum((m_w & (decided == 0) & (is_fixed == 0)).to(tl.int32), 0)
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    is_clean = samples & (num_chosen == num_masks)
    if limits.max_clean_passes is not None:
        sure = tl.load(limits.edit_threshold_Z + lane)
        edited = can_edit & (proposed != tokens) & (confidence > sure)
        began_clean = samples & (num_masks == 0)
        num_clean = tl.load(blocks.num_clean_passes_Z + lane) + tl.where(began_clean, 1, 0)
        is_last = (tl.sum(edited.to(tl.int32), 0) == 0) | (num_clean >= limits.max_clean_passes)
        is_settled = (sure >= 1.0) | (began_clean & is_last)
        tl.store(blocks.num_clean_passes_Z + lane, tl.where(is_settled, 0, num_clean))
        is_clean = is_clean & is_settled
        chosen = chosen | edited
    if SHAPE.reuses:
        index = tl.min(tl.where(m_w & (decided == 0) & (is_fixed == 0), w, SHAPE.size - 1), 0)
        part, whole = (index // SHAPE.part_size).to(tl.int64), tl.load(blocks.whole_part_Z + lane)
        part = tl.where(samples & (opens == 0), part, whole)
        tl.store(blocks.whole_part_Z + lane, tl.where(is_clean, -1, part))
    tokens = tl.where(chosen, proposed, tokens)
    tl.store(blocks.tokens_ZW + at, tokens, mask=m_w)
    tl.store(blocks.is_decided_ZW + at, (decided | chosen) & (is_clean == 0), mask=m_w)
    num_waits = tl.where(tl.load(given.waits_B + b) != 0, tl.load(blocks.num_waits_Z + lane) + 1, 0)
    tl.store(blocks.num_waits_Z + lane, num_waits)
    passes += tl.where(samples & (opens == 0), 1, 0)
    tl.store(blocks.num_passes_Z + lane, tl.where(is_clean, 0, passes))

    last = tl.sum(tl.where(w == SHAPE.size - 1, tokens, 0), 0)
    tl.store(
        out_BW + b * SHAPE.size + tl.where(is_fixed, SHAPE.size - 1 - w, w - num_fixed),
        tl.where(is_fixed, last, tokens),
        mask=m_w,
    )
    tl.store(
        lanes.tokens_ZL + lane * L + start + w,
        tokens,
        mask=m_w & (is_fixed == 0) & is_clean & (start + w < L - 1),
    )
    num_emitted = tl.where(is_clean, SHAPE.size - num_fixed, 0)
    tl.store(emitted_B + b, num_emitted)
    if is_clean:
        tl.store(lanes.num_known_Z + lane, known + num_emitted)
        tl.store(steps_Z + lane, tl.load(steps_Z + lane) + 1)
    if feed > 0:
        tl.store(lanes.num_computed_Z + lane, tl.load(lanes.num_computed_Z + lane) + feed)
