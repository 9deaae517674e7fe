"""Triton kernels: wanted rows times the head, reduced to a few numbers per row while a tile is in registers.

No logits and no gathered rows are stored. A program multiplies a tile of rows with a range of the vocabulary,
tile by tile; a second kernel combines the ranges of a row. Contract and mathematics in README.md.
Shapes: X wanted rows, V vocabulary, D width, S ranges (splits) of the vocabulary, F numbers per range."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.sampling.kernel import ANY_ID, LOG2_E

# Numbers of a range (fp32); the last is for the entropy.
MAX: tl.constexpr = tl.constexpr(0)
MASS: tl.constexpr = tl.constexpr(1)
BEST: tl.constexpr = tl.constexpr(2)
MOMENT: tl.constexpr = tl.constexpr(3)

TILE_TOKENS: tl.constexpr = tl.constexpr(256)
"""Tokens of a tile."""


@triton.jit
def _product(
    p_x, weight, i_tile, num_tokens, width, weight_stride,
    TMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of a tile in fp32, [BLOCK_X, TILE_TOKENS]; those after the last token mean nothing."""
    acc = tl.zeros([BLOCK_X, TILE_TOKENS], tl.float32)
    o_column = tl.arange(0, BLOCK_D)
    o_token = tl.arange(0, TILE_TOKENS) + i_tile * TILE_TOKENS
    if not TMA:
        # Rows after the last token are read as the last one: cheaper than a mask, and never used.
        o_row = tl.minimum(o_token, num_tokens - 1).to(tl.int64)
        p_w = weight + o_row[:, None] * weight_stride + o_column[None, :]
    for column in tl.range(0, width, BLOCK_D, num_stages=STAGES):
        m_column = (column + o_column < width)[None, :]
        x = tl.load(p_x + column) if EVEN else tl.load(p_x + column, mask=m_column, other=0.0)
        if TMA:
            w = weight.load([i_tile * TILE_TOKENS, column])
        elif EVEN:
            w = tl.load(p_w + column)
        else:
            w = tl.load(p_w + column, mask=m_column, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _store(p_parts, field, o_row, m_row, split, num_rows, splits, b_value):
    p_field = p_parts + (field * num_rows.to(tl.int64) + o_row) * splits + split
    tl.store(p_field, b_value.to(tl.float32), mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "splits", "split_tiles"])
