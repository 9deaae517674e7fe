"""Device functions of `pack_blocks_kernel`: which positions of blocks need a wanted row, and those rows.

b some sequences, X wanted rows, W positions of a block."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """The wanted rows of sequence `i`, from number `first` on; padding too if it is the last with room."""
    lane, first_lane = lanes
    first, num, is_due, waits, is_last = mine
    is_wanted = is_due & (waits == 0)
    number = first + tl.cumsum(is_due.to(tl.int32), 0) - 1
    tl.store(number_BW + i * SIZE + w, tl.where(is_wanted, number, -1), mask=w < SIZE)
    tl.store(wanted_IX + number, rows, mask=is_wanted)
    tl.store(wanted_IX + X + number, (i * SIZE + w).to(tl.int64), mask=is_wanted)
    tl.store(wanted_IX + 2 * X + number, tl.zeros_like(rows) + lane, mask=is_wanted)
    # All behind the first that waits wait too.
    end = tl.where(waits, first, first + num)
    BLOCK: tl.constexpr = 512
    if (waits | is_last) & (end <= X):
        for start in range(end, X, BLOCK):
            x = start + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], tl.int64)
            tl.store(wanted_IX + x, zero, mask=x < X)
            tl.store(wanted_IX + X + x, zero, mask=x < X)
            tl.store(wanted_IX + 2 * X + x, zero + first_lane, mask=x < X)
