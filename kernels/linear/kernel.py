"""The Triton kernel of a skinny linear: y^T = W x^T, tile by tile, the weight streamed once.

The weight is the M side of the matrix instruction, so few rows cost few padded ones. A split is a fixed range
of columns; its product starts from zero, and products of splits are added in their order, whether one
program computes all of them (SERIAL) or several do and the last to finish adds them up. So the bits of a row
depend on the ranges and on nothing else. Contract in README.md.

R rows, D input width, E output width."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.linear.kernel_finish import (
    H_TILE,
    finish,
    finish_with_lora,
    p_of_part,
    store_part,
    sum_of_parts,
)

QUANTUM: tl.constexpr = tl.constexpr(256)
"""Splits start at its multiples, so that tiles of any width share the same ranges of columns."""
SECTOR_BITS: tl.constexpr = tl.constexpr(256)
"""Minimum size of a memory request."""


@triton.jit
def _first_column(split, splits, D):
    return split * tl.cdiv(D, QUANTUM) // splits * QUANTUM


@triton.jit
def _prefetch(p_row, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD columns of every row into the L2 cache, without waiting.

    A bulk request per row would need one request for 256 bytes, but a warp issues those one by one."""
    STEP: tl.constexpr = SECTOR_BITS // p_row.dtype.element_ty.primitive_bitwidth
    p = p_row[:, None] + tl.arange(0, AHEAD // STEP)[None, :] * STEP
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [p.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def product(
    p_x,
    p_w,
    p_up,
    m_row,
    first,
    end,
    D,
    GATED: tl.constexpr,
    EVEN_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W x^T over columns first..end, [BLOCK_E, BLOCK_R] fp32, and the product of the up rows if GATED."""
    BLOCK_E: tl.constexpr = p_w.shape[0]
    BLOCK_D: tl.constexpr = p_w.shape[1]
    BLOCK_R: tl.constexpr = m_row.shape[0]
    acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    o_column = tl.arange(0, BLOCK_D)
    for column in tl.range(first, end, BLOCK_D, num_stages=STAGES):
        m_column = (column + o_column < D)[None, :]
        x = tl.load(p_x + column, mask=m_row[:, None] if EVEN_D else m_row[:, None] & m_column, other=0.0)
        w = tl.load(p_w + column) if EVEN_D else tl.load(p_w + column, mask=m_column, other=0.0)
        acc = tl.dot(w.to(x.dtype), x.T, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(p_up + column) if EVEN_D else tl.load(p_up + column, mask=m_column, other=0.0)
            acc_up = tl.dot(up.to(x.dtype), x.T, acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit(do_not_specialize=["splits", "R"])
def linear_kernel(
    x_RD,
    w_ED,
    y_RE,
    scale_E,
    bias_E,
    work,
    adapter,
    R,
    E,
    D,
    strides,
    splits,
    GATED: tl.constexpr,
    EVEN_D: tl.constexpr,
    MANY: tl.constexpr,
    SERIAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of rows and outputs, over one split of the columns or (SERIAL) over all of them in turn.

    MANY: every split has its own program, or waits for the programs of h. GATED: `w_ED` has 2E rows, gate
    before up, and the output is silu(gate) * up. With an `adapter` (only if GATED) the A
    of gate and of up follow these rows, `rank` rows each; their tiles come first in the grid, and there is
    one tile of rows. `work`: partial sums and counters. `strides`: of x and weight, from gate to up, of y."""
    stride_x, stride_w, up_offset, stride_y = strides
    partials, counters = work
    SLOTS: tl.constexpr = 2 if GATED else 1
    tiles_r = tl.cdiv(R, BLOCK_R)
    programs = splits if MANY else 1
    row = (tl.program_id(0) % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    split = tl.program_id(0) // tiles_r % programs
    tile_e = tl.program_id(0) // tiles_r // programs
    tile = tile_e * tiles_r + tl.program_id(0) % tiles_r
    num_outputs, is_h = E, False
    if adapter is not None:
        rank = adapter[3]
        is_h = tile_e < tl.cdiv(rank, BLOCK_E)
        tile_e -= tl.where(is_h, 0, tl.cdiv(rank, BLOCK_E))
        w_ED += tl.where(is_h, (2 * E).to(tl.int64) * stride_w, 0)
        up_offset = tl.where(is_h, rank * stride_w, up_offset)
        num_outputs = tl.where(is_h, rank, E)
    e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_row, m_e = row < R, e < num_outputs
    o_column = tl.arange(0, BLOCK_D)
    # Rows after the last output are read as the last one: cheaper than a mask, and never stored.
    p_row = w_ED + tl.minimum(e, num_outputs - 1).to(tl.int64) * stride_w
    p_w, p_up = p_row[:, None] + o_column[None, :], p_row[:, None] + o_column[None, :]
    if GATED:
        p_up += up_offset
    p_x = x_RD + row[:, None] * stride_x + o_column[None, :]
    if PDL:
        if AHEAD:
            # Weights do not depend on the previous kernel, which leaves the memory idle when it ends.
            p_first = p_row + _first_column(split, splits, D)
            _prefetch(p_first, AHEAD)
            if GATED:
                _prefetch(p_first + up_offset, AHEAD)
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    # This loop is not unrolled: copies of the pipeline would cost registers.
    for s in range(0 if SERIAL else split, splits if SERIAL else split + 1):
        first = _first_column(s, splits, D)
        end = tl.minimum(_first_column(s + 1, splits, D), D)
        part, part_up = product(p_x, p_w, p_up, m_row, first, end, D, GATED, EVEN_D, STAGES, PRECISION)
        acc, acc_up = acc + part, acc_up + part_up

    if PDL:
        # Not earlier: the next large kernel would be spread unevenly over the multiprocessors that are free.
        tl.extra.cuda.gdc_launch_dependents()
    p_part = p_of_part(partials, tile, splits, SLOTS, BLOCK_E, BLOCK_R)
    is_last, count = True, 0
    if MANY:
        store_part(acc, acc_up, p_part, split, splits, SLOTS)
        tl.debug_barrier()
        count = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        is_last = count % H_TILE == splits - 1
    if is_last:
        outputs = (e, m_e, row, m_row)
        if adapter is not None:
            products, at = (acc, acc_up, p_part, splits), (is_h, count, tile, outputs)
            finish_with_lora(
                products, y_RE, bias_E, counters, adapter, at, E, stride_y, BLOCK_K, BLOCK_T, PRECISION
            )
        else:
            if MANY:
                acc, acc_up = sum_of_parts(acc, acc_up, p_part, splits, SLOTS)
                tl.store(counters + tile, 0)
            finish(acc, acc_up, y_RE, scale_E, bias_E, outputs, E, stride_y, GATED)
