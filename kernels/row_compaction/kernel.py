"""The Triton kernels of compaction: how many rows each sequence goes on with, where they go, and a gather.

B sequences, R rows, I rows that are left, W places of a block (SIZE, padded to BLOCK_W)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_needed(
    cu_rows_B1, rows_BW, keep_R, needs_all_B, scheduled_B, b, B,
    HAS_SCHEDULED: tl.constexpr, DROPS_STORED: tl.constexpr, SIZE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Of sequences `b`: rows before the block, the scheduled ones of these, and all else that goes on."""
    w = tl.arange(0, BLOCK_W)
    m_b = b < B
    m_bw = m_b[:, None] & (w < SIZE)[None, :]
    row = tl.load(rows_BW + b[:, None] * SIZE + w[None, :], mask=m_bw, other=-1)
    needs_all = tl.load(needs_all_B + b, mask=m_b, other=0) != 0
    kept = tl.load(keep_R + row, mask=row >= 0, other=0) != 0
    goes_on = (row >= 0) & (kept | needs_all[:, None])
    start = tl.load(cu_rows_B1 + b, mask=m_b, other=0)
    count = tl.load(cu_rows_B1 + 1 + b, mask=m_b, other=0) - start
    before = count - tl.sum((row >= 0).to(tl.int64), 1)
    if DROPS_STORED:
        number = before[:, None] - SIZE + w[None, :]
        m_stored = m_bw & (number >= 0)
        stays = tl.load(keep_R + start[:, None] + number, mask=m_stored, other=1) != 0
        before -= tl.sum((m_stored & (stays == 0)).to(tl.int64), 1)
    scheduled = before
    if HAS_SCHEDULED:
        scheduled = tl.minimum(before, tl.load(scheduled_B + b, mask=m_b, other=0))
    return before, scheduled, before - scheduled + tl.sum(goes_on.to(tl.int64), 1)


