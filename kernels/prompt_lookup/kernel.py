"""Triton kernel: find the last tokens of a sequence earlier in it, and store what followed as drafts.

Contract in README.md. The lane of an inactive sequence is not written."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import ANY_ID, BEST, LOG2_E, MASS, NUM_NUMBERS, SCALE, THRESHOLD, TIE

POSITION: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def longest_match(p_tokens, last, minimum, LONGEST: tl.constexpr, TILE: tl.constexpr):
    """2^32 times the length of the longest match of the tokens up to `last`, and the end of the latest one of
    this length; -1 if all are shorter than `minimum`."""
    best = tl.full((), -1, tl.int64)
    for start in range(0, last, TILE):
        o_end = start + tl.arange(0, TILE)
        b_same = o_end < last
        b_length = tl.zeros([TILE], tl.int32)
        for back in range(LONGEST):
            token = tl.load(p_tokens + tl.maximum(last - back, 0))
            b_same = b_same & (o_end >= back)
            b_same = b_same & (tl.load(p_tokens + o_end - back, mask=b_same, other=-1) == token)
            b_length += b_same.to(tl.int32)
        b_key = tl.where(b_length >= minimum, b_length.to(tl.int64) * (POSITION + 1) + o_end, -1)
        best = tl.maximum(best, tl.max(b_key, 0))
    return best


@triton.jit
def put_certain(store, slot, token, num_tokens, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store a distribution that gives one token probability 1."""
    o_chunk, chunk = tl.arange(0, CHUNKS), token // CHUNK
    b_mass = tl.where(o_chunk == chunk, 1.0, 0.0)
    tl.store(store.masses_ZJC + slot * num_chunks + o_chunk, b_mass, mask=o_chunk < num_chunks)
    o_token = chunk * CHUNK + tl.arange(0, CHUNK)
    b_logits = tl.where(o_token == token, 0.0, float("-inf")).to(store.logits_ZJV.dtype.element_ty)
    tl.store(store.logits_ZJV + slot * num_tokens + o_token, b_logits, mask=o_token < num_tokens)
    o_number = tl.arange(0, NUM_NUMBERS)
    b_number = tl.where(o_number == SCALE, tl.full((), LOG2_E, tl.float64), 0.0)
    b_number = tl.where(o_number == THRESHOLD, float("-inf"), b_number)
    b_number = tl.where(o_number == TIE, tl.full((), ANY_ID, tl.float64), b_number)
    b_number = tl.where(o_number == MASS, 1.0, b_number)
    b_number = tl.where(o_number == BEST, token.to(tl.float64), b_number)
    tl.store(store.numbers_ZJF + slot * NUM_NUMBERS + o_number, b_number)


@triton.jit(do_not_specialize=["num_columns", "minimum", "layout"])
def look_up_kernel(
    p_tokens,
    p_known,
    store,
    p_lanes,
    p_active,
    state,
    num_columns,
    num_drafts,
    num_tokens,
    num_chunks,
    minimum,
    layout,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One sequence: its match, and the drafts after it."""
    p_drafts, p_layout, p_found = state
    i_sequence = tl.program_id(0).to(tl.int64)
    lane = tl.load(p_lanes + i_sequence).to(tl.int64)
    last = tl.load(p_known + lane) - 1
    best = tl.full((), -1, tl.int64)
    p_sequence = p_tokens + lane * num_columns
    if (tl.load(p_active + i_sequence).to(tl.int32) != 0) & (last < num_columns):
        best = longest_match(p_sequence, last.to(tl.int32), minimum, LONGEST, TILE)
    tl.store(p_found + i_sequence, best >= 0)
    if best >= 0:
        end = best & POSITION
        tl.store(p_layout + lane, layout)
        for j in range(num_drafts):
            token = tl.load(p_sequence + end + 1 + j % (last - end))
            slot = lane * num_drafts + j
            tl.store(p_drafts + slot, token)
            put_certain(store, slot, token, num_tokens, num_chunks, CHUNK, CHUNKS)
