"""Device functions of `pack_blocks_kernel`: which places of blocks ask for a wanted row, and those rows.

b some sequences, X wanted rows, W places of a block (SIZE, padded to BLOCK_W)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def open_places(decided_bw, known_b, samples_b, opens_b, w, SIZE: tl.constexpr, PART: tl.constexpr):
    """Masks that may be decided, [b, w]; `decided_bw` holds in places beyond the block."""
    is_open = (w[None, :] >= (known_b % SIZE)[:, None]) & (decided_bw == 0) & samples_b[:, None]
    is_open = is_open & ((w[None, :] == 0) | (opens_b[:, None] == 0))
    if PART < SIZE:
        part = (w // PART)[None, :]
        is_open = is_open & (part == tl.min(tl.where(is_open, part, SIZE), 1)[:, None])
    return is_open


@triton.jit
def editable_places(decided_bw, known_b, samples_b, opens_b, w, SIZE: tl.constexpr, SHIFTED: tl.constexpr):
    """Decided places that may be edited, [b, w]. Inside a shifted block no row predicts the first place."""
    has_row = (w < SIZE) & (w >= (1 if SHIFTED else 0))
    is_mine = samples_b & (opens_b == 0)
    return decided_bw & (w[None, :] >= (known_b % SIZE)[:, None]) & has_row[None, :] & is_mine[:, None]


@triton.jit
def places_of(
    known_Z, decided_ZW, lanes_B, b, m_b, samples_b, opens_b,
    SIZE: tl.constexpr, PART: tl.constexpr, SHIFTED: tl.constexpr, EDITS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Of sequences `b`: the masks that may be decided, and the places that ask for a wanted row, [b, w]."""
    w = tl.arange(0, BLOCK_W)
    lane = tl.load(lanes_B + b, mask=m_b, other=0)
    known = tl.load(known_Z + lane)
    m_bw = m_b[:, None] & (w < SIZE)[None, :]
    decided = tl.load(decided_ZW + lane[:, None] * SIZE + w[None, :], mask=m_bw, other=1) != 0
    is_open = open_places(decided, known, samples_b, opens_b, w, SIZE, PART)
    is_asked = is_open
    if EDITS:
        is_asked = is_open | editable_places(decided, known, samples_b, opens_b, w, SIZE, SHIFTED)
    return is_open, is_asked


@triton.jit
def store_wanted(
    wanted_IX, number_BW, X, i, lane, first_lane, first, num, rows, is_asked, waits, is_last, w,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The wanted rows of sequence `i`, from number `first` on; padding too if it is the last with room."""
    is_wanted = is_asked & (waits == 0)
    number = first + tl.cumsum(is_asked.to(tl.int32), 0) - 1
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