@triton.jit(do_not_specialize=["B", "NUM", "capacity"])
def count_kernel(
    cu_rows_B1,
    rows_BW,
    keep_R,
    needs_all_B,
    waited_B,
    scheduled_B,
    num_waits_B,
    new_cu_rows_B1,
    num_before_B,
    asked_B,
    waits_B,
    B,
    NUM,
    capacity,
    HAS_SCHEDULED: tl.constexpr,
    HAS_ROOM: tl.constexpr,
    DROPS_STORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program: which sequences wait, how many rows before its block each sequence goes on with, and
    where its rows begin."""
    CHUNK: tl.constexpr = 16
    b = tl.arange(0, BLOCK_B)
    m_b = b < B
    before, scheduled, needs = rows_needed(
        cu_rows_B1, rows_BW, keep_R, needs_all_B, scheduled_B, b, B,
        HAS_SCHEDULED, DROPS_STORED, SIZE, BLOCK_W,
    )  # fmt: skip
    tl.store(asked_B + b, scheduled + needs, mask=m_b)
    waits = tl.load(waited_B + b, mask=m_b, other=0) != 0
    if HAS_ROOM:
        key = tl.load(num_waits_B + b, mask=m_b, other=-1)
        end = needs + tl.sum(tl.where(m_b, scheduled, 0), 0)
        for start in range(0, B, CHUNK):
            c = start + tl.arange(0, CHUNK)
            _, _, others = rows_needed(
                cu_rows_B1, rows_BW, keep_R, needs_all_B, scheduled_B, c, B,
                HAS_SCHEDULED, DROPS_STORED, SIZE, BLOCK_W,
            )  # fmt: skip
            other_key = tl.load(num_waits_B + c, mask=c < B, other=-1)
            is_as_long = other_key[None, :] == key[:, None]
            is_smaller = (others[None, :] < needs[:, None]) | (
                (others[None, :] == needs[:, None]) & (c[None, :] < b[:, None])
            )
            is_before = (other_key[None, :] > key[:, None]) | (is_as_long & is_smaller)
            end += tl.sum(tl.where(is_before, others[None, :], 0), 1)
        waits = waits | ((needs > 0) & (end > capacity))
        before = tl.where(waits, scheduled, before)
        needs = tl.where(waits, 0, needs)
    tl.store(waits_B + b, waits, mask=m_b)
    tl.store(num_before_B + b, before, mask=m_b)
    end_of = tl.cumsum(tl.where(m_b, scheduled + needs, 0), 0)
    tl.store(new_cu_rows_B1 + 1 + b, tl.minimum(end_of, NUM), mask=m_b)
    tl.store(new_cu_rows_B1, tl.zeros([], tl.int64))


@triton.jit
def copy_rows(
    sequence_R, token_R, position_R, slot_R, limit_R, branch_R, mapping_R, origin_R, new_limit_R, mask_R,
    ints_JI, is_mask_I, NUM, row, to, m_row, narrows, is_row, num_origins,
    HAS_LIMITS: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """All columns of rows `row` to rows `to`; padding unless `is_row`."""
    m_to = m_row & (to < NUM)
    limit = tl.load(limit_R + row, mask=m_to)
    if HAS_LIMITS:
        limit = tl.where(narrows, tl.minimum(limit, tl.load(new_limit_R + row, mask=m_to)), limit)
    tl.store(ints_JI + to, tl.load(sequence_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + NUM + to, tl.load(token_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 2 * NUM + to, tl.load(position_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 3 * NUM + to, tl.load(slot_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 4 * NUM + to, limit, mask=m_to)
    tl.store(ints_JI + 5 * NUM + to, tl.load(branch_R + row, mask=m_to), mask=m_to)
    mapping = tl.where(is_row, tl.load(mapping_R + row, mask=m_to), -1)
    tl.store(ints_JI + 6 * NUM + to, mapping, mask=m_to)
    origin = tl.where(is_row, tl.load(origin_R + row, mask=m_to), num_origins)
    tl.store(ints_JI + 7 * NUM + to, origin, mask=m_to)
    tl.store(ints_JI + 8 * NUM + to, row, mask=m_to)
    if HAS_MASKS:
        is_mask = tl.load(mask_R + row, mask=m_to, other=0) != 0
        tl.store(is_mask_I + to, is_mask & is_row, mask=m_to)


@triton.jit(do_not_specialize=["B", "NUM", "num_origins"])
def place_kernel(
    sequence_R,
    token_R,
    position_R,
    slot_R,
    limit_R,
    branch_R,
    mapping_R,
    origin_R,
    cu_rows_B1,
    rows_BW,
    keep_R,
    needs_all_B,
    new_limit_R,
    mask_R,
    new_cu_rows_B1,
    num_before_B,
    waits_B,
    new_rows_BW,
    ints_JI,
    is_mask_I,
    B,
    NUM,
    num_origins,
    HAS_ROOM: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    DROPS_STORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of one sequence, or (in the programs after those) padding."""
    b = tl.program_id(0)
    x = tl.arange(0, BLOCK)
    if b >= B:
        to = (b - B) * BLOCK + x
        is_padding = to >= tl.load(new_cu_rows_B1 + B)
        row = tl.zeros([BLOCK], tl.int64)
        narrows = tl.zeros([BLOCK], tl.int1)
        if HAS_LIMITS:
            # Row 0 itself, as it goes on.
            sequence = tl.load(sequence_R)
            first = tl.load(rows_BW + sequence * SIZE + tl.arange(0, BLOCK_W),
                            mask=tl.arange(0, BLOCK_W) < SIZE, other=-1)  # fmt: skip
            is_block = tl.sum((first == 0).to(tl.int32), 0) > 0
            narrows = narrows | (is_block & (tl.load(needs_all_B + sequence) == 0))
        copy_rows(
            sequence_R, token_R, position_R, slot_R, limit_R, branch_R, mapping_R, origin_R, new_limit_R,
            mask_R, ints_JI, is_mask_I, NUM, row, to, is_padding, narrows, narrows & False, num_origins,
            HAS_LIMITS, HAS_MASKS,
        )  # fmt: skip
        return

    first, start, before = tl.load(cu_rows_B1 + b), tl.load(new_cu_rows_B1 + b), tl.load(num_before_B + b)
    yes = tl.full([BLOCK], 1, tl.int1)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    row = tl.load(rows_BW + b.to(tl.int64) * SIZE + w, mask=m_w, other=-1)
    whole = before
    if DROPS_STORED:
        # The last block before the active one, of which some rows are left out.
        count = tl.load(cu_rows_B1 + b + 1) - first - tl.sum((row >= 0).to(tl.int64), 0)
        number = count - SIZE + w
        m_stored = m_w & (number >= 0)
        stays = m_stored & (tl.load(keep_R + first + number, mask=m_stored, other=0) != 0)
        whole = tl.minimum(before, tl.maximum(count - SIZE, 0))
        place = tl.maximum(count - SIZE, 0) + tl.cumsum(stays.to(tl.int64), 0) - 1
        stays = stays & (place < before)
        copy_rows(
            sequence_R, token_R, position_R, slot_R, limit_R, branch_R, mapping_R, origin_R, new_limit_R,
            mask_R, ints_JI, is_mask_I, NUM, first + number, start + place, stays, stays & False, stays,
            num_origins, HAS_LIMITS, HAS_MASKS,
        )  # fmt: skip
    for number in range(0, whole, BLOCK):
        k = number + x
        copy_rows(
            sequence_R, token_R, position_R, slot_R, limit_R, branch_R, mapping_R, origin_R, new_limit_R,
            mask_R, ints_JI, is_mask_I, NUM, first + k, start + k, k < whole, yes & False, yes, num_origins,
            HAS_LIMITS, HAS_MASKS,
        )  # fmt: skip
    needs_all = tl.load(needs_all_B + b) != 0
    goes_on = (row >= 0) & ((tl.load(keep_R + row, mask=row >= 0, other=0) != 0) | needs_all)
    if HAS_ROOM:
        goes_on = goes_on & (tl.load(waits_B + b) == 0)
    to = start + before + tl.cumsum(goes_on.to(tl.int64), 0) - 1
    tl.store(new_rows_BW + b.to(tl.int64) * SIZE + w, tl.where(goes_on & (to < NUM), to, -1), mask=m_w)
    copy_rows(
        sequence_R, token_R, position_R, slot_R, limit_R, branch_R, mapping_R, origin_R, new_limit_R, mask_R,
        ints_JI, is_mask_I, NUM, row, to, goes_on, goes_on & (needs_all == 0), goes_on, num_origins,
        HAS_LIMITS, HAS_MASKS,
    )  # fmt: skip


@triton.jit
def find_kernel(
    cu_rows_B1, slots_R, mask_R, starts_B, rows_BW, is_mask_BW,
    HAS_MASKS: tl.constexpr, SIZE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The row at each place of one sequence's block, and whether it is a mask."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    m_w, at = w < SIZE, b * SIZE + w
    first, last = tl.load(cu_rows_B1 + b), tl.load(cu_rows_B1 + b + 1)
    row = first + tl.load(starts_B + b) + w - tl.load(slots_R + first, mask=first < last, other=0)
    has_row = m_w & (row >= first) & (row < last)
    tl.store(rows_BW + at, tl.where(has_row, row, -1), mask=m_w)
    is_mask = has_row
    if HAS_MASKS:
        is_mask = tl.load(mask_R + row, mask=has_row, other=0) != 0
    tl.store(is_mask_BW + at, is_mask & HAS_MASKS, mask=m_w)


@triton.jit
def spread_kernel(
    kept_BW, ends_B, starts_B, rows_BW, keep_R, limits_R, SIZE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Flags of one sequence's places to their rows, and the slot below which these see their block."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    row = tl.load(rows_BW + b * SIZE + w, mask=w < SIZE, other=-1)
    kept = tl.load(kept_BW + b * SIZE + w, mask=w < SIZE, other=0)
    limit = tl.load(starts_B + b) + tl.load(ends_B + b)
    tl.store(keep_R + row, kept, mask=row >= 0)
    tl.store(limits_R + row, limit + w * 0, mask=row >= 0)


@triton.jit
def gather_one(source, target, stride, width, row, to, BLOCK: tl.constexpr):
    """A part of one row of one tensor, in words."""
    x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + to * width + x, tl.load(source + row * stride + x, mask=x < width), mask=x < width)


@triton.jit
def gather_kernel(
    numbers_I,
    source_0,
    source_1,
    source_2,
    source_3,
    source_4,
    source_5,
    target_0,
    target_1,
    target_2,
    target_3,
    target_4,
    target_5,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    stride_4,
    stride_5,
    width_0,
    width_1,
    width_2,
    width_3,
    width_4,
    width_5,
    BLOCK: tl.constexpr,
):
    """A part of one row of the tensor that the program's second number says."""
    to, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(numbers_I + to)
    if number == 0:
        gather_one(source_0, target_0, stride_0, width_0, row, to, BLOCK)
    elif number == 1:
        gather_one(source_1, target_1, stride_1, width_1, row, to, BLOCK)
    elif number == 2:
        gather_one(source_2, target_2, stride_2, width_2, row, to, BLOCK)
    elif number == 3:
        gather_one(source_3, target_3, stride_3, width_3, row, to, BLOCK)
    elif number == 4:
        gather_one(source_4, target_4, stride_4, width_4, row, to, BLOCK)
    else:
        gather_one(source_5, target_5, stride_5, width_5, row, to, BLOCK)
