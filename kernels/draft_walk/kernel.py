"""Triton kernels: the likeliest tokens of rows, and drafts drawn from their scores one after the other.

Contract in README.md. Lanes of inactive sequences, whose rows are -1, are not written."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    BEST,
    MASS,
    MAX,
    NUM_NUMBERS,
    SCALE,
    THRESHOLD,
    draw_token,
    is_filtered,
    scale_of,
    weight,
)

NO_KEY: tl.constexpr = tl.constexpr(-0x8000000000000000)
LOW_WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)
SIGN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def logits_of(p_row, o_token, num_tokens):
    """fp32, in the order of candidates: NaN and what is outside the vocabulary last, -0 equal to 0."""
    b_logits = tl.load(p_row + o_token, mask=o_token < num_tokens, other=float("-inf")).to(tl.float32)
    b_logits = tl.where(b_logits == b_logits, b_logits, float("-inf"))
    return tl.where(b_logits == 0, 0.0, b_logits)


@triton.jit
def key_of(b_logits, b_ids):
    """int64 in the order of logits, lower ids first among equal ones."""
    b_bits = b_logits.to(tl.int32, bitcast=True)
    b_order = tl.where(b_bits < 0, b_bits ^ SIGN, b_bits).to(tl.int64)
    return b_order * 4294967296 + (b_ids.to(tl.int64) ^ LOW_WORD)


@triton.jit
def id_of(b_key):
    return (b_key & LOW_WORD) ^ LOW_WORD


@triton.jit
def group_largest_kernel(
    p_logits,
    p_rows,
    p_largest,
    row_stride,
    num_tokens,
    num_groups,
    num_tiles,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Key of the largest logit of each of GROUPS groups of one row."""
    i_row = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = tl.load(p_rows + i_row).to(tl.int64)
    if row >= 0:
        o_group = tl.program_id(0) % num_tiles * GROUPS + tl.arange(0, GROUPS)
        o_token = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        b_logits = logits_of(p_logits + row * row_stride, o_token, num_tokens)
        b_largest = tl.max(b_logits, 1)
        b_id = tl.min(tl.where(b_logits == b_largest[:, None], o_token, 0x7FFFFFFF), 1)
        p_out = p_largest + i_row * num_groups + o_group
        tl.store(p_out, key_of(b_largest, b_id), mask=o_group < num_groups)


@triton.jit
def candidates_kernel(
    p_logits,
    p_rows,
    p_largest,
    found,
    row_stride,
    num_tokens,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
):
    """The K largest logits of one row, which are in the K groups with the largest maxima, and their ids."""
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_row).to(tl.int64)
    if row >= 0:
        o_group = tl.arange(0, GROUPS)
        p_own = p_largest + i_row * num_groups + o_group
        b_largest = tl.topk(tl.load(p_own, mask=o_group < num_groups, other=NO_KEY), K)
        o_token = id_of(b_largest)[:, None] // GROUP * GROUP + tl.arange(0, GROUP)[None, :]
        b_logits = logits_of(p_logits + row * row_stride, o_token, num_tokens)
        b_key = tl.where(o_token < num_tokens, key_of(b_logits, o_token), NO_KEY)
        b_found = tl.topk(b_key.reshape(K * GROUP), K)
        b_order = (b_found >> 32).to(tl.int32)
        b_bits = tl.where(b_order < 0, b_order ^ SIGN, b_order)
        p_out = i_row * K + tl.arange(0, K)
        tl.store(found.ids_MK + p_out, id_of(b_found))
        tl.store(found.logits_MK + p_out, b_bits.to(tl.float32, bitcast=True))


@triton.jit
def kept_scores(b_scores, scale, settings, lane, FILTERS: tl.constexpr, K: tl.constexpr):
    """Scores of the candidates that the settings of a lane without a rest keep; -inf for the others."""
    o_index = tl.arange(0, K)
    b_above = b_scores[None, :] > b_scores[:, None]
    b_before = b_above | ((b_scores[None, :] == b_scores[:, None]) & (o_index[None, :] < o_index[:, None]))
    b_is_best = tl.sum(b_before.to(tl.int32), 1) == 0
    b_kept = o_index < K
    if FILTERS:
        top_k, top_p = tl.load(settings[1] + lane), tl.load(settings[2] + lane)
        b_kept = (tl.sum(b_above.to(tl.int32), 1) < top_k) | (top_k <= 0)
        b_mass = tl.where(b_kept, weight(b_scores, tl.max(b_scores, 0), scale), 0.0).to(tl.float64)
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
def keeps_rest(settings, lane, num_tokens, FILTERS: tl.constexpr):
    """Whether tokens that are no candidates stay: not at temperature 0 or under filters."""
    is_kept = tl.load(settings[0] + lane) != 0
    if FILTERS:
        is_kept = is_kept & ~is_filtered(settings[0], settings[1], settings[2], settings[3], lane, num_tokens)
    return is_kept


