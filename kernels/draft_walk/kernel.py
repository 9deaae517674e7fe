"""Triton kernels: the likeliest tokens of rows, and drafts drawn from their scores one after the other.

Contract in README.md. Lanes of inactive sequences, whose rows are -1, are not written."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    BEST,
    MASS,
    NUM_NUMBERS,
    SCALE,
    THRESHOLD,
    scale_of,
    weight,
)

NO_KEY: tl.constexpr = tl.constexpr(-0x8000000000000000)
LOW_WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)
SIGN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def key_of(b_logits, b_ids):
    """int64 in the order of the logits (fp32; NaN is the least), lower ids first among equal ones."""
    b_logits = tl.where(b_logits == b_logits, b_logits, float("-inf"))
    # -0 and 0 are equal.
    b_bits = tl.where(b_logits == 0, 0.0, b_logits).to(tl.int32, bitcast=True)
    b_order = tl.where(b_bits < 0, b_bits ^ SIGN, b_bits).to(tl.int64)
    return b_order * 4294967296 + (b_ids.to(tl.int64) ^ LOW_WORD)


@triton.jit
def tile_candidates_kernel(
    p_logits, p_rows, p_parts, row_stride, num_tokens, num_tiles, TILE: tl.constexpr, K: tl.constexpr
):
    """Keys of the K largest logits of one tile of one row."""
    i_row = (tl.program_id(0) // num_tiles).to(tl.int64)
    i_tile = tl.program_id(0) % num_tiles
    row = tl.load(p_rows + i_row).to(tl.int64)
    if row >= 0:
        o_token = i_tile * TILE + tl.arange(0, TILE)
        b_logits = tl.load(p_logits + row * row_stride + o_token, mask=o_token < num_tokens, other=0.0)
        b_key = tl.where(o_token < num_tokens, key_of(b_logits.to(tl.float32), o_token), NO_KEY)
        p_out = p_parts + (i_row * num_tiles + i_tile) * K
        for i in range(K):
            largest = tl.max(b_key, 0)
            tl.store(p_out + i, largest)
            b_key = tl.where(b_key == largest, NO_KEY, b_key)


@triton.jit
def merge_candidates_kernel(p_parts, p_rows, found, num_parts, PARTS: tl.constexpr, K: tl.constexpr):
    """The K largest keys of all tiles of one row, as ids and logits."""
    i_row = tl.program_id(0).to(tl.int64)
    if tl.load(p_rows + i_row) >= 0:
        o_part = tl.arange(0, PARTS)
        b_key = tl.load(p_parts + i_row * num_parts + o_part, mask=o_part < num_parts, other=NO_KEY)
        for i in range(K):
            largest = tl.max(b_key, 0)
            order = (largest >> 32).to(tl.int32)
            bits = tl.where(order < 0, order ^ SIGN, order)
            tl.store(found.ids_MK + i_row * K + i, (largest & LOW_WORD) ^ LOW_WORD)
            tl.store(found.logits_MK + i_row * K + i, bits.to(tl.float32, bitcast=True))
            b_key = tl.where(b_key == largest, NO_KEY, b_key)


@triton.jit
def kept_scores(b_scores, scale, settings, lane, FILTERS: tl.constexpr, K: tl.constexpr):
    """Scores, relative to the largest, of the candidates that a lane's settings keep; -inf for the others."""
    o_index = tl.arange(0, K)
    b_above = b_scores[None, :] > b_scores[:, None]
    b_before = b_above | ((b_scores[None, :] == b_scores[:, None]) & (o_index[None, :] < o_index[:, None]))
    b_is_best = tl.sum(b_before.to(tl.int32), 1) == 0
    b_kept = o_index < K
    if FILTERS:
        top_k, top_p = tl.load(settings[1] + lane), tl.load(settings[2] + lane)
        b_kept = (tl.sum(b_above.to(tl.int32), 1) < top_k) | (top_k <= 0)
        b_mass = tl.where(b_kept, weight(b_scores, 0.0, scale), 0.0).to(tl.float64)
        b_sum = tl.sum(tl.where(b_before, b_mass[None, :], 0.0), 1)
        b_kept = b_kept & ((b_sum < top_p * tl.sum(b_mass, 0)) | (top_p >= 1) | b_is_best)
        b_kept = b_kept & (b_mass >= tl.load(settings[3] + lane))
    is_greedy = tl.load(settings[0] + lane) == 0
    return tl.where(tl.where(is_greedy, b_is_best, b_kept), b_scores, float("-inf"))


@triton.jit
def pick_few(b_mass, target, K: tl.constexpr):
    """`pick` of few positions: sums instead of a scan, whose elements must not be held twice."""
    o_index = tl.arange(0, K)
    b_total = tl.sum(tl.where(o_index[None, :] <= o_index[:, None], b_mass[None, :], 0.0), 1)
    first = tl.min(tl.where((b_total > target) & (b_mass > 0), o_index, K), 0)
    last = tl.max(tl.where(b_mass > 0, o_index, 0), 0)
    return tl.where(first < K, first, last)


