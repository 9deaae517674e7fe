"""The Triton kernels: counts of the tokens of lanes, and rows of logits changed by them.

A row costs as much as reading the tokens before it: the vocabulary is not walked. A program owns its row, and
barriers separate biases, penalties and bans, so that no two threads change a logit at once. Z lanes, L
columns of the token table, K entries of a list, N drafts."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.logit_changes import types

REPETITION: tl.constexpr = tl.constexpr(types.REPETITION)
PRESENCE: tl.constexpr = tl.constexpr(types.PRESENCE)
FREQUENCY: tl.constexpr = tl.constexpr(types.FREQUENCY)
ABSENT: tl.constexpr = tl.constexpr(types.ABSENT)
NO_TOKEN: tl.constexpr = tl.constexpr(-2)
BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["L"], do_not_specialize_on_alignment=["lanes_B"])
def count_kernel(lanes, known, lanes_B, L, NEW: tl.constexpr, TILE: tl.constexpr):
    """Count the tokens of one lane that are known since its last count."""
    lane = tl.load(lanes_B + tl.program_id(0)).to(tl.int64)
    if tl.load(lanes.is_active_Z + lane) != 0:
        end = tl.minimum(tl.load(known.num_known_Z + lane), L - 1)
        begin = tl.load(lanes.num_counted_Z + lane)
        p_tokens, p_counts = known.tokens_ZL + lane * L, lanes.counts_ZL + lane * L
        for start in range(begin, end, NEW):
            o_new = start + tl.arange(0, NEW)
            m_new = o_new < end
            b_new = tl.load(p_tokens + o_new, mask=m_new, other=NO_TOKEN)
            b_owner = tl.full([NEW], BEYOND, tl.int64)
            for first in range(0, start, TILE):
                o_old = first + tl.arange(0, TILE)
                b_old = tl.load(p_tokens + o_old, mask=o_old < start, other=ABSENT)
                b_same = b_new[:, None] == b_old[None, :]
                b_owner = tl.minimum(b_owner, tl.min(tl.where(b_same, o_old[None, :], BEYOND), 1))
            b_pair = (b_new[:, None] == b_new[None, :]) & m_new[None, :]
            b_is_first = tl.min(tl.where(b_pair, o_new[None, :], BEYOND), 1) == o_new
            b_is_old = b_owner < BEYOND
            p_own = p_counts + tl.where(b_is_old, b_owner, o_new)
            m_own = m_new & b_is_first
            b_before = tl.load(p_own, mask=m_own & b_is_old, other=0)
            tl.store(p_own, b_before + tl.sum(b_pair.to(tl.int32), 1), mask=m_own)
            tl.store(
                p_counts + o_new,
                tl.full([NEW], ABSENT, tl.int32),
                mask=m_new & ((b_is_first & ~b_is_old) == 0),
            )
            tl.debug_barrier()
        tl.store(lanes.num_counted_Z + lane, tl.maximum(begin, end))


@triton.jit
def change_penalised(p_row, b_token, b_count, m_token, repetition, presence, frequency):
    """Penalise distinct tokens, of which the answer has `b_count`."""
    m_token = m_token & ((b_count > 0) | (repetition != 1.0))
    b_value = tl.load(p_row + b_token, mask=m_token, other=0.0)
    b_logit = b_value.to(tl.float32)
    b_logit = tl.where(b_logit > 0, b_logit / repetition, b_logit * repetition)
    b_penalised = b_logit - frequency * b_count.to(tl.float32) - presence
    b_logit = tl.where(b_count > 0, b_penalised, b_logit)
    tl.store(p_row + b_token, b_logit.to(b_value.dtype), mask=m_token)


@triton.jit
def token_at(known, lane, o_token, m_token, num_known, L, num_drafts):
    """Tokens of a lane's known ones and the drafts after them."""
    b_known = tl.load(
        known.tokens_ZL + lane * L + o_token, mask=m_token & (o_token < num_known), other=NO_TOKEN
    )
    if known.drafts_ZN is not None:
        m_draft = m_token & (o_token >= num_known)
        p_draft = known.drafts_ZN + lane * num_drafts + o_token - num_known
        b_known = tl.where(m_draft, tl.load(p_draft, mask=m_draft, other=NO_TOKEN), b_known)
    return b_known


