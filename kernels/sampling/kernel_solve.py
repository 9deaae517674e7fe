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
    DONE,
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
def packed_of(b_logits, b_ids, KEY_SHIFT: tl.constexpr, ID_BITS: tl.constexpr):
    """int64 that falls in the order of top-p: falling logit, then rising id, which has ID_BITS bits."""
    return (key_of(b_logits, KEY_SHIFT) << ID_BITS) + (-b_ids + ((1 << ID_BITS) - 1)).to(tl.int64)


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
def scan_row(
    p_row, num_tokens, largest, scale, bound,
    KEY_SHIFT: tl.constexpr, ID_BITS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """(number of tokens whose packed value is at least `bound`, fixed weight of those above it)."""
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.int64)
    for start in range(0, num_tokens, SCAN):
        o_token = start + tl.arange(0, SCAN)
        m_token = o_token < num_tokens
        b_logits = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
        b_packed = packed_of(b_logits, o_token, KEY_SHIFT, ID_BITS)
        count += tl.sum((m_token & (b_packed >= bound)).to(tl.int32), 0)
        b_weight = fixed_weight(b_logits, largest, scale)
        mass += tl.sum(tl.where(m_token & (b_packed > bound), b_weight, 0), 0)
    return count, mass


@triton.jit
def solve_row(
    p_row, num_tokens, largest, scale, low, high, by_count, top_k, top_p, target,
    KEY_SHIFT: tl.constexpr, ID_BITS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The least packed token that a row keeps, by bisection over the whole row."""
    low_key = key_of(low, KEY_SHIFT)
    high_key = key_of(tl.minimum(high, largest), KEY_SHIFT)
    if by_count:
        while low_key < high_key:
            middle = upper_middle(low_key, high_key)
            at_middle = middle << ID_BITS
            count, _ = scan_row(p_row, num_tokens, largest, scale, at_middle, KEY_SHIFT, ID_BITS, SCAN)
            is_enough = count >= top_k
            low_key = tl.where(is_enough, middle, low_key)
            high_key = tl.where(is_enough, high_key, middle - 1)
        high_key = key_of(largest, KEY_SHIFT)
    bound = low_key << ID_BITS
    if top_p < 1:
        if by_count:
            _, mass = scan_row(p_row, num_tokens, largest, scale, bound - 1, KEY_SHIFT, ID_BITS, SCAN)
            target = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)), 1.0).to(tl.int64)
        last = (high_key << ID_BITS) + ((1 << ID_BITS) - 1)
        while bound < last:
            middle = lower_middle(bound, last)
            _, mass = scan_row(p_row, num_tokens, largest, scale, middle, KEY_SHIFT, ID_BITS, SCAN)
            is_short = mass < target
            bound = tl.where(is_short, bound, middle + 1)
            last = tl.where(is_short, middle, last)
    return bound


@triton.jit
def solve_list(
    b_packed, b_weight, m_list, above, by_count, top_k, top_p, target, ID_BITS: tl.constexpr
):  # fmt: skip
    """The same among gathered tokens of fixed weights `b_weight`; `above`: the mass over them."""
    bound = tl.min(tl.where(m_list, b_packed, MOST), 0)
    last = tl.max(b_packed, 0)
    if by_count:
        low_key = bound >> ID_BITS
        high_key = last >> ID_BITS
        while low_key < high_key:
            middle = upper_middle(low_key, high_key)
            is_enough = tl.sum((b_packed >= (middle << ID_BITS)).to(tl.int32), 0) >= top_k
            low_key = tl.where(is_enough, middle, low_key)
            high_key = tl.where(is_enough, high_key, middle - 1)
        bound = low_key << ID_BITS
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
def solve_few(
    b_packed, b_weight, m_list, above, by_count, top_k, top_p, target, ID_BITS: tl.constexpr
):  # fmt: skip
    """The same by comparing each with each, without steps that wait for one another."""
    bound = tl.min(tl.where(m_list, b_packed, MOST), 0)
    last = tl.max(b_packed, 0)
    if by_count:
        b_key = b_packed >> ID_BITS
        b_rank = tl.sum((b_key[None, :] >= b_key[:, None]).to(tl.int32), 1)
        kth = tl.max(tl.where(m_list & (b_rank >= top_k), b_packed, LEAST), 0)
        bound = tl.maximum(bound, (kth >> ID_BITS) << ID_BITS)
        b_weight = tl.where(b_packed >= bound, b_weight, 0)
        mass = tl.sum(b_weight, 0).to(tl.float64)
        target = tl.maximum(tl.ceil(top_p * mass), 1.0).to(tl.int64)
    if top_p < 1:
        b_shares = tl.where(b_packed[None, :] > b_packed[:, None], b_weight[None, :], 0)
        b_kept = m_list & (b_packed >= bound) & (tl.sum(b_shares, 1) + above < target)
        bound = tl.minimum(tl.min(tl.where(b_kept, b_packed, MOST), 0), last)
    return bound


@triton.jit
def load_list(
    p_list, count, largest, scale, KEY_SHIFT: tl.constexpr, ID_BITS: tl.constexpr, SIZE: tl.constexpr
):
    """Packed tokens, their fixed weights, and which of the SIZE places hold one."""
    o_list = tl.arange(0, SIZE)
    m_list = o_list < count
    b_packed = tl.load(p_list + o_list, mask=m_list, other=LEAST)
    b_weight = fixed_weight(logit_of(b_packed >> ID_BITS, KEY_SHIFT), largest, scale)
    return b_packed, tl.where(m_list, b_weight, 0), m_list


@triton.jit
def store_masses(
    p_kept, b_packed, b_weight, bound, num_chunks,
    ID_BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Kept weight of every chunk from a list that holds all kept tokens."""
    o_chunk = tl.arange(0, CHUNKS)
    last_id: tl.constexpr = (1 << ID_BITS) - 1
    b_chunk = ((-(b_packed & last_id) + last_id) // CHUNK).to(tl.int32)
    b_kept = tl.where(b_packed >= bound, b_weight, 0)
    b_mass = tl.sum(tl.where(o_chunk[:, None] == b_chunk[None, :], b_kept[None, :], 0), 1)
    tl.store(
        p_kept + o_chunk, (b_mass.to(tl.float64) / FIXED_POINT).to(tl.float32), mask=o_chunk < num_chunks
    )


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
    p_kept,
    p_numbers,
    row_stride,
    num_tokens,
    num_chunks,
    rows_per_lane,
    HAS_LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    ID_BITS: tl.constexpr,
    FEW: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Threshold and tie id of one row, with its largest logit and its scale.

    Where a short list holds all kept tokens, also the chunks' kept masses, and DONE in the row's first count.
    """
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
        p_list = p_packed + i_row * CAPACITY
        is_whole = False
        count = tl.load(p_counts + i_row * 2)
        if has_search:
            target = tl.maximum(tl.ceil(reached * FIXED_POINT), 1.0).to(tl.int64)
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
                    by_count, top_k, top_p, target, KEY_SHIFT, ID_BITS, SCAN,
                )  # fmt: skip
            elif count > FEW:
                b_packed, b_weight, m_list = load_list(
                    p_list, count, largest, scale, KEY_SHIFT, ID_BITS, CAPACITY
                )
                bound = solve_list(b_packed, b_weight, m_list, above, by_count, top_k, top_p, target, ID_BITS)
            elif count > 0:
                b_packed, b_weight, m_list = load_list(p_list, count, largest, scale, KEY_SHIFT, ID_BITS, FEW)
                bound = solve_few(b_packed, b_weight, m_list, above, by_count, top_k, top_p, target, ID_BITS)
                is_whole = by_count | (i_bracket == 0)
            else:
                bound = key_of(low, KEY_SHIFT) << ID_BITS
        if min_p > 0:
            bound = tl.maximum(bound, floor_key(largest, scale, min_p, KEY_SHIFT) << ID_BITS)
        if is_whole:
            b_packed, b_weight, m_list = load_list(p_list, count, largest, scale, KEY_SHIFT, ID_BITS, FEW)
            p_masses = p_kept + i_row * num_chunks
            store_masses(p_masses, b_packed, b_weight, bound, num_chunks, ID_BITS, CHUNK, CHUNKS)
            tl.store(p_counts + i_row * 2, DONE)
        threshold = logit_of(bound >> ID_BITS, KEY_SHIFT).to(tl.float64)
        threshold = tl.where(bound == LEAST, float("-inf"), threshold)
        p_row_numbers = p_numbers + i_row * NUM_NUMBERS
        tl.store(p_row_numbers + MAX, largest.to(tl.float64))
        tl.store(p_row_numbers + SCALE, scale)
        tl.store(p_row_numbers + THRESHOLD, threshold)
        tl.store(p_row_numbers + TIE, (-(bound & ((1 << ID_BITS) - 1)) + ((1 << ID_BITS) - 1)).to(tl.float64))
