"""Triton: brackets around the thresholds of top-k and top-p, and the tokens inside them, without a sort.

Passes over the logits, each with 16 pivots, narrow a bracket around the threshold. What lies inside it (for
top-k: all above its lower end) is gathered, and kernel_solve.py finds the exact threshold there.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    CHUNK_MAX,
    NUM_STATS,
    is_filtered,
    row_totals,
    scale_of,
    setting_of,
    wait_for_previous,
    weight,
)
from idlm.kernels.sampling.kernel_solve import (
    ABOVE,
    HIGH,
    LOW,
    NUM_BRACKET,
    packed_of,
    search_target,
)

PIVOTS: tl.constexpr = tl.constexpr(16)


@triton.jit
def bracket_of(
    p_brackets,
    p_pivots,
    p_sums,
    largest,
    smallest,
    scale,
    target,
    num_chunks,
    ROUND: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Lower end (inclusive), upper end (exclusive) and what lies above it, before round ROUND.

    `p_brackets`, `p_pivots`, `p_sums` are the row's: one record per round.
    """
    if ROUND == 0:
        # 2^-126 is where weights end, so nothing below this can be drawn, whatever a filter keeps.
        low = tl.maximum(smallest.to(tl.float64), largest.to(tl.float64) - 127.0 / scale)
        return low.to(tl.float32), tl.full((), float("inf"), tl.float32), tl.zeros((), tl.float64)
    else:  # noqa: RET505 (a trace takes one branch only if it is an else)
        p_bracket = p_brackets + (ROUND - 1) * NUM_BRACKET
        low = tl.load(p_bracket + LOW)
        high = tl.load(p_bracket + HIGH)
        above = tl.load(p_bracket + ABOVE)
        o_pivot = tl.arange(0, PIVOTS)
        o_chunk = tl.arange(0, CHUNKS)
        b_pivot = tl.load(p_pivots + (ROUND - 1) * PIVOTS + o_pivot)
        p_sum = p_sums + num_chunks * ((ROUND - 1) * PIVOTS) + o_chunk[:, None] * PIVOTS + o_pivot[None, :]
        b_sum = tl.load(p_sum, mask=(o_chunk < num_chunks)[:, None], other=0.0).to(tl.float64)
        b_reached = tl.sum(b_sum, 0)
        # The last pivot is the lower end itself: short of the target there too, everything is kept.
        num_short = tl.minimum(tl.sum((b_reached < target).to(tl.int32), 0), PIVOTS - 1)
        b_last_short = o_pivot == num_short - 1
        new_low = tl.sum(tl.where(o_pivot == num_short, b_pivot, 0.0), 0)
        if num_short > 0:
            high = tl.sum(tl.where(b_last_short, b_pivot, 0.0), 0).to(tl.float64)
            above = tl.sum(tl.where(b_last_short, b_reached, 0.0), 0)
        return new_low, high.to(tl.float32), above