def parts_kernel(
    p_hidden, p_rows, weight, p_forbidden, p_parts,
    num_rows, num_tokens, width, hidden_stride, weight_stride, splits, split_tiles,
    FORBIDDEN: tl.constexpr, ENTROPY: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The numbers of a tile of rows over one range of `split_tiles` tiles of the vocabulary.

    A tile without a wanted row (all -1) ends at once and stores nothing. FORBIDDEN: number of ids at
    `p_forbidden`. `weight`: a pointer, or (TMA) a tensor descriptor of tiles [TILE_TOKENS, BLOCK_D].
    FLAT: one pipeline for all tiles, so that a tile is loaded while the one before it is reduced."""
    row_tiles = tl.cdiv(num_rows, BLOCK_X)
    # Programs that run at the same time share GROUP tiles of rows and few ranges of the weight (L2 cache).
    first_row_tile = tl.program_id(0) // (GROUP * splits) * GROUP
    within = tl.program_id(0) % (GROUP * splits)
    group = tl.minimum(row_tiles - first_row_tile, GROUP)
    split = within // group
    o_row = (first_row_tile + within % group).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_row = o_row < num_rows
    b_row = tl.load(p_rows + o_row, mask=m_row, other=-1).to(tl.int64)
    if tl.max(b_row, 0) < 0:
        return
    p_x = p_hidden + tl.maximum(b_row, 0)[:, None] * hidden_stride + tl.arange(0, BLOCK_D)[None, :]

    b_max = tl.full([BLOCK_X], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_X], tl.float32)
    b_best = tl.zeros([BLOCK_X], tl.int32)
    b_moment = tl.zeros([BLOCK_X], tl.float32)

    last_tile = tl.minimum((split + 1) * split_tiles, tl.cdiv(num_tokens, TILE_TOKENS))
    for i_tile in tl.range(split * split_tiles, last_tile, flatten=FLAT):
        b_logits = _product(
            p_x, weight, i_tile, num_tokens, width, weight_stride,
            TMA, EVEN, BLOCK_X, BLOCK_D, STAGES, PRECISION,
        )  # fmt: skip
        # Rounded as the logits that a head stores, so that ties are the same.
        b_logits = b_logits.to(p_hidden.dtype.element_ty).to(tl.float32)
        o_token = tl.arange(0, TILE_TOKENS) + i_tile * TILE_TOKENS
        m_token = o_token < num_tokens
        for number in tl.static_range(FORBIDDEN):
            m_token = m_token & (o_token != tl.load(p_forbidden + number))
        b_logits = tl.where(m_token[None, :], b_logits, float("-inf"))

        b_largest = tl.max(b_logits, 1)
        b_id = tl.min(tl.where(b_logits == b_largest[:, None], o_token[None, :], ANY_ID), 1)
        b_best = tl.where(b_largest > b_max, b_id, b_best)
        b_new = tl.maximum(b_max, b_largest)
        # Finite while nothing is, so that weights are 0 and not NaN; NaN or +inf still make the mass NaN.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_below = b_logits - b_base[:, None]
        b_weight = tl.exp2(b_below * LOG2_E)
        b_share = tl.where(b_max == b_new, 1.0, tl.exp2((b_max - b_new) * LOG2_E))
        if ENTROPY:
            b_drop = tl.where(b_mass > 0, b_max - b_new, 0.0)
            b_product = tl.where(b_weight > 0, b_weight * b_below, 0.0)
            b_moment = b_share * (b_moment + b_mass * b_drop) + tl.sum(b_product, 1)
        b_mass = b_mass * b_share + tl.sum(b_weight, 1)
        b_max = b_new

    where = (o_row, m_row, split, num_rows, splits)
    _store(p_parts, MAX, *where, b_max)
    _store(p_parts, MASS, *where, b_mass)
    _store(p_parts, BEST, *where, b_best)
    if ENTROPY:
        _store(p_parts, MOMENT, *where, b_moment)


@triton.jit
def _load(p_parts, field, o_row, o_split, m_part, num_rows, splits, other):
    p_field = p_parts + (field * num_rows.to(tl.int64) + o_row[:, None]) * splits + o_split[None, :]
    return tl.load(p_field, mask=m_part, other=other)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def combine_kernel(
    p_parts, p_rows, p_token, p_own, p_nonfinite, p_entropy,
    num_rows, num_tokens, splits,
    ENTROPY: tl.constexpr, BLOCK_X: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Token, probability and flag of a row from the numbers of its ranges; zeros for row -1."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    o_split = tl.arange(0, SPLITS)
    m_row = o_row < num_rows
    b_is_row = tl.load(p_rows + o_row, mask=m_row, other=-1) >= 0
    m_part = b_is_row[:, None] & (o_split < splits)[None, :]
    at = (o_row, o_split, m_part, num_rows, splits)
    b_max = _load(p_parts, MAX, *at, float("-inf"))
    b_mass = _load(p_parts, MASS, *at, 0.0)
    b_best = _load(p_parts, BEST, *at, 0.0).to(tl.int32)
    b_largest = tl.max(b_max, 1)
    b_base = tl.where(b_largest == float("-inf"), 0.0, b_largest)
    b_below = b_max - b_base[:, None]
    b_share = tl.exp2(b_below * LOG2_E)
    mass = tl.sum((b_mass * b_share).to(tl.float64), 1)
    # A comparison with NaN is false.
    b_is_finite = (tl.abs(b_largest) < float("inf")) & (mass < float("inf")) & (mass > 0)
    token = tl.min(tl.where(b_max == b_largest[:, None], b_best, ANY_ID), 1)
    token = tl.minimum(tl.maximum(token, 0), num_tokens - 1)
    own = tl.exp2((b_largest - b_base) * LOG2_E).to(tl.float64) / tl.where(mass > 0, mass, 1.0)
    tl.store(p_token + o_row, tl.where(b_is_finite, token, 0).to(tl.int64), mask=m_row)
    tl.store(p_own + o_row, tl.where(b_is_finite, own, 0.0), mask=m_row)
    tl.store(p_nonfinite + o_row, (b_is_row & (b_is_finite == 0)).to(tl.int8), mask=m_row)
    if ENTROPY:
        b_moment = _load(p_parts, MOMENT, *at, 0.0)
        b_drop = tl.where(b_mass > 0, b_below, 0.0)
        moment = tl.sum((b_share * (b_moment + b_mass * b_drop)).to(tl.float64), 1)
        entropy = tl.log(tl.where(b_is_finite, mass, 1.0)) - moment / tl.where(mass > 0, mass, 1.0)
        tl.store(p_entropy + o_row, tl.where(b_is_finite, entropy, 0.0), mask=m_row)
