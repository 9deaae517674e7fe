"""Triton kernels that forbid tokens: copies of rows of logits without them, and stored drafts' distributions
without them.

Bit i % 32 of word i // 32 is 1 where token i is allowed. Contract in README.md."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import (
    ANY_ID,
    BEST,
    LOG2_E,
    MASS,
    MAX,
    NUM_NUMBERS,
    SCALE,
    THRESHOLD,
    TIE,
    kept_weight,
)


@triton.jit
def is_allowed(p_bits, o_token, m_token):
    """Whether tokens are allowed; False outside of `m_token`."""
    b_word = tl.load(p_bits + o_token // 32, mask=m_token, other=0)
    return ((b_word >> (o_token % 32)) & 1) != 0


@triton.jit(do_not_specialize_on_alignment=["p_rows", "p_masks"])
def allowed_kernel(
    p_logits, p_rows, p_bits, p_masks, p_out, row_stride, num_tokens, num_words, num_tiles, TILE: tl.constexpr
):  # fmt: skip
    """Copy TILE tokens of a row, with -inf for those that its mask forbids; mask -1 forbids none."""
    i_row = (tl.program_id(0) // num_tiles).to(tl.int64)
    o_token = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    m_token = o_token < num_tokens
    row, mask = tl.load(p_rows + i_row).to(tl.int64), tl.load(p_masks + i_row).to(tl.int64)
    b_values = tl.load(p_logits + row * row_stride + o_token, mask=m_token)
    if mask >= 0:
        b_open = is_allowed(p_bits + mask * num_words, o_token, m_token)
        b_values = tl.where(b_open, b_values, tl.full((), float("-inf"), tl.float32).to(b_values.dtype))
    tl.store(p_out + i_row * num_tokens + o_token, b_values, mask=m_token)


@triton.jit(
    do_not_specialize=["num_masks", "num_drafts", "num_rows"],
    do_not_specialize_on_alignment=["p_lanes", "p_only"],
)
def restrict_kernel(
    store,
    p_lanes,
    p_bits,
    p_only,
    sizes,
    num_masks,
    num_drafts,
    num_rows,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Forbid tokens in TILE chunks of one stored draft; or leave one token alone, of weight 1."""
    p_store, p_store_numbers, p_store_masses = store
    num_tokens, num_words, num_chunks, num_tiles = sizes
    i_draft = (tl.program_id(0) // num_tiles).to(tl.int64)
    i_sequence, index = i_draft // num_drafts, i_draft % num_drafts
    slot = tl.load(p_lanes + i_sequence).to(tl.int64) * num_masks + index
    only = tl.load(p_only + i_draft).to(tl.int32)
    o_chunk = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    m_chunk = o_chunk < num_chunks
    p_masses = p_store_masses + slot * num_chunks + o_chunk
    b_mass = tl.load(p_masses, mask=m_chunk, other=0.0)
    o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    m_token = (b_mass > 0)[:, None] & (o_token < num_tokens)
    p_token = p_store + slot * num_tokens + o_token
    if only >= 0:
        b_is_only = o_chunk == only // CHUNK
        m_token = b_is_only[:, None] & (o_token < num_tokens)
        b_values = tl.where(o_token == only, 0.0, float("-inf")).to(p_store.dtype.element_ty)
        b_mass = tl.where(b_is_only, 1.0, 0.0)
    else:
        b_values = tl.load(p_token, mask=m_token, other=float("-inf"))
        b_open = is_allowed(p_bits + (i_sequence * num_rows + index) * num_words, o_token, m_token)
        b_values = tl.where(b_open, b_values, tl.full((), float("-inf"), tl.float32).to(b_values.dtype))
        b_weight = kept_weight(b_values, o_token, p_store_numbers + slot * NUM_NUMBERS)
        b_mass = tl.sum(tl.where(b_open, b_weight, 0.0), 1)
    tl.store(p_token, b_values, mask=m_token)
    tl.store(p_masses, b_mass, mask=m_chunk)


@triton.jit(
    do_not_specialize=["num_masks", "num_drafts"], do_not_specialize_on_alignment=["p_lanes", "p_only"]
)
def restricted_mass_kernel(
    p_store_numbers, p_store_masses, p_lanes, p_only, num_chunks, num_masks, num_drafts, CHUNKS: tl.constexpr
):
    """The mass of one stored draft after `restrict_kernel`; all numbers where one token is left alone."""
    i_draft = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_lanes + i_draft // num_drafts).to(tl.int64) * num_masks + i_draft % num_drafts
    only = tl.load(p_only + i_draft)
    o_chunk = tl.arange(0, CHUNKS)
    b_mass = tl.load(p_store_masses + slot * num_chunks + o_chunk, mask=o_chunk < num_chunks, other=0.0)
    p_numbers = p_store_numbers + slot * NUM_NUMBERS
    tl.store(p_numbers + MASS, tl.sum(b_mass.to(tl.float64), 0))
    if only >= 0:
        tl.store(p_numbers + MAX, tl.zeros((), tl.float64))
        tl.store(p_numbers + SCALE, tl.full((), LOG2_E, tl.float64))
        tl.store(p_numbers + THRESHOLD, tl.full((), float("-inf"), tl.float64))
        tl.store(p_numbers + TIE, tl.full((), ANY_ID, tl.float64))
        tl.store(p_numbers + BEST, only.to(tl.float64))