@triton.jit
def pivots_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_lanes,
    p_stats,
    p_brackets,
    p_pivots,
    p_sums,
    row_stride,
    num_tokens,
    num_chunks,
    rows_per_lane,
    HAS_LANES: tl.constexpr,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count or mass of one chunk at or above each of 16 pivots that divide the bracket so far."""
    wait_for_previous(PDL)
    i_row = (tl.program_id(0) // num_chunks).to(tl.int64)
    i_chunk = tl.program_id(0) % num_chunks
    setting = setting_of(p_lanes, i_row, rows_per_lane, HAS_LANES)
    top_p = tl.load(p_top_p + setting)
    scale = scale_of(tl.load(p_temperature + setting))
    p_row_stats = p_stats + i_row * num_chunks * NUM_STATS
    largest, total, smallest, _ = row_totals(p_row_stats, num_chunks, scale, CHUNKS)
    by_count, target, has_search = search_target(tl.load(p_top_k + setting), top_p, total, num_tokens)
    if has_search & is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens):
        p_brackets += i_row * ((ROUNDS + 1) * NUM_BRACKET)
        p_pivots += i_row * (ROUNDS * PIVOTS)
        p_sums += i_row * num_chunks * (ROUNDS * PIVOTS)
        low, high, above = bracket_of(
            p_brackets, p_pivots, p_sums, largest, smallest, scale, target, num_chunks, ROUND, CHUNKS
        )
        top = tl.minimum(high, largest).to(tl.float64)
        span = top - low.to(tl.float64)
        if i_chunk == 0:
            tl.store(p_brackets + ROUND * NUM_BRACKET + LOW, low.to(tl.float64))
            tl.store(p_brackets + ROUND * NUM_BRACKET + HIGH, high.to(tl.float64))
            tl.store(p_brackets + ROUND * NUM_BRACKET + ABOVE, above)
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        # Below the bracket nothing counts, so a chunk that lies there entirely is not read.
        is_needed = tl.load(p_row_stats + i_chunk * NUM_STATS + CHUNK_MAX) >= low
        m_token = o_token < tl.where(is_needed, num_tokens, 0)
        p_token = p_logits + i_row * row_stride + o_token
        b_values = tl.load(p_token, mask=m_token, other=float("-inf"))
        b_logits = b_values.to(tl.float32)
        b_share = tl.where(by_count, 1.0, weight(b_values, largest, scale))
        p_chunk = p_sums + (num_chunks * ROUND + i_chunk) * PIVOTS
        for i_pivot in tl.static_range(16):
            pivot = (top - span * ((i_pivot + 1) / 16)).to(tl.float32)
            if i_pivot == 15:
                pivot = low
            reached = tl.sum(tl.where((b_logits >= pivot) & m_token, b_share, 0.0), 0)
            tl.store(p_chunk + i_pivot, reached)
            if i_chunk == 0:
                tl.store(p_pivots + ROUND * PIVOTS + i_pivot, pivot)


@triton.jit
def gather_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_lanes,
    p_stats,
    p_brackets,
    p_pivots,
    p_sums,
    p_counts,
    p_packed,
    row_stride,
    num_tokens,
    num_chunks,
    rows_per_lane,
    HAS_LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Append one chunk's tokens inside the bracket to the row's list, in any order of the chunks."""
    wait_for_previous(PDL)
    i_row = (tl.program_id(0) // num_chunks).to(tl.int64)
    i_chunk = tl.program_id(0) % num_chunks
    setting = setting_of(p_lanes, i_row, rows_per_lane, HAS_LANES)
    top_p = tl.load(p_top_p + setting)
    scale = scale_of(tl.load(p_temperature + setting))
    p_row_stats = p_stats + i_row * num_chunks * NUM_STATS
    largest, total, smallest, _ = row_totals(p_row_stats, num_chunks, scale, CHUNKS)
    by_count, target, has_search = search_target(tl.load(p_top_k + setting), top_p, total, num_tokens)
    if has_search & is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens):
        p_brackets += i_row * ((ROUNDS + 1) * NUM_BRACKET)
        p_pivots += i_row * (ROUNDS * PIVOTS)
        p_sums += i_row * num_chunks * (ROUNDS * PIVOTS)
        low, high, above = bracket_of(
            p_brackets, p_pivots, p_sums, largest, smallest, scale, target, num_chunks, ROUNDS, CHUNKS
        )
        # By count, everything above is wanted: top-p divides the mass of what top-k keeps.
        high = tl.where(by_count, float("inf"), high)
        if i_chunk == 0:
            tl.store(p_brackets + ROUNDS * NUM_BRACKET + LOW, low.to(tl.float64))
            tl.store(p_brackets + ROUNDS * NUM_BRACKET + HIGH, high.to(tl.float64))
            tl.store(p_brackets + ROUNDS * NUM_BRACKET + ABOVE, tl.where(by_count, 0.0, above))
        if tl.load(p_row_stats + i_chunk * NUM_STATS + CHUNK_MAX) >= low:
            o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
            m_token = o_token < num_tokens
            p_token = p_logits + i_row * row_stride + o_token
            b_logits = tl.load(p_token, mask=m_token, other=float("-inf")).to(tl.float32)
            m_token = m_token & (b_logits >= low) & (b_logits < high)
            b_place = tl.cumsum(m_token.to(tl.int32), 0)
            count = tl.max(b_place, 0)
            if count > 0:
                b_place += tl.atomic_add(p_counts + i_row, count) - 1
                p_place = p_packed + i_row * CAPACITY + b_place
                b_packed = packed_of(b_logits, o_token, KEY_SHIFT)
                tl.store(p_place, b_packed, mask=m_token & (b_place < CAPACITY))
