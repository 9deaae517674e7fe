"""The Triton kernels of `keep_wanted`: which wanted rows are left, and their rows of the head.

B sequences, R rows that are left, X wanted rows, H rows of the head, W positions of a block (SIZE, padded to
BLOCK_W)."""

from __future__ import annotations

import triton
import triton.language as tl


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
    first_B,
    num_B,
    waited_B,
    index_BW,
    count_B,
    index_H,
    origin_H,
    numbers_X,
    waits_B,
    B,
    X,
    H,
    PACKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of the head of one sequence, or (in the programs after those) padding."""
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
