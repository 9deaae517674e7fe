"""Triton kernel: the numbers of a row from the statistics of its chunks; one program per row.

With top-k, top-p or min-p it also computes the threshold: the chunks' maxima give a lower bound, the few
tokens above it are listed and solved at once; kernel_search.py solves rows with many such tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    ANY_ID,
    BEST,
    ENTROPY,
    MASS,
    MAX,
    NUM_NUMBERS,
    OWN_MASS,
    SCALE,
    THRESHOLD,
    TIE,
    is_filtered,
    own_scale,
    scale_of,
    setting_of,
    weight,
)
from idlm.kernels.sampling.kernel_search import (
    highest_reaching,
    key_of,
    logit_of,
    sampled_bracket,
    search_row,
    weight_in_row,
)


@triton.jit
def lowest_key(
    b_max, m_chunk, largest, total, scale, by_count, top_k, top_p, num_tokens, num_chunks,
    KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """A lower bound (key) of the threshold of top-k, or else of top-p."""
    if by_count:
        # At least k tokens reach the k-th largest of the chunks' maxima.
        b_share = tl.where(m_chunk, 1.0, 0.0)
        target = top_k.to(tl.float64)
        low = tl.where(top_k <= num_chunks, tl.min(tl.where(m_chunk, b_max, float("inf")), 0), float("-inf"))
    else:
        # The maxima are some of the tokens; tokens of less than (1 - top_p) / V have less than 1 - top_p.
        b_share = weight(b_max, largest, scale)
        target = top_p * total * 1.000001
        share = (1.0 - top_p) * total / num_tokens * 0.999999
        exponent = tl.maximum(tl.log2(tl.maximum(share, 1e-300)), -127.0)
        low = (largest.to(tl.float64) + exponent / scale).to(tl.float32)
    key, _ = highest_reaching(
        b_max, b_share, target, key_of(low, KEY_SHIFT), key_of(largest, KEY_SHIFT) + 1, KEY_SHIFT
    )
    return key


@triton.jit
def store_chunks(p_chunks, b_is_wanted, CHUNKS: tl.constexpr):
    """Write the numbers of the wanted chunks consecutively; returns their count."""
    # Other threads may still be reading the list before.
    tl.debug_barrier()
    b_index = tl.cumsum(b_is_wanted.to(tl.int32), 0) - 1
    tl.store(p_chunks + b_index, tl.arange(0, CHUNKS), mask=b_is_wanted)
    tl.debug_barrier()
    return tl.sum(b_is_wanted.to(tl.int32), 0)


@triton.jit
def load_chunks(p_row, p_chunks, start, num_listed, num_tokens, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """GROUP of the listed chunks [GROUP, CHUNK], their numbers and the mask of their tokens."""
    o_index = start + tl.arange(0, GROUP)
    b_chunk = tl.load(p_chunks + o_index, mask=o_index < num_listed, other=0)
    o_token = b_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    m_token = (o_index < num_listed)[:, None] & (o_token < num_tokens)
    return tl.load(p_row + o_token, mask=m_token, other=float("-inf")), b_chunk, m_token


@triton.jit
def list_tokens(
    p_row, p_chunks, p_list, num_listed, low, num_tokens,
    LIST: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the logits of the listed chunks from `low` on while they fit; returns their count."""
    count = 0
    for start in range(0, num_listed, GROUP):
        b_values, _, m_token = load_chunks(p_row, p_chunks, start, num_listed, num_tokens, GROUP, CHUNK)
        b_logits = b_values.to(tl.float32)
        m_token = m_token & (b_logits >= low)
        b_taken = m_token.to(tl.int32)
        b_count = tl.sum(b_taken, 1)
        b_first = count + tl.cumsum(b_count, 0) - b_count
        b_index = tl.cumsum(b_taken, 1) - 1 + b_first[:, None]
        tl.store(p_list + b_index, b_logits, mask=m_token & (b_index < LIST))
        count += tl.sum(b_count, 0)
    tl.debug_barrier()
    return count


