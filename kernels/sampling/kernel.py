"""Triton kernels: statistics of rows of logits, and draws from them, without probabilities in memory.

A row is walked in chunks of CHUNK tokens, a number that depends on V alone; sums inside a chunk are fp32
trees, sums over chunks fp64, so a row's numbers depend neither on the other rows nor on their count. Contract
in README.md; the thresholds of top-k, top-p and min-p are found in kernel_probs.py."""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a row's numbers (fp64).
MAX: tl.constexpr = tl.constexpr(0)
SCALE: tl.constexpr = tl.constexpr(1)
THRESHOLD: tl.constexpr = tl.constexpr(2)
TIE: tl.constexpr = tl.constexpr(3)
MASS: tl.constexpr = tl.constexpr(4)
BEST: tl.constexpr = tl.constexpr(5)
OWN_MASS: tl.constexpr = tl.constexpr(6)
ENTROPY: tl.constexpr = tl.constexpr(7)
NUM_NUMBERS: tl.constexpr = tl.constexpr(8)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ANY_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, fp64; finite in fp32 for any temperature; greedy rows use temperature 1."""
    is_greedy = temperature == 0
    return tl.minimum(1.0 / tl.where(is_greedy, 1.0, temperature) * LOG2_E, 1e38)


@triton.jit
def own_scale():
    """The scale of temperature 1."""
    return tl.full((), LOG2_E, tl.float64)


@triton.jit
def weight(b_values, largest, scale):
    """exp((logits - largest) / temperature) of logits of any dtype; zero below 2^-126 and for NaN.

    The exponent is as exact as in fp64: a plain fp32 product of -20 would be wrong by 1e-6."""
    b_logits = b_values.to(tl.float32)
    high = scale.to(tl.float32)
    low = (scale - high.to(tl.float64)).to(tl.float32)
    b_below = b_logits - largest
    b_power = b_below * high
    b_rest = tl.fma(b_below, high, -b_power) + b_below * low
    # The difference of two 16-bit logits is exact in fp32, that of two fp32 logits is not.
    if b_values.dtype == tl.float32:
        b_taken = b_logits - b_below
        b_rest += ((b_logits - (b_below + b_taken)) + (b_taken - largest)) * high
    return tl.where(b_power > -126.0, tl.exp2(b_power) * (b_rest * LN_2 + 1.0), 0.0)


@triton.jit
def kept_weight(b_values, b_ids, p_numbers):
    """Weight of the tokens that the filters keep, zero for the others; `p_numbers`: those of the row."""
    b_logits = b_values.to(tl.float32)
    largest = tl.load(p_numbers + MAX).to(tl.float32)
    threshold = tl.load(p_numbers + THRESHOLD).to(tl.float32)
    tie = tl.load(p_numbers + TIE).to(tl.int32)
    b_kept = (b_logits > threshold) | ((b_logits == threshold) & (b_ids <= tie))
    return tl.where(b_kept, weight(b_values, largest, tl.load(p_numbers + SCALE)), 0.0)


@triton.jit
def inverse_mass(p_numbers):
    mass = tl.load(p_numbers + MASS)
    return tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)


@triton.jit
def pick(b_mass, target, NUM: tl.constexpr):
    """First position whose cumulated mass exceeds `target`, else the last with mass, else 0. Never a position
    without mass: a parallel cumulated sum may rise by rounding where nothing is added."""
    o_index = tl.arange(0, NUM)
    b_total = tl.cumsum(b_mass, 0)
    first = tl.min(tl.where((b_total > target) & (b_mass > 0), o_index, NUM), 0)
    last = tl.max(tl.where(b_mass > 0, o_index, 0), 0)
    return tl.where(first < NUM, first, last)


@triton.jit
def setting_of(p_lanes, i_row, rows_per_lane):
    """Index of a row's sampling settings."""
    if p_lanes is not None:
        return tl.load(p_lanes + i_row // rows_per_lane).to(tl.int64)
    return i_row


@triton.jit
def is_filtered(p_temperature, p_top_k, p_top_p, p_min_p, setting, num_tokens):
    top_k = tl.load(p_top_k + setting)
    limits_count = (top_k > 0) & (top_k < num_tokens)
    limits_mass = (tl.load(p_top_p + setting) < 1) | (tl.load(p_min_p + setting) > 0)
    return (tl.load(p_temperature + setting) != 0) & (limits_count | limits_mass)


@triton.jit(do_not_specialize=["rows_per_lane"])
def stats_kernel(
    p_logits,
    p_temperature,
    p_lanes,
    p_max,
    p_masses,
    own,
    sizes,
    rows_per_lane,
    forbidden,
    LOWEST: tl.constexpr,
    FORBIDS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Largest logit of each of TILE chunks of one row, and the chunk's weight relative to it.

    FORBIDS: the logit of token `forbidden` becomes LOWEST, in memory too. `own`: also the weight, and the sum
    of weight times logit, relative to the largest, at temperature 1."""
    row_stride, num_tokens, num_chunks, num_tiles = sizes
    i_row = (tl.program_id(0) // num_tiles).to(tl.int64)
    i_tile = tl.program_id(0) % num_tiles
    scale = scale_of(tl.load(p_temperature + setting_of(p_lanes, i_row, rows_per_lane)))
    o_chunk = i_tile * TILE + tl.arange(0, TILE)
    o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    p_token = p_logits + i_row * row_stride + o_token
    b_values = tl.load(p_token, mask=o_token < num_tokens, other=float("-inf"))
    if FORBIDS:
        lowest = tl.full((), LOWEST, tl.float32).to(b_values.dtype)
        b_values = tl.where(o_token == forbidden, lowest, b_values)
        is_mine = forbidden // (TILE * CHUNK) == i_tile
        tl.store(p_logits + i_row * row_stride + forbidden, lowest, mask=is_mine)
    b_logits = b_values.to(tl.float32)
    # A maximum ignores NaN, which must be reported like an overflow.
    b_max = tl.max(tl.where(b_logits == b_logits, b_logits, float("inf")), 1)
    b_weight = weight(b_values, b_max[:, None], scale)
    b_mass = tl.sum(b_weight, 1)
    o_chunk = o_chunk.to(tl.int64)
    if own is not None:
        if scale != own_scale():
            b_weight = weight(b_values, b_max[:, None], own_scale())
        b_moment = tl.where(b_weight > 0, b_weight * (b_logits - b_max[:, None]), 0.0)
        p_chunk = i_row * num_chunks + o_chunk
        tl.store(own[0] + p_chunk, tl.sum(b_weight, 1), mask=o_chunk < num_chunks)
        tl.store(own[1] + p_chunk, tl.sum(b_moment, 1), mask=o_chunk < num_chunks)
    tl.store(p_max + i_row * num_chunks + o_chunk, b_max, mask=o_chunk < num_chunks)
    tl.store(p_masses + i_row * num_chunks + o_chunk, b_mass, mask=o_chunk < num_chunks)


@triton.jit(do_not_specialize=["num_rows"])
def nonfinite_kernel(p_numbers, p_rows, p_out, num_rows, ROWS: tl.constexpr):
    """1 + the first position where a sequence's row has no finite largest logit, or 0; rows -1 are
    skipped."""
    i_sequence = tl.program_id(0).to(tl.int64)
    o_row = tl.arange(0, ROWS)
    b_row = tl.load(p_rows + i_sequence * num_rows + o_row, mask=o_row < num_rows, other=-1).to(tl.int64)
    b_max = tl.load(p_numbers + b_row * NUM_NUMBERS + MAX, mask=b_row >= 0, other=0.0)
    first = tl.min(tl.where(tl.abs(b_max) < float("inf"), ROWS, o_row), 0)
    tl.store(p_out + i_sequence, tl.where(first < ROWS, first + 1, 0).to(tl.int64))


@triton.jit
def probability_of(b_values, b_ids, p_numbers, m_pair):
    """Probabilities (fp64) of one token per row; `p_numbers`: one pointer per row."""
    b_logits = b_values.to(tl.float32)
    b_largest = tl.load(p_numbers + MAX, mask=m_pair, other=0.0).to(tl.float32)
    b_scale = tl.load(p_numbers + SCALE, mask=m_pair, other=1.0)
    b_threshold = tl.load(p_numbers + THRESHOLD, mask=m_pair, other=0.0).to(tl.float32)
    b_tie = tl.load(p_numbers + TIE, mask=m_pair, other=0.0).to(tl.int64)
    b_mass = tl.load(p_numbers + MASS, mask=m_pair, other=0.0)
    b_kept = (b_logits > b_threshold) | ((b_logits == b_threshold) & (b_ids <= b_tie))
    b_weight = tl.where(b_kept & m_pair & (b_mass > 0), weight(b_values, b_largest, b_scale), 0.0)
    return b_weight.to(tl.float64) / tl.where(b_mass > 0, b_mass, 1.0)


@triton.jit
def draw_token(
    p_row, p_numbers, p_masses, uniform, num_tokens, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Draw a token of one row by inversion: first the chunk, then the token in it."""
    o_chunk = tl.arange(0, CHUNKS)
    b_mass = tl.load(p_masses + o_chunk, mask=o_chunk < num_chunks, other=0.0).to(tl.float64)
    target = uniform * tl.sum(b_mass, 0)
    i_chunk = pick(b_mass, target, CHUNKS)
    target -= tl.sum(tl.where(o_chunk < i_chunk, b_mass, 0.0), 0)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < num_tokens
    b_values = tl.load(p_row + o_token, mask=m_token, other=float("-inf"))
    b_weight = tl.where(m_token, kept_weight(b_values, o_token, p_numbers), 0.0)
    return i_chunk * CHUNK + pick(b_weight, target.to(tl.float32), CHUNK)


@triton.jit
def draw_kernel(probs, p_rows, p_uniforms, p_out, sizes, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Draw one token of one row; 0 for row -1."""
    p_logits, p_numbers, p_masses = probs
    row_stride, uniform_stride, num_tokens, num_chunks = sizes
    i_draw = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_draw).to(tl.int64)
    token = tl.zeros((), tl.int32)
    if row >= 0:
        uniform = tl.load(p_uniforms + i_draw * uniform_stride)
        p_row, p_row_numbers = p_logits + row * row_stride, p_numbers + row * NUM_NUMBERS
        p_chunks = p_masses + row * num_chunks
        token = draw_token(p_row, p_row_numbers, p_chunks, uniform, num_tokens, num_chunks, CHUNK, CHUNKS)
    tl.store(p_out + i_draw, token.to(tl.int64))


@triton.jit
def judged_kernel(
    probs,
    p_uniforms,
    p_temperature,
    p_lanes,
    p_takes_best,
    out,
    sizes,
    ALWAYS_OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One token of one row, drawn or the best, and its probability (the row's or the model's own)."""
    p_logits, p_numbers, p_masses = probs
    p_out, p_confidence = out
    row_stride, num_tokens, num_chunks, rows_per_lane = sizes
    i_row = tl.program_id(0).to(tl.int64)
    p_row, p_row_numbers = p_logits + i_row * row_stride, p_numbers + i_row * NUM_NUMBERS
    takes_best = 0
    if p_takes_best is not None:
        takes_best = tl.load(p_takes_best + i_row).to(tl.int32)
    token = tl.load(p_row_numbers + BEST).to(tl.int32)
    if takes_best == 0:
        p_chunks = p_masses + i_row * num_chunks
        uniform = tl.load(p_uniforms + i_row)
        token = draw_token(p_row, p_row_numbers, p_chunks, uniform, num_tokens, num_chunks, CHUNK, CHUNKS)
    value = tl.load(p_row + token)
    mass = tl.load(p_row_numbers + MASS)
    share = kept_weight(value, token, p_row_numbers)
    is_own = tl.load(p_temperature + setting_of(p_lanes, i_row, rows_per_lane)) == 0
    if is_own | ALWAYS_OWN:
        mass = tl.load(p_row_numbers + OWN_MASS)
        share = weight(value, tl.load(p_row_numbers + MAX).to(tl.float32), own_scale())
    tl.store(p_out + i_row, token.to(tl.int64))
    share = tl.where(mass > 0, share.to(tl.float64) / tl.where(mass > 0, mass, 1.0), 0.0)
    tl.store(p_confidence + i_row, share)


@triton.jit
def random_words(seed, sample, step, b_draw):
    """Philox4x32-10 numbers below 2^32 of a stream; `b_draw`: a block, the others like it or numbers."""
    b_zero = (b_draw * 0).to(tl.uint32)
    b_word, _, _, _ = tl.philox(
        seed,
        b_draw.to(tl.uint32),
        b_zero + (step & 0xFFFFFFFF).to(tl.uint32),
        b_zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32),
        b_zero + (sample & 0xFFFFFFFF).to(tl.uint32),
    )
    return b_word


@triton.jit
def uniforms_kernel(
    p_seeds, p_samples, p_steps, p_lanes, p_out, num_draws, STEP_BY_LANE: tl.constexpr, TILE: tl.constexpr
):
    """Philox4x32-10 numbers in (0, 1), fp64: a tile of those of one sequence's sampling step."""
    i_sequence = tl.program_id(0).to(tl.int64)
    lane = i_sequence
    if p_lanes is not None:
        lane = tl.load(p_lanes + i_sequence).to(tl.int64)
    step = tl.load(p_steps + (lane if STEP_BY_LANE else i_sequence))
    o_draw = tl.program_id(1) * TILE + tl.arange(0, TILE)
    b_word = random_words(tl.load(p_seeds + lane), tl.load(p_samples + lane), step, o_draw)
    b_uniform = (b_word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    tl.store(p_out + i_sequence * num_draws + o_draw, b_uniform, mask=o_draw < num_draws)
