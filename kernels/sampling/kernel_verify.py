"""Triton kernels: test the drafts, draw the token after the accepted ones, store the next drafts' rows.

Tensors with the letter Z are indexed by lane through `lanes_B`. Nothing is written to the lane of an inactive
sequence, and its outputs are 0. Contract in README.md."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    BEST,
    NUM_NUMBERS,
    draw_token,
    inverse_mass,
    kept_weight,
    pick,
    probability_of,
)

# Rows of the verdict [NUM_VERDICT, B].
ACCEPTED: tl.constexpr = tl.constexpr(0)
TESTED: tl.constexpr = tl.constexpr(1)
EMITTED: tl.constexpr = tl.constexpr(2)
EMIT_ROW: tl.constexpr = tl.constexpr(3)
REJECTED: tl.constexpr = tl.constexpr(4)
NEXT_LAYOUT: tl.constexpr = tl.constexpr(5)
NUM_VERDICT: tl.constexpr = tl.constexpr(6)
NO_ROW: tl.constexpr = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_sequences"])
def verify_kernel(
    probs,
    store,
    columns,
    tables,
    p_uniforms,
    verdict,
    sizes,
    num_sequences,
    MASKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Accepted drafts of one sequence, and the rows that its next token and next drafts are drawn from."""
    p_logits, p_numbers = probs[0], probs[1]
    p_lanes, p_first, p_active, p_drafts, p_tau, p_layout = columns
    p_verdict, p_tokens, p_rows = verdict
    row_stride, uniform_stride, num_tokens, num_chunks, num_masks = sizes
    i_sequence = tl.program_id(0).to(tl.int64)
    is_active = tl.load(p_active + i_sequence).to(tl.int32) != 0
    p_out = p_verdict + i_sequence
    o_mask = tl.arange(0, MASKS)
    m_mask = o_mask < num_masks
    p_sequence_tokens = p_tokens + i_sequence * (num_masks + 1)
    p_sequence_rows = p_rows + i_sequence * num_masks
    if is_active:
        lane = tl.load(p_lanes + i_sequence).to(tl.int64)
        first = tl.load(p_first + i_sequence).to(tl.int64)
        layout = tl.load(p_layout + lane).to(tl.int64)
        num_drafts = tl.load(tables.num_drafts_Y + layout).to(tl.int32)
        m_draft = m_mask & (o_mask < num_drafts)
        b_id = tl.load(p_drafts + lane * num_masks + o_mask, mask=m_draft, other=0).to(tl.int64)
        b_row = first + o_mask
        b_slot = lane * num_masks + o_mask
        b_values = tl.load(p_logits + b_row * row_stride + b_id, mask=m_draft, other=0.0)
        b_p = probability_of(b_values, b_id, p_numbers + b_row * NUM_NUMBERS, m_draft)
        p_mass = store.masses_ZJC + b_slot * num_chunks + b_id // CHUNK
        m_stored = m_draft & (tl.load(p_mass, mask=m_draft, other=0.0) > 0)
        b_values = tl.load(store.logits_ZJV + b_slot * num_tokens + b_id, mask=m_draft, other=0.0)
        b_q = probability_of(b_values, b_id, store.numbers_ZJF + b_slot * NUM_NUMBERS, m_stored)
        p_uniform = p_uniforms + i_sequence * uniform_stride + o_mask
        b_uniform = tl.load(p_uniform, mask=m_draft, other=1.0)
        b_passes = m_draft & (b_uniform * b_q < (1.0 + tl.load(p_tau + lane)) * b_p)
        accepted = tl.min(tl.where(b_passes, MASKS, o_mask), 0)
        rejected = (accepted < num_drafts).to(tl.int32)
        tl.store(p_out + num_sequences * ACCEPTED, accepted.to(tl.int64))
        tl.store(p_out + num_sequences * TESTED, (accepted + rejected).to(tl.int64))
        tl.store(p_out + num_sequences * EMITTED, (accepted + 1).to(tl.int64))
        tl.store(p_out + num_sequences * EMIT_ROW, first + accepted)
        tl.store(p_out + num_sequences * REJECTED, rejected.to(tl.int64))
        case = layout * (num_masks + 1) + accepted
        tl.store(p_out + num_sequences * NEXT_LAYOUT, tl.load(tables.next_layouts_YA + case))
        b_next = tl.load(tables.draft_rows_YAJ + case * num_masks + o_mask, mask=m_mask, other=NO_ROW)
        tl.store(p_sequence_rows + o_mask, tl.where(b_next >= 0, first + b_next, NO_ROW), mask=m_mask)
        tl.store(p_sequence_tokens + o_mask, tl.where(o_mask < accepted, b_id, 0), mask=m_mask)
    else:
        b_field = tl.arange(0, 8)
        b_value = tl.where(b_field == EMIT_ROW, NO_ROW, 0).to(tl.int64)
        tl.store(p_out + b_field * num_sequences, b_value, mask=b_field < NUM_VERDICT)
        tl.store(p_sequence_rows + o_mask, tl.full([MASKS], NO_ROW, tl.int64), mask=m_mask)
        tl.store(p_sequence_tokens + o_mask, tl.zeros([MASKS], tl.int64), mask=m_mask)
    tl.store(p_sequence_tokens + num_masks, tl.zeros((), tl.int64))