@triton.jit
def change_listed(p_row, lanes, lane, K, STOPS: tl.constexpr, LOWEST: tl.constexpr, TILE: tl.constexpr):
    """Add biases, or with STOPS forbid the listed tokens that stop an answer."""
    num_listed = tl.load(lanes.num_listed_Z + lane)
    for start in range(0, num_listed, TILE):
        o_entry = start + tl.arange(0, TILE)
        m_entry = o_entry < num_listed
        b_id = tl.load(lanes.listed_ids_ZK + lane * K + o_entry, mask=m_entry, other=0)
        if STOPS:
            m_stop = tl.load(lanes.is_stop_ZK + lane * K + o_entry, mask=m_entry, other=0) != 0
            b_closed = tl.full([TILE], LOWEST, tl.float32).to(p_row.dtype.element_ty)
            tl.store(p_row + b_id, b_closed, mask=m_stop)
        else:
            b_bias = tl.load(lanes.biases_ZK + lane * K + o_entry, mask=m_entry, other=0.0)
            b_value = tl.load(p_row + b_id, mask=m_entry, other=0.0)
            tl.store(p_row + b_id, (b_value.to(tl.float32) + b_bias).to(b_value.dtype), mask=m_entry)


@triton.jit
def change_repeating(
    p_row, known, lane, size, num_known, end, L, num_drafts, LOWEST: tl.constexpr, TILE: tl.constexpr
):
    """Forbid tokens that would end a run of `size` tokens which comes before."""
    last = end - size + 1
    for start in range(0, last, TILE):
        o_run = start + tl.arange(0, TILE)
        m_run = o_run < last
        b_same = m_run
        for k in range(size - 1):
            o_last = last + k + tl.zeros([TILE], tl.int64)
            b_mine = token_at(known, lane, o_last, m_run, num_known, L, num_drafts)
            b_same = b_same & (token_at(known, lane, o_run + k, m_run, num_known, L, num_drafts) == b_mine)
        b_token = token_at(known, lane, o_run + size - 1, b_same, num_known, L, num_drafts)
        b_closed = tl.full([TILE], LOWEST, tl.float32).to(p_row.dtype.element_ty)
        tl.store(p_row + b_token, b_closed, mask=b_same)


@triton.jit(do_not_specialize=["num_tokens", "L", "K", "num_drafts"])
def change_kernel(
    p_logits,
    lanes,
    known,
    rows,
    row_stride,
    num_tokens,
    L,
    K,
    num_drafts,
    DRAFTS: tl.constexpr,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Change one row: biases, then penalties, then bans."""
    i_row = tl.program_id(0).to(tl.int64)
    lane = tl.load(rows.lanes_X + i_row)
    num_before = tl.load(rows.num_drafts_X + i_row)
    if (tl.load(lanes.is_active_Z + lane) != 0) & (num_before >= 0):
        p_row = p_logits + i_row * row_stride
        num_known = tl.minimum(tl.load(known.num_known_Z + lane), L - 1)
        p_penalties = lanes.penalties_Z3 + lane * 3
        repetition = tl.load(p_penalties + REPETITION)
        presence, frequency = tl.load(p_penalties + PRESENCE), tl.load(p_penalties + FREQUENCY)
        change_listed(p_row, lanes, lane, K, False, LOWEST, TILE)
        tl.debug_barrier()
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            o_draft = tl.arange(0, DRAFTS)
            b_draft = tl.full([DRAFTS], ABSENT, tl.int64)
            if known.drafts_ZN is not None:
                m_draft = (o_draft < num_before) & (o_draft < num_drafts)
                if rows.own_X is not None:
                    m_draft = m_draft & (o_draft != tl.load(rows.own_X + i_row))
                b_draft = tl.load(known.drafts_ZN + lane * num_drafts + o_draft, mask=m_draft, other=ABSENT)
            b_is_known = o_draft < 0
            for start in range(0, num_known, TILE):
                o_token = start + tl.arange(0, TILE)
                m_token = o_token < num_known
                b_token = tl.load(known.tokens_ZL + lane * L + o_token, mask=m_token, other=NO_TOKEN)
                b_count = tl.load(lanes.counts_ZL + lane * L + o_token, mask=m_token, other=ABSENT)
                b_same = b_token[:, None] == b_draft[None, :]
                b_is_known = b_is_known | (tl.max(b_same.to(tl.int32), 0) > 0)
                m_token = m_token & (b_count >= 0)
                b_count += tl.sum(b_same.to(tl.int32), 1)
                change_penalised(p_row, b_token, b_count, m_token, repetition, presence, frequency)
            b_pair = b_draft[:, None] == b_draft[None, :]
            b_first = tl.min(tl.where(b_pair, o_draft[None, :], DRAFTS), 1)
            m_new = (b_draft != ABSENT) & (b_is_known == 0) & (b_first == o_draft)
            b_count = tl.sum(b_pair.to(tl.int32), 1)
            change_penalised(p_row, b_draft, b_count, m_new, repetition, presence, frequency)
        tl.debug_barrier()
        position = tl.load(rows.positions_X + i_row)
        if position < tl.load(lanes.free_from_Z + lane):
            change_listed(p_row, lanes, lane, K, True, LOWEST, TILE)
        size, end = tl.load(lanes.ngram_Z + lane), num_known + num_before
        if (size > 0) & (position == end):
            change_repeating(p_row, known, lane, size, num_known, end, L, num_drafts, LOWEST, TILE)
