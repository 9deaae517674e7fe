"""The Triton kernel of grouped products: y^T = W x^T of one expert's rows, tile by tile.

The weight is the M side of the matrix instruction, as in kernels/linear, so few rows cost few padded ones. A
program walks all columns from the first to the last: the bits of a row do not depend on tiles or other rows.
Contract in README.md. P pairs of a row and an expert, sorted by expert, T tiles, IN columns, OUT outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.linear.kernel import product
from idlm.kernels.swiglu.kernel import rounded_swiglu


@triton.jit(do_not_specialize=["first", "num_experts", "num_chosen"])
def grouped_kernel(
    x,
    w,
    y,
    plan,
    first,
    num_experts,
    num_chosen,
    IN,
    OUT,
    strides,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of an expert's pairs and of outputs.

    GATED: rows of `x` are looked up by pair, those of `y` are in sorted order, `w` has 2 OUT rows per expert,
    gate before up, and the output is silu(gate) * up; a stacked TILE makes both by one product of twice as
    many weight rows. Otherwise `x` is sorted, and the output is stored at its pair's position. Without tiles
    in the plan there is one row, so every pair is a tile. `strides`: of x, an expert, the weight, y."""
    tiles_T4, order_P, experts_P = plan
    BLOCK_O: tl.constexpr = TILE.block_o
    tiles_o = tl.cdiv(OUT, BLOCK_O)
    tile = tl.program_id(0) // tiles_o
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tiles_T4 is None:
        begin = tile
        end = tile + 1
        expert = tl.load(experts_P + tile).to(tl.int32) - first
        expert = tl.where(expert < num_experts, expert, -1)
    else:
        expert = tl.load(tiles_T4 + tile * 4)
        begin = tl.load(tiles_T4 + tile * 4 + 1)
        end = tl.load(tiles_T4 + tile * 4 + 2)
    if expert < 0:
        return
    sorted_R = begin + tl.arange(0, BLOCK_R)
    m_row = sorted_R < end
    pair_R = sorted_R if tiles_T4 is None else tl.load(order_P + sorted_R, mask=m_row, other=0)
    row_x = pair_R // num_chosen if GATED else sorted_R
    row_y = sorted_R if GATED else pair_R
    o = tl.program_id(0) % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    o_column = tl.arange(0, BLOCK_I)
    p_expert = w + expert.to(tl.int64) * strides[1]
    # Rows after the last output are read as the last one: cheaper than a mask, and never stored.
    row_w = tl.minimum(o, OUT - 1)
    p_x = x + row_x.to(tl.int64)[:, None] * strides[0] + o_column[None, :]
    if TILE.stacked:
        o_stacked = tl.arange(0, 2 * BLOCK_O)
        row_w = tl.minimum(tl.program_id(0) % tiles_o * BLOCK_O + o_stacked % BLOCK_O, OUT - 1)
        row_w += o_stacked // BLOCK_O * OUT
    p_w = p_expert + row_w[:, None] * strides[2] + o_column[None, :]
    p_up = p_w + OUT * strides[2] if GATED and not TILE.stacked else p_w
    is_twice: tl.constexpr = GATED and not TILE.stacked
    acc, acc_up = product(p_x, p_w, p_up, m_row, 0, IN, IN, is_twice, EVEN, TILE.stages, PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype = y.dtype.element_ty
    # Every step rounds as the separate torch ops do.
    out = acc.to(dtype)
    if GATED:
        if TILE.stacked:
            pairs = tl.permute(tl.reshape(out, (2, BLOCK_O, BLOCK_R)), (1, 2, 0))
            out, up = tl.split(pairs)
        else:
            up = acc_up.to(dtype)
        out = rounded_swiglu(out.to(tl.float32), up.to(tl.float32), dtype).to(dtype)
    p_y = y + row_y.to(tl.int64)[:, None] * strides[3] + o[None, :]
    tl.store(p_y, out.T, mask=m_row[:, None] & (o < OUT)[None, :])
