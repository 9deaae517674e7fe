"""Triton: the exact threshold of top-k, top-p and min-p among gathered tokens, or else in a whole row.

Bisection over (logit, id) packed into an int64, which orders as top-p does. Masses are summed in fixed point,
so the order of gathering does not matter. Where more tokens than fit lie inside the bracket, the whole row is
bisected: slow, and exact as well.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    ANY_ID,
    MAX,
    NUM_NUMBERS,
    NUM_STATS,
    SCALE,
    THRESHOLD,
    TIE,
    is_filtered,
    row_totals,
    scale_of,
    setting_of,
    wait_for_previous,
    weight,
)

# Fields of a bracket (fp64).
LOW: tl.constexpr = tl.constexpr(0)
HIGH: tl.constexpr = tl.constexpr(1)
ABOVE: tl.constexpr = tl.constexpr(2)
NUM_BRACKET: tl.constexpr = tl.constexpr(4)
FIXED_POINT: tl.constexpr = tl.constexpr(1099511627776.0)
LEAST: tl.constexpr = tl.constexpr(-9223372036854775808)
MOST: tl.constexpr = tl.constexpr(9223372036854775807)


@triton.jit
def key_of(b_logits, KEY_SHIFT: tl.constexpr):
    """int64 that orders as the logit does (-0 is 0); the dtype leaves KEY_SHIFT mantissa bits zero."""
    b_bits = tl.where(b_logits == 0, 0.0, b_logits).to(tl.int32, bitcast=True)
    return ((b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT).to(tl.int64)


@triton.jit
def logit_of(key, KEY_SHIFT: tl.constexpr):
    """The fp32 logit of a key."""
    bits = (key << KEY_SHIFT).to(tl.int32)
    bits = tl.where(key < 0, bits | ((1 << KEY_SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_of(b_logits, b_ids, KEY_SHIFT: tl.constexpr):
    """int64 that falls in the order of top-p: falling logit, then rising id."""
    return (key_of(b_logits, KEY_SHIFT) << 32) + (-b_ids + ANY_ID).to(tl.int64)


@triton.jit
def search_target(top_k, top_p, total, num_tokens):
    """(is the search by count, what must be reached, is there a search) of a filtered row."""
    by_count = (top_k > 0) & (top_k < num_tokens)
    return by_count, tl.where(by_count, top_k.to(tl.float64), top_p * total), by_count | (top_p < 1)


@triton.jit
def fixed_weight(b_logits, largest, scale):
    """Weights as int64 multiples of 2^-40: their sums do not depend on an order."""
    return (weight(b_logits, largest, scale).to(tl.float64) * FIXED_POINT + 0.5).to(tl.int64)


@triton.jit
def upper_middle(low, high):
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def lower_middle(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def scan_row(p_row, num_tokens, largest, scale, bound, KEY_SHIFT: tl.constexpr, SCAN: tl.constexpr):
    """(number of tokens whose packed value is at least `bound`, fixed weight of those above it)."""
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.int64)
    for start in range(0, num_tokens, SCAN):
        o_token = start + tl.arange(0, SCAN)
        m_token = o_token < num_tokens
        b_logits = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
        b_packed = packed_of(b_logits, o_token, KEY_SHIFT)
        count += tl.sum((m_token & (b_packed >= bound)).to(tl.int32), 0)
        b_weight = fixed_weight(b_logits, largest, scale)
        mass += tl.sum(tl.where(m_token & (b_packed > bound), b_weight, 0), 0)
    return count, mass


@triton.jit
def solve_row(
    p_row, num_tokens, largest, scale, low, high, by_count, top_k, top_p, target,
    KEY_SHIFT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The least packed token that a row keeps, by bisection over the whole row."""
    low_key = key_of(low, KEY_SHIFT)
    high_key = key_of(tl.minimum(high, largest), KEY_SHIFT)
    if by_count:
        while low_key < high_key:
            middle = upper_middle(low_key, high_key)
            count, _ = scan_row(p_row, num_tokens, largest, scale, middle << 32, KEY_SHIFT, SCAN)
            is_enough = count >= top_k
            low_key = tl.where(is_enough, middle, low_key)
            high_key = tl.where(is_enough, high_key, middle - 1)
        high_key = key_of(largest, KEY_SHIFT)
    bound = low_key << 32
    if top_p < 1:
        if by_count:
            _, mass = scan_row(p_row, num_tokens, largest, scale, bound - 1, KEY_SHIFT, SCAN)
            target = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)), 1.0).to(tl.int64)
        last = (high_key << 32) + ANY_ID
        while bound < last:
            middle = lower_middle(bound, last)
            _, mass = scan_row(p_row, num_tokens, largest, scale, middle, KEY_SHIFT, SCAN)
            is_short = mass < target
            bound = tl.where(is_short, bound, middle + 1)
            last = tl.where(is_short, middle, last)
    return bound


