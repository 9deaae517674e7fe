"""The Triton kernels of compaction: how many rows of each sequence remain, where they go, and a gather.

B sequences, R rows, I rows that are left, W positions of a block (SIZE, padded to BLOCK_W)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_needed(rows, drop, b, B, DROPS_STORED: tl.constexpr, SIZE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Of sequences `b`: rows before the block, the scheduled ones of these, and all others that remain."""
    w = tl.arange(0, BLOCK_W)
    m_b = b < B
    m_bw = m_b[:, None] & (w < SIZE)[None, :]
    row = tl.load(drop.rows_BW + b[:, None] * SIZE + w[None, :], mask=m_bw, other=-1)
    needs_all = tl.load(drop.needs_all_B + b, mask=m_b, other=0) != 0
    kept = tl.load(drop.keep_R + row, mask=row >= 0, other=0) != 0
    remains = (row >= 0) & (kept | needs_all[:, None])
    start = tl.load(rows.cu_rows_B1 + b, mask=m_b, other=0)
    count = tl.load(rows.cu_rows_B1 + 1 + b, mask=m_b, other=0) - start
    before = count - tl.sum((row >= 0).to(tl.int64), 1)
    if DROPS_STORED:
        number = before[:, None] - SIZE + w[None, :]
        m_stored = m_bw & (number >= 0)
        stays = tl.load(drop.keep_R + start[:, None] + number, mask=m_stored, other=1) != 0
        before -= tl.sum((m_stored & (stays == 0)).to(tl.int64), 1)
    scheduled = before
    if drop.scheduled_B is not None:
        scheduled = tl.minimum(before, tl.load(drop.scheduled_B + b, mask=m_b, other=0))
    return before, scheduled, before - scheduled + tl.sum(remains.to(tl.int64), 1)