@triton.jit
def largest_of(b_scores, row_largest, is_kept):
    """The logit to which weights are relative: of the scores and, where the rest stays, of the row."""
    return tl.maximum(tl.max(b_scores, 0), tl.where(is_kept, row_largest, float("-inf")))


@triton.jit
def rest_kernel(
    scored,
    candidates,
    store,
    settings,
    p_rows,
    p_lanes,
    p_products,
    num_tokens,
    num_chunks,
    num_drafts,
    width,
    FILTERS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Take the candidates of one draft out of its stored row, and the other tokens unless they stay; multiply
    the candidates' rows of B by the draft's projection."""
    i_draft = tl.program_id(0).to(tl.int64)
    if tl.load(p_rows + i_draft) >= 0:
        lane = tl.load(p_lanes + i_draft // num_drafts).to(tl.int64)
        slot = lane * num_drafts + i_draft % num_drafts
        is_kept = keeps_rest(settings, lane, num_tokens, FILTERS)
        o_index, o_chunk = tl.arange(0, K), tl.arange(0, CHUNKS)
        b_id = tl.load(candidates.ids_MK + i_draft * K + o_index)
        o_width = tl.arange(0, WIDTH)
        p_projected = scored.projected_MW + i_draft * width + o_width
        b_projected = tl.load(p_projected, mask=o_width < width, other=0.0).to(tl.float32)
        p_table = scored.candidate_VW + b_id[:, None] * width + o_width[None, :]
        b_product = tl.load(p_table, mask=o_width[None, :] < width, other=0.0).to(tl.float32)
        b_product *= b_projected[None, :]
        p_product = p_products + (i_draft * K + o_index[:, None]) * WIDTH + o_width[None, :]
        tl.store(p_product, b_product)
        b_own = b_id // CHUNK
        p_masses, p_row = store.masses_ZJC + slot * num_chunks, store.logits_ZJV + slot * num_tokens
        # A chunk without mass was not copied.
        b_has_rest = (tl.load(p_masses + b_own) > 0) & is_kept
        o_token = (b_own * CHUNK).to(tl.int32)[:, None] + tl.arange(0, CHUNK)[None, :]
        m_token = o_token < num_tokens
        b_rest = tl.load(p_row + o_token, mask=m_token & b_has_rest[:, None], other=float("-inf"))
        for i in range(K):
            b_rest = tl.where(o_token == tl.load(candidates.ids_MK + i_draft * K + i), float("-inf"), b_rest)
        p_numbers = store.numbers_ZJF + slot * NUM_NUMBERS
        largest = tl.load(p_numbers + MAX).to(tl.float32)
        b_mass = tl.sum(weight(b_rest, largest, tl.load(p_numbers + SCALE)), 1)
        # Candidates may share a chunk.
        tl.debug_barrier()
        if ~is_kept:
            tl.store(p_masses + o_chunk, tl.zeros([CHUNKS], tl.float32), mask=o_chunk < num_chunks)
            tl.debug_barrier()
        # The other logits are in place.
        tl.store(p_row + o_token, b_rest, mask=m_token & (b_rest == float("-inf")))
        tl.store(p_masses + b_own, b_mass)
        tl.debug_barrier()
        b_mass = tl.load(p_masses + o_chunk, mask=o_chunk < num_chunks, other=0.0)
        tl.store(p_numbers + MASS, tl.sum(b_mass.to(tl.float64), 0))


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
    p_products,
    uniform_stride,
    num_tokens,
    num_chunks,
    num_drafts,
    width,
    FILTERS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The drafts of one sequence, each after the one before it, and the scores that they are drawn from."""
    i_sequence = tl.program_id(0).to(tl.int64)
    lane = tl.load(p_lanes + i_sequence).to(tl.int64)
    scale = scale_of(tl.load(settings[0] + lane))
    is_kept = keeps_rest(settings, lane, num_tokens, FILTERS)
    o_width, o_index = tl.arange(0, WIDTH), tl.arange(0, K)
    o_product = o_index[:, None] * WIDTH + o_width[None, :]
    previous = tl.load(scored.anchors_B + i_sequence)
    for j in range(num_drafts):
        # What does not depend on the draft before this one is loaded with its row of A, for rows -1 too.
        i_draft, slot = i_sequence * num_drafts + j, lane * num_drafts + j
        row = tl.load(p_rows + i_draft)
        b_id = tl.load(candidates.ids_MK + i_draft * K + o_index)
        b_logits = tl.load(candidates.logits_MK + i_draft * K + o_index)
        b_product = tl.load(p_products + i_draft * (K * WIDTH) + o_product)
        p_numbers = store.numbers_ZJF + slot * NUM_NUMBERS
        row_largest, row_mass = tl.load(p_numbers + MAX).to(tl.float32), tl.load(p_numbers + MASS)
        uniform = tl.load(p_uniforms + i_sequence * uniform_stride + j)
        p_previous = scored.previous_VW + previous * width + o_width
        b_previous = tl.load(p_previous, mask=o_width < width, other=0.0).to(tl.float32)
        if row >= 0:
            # 1. Scores of the candidates after the draft before them.
            b_scores = b_logits + tl.sum(b_product * b_previous[None, :], 1)
            b_scores = b_scores.to(store.logits_ZJV.dtype.element_ty).to(tl.float32)
            if ~is_kept:
                b_scores = kept_scores(b_scores, scale, settings, lane, FILTERS, K)
            tl.store(p_scores + i_draft * K + o_index, b_scores)
            # 2. Weights of the candidates and of the rest, relative to the largest of all.
            largest = largest_of(b_scores, row_largest, is_kept)
            b_weight = weight(b_scores, largest, scale)
            own = tl.sum(b_weight.to(tl.float64), 0)
            rest = row_mass * weight(row_largest, largest, scale)
            # 3. The draft: a candidate, or else one of the other tokens.
            target = uniform * (own + rest)
            if (target < own) | (rest <= 0):
                chosen = pick_few(b_weight, target.to(tl.float32), K)
                previous = tl.sum(tl.where(o_index == chosen, b_id, 0), 0)
            else:
                p_row, p_masses = store.logits_ZJV + slot * num_tokens, store.masses_ZJC + slot * num_chunks
                uniform = (target - own) / rest
                previous = draw_token(
                    p_row, p_numbers, p_masses, uniform, num_tokens, num_chunks, CHUNK, CHUNKS
                ).to(tl.int64)
            tl.store(p_drafts + lane * num_drafts + j, previous)


@triton.jit
def put_scores_kernel(
    candidates,
    store,
    settings,
    p_rows,
    p_lanes,
    p_scores,
    num_tokens,
    num_chunks,
    num_drafts,
    FILTERS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Add the candidates of one draft, by their scores, to the stored row of the other tokens."""
    i_draft = tl.program_id(0).to(tl.int64)
    if tl.load(p_rows + i_draft) >= 0:
        lane = tl.load(p_lanes + i_draft // num_drafts).to(tl.int64)
        slot = lane * num_drafts + i_draft % num_drafts
        scale = scale_of(tl.load(settings[0] + lane))
        o_index, o_chunk = tl.arange(0, K), tl.arange(0, CHUNKS)
        b_id = tl.load(candidates.ids_MK + i_draft * K + o_index)
        b_scores = tl.load(p_scores + i_draft * K + o_index)
        p_masses, p_row = store.masses_ZJC + slot * num_chunks, store.logits_ZJV + slot * num_tokens
        p_numbers = store.numbers_ZJF + slot * NUM_NUMBERS
        row_largest = tl.load(p_numbers + MAX).to(tl.float32)
        largest = largest_of(b_scores, row_largest, keeps_rest(settings, lane, num_tokens, FILTERS))
        b_weight, factor = weight(b_scores, largest, scale), weight(row_largest, largest, scale)
        b_own = b_id // CHUNK
        b_mass = tl.sum(tl.where(b_own[None, :] == b_own[:, None], b_weight[None, :], 0.0), 1)
        b_mass += tl.load(p_masses + b_own) * factor
        b_rest = tl.load(p_masses + o_chunk, mask=o_chunk < num_chunks, other=0.0) * factor
        mass = tl.sum(b_rest.to(tl.float64), 0) + tl.sum(b_weight.to(tl.float64), 0)
        # What follows overwrites some of what was read.
        tl.debug_barrier()
        tl.store(p_masses + o_chunk, b_rest, mask=o_chunk < num_chunks)
        tl.debug_barrier()
        tl.store(p_masses + b_own, b_mass)
        tl.store(p_row + b_id, b_scores.to(store.logits_ZJV.dtype.element_ty))
        o_number = tl.arange(0, NUM_NUMBERS)
        best = tl.max(tl.where(b_scores == tl.max(b_scores, 0), b_id ^ LOW_WORD, 0), 0)
        b_number = tl.where(o_number == MAX, largest, 0.0).to(tl.float64)
        b_number = tl.where(o_number == SCALE, scale, b_number)
        b_number = tl.where(o_number == THRESHOLD, LOWEST, b_number)
        b_number = tl.where(o_number == MASS, mass, b_number)
        b_number = tl.where(o_number == BEST, (best ^ LOW_WORD).to(tl.float64), b_number)
        tl.store(p_numbers + o_number, b_number)