@triton.jit
def walk_kernel(
    scored,
    candidates,
    store,
    settings,
    p_rows,
    p_lanes,
    p_uniforms,
    p_drafts,
    p_scores,
    uniform_stride,
    num_drafts,
    width,
    FILTERS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The drafts of one sequence, each after the one before it, and the scores that they are drawn from."""
    i_sequence = tl.program_id(0).to(tl.int64)
    lane = tl.load(p_lanes + i_sequence).to(tl.int64)
    scale = scale_of(tl.load(settings[0] + lane))
    o_width, o_index = tl.arange(0, WIDTH), tl.arange(0, K)
    m_width = o_width < width
    previous = tl.load(scored.anchors_B + i_sequence)
    for j in range(num_drafts):
        i_draft = i_sequence * num_drafts + j
        if tl.load(p_rows + i_draft) >= 0:
            b_id = tl.load(candidates.ids_MK + i_draft * K + o_index)
            b_logits = tl.load(candidates.logits_MK + i_draft * K + o_index)
            p_projected = scored.projected_MW + i_draft * width + o_width
            b_query = tl.load(p_projected, mask=m_width, other=0.0).to(tl.float32)
            p_previous = scored.previous_VW + previous * width + o_width
            b_query *= tl.load(p_previous, mask=m_width, other=0.0).to(tl.float32)
            p_table = scored.candidate_VW + b_id[:, None] * width + o_width[None, :]
            b_table = tl.load(p_table, mask=m_width[None, :], other=0.0).to(tl.float32)
            b_scores = b_logits + tl.sum(b_table * b_query[None, :], 1)
            b_scores = b_scores - tl.max(b_scores, 0)
            b_stored = b_scores.to(store.logits_ZJV.dtype.element_ty)
            b_kept = kept_scores(b_stored.to(tl.float32), scale, settings, lane, FILTERS, K)
            tl.store(p_scores + i_draft * K + o_index, b_kept)
            b_weight = weight(b_kept, 0.0, scale)
            uniform = tl.load(p_uniforms + i_sequence * uniform_stride + j)
            target = (uniform * tl.sum(b_weight, 0).to(tl.float64)).to(tl.float32)
            chosen = pick_few(b_weight, target, K)
            previous = tl.sum(tl.where(o_index == chosen, b_id, 0), 0)
            tl.store(p_drafts + lane * num_drafts + j, previous)


@triton.jit
def put_candidates_kernel(
    candidates,
    store,
    p_temperature,
    p_rows,
    p_lanes,
    p_scores,
    num_tokens,
    num_chunks,
    num_drafts,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store the distribution of one draft: scores of its candidates, -inf for what shares their chunks."""
    i_draft = tl.program_id(0).to(tl.int64)
    if tl.load(p_rows + i_draft) >= 0:
        i_sequence = i_draft // num_drafts
        lane = tl.load(p_lanes + i_sequence).to(tl.int64)
        slot = lane * num_drafts + i_draft % num_drafts
        scale = scale_of(tl.load(p_temperature + lane))
        o_index, o_chunk = tl.arange(0, K), tl.arange(0, CHUNKS)
        b_id = tl.load(candidates.ids_MK + i_draft * K + o_index)
        b_scores = tl.load(p_scores + i_draft * K + o_index)
        b_weight = weight(b_scores, 0.0, scale)
        b_own = b_id // CHUNK
        b_mass = tl.sum(tl.where(b_own[None, :] == b_own[:, None], b_weight[None, :], 0.0), 1)
        p_masses, p_row = store.masses_ZJC + slot * num_chunks, store.logits_ZJV + slot * num_tokens
        tl.store(p_masses + o_chunk, tl.zeros([CHUNKS], tl.float32), mask=o_chunk < num_chunks)
        o_token = b_own[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        b_fill = tl.full([K, CHUNK], float("-inf"), tl.float32).to(store.logits_ZJV.dtype.element_ty)
        tl.store(p_row + o_token, b_fill, mask=(o_token < num_tokens) & (b_mass > 0)[:, None])
        # What follows overwrites some of it.
        tl.debug_barrier()
        tl.store(p_masses + b_own, b_mass, mask=b_mass > 0)
        tl.store(p_row + b_id, b_scores.to(store.logits_ZJV.dtype.element_ty), mask=b_mass > 0)
        o_number = tl.arange(0, NUM_NUMBERS)
        best = tl.max(tl.where(b_scores == tl.max(b_scores, 0), b_id ^ LOW_WORD, 0), 0)
        b_number = tl.where(o_number == SCALE, scale, 0.0)
        b_number = tl.where(o_number == THRESHOLD, LOWEST, b_number)
        b_number = tl.where(o_number == MASS, tl.sum(b_weight, 0).to(tl.float64), b_number)
        b_number = tl.where(o_number == BEST, (best ^ LOW_WORD).to(tl.float64), b_number)
        tl.store(store.numbers_ZJF + slot * NUM_NUMBERS + o_number, b_number)