@triton.jit
def excess(row, draft, o_token, m_token, m_stored):
    """max(0, p - q) of some tokens, fp32; q is 0 outside `m_stored`. `row`, `draft`: logits and numbers."""
    p_row, p_numbers = row
    p_draft, p_draft_numbers = draft
    b_values = tl.load(p_row + o_token, mask=m_token, other=float("-inf"))
    b_p = kept_weight(b_values, o_token, p_numbers) * inverse_mass(p_numbers).to(tl.float32)
    b_values = tl.load(p_draft + o_token, mask=m_token & m_stored, other=float("-inf"))
    b_q = kept_weight(b_values, o_token, p_draft_numbers) * inverse_mass(p_draft_numbers).to(tl.float32)
    b_q = tl.where(m_stored, b_q, 0.0)
    return tl.where(m_token, tl.maximum(b_p - b_q, 0.0), 0.0)


@triton.jit(do_not_specialize=["num_sequences"])
def residual_kernel(
    probs, store, p_lanes, p_verdict, p_excess, sizes, num_sequences, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """Mass of max(0, p - q) in each of TILE chunks, for sequences with a rejected draft."""
    p_logits, p_numbers, p_masses = probs
    row_stride, num_tokens, num_chunks, num_tiles, num_masks = sizes
    i_sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
    i_tile = tl.program_id(0) % num_tiles
    if tl.load(p_verdict + num_sequences * REJECTED + i_sequence) != 0:
        row = tl.load(p_verdict + num_sequences * EMIT_ROW + i_sequence)
        accepted = tl.load(p_verdict + num_sequences * ACCEPTED + i_sequence)
        slot = tl.load(p_lanes + i_sequence).to(tl.int64) * num_masks + accepted
        o_chunk = i_tile * TILE + tl.arange(0, TILE)
        m_chunk = o_chunk < num_chunks
        # Without mass p exceeds q nowhere, so nothing is read.
        b_is_kept = tl.load(p_masses + row * num_chunks + o_chunk, mask=m_chunk, other=0.0) > 0
        b_is_stored = tl.load(store.masses_ZJC + slot * num_chunks + o_chunk, mask=m_chunk, other=0.0) > 0
        o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        row_of_p = (p_logits + row * row_stride, p_numbers + row * NUM_NUMBERS)
        draft = (store.logits_ZJV + slot * num_tokens, store.numbers_ZJF + slot * NUM_NUMBERS)
        m_token = b_is_kept[:, None] & (o_token < num_tokens)
        b_excess = excess(row_of_p, draft, o_token, m_token, b_is_stored[:, None])
        tl.store(p_excess + i_sequence * num_chunks + o_chunk, tl.sum(b_excess, 1), mask=m_chunk)


@triton.jit
def draw_excess(
    row, draft, p_draft_masses, b_mass, uniform, num_tokens, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Draw a token of max(0, p - q), whose chunks have the masses `b_mass` (fp64)."""
    target = uniform * tl.sum(b_mass, 0)
    i_chunk = pick(b_mass, target, CHUNKS)
    target -= tl.sum(tl.where(tl.arange(0, CHUNKS) < i_chunk, b_mass, 0.0), 0)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_stored = tl.zeros([CHUNK], tl.float32) + tl.load(p_draft_masses + i_chunk) > 0
    b_excess = excess(row, draft, o_token, o_token < num_tokens, m_stored)
    return i_chunk * CHUNK + pick(b_excess, target.to(tl.float32), CHUNK)


@triton.jit(do_not_specialize=["num_sequences"])
def emit_kernel(
    probs,
    store,
    verdict,
    p_lanes,
    p_excess,
    p_uniforms,
    state,
    sizes,
    num_sequences,
    TAKES_BEST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One draw of a sequence: draw 0 is the token after its accepted drafts, from the residual after a
    rejection, else from p; the others are its next drafts. TAKES_BEST: drafts are the argmax."""
    p_logits, p_numbers, p_masses = probs
    p_verdict, p_tokens, p_rows = verdict
    p_drafts, p_layout = state
    row_stride, uniform_stride, num_tokens, num_chunks, num_masks = sizes
    i_sequence = (tl.program_id(0) // (num_masks + 1)).to(tl.int64)
    i_draw = tl.program_id(0) % (num_masks + 1)
    emit_row = tl.load(p_verdict + num_sequences * EMIT_ROW + i_sequence)
    if emit_row >= 0:
        lane = tl.load(p_lanes + i_sequence).to(tl.int64)
        accepted = tl.load(p_verdict + num_sequences * ACCEPTED + i_sequence)
        uniform = tl.load(p_uniforms + i_sequence * uniform_stride + i_draw)
        o_chunk = tl.arange(0, CHUNKS)
        b_mass = tl.zeros([CHUNKS], tl.float64)
        row = emit_row
        if i_draw > 0:
            row = tl.load(p_rows + i_sequence * num_masks + i_draw - 1)
        else:
            is_rejected = tl.load(p_verdict + num_sequences * REJECTED + i_sequence) != 0
            m_chunk = o_chunk < tl.where(is_rejected, num_chunks, 0)
            p_mass = p_excess + i_sequence * num_chunks + o_chunk
            b_mass = tl.load(p_mass, mask=m_chunk, other=0.0).to(tl.float64)
        p_row = p_logits + row * row_stride
        p_row_numbers = p_numbers + row * NUM_NUMBERS
        token = tl.zeros((), tl.int32)
        if tl.sum(b_mass, 0) > 0:
            slot = lane * num_masks + accepted
            draft = (store.logits_ZJV + slot * num_tokens, store.numbers_ZJF + slot * NUM_NUMBERS)
            p_draft_masses = store.masses_ZJC + slot * num_chunks
            token = draw_excess(
                (p_row, p_row_numbers), draft, p_draft_masses, b_mass, uniform, num_tokens, CHUNK, CHUNKS
            )
        elif row >= 0:
            if TAKES_BEST:
                is_draft = i_draw > 0
            else:
                is_draft = False
            if is_draft:
                token = tl.load(p_row_numbers + BEST).to(tl.int32)
            else:
                p_chunks = p_masses + row * num_chunks
                token = draw_token(
                    p_row, p_row_numbers, p_chunks, uniform, num_tokens, num_chunks, CHUNK, CHUNKS
                )
        if i_draw > 0:
            tl.store(p_drafts + lane * num_masks + i_draw - 1, token.to(tl.int64))
        else:
            tl.store(p_tokens + i_sequence * (num_masks + 1) + accepted, token.to(tl.int64))
        layout = tl.load(p_verdict + num_sequences * NEXT_LAYOUT + i_sequence)
        tl.store(p_layout + lane, layout, mask=i_draw == 0)


@triton.jit
def put_kernel(probs, store, p_lanes, p_active, p_rows, sizes, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Copy TILE chunks of one draft row, those that have mass, and its numbers to the sequence's lane."""
    p_logits, p_numbers, p_masses = probs
    row_stride, num_tokens, num_chunks, num_tiles, num_masks = sizes
    i_draft = (tl.program_id(0) // num_tiles).to(tl.int64)
    i_tile = tl.program_id(0) % num_tiles
    i_sequence = i_draft // num_masks
    row = tl.load(p_rows + i_draft)
    if (row >= 0) & (tl.load(p_active + i_sequence).to(tl.int32) != 0):
        slot = tl.load(p_lanes + i_sequence).to(tl.int64) * num_masks + i_draft % num_masks
        o_chunk = i_tile * TILE + tl.arange(0, TILE)
        m_chunk = o_chunk < num_chunks
        b_mass = tl.load(p_masses + row * num_chunks + o_chunk, mask=m_chunk, other=0.0)
        tl.store(store.masses_ZJC + slot * num_chunks + o_chunk, b_mass, mask=m_chunk)
        o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        m_token = (b_mass > 0)[:, None] & (o_token < num_tokens)
        b_logits = tl.load(p_logits + row * row_stride + o_token, mask=m_token)
        tl.store(
            store.logits_ZJV + slot * num_tokens + o_token,
            b_logits.to(store.logits_ZJV.dtype.element_ty),
            mask=m_token,
        )
        if i_tile == 0:
            o_number = tl.arange(0, NUM_NUMBERS)
            b_number = tl.load(p_numbers + row * NUM_NUMBERS + o_number)
            tl.store(store.numbers_ZJF + slot * NUM_NUMBERS + o_number, b_number)