@triton.jit
def solve_list(
    p_list, count, largest, total, scale, by_count, top_k, top_p, low,
    KEY_SHIFT: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """(key of the threshold, weight still wanted of the tokens at it) among all tokens from key `low` on."""
    o_list = tl.arange(0, LIST)
    b_logits = tl.load(p_list + o_list, mask=o_list < count, other=float("-inf"))
    m_list = o_list < count
    b_weight = tl.where(m_list, weight(b_logits, largest, scale), 0.0)
    high = key_of(largest, KEY_SHIFT) + 1
    if by_count:
        b_one = tl.where(m_list, 1.0, 0.0)
        low, _ = highest_reaching(b_logits, b_one, top_k.to(tl.float64), low, high, KEY_SHIFT)
        b_weight = tl.where(b_logits >= logit_of(low, KEY_SHIFT), b_weight, 0.0)
        total = tl.sum(b_weight.to(tl.float64), 0)
    wanted = tl.full((), float("inf"), tl.float64)
    if top_p < 1:
        low, above = highest_reaching(b_logits, b_weight, top_p * total, low, high, KEY_SHIFT)
        wanted = top_p * total - above
    return low, wanted


@triton.jit
def solve_row(
    p_row, num_tokens, largest, total, scale, by_count, top_k, top_p, low,
    KEY_SHIFT: tl.constexpr, SAMPLE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The same as `solve_list`, by passes over the row."""
    high = key_of(largest, KEY_SHIFT) + 1
    if by_count:
        top = logit_of(high, KEY_SHIFT)
        bottom = logit_of(low, KEY_SHIFT)
        target = top_k.to(tl.float64)
        low, _ = search_row(
            p_row, num_tokens, largest, scale, by_count, target, low, high, top, bottom, KEY_SHIFT, STEP
        )
        total = weight_in_row(p_row, num_tokens, largest, scale, logit_of(low, KEY_SHIFT), STEP)
    wanted = tl.full((), float("inf"), tl.float64)
    if top_p < 1:
        target = top_p * total
        top, bottom = sampled_bracket(
            p_row, num_tokens, largest, scale, total - target, low, high, KEY_SHIFT, SAMPLE
        )
        low, above = search_row(
            p_row, num_tokens, largest, scale, False, target, low, high, top, bottom, KEY_SHIFT, STEP
        )
        wanted = target - above
    return low, wanted


@triton.jit
def floor_key(largest, scale, min_p, KEY_SHIFT: tl.constexpr):
    """Key of the smallest logit whose weight is at least `min_p`, which is above 0."""
    exact = largest.to(tl.float64) + tl.log2(min_p) / scale
    near = exact.to(tl.float32)
    key = key_of(near, 0)
    key += tl.where(near.to(tl.float64) < exact, 1, 0)
    # A floor between two keys of the dtype is the upper one; those of negative logits end in ones.
    return tl.where(key < 0, key, key + ((1 << KEY_SHIFT) - 1)) >> KEY_SHIFT


@triton.jit
def kept_chunks(
    p_row, p_chunks, p_masses, p_ties, b_max, m_chunk, num_tokens, largest, scale, threshold, wanted,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Last id that passes among the tokens at `threshold`, and the chunks' kept weights (fp32)."""
    b_is_kept = m_chunk & (b_max >= threshold)
    num_listed = store_chunks(p_chunks, b_is_kept, CHUNKS)
    b_next, b_next_chunk, m_next = load_chunks(p_row, p_chunks, 0, num_listed, num_tokens, GROUP, CHUNK)
    for start in range(0, num_listed, GROUP):
        b_values, b_chunk, m_token = b_next, b_next_chunk, m_next
        b_next, b_next_chunk, m_next = load_chunks(
            p_row, p_chunks, start + GROUP, num_listed, num_tokens, GROUP, CHUNK
        )
        b_logits = b_values.to(tl.float32)
        b_weight = tl.where(b_logits > threshold, weight(b_values, largest, scale), 0.0)
        m_index = start + tl.arange(0, GROUP) < num_listed
        tl.store(p_masses + b_chunk, tl.sum(b_weight, 1), mask=m_index)
        b_tie = (m_token & (b_logits == threshold)).to(tl.int32)
        tl.store(p_ties + b_chunk, tl.sum(b_tie, 1), mask=m_index)
    tl.debug_barrier()
    o_chunk = tl.arange(0, CHUNKS)
    b_mass = tl.load(p_masses + o_chunk, mask=b_is_kept, other=0.0)
    b_ties = tl.load(p_ties + o_chunk, mask=b_is_kept, other=0)
    each = tl.sum(weight(tl.zeros([1], tl.float32) + threshold, largest, scale), 0)
    # Without weight they may all stay. An fp32 holds the number of tokens.
    num_wanted = tl.where(each > 0, tl.ceil(wanted / tl.maximum(each, 1e-38).to(tl.float64)), 1e9)
    num_wanted = tl.minimum(tl.maximum(num_wanted, 1.0), 1e9).to(tl.int32)
    b_upto = tl.cumsum(b_ties, 0)
    tie = tl.full((), ANY_ID, tl.int32)
    if tl.sum(b_ties, 0) > num_wanted:
        i_chunk = tl.min(tl.where(b_upto >= num_wanted, o_chunk, CHUNKS - 1), 0)
        before = tl.sum(tl.where(o_chunk < i_chunk, b_ties, 0), 0)
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        m_token = o_token < num_tokens
        b_logits = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
        b_is_tie = m_token & (b_logits == threshold)
        b_rank = before + tl.cumsum(b_is_tie.to(tl.int32), 0)
        tie = tl.max(tl.where(b_is_tie & (b_rank <= num_wanted), o_token, 0), 0)
        b_ties = tl.minimum(tl.maximum(num_wanted - (b_upto - b_ties), 0), b_ties)
    return tie, b_mass + b_ties.to(tl.float32) * each


@triton.jit(do_not_specialize=["rows_per_lane"])
def probs_kernel(
    p_logits,
    settings,
    p_lanes,
    p_max,
    p_masses,
    own,
    p_numbers,
    scratch,
    sizes,
    rows_per_lane,
    KEY_SHIFT: tl.constexpr,
    TUNING: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The numbers of a row and the kept masses of its chunks, which replace those of the statistics."""
    i_row = tl.program_id(0).to(tl.int64)
    row_stride, num_tokens, num_chunks = sizes
    p_temperature, p_top_k, p_top_p, p_min_p = settings
    setting = setting_of(p_lanes, i_row, rows_per_lane)
    temperature = tl.load(p_temperature + setting)
    scale = scale_of(temperature)
    p_row = p_logits + i_row * row_stride
    p_masses += i_row * num_chunks
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    b_max = tl.load(p_max + i_row * num_chunks + o_chunk, mask=m_chunk, other=float("-inf"))
    b_mass = tl.load(p_masses + o_chunk, mask=m_chunk, other=0.0)
    largest = tl.max(b_max, 0)
    b_mass *= weight(b_max, largest, scale)
    # A row of NaN has no best chunk: its id is 0 then.
    i_best = tl.min(tl.where((b_max == largest) & m_chunk, o_chunk, CHUNKS), 0)
    i_best = tl.where(i_best < CHUNKS, i_best, 0)
    o_token = i_best * CHUNK + tl.arange(0, CHUNK)
    b_logits = tl.load(p_row + o_token, mask=o_token < num_tokens, other=float("-inf")).to(tl.float32)
    best = tl.min(tl.where(b_logits == largest, o_token, ANY_ID), 0)
    best = tl.where(best < num_tokens, best, 0)

    threshold = tl.full((), float("-inf"), tl.float32)
    tie = tl.full((), ANY_ID, tl.int32)
    if temperature == 0:
        threshold = largest
        tie = best
        b_mass = tl.where(o_chunk == i_best, 1.0, 0.0)
    if scratch is not None:
        p_chunks, p_ties, p_list = scratch
        if is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens):
            top_k = tl.load(p_top_k + setting)
            top_p = tl.load(p_top_p + setting)
            min_p = tl.load(p_min_p + setting)
            total = tl.sum(b_mass.to(tl.float64), 0)
            by_count = (top_k > 0) & (top_k < num_tokens)
            key = key_of(threshold, KEY_SHIFT)
            wanted = tl.full((), float("inf"), tl.float64)
            p_chunks += i_row * num_chunks
            p_list += i_row * TUNING.capacity
            if by_count | (top_p < 1):
                low = lowest_key(
                    b_max, m_chunk, largest, total, scale, by_count, top_k, top_p,
                    num_tokens, num_chunks, KEY_SHIFT,
                )  # fmt: skip
                lowest = logit_of(low, KEY_SHIFT)
                num_listed = store_chunks(p_chunks, m_chunk & (b_max >= lowest), CHUNKS)
                count = TUNING.capacity + 1
                if num_listed <= TUNING.listed:
                    count = list_tokens(
                        p_row, p_chunks, p_list, num_listed, lowest, num_tokens, TUNING.capacity, GROUP, CHUNK
                    )
                if count <= TUNING.capacity:
                    key, wanted = solve_list(
                        p_list, count, largest, total, scale, by_count, top_k, top_p, low,
                        KEY_SHIFT, TUNING.capacity,
                    )  # fmt: skip
                else:
                    key, wanted = solve_row(
                        p_row, num_tokens, largest, total, scale, by_count, top_k, top_p, low,
                        KEY_SHIFT, TUNING.sample, TUNING.step,
                    )  # fmt: skip
            if min_p > 0:
                floor = floor_key(largest, scale, min_p, KEY_SHIFT)
                wanted = tl.where(floor > key, float("inf"), wanted)
                key = tl.maximum(key, floor)
            threshold = logit_of(key, KEY_SHIFT)
            tie, b_mass = kept_chunks(
                p_row, p_chunks, p_masses, p_ties + i_row * num_chunks, b_max, m_chunk,
                num_tokens, largest, scale, threshold, wanted, GROUP, CHUNK, CHUNKS,
            )  # fmt: skip
    tl.store(p_masses + o_chunk, b_mass, mask=m_chunk)
    p_row_numbers = p_numbers + i_row * NUM_NUMBERS
    if own is not None:
        b_own = tl.load(own[0] + i_row * num_chunks + o_chunk, mask=m_chunk, other=0.0)
        b_moment = tl.load(own[1] + i_row * num_chunks + o_chunk, mask=m_chunk, other=0.0)
        b_share = weight(b_max, largest, own_scale())
        b_below = tl.where(b_share > 0, b_max - largest, 0.0)
        mass = tl.sum((b_own * b_share).to(tl.float64), 0)
        moment = tl.sum(((b_moment + b_own * b_below) * b_share).to(tl.float64), 0)
        tl.store(p_row_numbers + OWN_MASS, mass)
        # In nats: log of the mass, less the mean logit, both relative to the largest.
        tl.store(p_row_numbers + ENTROPY, tl.log(mass) - moment / mass)
    tl.store(p_row_numbers + MAX, largest.to(tl.float64))
    tl.store(p_row_numbers + SCALE, scale)
    tl.store(p_row_numbers + THRESHOLD, threshold.to(tl.float64))
    tl.store(p_row_numbers + TIE, tie.to(tl.float64))
    tl.store(p_row_numbers + MASS, tl.sum(b_mass.to(tl.float64), 0))
    tl.store(p_row_numbers + BEST, best.to(tl.float64))