@triton.jit
def solve_list(
    b_packed, b_weight, above, by_count, top_k, top_p, target, m_list,
):  # fmt: skip
    """The same among gathered tokens of fixed weights `b_weight`; `above`: the mass over them."""
    bound = tl.min(tl.where(m_list, b_packed, MOST), 0)
    last = tl.max(b_packed, 0)
    if by_count:
        low_key = bound >> 32
        high_key = last >> 32
        while low_key < high_key:
            middle = upper_middle(low_key, high_key)
            is_enough = tl.sum((b_packed >= (middle << 32)).to(tl.int32), 0) >= top_k
            low_key = tl.where(is_enough, middle, low_key)
            high_key = tl.where(is_enough, high_key, middle - 1)
        bound = low_key << 32
        b_weight = tl.where(b_packed >= bound, b_weight, 0)
        mass = tl.sum(b_weight, 0).to(tl.float64)
        target = tl.maximum(tl.ceil(top_p * mass), 1.0).to(tl.int64)
    if top_p < 1:
        while bound < last:
            middle = lower_middle(bound, last)
            is_short = above + tl.sum(tl.where(b_packed > middle, b_weight, 0), 0) < target
            bound = tl.where(is_short, bound, middle + 1)
            last = tl.where(is_short, middle, last)
    return bound


@triton.jit
def floor_key(largest, scale, min_p, KEY_SHIFT: tl.constexpr):
    """Key of the least logit whose weight is at least `min_p`, which is above 0."""
    exact = largest.to(tl.float64) + tl.log2(min_p) / scale
    near = exact.to(tl.float32)
    key = key_of(near, 0)
    key += tl.where(near.to(tl.float64) < exact, 1, 0)
    # A floor between two keys of the dtype is the upper one; those of negative logits end in ones.
    return tl.where(key < 0, key, key + ((1 << KEY_SHIFT) - 1)) >> KEY_SHIFT


@triton.jit
def solve_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_lanes,
    p_stats,
    p_brackets,
    p_counts,
    p_packed,
    p_numbers,
    row_stride,
    num_tokens,
    num_chunks,
    rows_per_lane,
    HAS_LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Threshold and tie id of one row, with its largest logit and its scale."""
    wait_for_previous(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    setting = setting_of(p_lanes, i_row, rows_per_lane, HAS_LANES)
    if is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens):
        top_k = tl.load(p_top_k + setting)
        top_p = tl.load(p_top_p + setting)
        min_p = tl.load(p_min_p + setting)
        scale = scale_of(tl.load(p_temperature + setting))
        p_row_stats = p_stats + i_row * num_chunks * NUM_STATS
        largest, total, _, _ = row_totals(p_row_stats, num_chunks, scale, CHUNKS)
        by_count, reached, has_search = search_target(top_k, top_p, total, num_tokens)
        bound = tl.full((), LEAST, tl.int64)
        if has_search:
            target = tl.maximum(tl.ceil(reached * FIXED_POINT), 1.0).to(tl.int64)
            count = tl.load(p_counts + i_row * 2)
            # Too many above the lowest threshold: the list is what the last bracket holds.
            i_bracket = tl.where(count > CAPACITY, ROUNDS, 0)
            if count > CAPACITY:
                count = tl.load(p_counts + i_row * 2 + 1)
            p_bracket = p_brackets + (i_row * (ROUNDS + 1) + i_bracket) * NUM_BRACKET
            low = tl.load(p_bracket + LOW).to(tl.float32)
            high = tl.load(p_bracket + HIGH).to(tl.float32)
            above = (tl.load(p_bracket + ABOVE) * FIXED_POINT + 0.5).to(tl.int64)
            if count > CAPACITY:
                bound = solve_row(
                    p_logits + i_row * row_stride, num_tokens, largest, scale, low, high,
                    by_count, top_k, top_p, target, KEY_SHIFT, SCAN,
                )  # fmt: skip
            elif count > 0:
                o_list = tl.arange(0, CAPACITY)
                m_list = o_list < count
                b_packed = tl.load(p_packed + i_row * CAPACITY + o_list, mask=m_list, other=LEAST)
                b_logits = logit_of(b_packed >> 32, KEY_SHIFT)
                b_weight = tl.where(m_list, fixed_weight(b_logits, largest, scale), 0)
                bound = solve_list(b_packed, b_weight, above, by_count, top_k, top_p, target, m_list)
            else:
                bound = key_of(low, KEY_SHIFT) << 32
        if min_p > 0:
            bound = tl.maximum(bound, floor_key(largest, scale, min_p, KEY_SHIFT) << 32)
        threshold = logit_of(bound >> 32, KEY_SHIFT).to(tl.float64)
        threshold = tl.where(bound == LEAST, float("-inf"), threshold)
        p_row_numbers = p_numbers + i_row * NUM_NUMBERS
        tl.store(p_row_numbers + MAX, largest.to(tl.float64))
        tl.store(p_row_numbers + SCALE, scale)
        tl.store(p_row_numbers + THRESHOLD, threshold)
        tl.store(p_row_numbers + TIE, (-(bound & 0xFFFFFFFF) + ANY_ID).to(tl.float64))
