"""Triton: the tokens that may lie at the thresholds of top-k and top-p, gathered without a sort.

A first pass gathers all that lies above a bound under which no threshold can be. Rows where that is too much
go through passes with 16 pivots, which narrow a bracket around the threshold, and gather what is inside it
(for top-k: all above its lower end). kernel_solve.py finds the exact threshold in the list.
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
def lowest_threshold(
    p_stats, largest, total, smallest, scale, by_count, top_k, top_p, num_tokens, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """A logit (fp32) that the threshold is not below, but for tokens without weight."""
    exponent = tl.full((), -127.0, tl.float64)
    if by_count:
        # At least k tokens reach the k-th largest of the chunks' maxima.
        o_chunk = tl.arange(0, CHUNKS)
        p_max = p_stats + o_chunk * NUM_STATS + CHUNK_MAX
        b_max = tl.load(p_max, mask=o_chunk < num_chunks, other=float("-inf"))
        b_rank = tl.sum((b_max[None, :] >= b_max[:, None]).to(tl.int32), 1)
        smallest = tl.maximum(smallest, tl.max(tl.where(b_rank >= top_k, b_max, float("-inf")), 0))
    else:
        # Tokens of less than (1 - top_p) / V together have less than 1 - top_p.
        share = (1.0 - top_p) * total / num_tokens * 0.999999
        exponent = tl.maximum(tl.log2(tl.maximum(share, 1e-300)), exponent)
    low = largest.to(tl.float64) + exponent / scale
    return tl.maximum(smallest, low.to(tl.float32))


@triton.jit
def narrow(p_brackets, p_pivots, p_sums, target, num_chunks, ROUND: tl.constexpr, CHUNKS: tl.constexpr):
    """Lower end (inclusive), upper end (exclusive) and what lies above it, before round ROUND > 0.

    `p_brackets`, `p_pivots`, `p_sums` are the row's: one record per round.
    """
    p_bracket = p_brackets + (ROUND - 1) * NUM_BRACKET
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
    low = tl.sum(tl.where(o_pivot == num_short, b_pivot, 0.0), 0)
    if num_short > 0:
        high = tl.sum(tl.where(b_last_short, b_pivot, 0.0), 0).to(tl.float64)
        above = tl.sum(tl.where(b_last_short, b_reached, 0.0), 0)
    return low, high.to(tl.float32), above


@triton.jit
def store_bracket(p_bracket, low, high, above):
    tl.store(p_bracket + LOW, low.to(tl.float64))
    tl.store(p_bracket + HIGH, high.to(tl.float64))
    tl.store(p_bracket + ABOVE, above)


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
    p_counts,
    row_stride,
    num_tokens,
    num_chunks,
    rows_per_lane,
    HAS_LANES: tl.constexpr,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count or mass of one chunk at or above each of 16 pivots that divide the bracket so far."""
    wait_for_previous(PDL)
    i_row = (tl.program_id(0) // num_chunks).to(tl.int64)
    i_chunk = tl.program_id(0) % num_chunks
    # Rows without a search have gathered nothing.
    if tl.load(p_counts + i_row * 2) > CAPACITY:
        setting = setting_of(p_lanes, i_row, rows_per_lane, HAS_LANES)
        scale = scale_of(tl.load(p_temperature + setting))
        p_row_stats = p_stats + i_row * num_chunks * NUM_STATS
        largest, total, _, _ = row_totals(p_row_stats, num_chunks, scale, CHUNKS)
        by_count, target, _ = search_target(
            tl.load(p_top_k + setting), tl.load(p_top_p + setting), total, num_tokens
        )
        p_brackets += i_row * ((ROUNDS + 1) * NUM_BRACKET)
        p_pivots += i_row * (ROUNDS * PIVOTS)
        p_sums += i_row * num_chunks * (ROUNDS * PIVOTS)
        if ROUND == 0:
            low = tl.load(p_brackets + LOW).to(tl.float32)
            high = tl.load(p_brackets + HIGH).to(tl.float32)
        else:
            low, high, above = narrow(p_brackets, p_pivots, p_sums, target, num_chunks, ROUND, CHUNKS)
            if i_chunk == 0:
                store_bracket(p_brackets + ROUND * NUM_BRACKET, low, high, above)
        top = tl.minimum(high, largest).to(tl.float64)
        span = top - low.to(tl.float64)
        # Below the bracket nothing counts, so a chunk that lies there entirely is not read.
        is_needed = tl.load(p_row_stats + i_chunk * NUM_STATS + CHUNK_MAX) >= low
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
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
            tl.store(p_chunk + i_pivot, tl.sum(tl.where(b_logits >= pivot, b_share, 0.0), 0))
            if i_chunk == 0:
                tl.store(p_pivots + ROUND * PIVOTS + i_pivot, pivot)


@triton.jit
def append(
    p_row, p_count, p_list, i_chunk, low, high, num_tokens,
    CAPACITY: tl.constexpr, KEY_SHIFT: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Append one chunk's tokens with low <= logit < high to the row's list, as far as it has room."""
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < num_tokens
    b_logits = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
    m_token = m_token & (b_logits >= low) & (b_logits < high)
    b_place = tl.cumsum(m_token.to(tl.int32), 0)
    count = tl.max(b_place, 0)
    if count > 0:
        b_place += tl.atomic_add(p_count, count) - 1
        b_packed = packed_of(b_logits, o_token, KEY_SHIFT, ID_BITS)
        tl.store(p_list + b_place, b_packed, mask=m_token & (b_place < CAPACITY))


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
    IS_FIRST: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List one chunk's tokens that may lie at the threshold, in any order of the chunks.

    IS_FIRST: above the lowest threshold there can be. Else, for rows where these were too many: inside the
    bracket that the pivots leave.
    """
    wait_for_previous(PDL)
    i_row = (tl.program_id(0) // num_chunks).to(tl.int64)
    i_chunk = tl.program_id(0) % num_chunks
    setting = setting_of(p_lanes, i_row, rows_per_lane, HAS_LANES)
    p_brackets += i_row * ((ROUNDS + 1) * NUM_BRACKET)
    if IS_FIRST:
        is_wanted = is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens)
    else:
        is_wanted = tl.load(p_counts + i_row * 2) > CAPACITY
    if is_wanted:
        top_k = tl.load(p_top_k + setting)
        top_p = tl.load(p_top_p + setting)
        scale = scale_of(tl.load(p_temperature + setting))
        p_row_stats = p_stats + i_row * num_chunks * NUM_STATS
        largest, total, smallest, _ = row_totals(p_row_stats, num_chunks, scale, CHUNKS)
        by_count, target, has_search = search_target(top_k, top_p, total, num_tokens)
        if has_search:
            if IS_FIRST:
                low = lowest_threshold(
                    p_row_stats, largest, total, smallest, scale, by_count, top_k, top_p,
                    num_tokens, num_chunks, CHUNKS,
                )  # fmt: skip
                high = tl.full((), float("inf"), tl.float32)
                if i_chunk == 0:
                    store_bracket(p_brackets, low, high, tl.zeros((), tl.float64))
            else:
                p_pivots += i_row * (ROUNDS * PIVOTS)
                p_sums += i_row * num_chunks * (ROUNDS * PIVOTS)
                low, high, above = narrow(p_brackets, p_pivots, p_sums, target, num_chunks, ROUNDS, CHUNKS)
                # By count, everything above is wanted: top-p divides the mass of what top-k keeps.
                high = tl.where(by_count, float("inf"), high)
                above = tl.where(by_count, 0.0, above)
                if i_chunk == 0:
                    store_bracket(p_brackets + ROUNDS * NUM_BRACKET, low, high, above)
            if tl.load(p_row_stats + i_chunk * NUM_STATS + CHUNK_MAX) >= low:
                p_count = p_counts + i_row * 2
                if not IS_FIRST:
                    p_count += 1
                append(
                    p_logits + i_row * row_stride, p_count, p_packed + i_row * CAPACITY,
                    i_chunk, low, high, num_tokens, CAPACITY, KEY_SHIFT, ID_BITS, CHUNK,
                )  # fmt: skip
