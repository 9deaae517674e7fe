"""The Triton kernels of planning and committing: small integers, fast because they are few launches.

Every program sums the widths of all sequences to locate its own rows, so programs exchange nothing.
B sequences, R rows, X wanted rows, W rows of the widest layout, J drafts, A emitted tokens, L
columns of the token table, P pages of a block table."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import random_words
from idlm.kernels.step_rows.types import GROUP_DRAWS, MASK, NOISE_DRAWS

MASK_SOURCE: tl.constexpr = tl.constexpr(MASK)
FIRST_DRAW: tl.constexpr = tl.constexpr(NOISE_DRAWS)
DRAWS: tl.constexpr = tl.constexpr(GROUP_DRAWS)


@triton.jit(
    do_not_specialize=["B", "R", "W", "stride_rows"],
    do_not_specialize_on_alignment=["lanes_B", "feed_B", "wants_B", "samples_B", "advances_B"],
)
def pack_rows_kernel(
    lanes,
    table,
    lanes_B,
    feed_B,
    wants_B,
    samples_B,
    advances_B,
    out,
    B,
    R,
    W,
    stride_rows,
    J,
    L,
    mask_token_id,
    noise,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of rows, or (in the programs after those) of wanted rows; the first program also stores the
    sums."""
    cu_rows_B1, logit_rows_X, rows_IR, is_mask_R = out
    b = tl.arange(0, BLOCK_B)
    m_b = b < B
    lane = tl.load(lanes_B + b, mask=m_b, other=0)
    feed = tl.load(feed_B + b, mask=m_b, other=0)
    advances = (tl.load(lanes.num_known_Z + lane) < tl.load(lanes.ends_Z + lane)) & m_b
    samples = (tl.load(wants_B + b, mask=m_b, other=0) != 0) & advances
    draft_buffer = tl.load(lanes.draft_buffer_Z + lane) if lanes.draft_buffer_Z is not None else lane * 0
    width = tl.where(samples, tl.load(table.width_Y + draft_buffer), 1)
    count = tl.where(m_b, feed - 1 + width, 0)
    end = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(cu_rows_B1, tl.zeros([], tl.int64))
        tl.store(cu_rows_B1 + 1 + b, end, mask=m_b)
        tl.store(samples_B + b, samples, mask=m_b)
        tl.store(advances_B + b, advances, mask=m_b)

    num_blocks = tl.cdiv(R, BLOCK)
    if tl.program_id(0) >= num_blocks:
        x = (tl.program_id(0) - num_blocks) * BLOCK + tl.arange(0, BLOCK)
        is_mine = (x // W)[:, None] == b[None, :]
        last = tl.sum(tl.where(is_mine, end[None, :], 0), 1) - 1
        first = last + 1 - tl.sum(tl.where(is_mine, width[None, :], 0), 1)
        tl.store(logit_rows_X + x, tl.maximum(tl.minimum(first + x % W, last), 0), mask=x < B * W)
        return

    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < R
    sequence = tl.minimum(tl.sum(((end[None, :] <= row[:, None]) & m_b[None, :]).to(tl.int32), 1), B - 1)
    is_mine = sequence[:, None] == b[None, :]
    offset = row - tl.sum(tl.where(is_mine, (end - count)[None, :], 0), 1)
    lane = tl.load(lanes_B + sequence)
    feed = tl.load(feed_B + sequence)
    computed = tl.load(lanes.num_computed_Z + lane)
    index = tl.minimum(tl.maximum(offset - (feed - 1), 0), W - 1)
    if lanes.draft_buffer_Z is not None:
        index += tl.load(lanes.draft_buffer_Z + lane) * W
    source = tl.load(table.source_YW + index)
    base, slot = computed + feed - 1, computed + offset
    is_known = slot <= base
    # Padding gets ids of text: the mask id may be outside the embedding.
    is_mask = (slot > base) & (source == MASK_SOURCE) & (row < total)
    token = tl.load(lanes.tokens_ZL + lane * L + tl.minimum(slot, L - 1))
    if lanes.drafts_ZJ is not None:
        token = tl.where(is_known, token, tl.load(lanes.drafts_ZJ + lane * J + tl.maximum(source - 1, 0)))
    limit, branch = tl.load(table.limit_YW + index), tl.load(table.branch_YW + index)
    mask = mask_token_id
    if noise is not None:
        seed, sample = tl.load(noise.seeds_Z + lane), tl.load(noise.samples_Z + lane)
        draw = FIRST_DRAW + limit * DRAWS + (slot - base - branch)
        word = random_words(seed, sample, tl.load(noise.steps_Z + lane), draw).to(tl.int64)
        mask = noise.low + (word * (noise.high - noise.low) >> 32)
    token = tl.where(is_mask, mask, token)
    tl.store(rows_IR + row, sequence.to(tl.int64), mask=m_row)
    tl.store(rows_IR + stride_rows + row, token, mask=m_row)
    position = tl.where(is_known, slot, base + tl.load(table.position_YW + index))
    tl.store(rows_IR + 2 * stride_rows + row, position, mask=m_row)
    tl.store(rows_IR + 3 * stride_rows + row, slot, mask=m_row)
    limit = tl.where(is_known, slot + 1, base + limit)
    tl.store(rows_IR + 4 * stride_rows + row, limit, mask=m_row)
    branch = tl.where(is_known, slot + 1, base + branch)
    tl.store(rows_IR + 5 * stride_rows + row, branch, mask=m_row)
    tl.store(is_mask_R + row, is_mask, mask=m_row)


@triton.jit(do_not_specialize=["stride", "B", "R", "P"])
def map_slots_kernel(
    rows, cu_rows_B1, block_table_BP, out_R, stride, B, R, P, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Physical slots of a block of rows."""
    sequence_R, slots_R = rows
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < R
    slot = tl.load(slots_R + row, mask=m_row, other=0)
    page = tl.minimum(slot // SIZE, P - 1)
    sequence = tl.load(sequence_R + row, mask=m_row, other=0)
    physical = tl.load(block_table_BP + sequence * stride + page) * SIZE + slot % SIZE
    tl.store(out_R + row, tl.where(row < tl.load(cu_rows_B1 + B), physical, -1), mask=m_row)


@triton.jit
def commit_kernel(
    lanes, steps_Z, lanes_B, token_ids_BA, emitted_B, num_computed_B, stride, A, L, BLOCK_A: tl.constexpr
):
    """Commit one sequence."""
    b = tl.program_id(0)
    lane, emitted = tl.load(lanes_B + b), tl.load(emitted_B + b)
    known = tl.load(lanes.num_known_Z + lane)
    num_tokens = tl.minimum(emitted, A)
    for start in range(0, num_tokens, BLOCK_A):
        a = start + tl.arange(0, BLOCK_A)
        token = tl.load(token_ids_BA + b * stride + a, mask=a < num_tokens, other=0)
        tl.store(lanes.tokens_ZL + lane * L + known + a, token, mask=(a < num_tokens) & (known + a < L - 1))
    if emitted > 0:
        tl.store(lanes.num_known_Z + lane, known + emitted)
        tl.store(steps_Z + lane, tl.load(steps_Z + lane) + 1)
    num_computed = tl.load(num_computed_B + b)
    if num_computed > 0:
        tl.store(lanes.num_computed_Z + lane, tl.load(lanes.num_computed_Z + lane) + num_computed)
