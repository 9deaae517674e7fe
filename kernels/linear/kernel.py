"""The Triton kernel of a skinny linear: y^T = W x^T, tile by tile, the weight streamed once.

The weight is the M side of the matrix instruction, so few rows cost few padded ones. A split is a fixed range
of columns; its product starts from zero, and products of splits are added in their order, whether one
program computes all of them (SERIAL) or several do and the last to finish adds them up. So the bits of a row
depend on the ranges and on nothing else. Contract in README.md.

R rows, D input width, E output width.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

QUANTUM: tl.constexpr = tl.constexpr(256)
"""Splits start at multiples of it, whatever the tile, so that tiles of any width share the same ranges."""


@triton.jit
def _first_column(split, splits, D):
    return split * tl.cdiv(D, QUANTUM) // splits * QUANTUM


@triton.jit
def _product(
    p_x,
    p_w,
    p_up,
    m_row,
    first,
    end,
    D,
    GATED: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W x^T over columns first..end, [BLOCK_E, BLOCK_R] fp32, and that of the up rows when GATED."""
    acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    o_column = tl.arange(0, BLOCK_D)
    for column in tl.range(first, end, BLOCK_D, num_stages=STAGES):
        if EVEN_D:
            x = tl.load(p_x + column, mask=m_row[:, None], other=0.0)
            w = tl.load(p_w + column)
        else:
            m_column = (column + o_column < D)[None, :]
            x = tl.load(p_x + column, mask=m_row[:, None] & m_column, other=0.0)
            w = tl.load(p_w + column, mask=m_column, other=0.0)
        acc = tl.dot(w.to(x.dtype), x.T, acc, input_precision=PRECISION)
        if GATED:
            if EVEN_D:
                up = tl.load(p_up + column)
            else:
                up = tl.load(p_up + column, mask=m_column, other=0.0)
            acc_up = tl.dot(up.to(x.dtype), x.T, acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit
def _rounded(acc, scale_E, bias_E, e, m_e, dtype, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The product as a linear returns it: scaled, biased, rounded; in fp32 again."""
    if SCALED:
        acc = acc * tl.load(scale_E + e, mask=m_e, other=0.0)[:, None]
    if HAS_BIAS:
        acc = acc + tl.load(bias_E + e, mask=m_e, other=0.0).to(tl.float32)[:, None]
    return acc.to(dtype).to(tl.float32)


@triton.jit
def _finish(
    acc,
    acc_up,
    y_RE,
    scale_E,
    bias_E,
    e,
    m_e,
    row,
    m_row,
    E,
    stride_y,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Epilogue and store; every step rounds as the separate torch ops do."""
    dtype = y_RE.dtype.element_ty
    y = _rounded(acc, scale_E, bias_E, e, m_e, dtype, SCALED, HAS_BIAS)
    if GATED:
        up = _rounded(acc_up, scale_E + E, bias_E + E, e, m_e, dtype, SCALED, HAS_BIAS)
        y = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32) * up
    y = y.to(dtype).T
    mask = m_row[:, None] & m_e[None, :]
    tl.store(y_RE + row[:, None] * stride_y + e[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["splits", "R"])
def linear_kernel(
    x_RD,
    w_ED,
    y_RE,
    scale_E,
    bias_E,
    partials,
    counters,
    R,
    E,
    D,
    stride_x,
    stride_w,
    up_offset,
    stride_y,
    splits,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_D: tl.constexpr,
    MANY: tl.constexpr,
    SERIAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of rows and outputs, over one split of the columns or (SERIAL) over all of them in turn.

    MANY: every split has a program of its own.
    GATED: `w_ED` has 2E rows, gate before up, and the output is silu(gate) * up.
    """
    tiles_r = tl.cdiv(R, BLOCK_R)
    programs = splits if MANY else 1
    row = (tl.program_id(0) % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    split = tl.program_id(0) // tiles_r % programs
    tile_e = tl.program_id(0) // tiles_r // programs
    e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_row, m_e = row < R, e < E
    o_column = tl.arange(0, BLOCK_D)
    # Rows behind the last output are read as the last one: cheaper than a mask, and never stored.
    p_row = w_ED + tl.minimum(e, E - 1).to(tl.int64) * stride_w
    p_w, p_up = p_row[:, None] + o_column[None, :], p_row[:, None] + o_column[None, :]
    if GATED:
        p_up += up_offset
    p_x = x_RD + row[:, None] * stride_x + o_column[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    # A loop that is not unrolled: copies of the pipeline would cost registers.
    for s in range(0 if SERIAL else split, splits if SERIAL else split + 1):
        first = _first_column(s, splits, D)
        end = tl.minimum(_first_column(s + 1, splits, D), D)
        part, part_up = _product(
            p_x, p_w, p_up, m_row, first, end, D, GATED, EVEN_D, BLOCK_E, BLOCK_R, BLOCK_D, STAGES, PRECISION
        )
        acc, acc_up = acc + part, acc_up + part_up

    if PDL:
        # Not before: the next large kernel would be spread over what this one has left free, unevenly.
        tl.extra.cuda.gdc_launch_dependents()
    is_last = True
    if MANY:
        SLOTS: tl.constexpr = 2 if GATED else 1
        SIZE: tl.constexpr = BLOCK_E * BLOCK_R
        tile = tile_e * tiles_r + tl.program_id(0) % tiles_r
        at = tl.arange(0, BLOCK_E)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        p_part = partials + tile.to(tl.int64) * splits * (SLOTS * SIZE) + at
        tl.store(p_part + split * (SLOTS * SIZE), acc)
        if GATED:
            tl.store(p_part + split * (SLOTS * SIZE) + SIZE, acc_up)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
            acc_up = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
            for s in range(splits):
                # Other multiprocessors wrote these: .cg reads past this one's L1 cache.
                acc += tl.load(p_part + s * (SLOTS * SIZE), cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(p_part + s * (SLOTS * SIZE) + SIZE, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        _finish(
            acc,
            acc_up,
            y_RE,
            scale_E,
            bias_E,
            e,
            m_e,
            row,
            m_row,
            E,
            stride_y,
            GATED,
            SCALED,
            HAS_BIAS,
        )