@triton.jit(do_not_specialize=["B", "NUM", "capacity"])
def count_kernel(
    rows,
    drop,
    num_waits_B,
    out,
    B,
    NUM,
    capacity,
    DROPS_STORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program: which sequences wait, how many rows before its block each sequence retains, and
    where its rows begin."""
    new_cu_rows_B1, num_before_B, demand_B, waits_B = out
    CHUNK: tl.constexpr = 16
    b = tl.arange(0, BLOCK_B)
    m_b = b < B
    before, scheduled, needs = rows_needed(rows, drop, b, B, DROPS_STORED, SIZE, BLOCK_W)
    tl.store(demand_B + b, scheduled + needs, mask=m_b)
    waits = tl.load(drop.waits_B + b, mask=m_b, other=0) != 0
    if num_waits_B is not None:
        key = tl.load(num_waits_B + b, mask=m_b, other=-1)
        end = needs + tl.sum(tl.where(m_b, scheduled, 0), 0)
        for start in range(0, B, CHUNK):
            c = start + tl.arange(0, CHUNK)
            _, _, others = rows_needed(rows, drop, c, B, DROPS_STORED, SIZE, BLOCK_W)
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
def copy_rows(rows, drop, into, row, to, m_row, narrows, is_row):
    """All columns of rows `row` to rows `to`; padding unless `is_row`."""
    ints_JI, is_mask_I, NUM, num_origins = into
    m_to = m_row & (to < NUM)
    limit = tl.load(rows.limits_R + row, mask=m_to)
    if drop.limits_R is not None:
        limit = tl.where(narrows, tl.minimum(limit, tl.load(drop.limits_R + row, mask=m_to)), limit)
    tl.store(ints_JI + to, tl.load(rows.sequence_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + NUM + to, tl.load(rows.token_ids_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 2 * NUM + to, tl.load(rows.positions_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 3 * NUM + to, tl.load(rows.slots_R + row, mask=m_to), mask=m_to)
    tl.store(ints_JI + 4 * NUM + to, limit, mask=m_to)
    tl.store(ints_JI + 5 * NUM + to, tl.load(rows.branch_starts_R + row, mask=m_to), mask=m_to)
    mapping = tl.where(is_row, tl.load(rows.mapping_R + row, mask=m_to), -1)
    tl.store(ints_JI + 6 * NUM + to, mapping, mask=m_to)
    origin = tl.where(is_row, tl.load(rows.origin_R + row, mask=m_to), num_origins)
    tl.store(ints_JI + 7 * NUM + to, origin, mask=m_to)
    tl.store(ints_JI + 8 * NUM + to, row, mask=m_to)
    if rows.is_mask_R is not None:
        is_mask = tl.load(rows.is_mask_R + row, mask=m_to, other=0) != 0
        tl.store(is_mask_I + to, is_mask & is_row, mask=m_to)


@triton.jit(do_not_specialize=["B", "NUM", "num_origins"])
def index_kernel(
    rows,
    drop,
    out,
    ints_JI,
    is_mask_I,
    B,
    NUM,
    num_origins,
    DROPS_STORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of one sequence, or (in the programs after those) padding."""
    new_cu_rows_B1, num_before_B, waits_B, new_rows_BW = out
    into = (ints_JI, is_mask_I, NUM, num_origins)
    b = tl.program_id(0)
    x = tl.arange(0, BLOCK)
    if b >= B:
        to = (b - B) * BLOCK + x
        is_padding = to >= tl.load(new_cu_rows_B1 + B)
        row = tl.zeros([BLOCK], tl.int64)
        narrows = tl.zeros([BLOCK], tl.int1)
        if drop.limits_R is not None:
            # Row 0 itself, as it remains.
            sequence = tl.load(rows.sequence_R)
            w = tl.arange(0, BLOCK_W)
            first = tl.load(drop.rows_BW + sequence * SIZE + w, mask=w < SIZE, other=-1)
            is_block = tl.sum((first == 0).to(tl.int32), 0) > 0
            narrows = narrows | (is_block & (tl.load(drop.needs_all_B + sequence) == 0))
        copy_rows(rows, drop, into, row, to, is_padding, narrows, narrows & False)
        return

    first, before = tl.load(rows.cu_rows_B1 + b), tl.load(num_before_B + b)
    start = tl.load(new_cu_rows_B1 + b)
    yes = tl.full([BLOCK], 1, tl.int1)
    w = tl.arange(0, BLOCK_W)
    m_w = w < SIZE
    row = tl.load(drop.rows_BW + b.to(tl.int64) * SIZE + w, mask=m_w, other=-1)
    whole = before
    if DROPS_STORED:
        # The last block before the active one, of which some rows are left out.
        count = tl.load(rows.cu_rows_B1 + b + 1) - first - tl.sum((row >= 0).to(tl.int64), 0)
        number = count - SIZE + w
        m_stored = m_w & (number >= 0)
        stays = m_stored & (tl.load(drop.keep_R + first + number, mask=m_stored, other=0) != 0)
        whole = tl.minimum(before, tl.maximum(count - SIZE, 0))
        index = tl.maximum(count - SIZE, 0) + tl.cumsum(stays.to(tl.int64), 0) - 1
        stays = stays & (index < before)
        copy_rows(rows, drop, into, first + number, start + index, stays, stays & False, stays)
    for number in range(0, whole, BLOCK):
        k = number + x
        copy_rows(rows, drop, into, first + k, start + k, k < whole, yes & False, yes)
    needs_all = tl.load(drop.needs_all_B + b) != 0
    remains = (row >= 0) & ((tl.load(drop.keep_R + row, mask=row >= 0, other=0) != 0) | needs_all)
    if waits_B is not None:
        remains = remains & (tl.load(waits_B + b) == 0)
    to = start + before + tl.cumsum(remains.to(tl.int64), 0) - 1
    tl.store(new_rows_BW + b.to(tl.int64) * SIZE + w, tl.where(remains & (to < NUM), to, -1), mask=m_w)
    copy_rows(rows, drop, into, row, to, remains, remains & (needs_all == 0), remains)


@triton.jit
def find_kernel(
    cu_rows_B1, slots_R, mask_R, starts_B, rows_BW, is_mask_BW, SIZE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """The row at each position of one sequence's block, and whether it is a mask."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    m_w, at = w < SIZE, b * SIZE + w
    first, last = tl.load(cu_rows_B1 + b), tl.load(cu_rows_B1 + b + 1)
    row = first + tl.load(starts_B + b) + w - tl.load(slots_R + first, mask=first < last, other=0)
    has_row = m_w & (row >= first) & (row < last)
    tl.store(rows_BW + at, tl.where(has_row, row, -1), mask=m_w)
    is_mask = has_row & False
    if mask_R is not None:
        is_mask = tl.load(mask_R + row, mask=has_row, other=0) != 0
    tl.store(is_mask_BW + at, is_mask, mask=m_w)


@triton.jit
def spread_kernel(
    retained_BW, ends_B, starts_B, rows_BW, keep_R, limits_R, SIZE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Flags of one sequence's positions to their rows, and the slot below which these see their block."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    row = tl.load(rows_BW + b * SIZE + w, mask=w < SIZE, other=-1)
    kept = tl.load(retained_BW + b * SIZE + w, mask=w < SIZE, other=0)
    limit = tl.load(starts_B + b) + tl.load(ends_B + b)
    tl.store(keep_R + row, kept, mask=row >= 0)
    tl.store(limits_R + row, limit + w * 0, mask=row >= 0)


@triton.jit
def gather_one(source, target, stride, width, row, to, BLOCK: tl.constexpr):
    """A part of one row of one tensor, in words."""
    x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + to * width + x, tl.load(source + row * stride + x, mask=x < width), mask=x < width)


@triton.jit
def gather_kernel(numbers_I, sources, targets, strides, widths, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row of the tensor, of NUM, given by the program's second number."""
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(numbers_I + to)
    for number in tl.static_range(NUM):
        if tl.program_id(1) == number:
            gather_one(sources[number], targets[number], strides[number], widths[number], row, to, BLOCK)


@triton.jit
def wanted_of(first_B, num_B, b, X, BLOCK_W: tl.constexpr):
    """The numbers of the wanted rows of a sequence, and which of them it has."""
    w = tl.arange(0, BLOCK_W)
    x = tl.load(first_B + b) + w
    return x, (w < tl.load(num_B + b)) & (x < X)


@triton.jit(do_not_specialize=["X", "R", "num_halvings"])
def search_wanted_kernel(
    rows_X, first_B, num_B, waits_B, origin_R, index_BW, count_B, X, R, num_halvings, BLOCK_W: tl.constexpr
):
    """The positions, among the rows that are left, of the wanted rows of one sequence, -1: dropped; and how
    many are left. `origin_R` ascends."""
    b = tl.program_id(0).to(tl.int64)
    x, m_x = wanted_of(first_B, num_B, b, X, BLOCK_W)
    row = tl.load(rows_X + x, mask=m_x, other=-1)
    low, high = tl.zeros([BLOCK_W], tl.int32), tl.zeros([BLOCK_W], tl.int32) + R
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_open = low < high
        is_below = tl.load(origin_R + middle, mask=m_x & is_open, other=0) < row
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    m_x = m_x & (low < R) & (tl.load(waits_B + b) == 0)
    is_left = m_x & (tl.load(origin_R + low, mask=m_x, other=-1) == row)
    tl.store(index_BW + b * BLOCK_W + tl.arange(0, BLOCK_W), tl.where(is_left, low, -1))
    tl.store(count_B + b, tl.sum(is_left.to(tl.int64), 0))


@triton.jit(do_not_specialize=["B", "X", "H"])
def index_wanted_kernel(
    given,
    out,
    B,
    X,
    H,
    PACKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of the head of one sequence, or (in the programs after those) padding."""
    first_B, num_B, waited_B, index_BW, count_B = given
    index_H, origin_H, numbers_X, waits_B = out
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_B)
    counts = tl.load(count_B + c, mask=c < B, other=0)
    firsts = tl.load(first_B + c, mask=c < B, other=0)
    if b >= B:
        i = (b - B) * BLOCK + tl.arange(0, BLOCK)
        # Programs of sequences that wait write the same.
        remains = (c < B) & (tl.load(waited_B + c, mask=c < B, other=1) == 0)
        end = tl.max(tl.where(remains, firsts + tl.load(num_B + c, mask=c < B, other=0), 0), 0)
        tl.store(numbers_X + i, tl.full([BLOCK], -1, tl.int64), mask=(i >= end) & (i < X))
        end_of_head = end
        if PACKS:
            end_of_head = tl.sum(counts, 0)
            tl.store(origin_H + i, tl.zeros([BLOCK], tl.int64), mask=(i >= end_of_head) & (i < H))
        tl.store(index_H + i, tl.zeros([BLOCK], tl.int64), mask=(i >= end_of_head) & (i < H))
        return

    start = tl.sum(tl.where(firsts < tl.load(first_B + b), counts, 0), 0)
    count = tl.load(count_B + b)
    waits = (tl.load(waited_B + b) != 0) | ((count > 0) & (start + count > H))
    tl.store(waits_B + b, waits)
    x, m_x = wanted_of(first_B, num_B, b, X, BLOCK_W)
    index = tl.load(index_BW + b * BLOCK_W + tl.arange(0, BLOCK_W)).to(tl.int64)
    is_left = index >= 0
    if PACKS:
        number = start + tl.cumsum(is_left.to(tl.int64), 0) - 1
        is_left = is_left & (number < H)
        tl.store(index_H + number, index, mask=is_left)
        tl.store(origin_H + number, x, mask=is_left)
    else:
        number = x
        tl.store(index_H + x, tl.where(is_left, index, 0), mask=m_x)
    tl.store(numbers_X + x, tl.where(is_left, number, -1), mask=m_x)
