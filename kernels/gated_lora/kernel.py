"""The Triton kernel of gated LoRA's second half: adds B h to MASK rows, and computes a SwiGLU that follows;
and its launch. Every adapter has its own programs, which take the rows of that adapter alone.

R rows, E outputs of all adapters, F half of one's for a SwiGLU, X ranks of all parts, r rank of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from idlm.kernels.backend import has_pdl, pdl_options, rounds_as_written
from idlm.kernels.gated_lora.types import Gate, RowGroups, gate_of
from idlm.kernels.swiglu.kernel import rounded_swiglu

BLOCK_E = 64
MAX_RANKS = 128
ROWS = (16, 32, 64)
PROGRAMS, STAGES = 264, 2
"""With more rows: programs, each of which reads its B once and goes from tile to tile of
rows, and how many of these are on their way."""
WARPS = 8


@triton.jit
def rows_of_b(b_Er, e, m_e, k, rank, stride_b):
    """Columns `k` of rows `e` of B, [BLOCK_E, BLOCK_K]."""
    mask = m_e[:, None] & (k < rank)[None, :]
    return tl.load(b_Er + e.to(tl.int64)[:, None] * stride_b + k[None, :], mask=mask, other=0.0)


@triton.jit
def rounded_gain(acc, scaling, dtype):
    """round(scaling * round(B h)) of the fp32 products B h; in fp32 again."""
    return (acc.to(dtype).to(tl.float32) * scaling).to(dtype).to(tl.float32)


@triton.jit
def _gain(b, p_h, of_b, is_mask, scaling, dtype, IS_WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """round(scaling * round(B h)) of MASK rows [BLOCK_R, BLOCK_E], 0 in others; `b`: the first columns."""
    b_Er, e, m_e, k, rank, stride_b = of_b
    h = tl.load(p_h + k[None, :], mask=is_mask[:, None] & (k < rank)[None, :], other=0.0)
    acc = tl.dot(b, h.T, input_precision=PRECISION)
    if IS_WIDE:
        for first in tl.range(k.shape[0], rank, k.shape[0], num_stages=1):
            more = first + k
            b = rows_of_b(b_Er, e, m_e, more, rank, stride_b)
            h = tl.load(p_h + more[None, :], mask=is_mask[:, None] & (more < rank)[None, :], other=0.0)
            acc = tl.dot(b, h.T, acc, input_precision=PRECISION)
    return rounded_gain(acc.T, scaling, dtype)


@triton.jit
def _rows(gate_R, at, R, of_group):
    """Rows, and which are MASK rows: those `at` themselves, or of several adapters those that the group has
    at these places, before `end`."""
    if of_group is None:
        row, is_mask = at, (tl.load(gate_R + at, mask=at < R, other=0) != 0) & (at < R)
    else:
        row = tl.load(of_group[0] + at, mask=at < of_group[1], other=0)
        is_mask = (at < of_group[1]) & of_group[2]
    return row, is_mask


@triton.jit
def _add_rows(
    tensors, row, is_mask, is_stored, gate, up, of_tile, IS_WIDE: tl.constexpr, PRECISION: tl.constexpr
):
    """A tile of rows: y += scaling * B h of MASK rows, or silu(gate) * up of all that are stored. `gate` and
    `up`: the first columns of B, and what `_gain` takes of it."""
    y_RE, out_RF, h_RX, scaling, strides = tensors
    o_e, part, size_0 = of_tile
    b, of_b = gate
    e, m_e, rank = of_b[1], of_b[2], of_b[4]
    GATED: tl.constexpr = out_RF is not None
    dtype = y_RE.dtype.element_ty
    p_h = h_RX + row[:, None] * strides[2] + part * rank
    p_y = y_RE + row[:, None] * strides[0] + e[None, :]
    mask = is_stored[:, None] & m_e[None, :]
    # Loaded before the products, so that it arrives meanwhile.
    y = tl.load(p_y, mask=mask, other=0.0)
    y = (y.to(tl.float32) + _gain(b, p_h, of_b, is_mask, scaling, dtype, IS_WIDE, PRECISION)).to(dtype)
    if not GATED:
        tl.store(p_y, y, mask=mask)
    else:
        b_up, of_b_up = up
        up_y = tl.load(p_y + size_0, mask=mask, other=0.0)
        gain = _gain(b_up, p_h + rank, of_b_up, is_mask, scaling, dtype, IS_WIDE, PRECISION)
        up_y = (up_y.to(tl.float32) + gain).to(dtype).to(tl.float32)
        out = rounded_swiglu(y.to(tl.float32), up_y, dtype)
        tl.store(out_RF + row[:, None] * strides[1] + o_e[None, :], out.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["programs_r"])
def expand_kernel(
    y_RE,
    out_RF,
    gate_R,
    h_RX,
    b_Er,
    adapters,
    R,
    sizes,
    rank,
    scaling,
    strides,
    programs_r,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += scaling * B h of the MASK rows of every `programs_r`-th tile; no other row is read or written.

    With `out_RF` y is not written, but silu(gate) * up of all rows goes there; the parts are gate and up.
    IS_WIDE: there are more ranks than `BLOCK_K`. `strides`: of the rows of y, the output, h and B.
    `adapters`: None for one; of several their scalings in place of `scaling`, how many columns of h and rows
    of B each has, and `RowGroups` in place of the gate."""
    GATED: tl.constexpr = out_RF is not None
    of_group, end, start_r = None, R, 0
    if adapters is not None:
        scaling_L, h_width, b_height, order_R, starts = adapters
        # Rows that are no MASK have the first group, which only a SwiGLU needs.
        group = tl.program_id(1) + (0 if GATED else 1)
        adapter = tl.maximum(group - 1, 0)
        start_r, end = tl.load(starts + group), tl.load(starts + group + 1)
        of_group = (order_R, end, group > 0)
        scaling = tl.load(scaling_L + adapter).to(tl.float32)
        h_RX += adapter * h_width
        b_Er += adapter.to(tl.int64) * b_height * strides[3]
    size_0, size_1, size_2 = sizes
    stride_b = strides[3]
    tiles_r = tl.cdiv(end - start_r, BLOCK_R)
    first_r = tl.program_id(0) % programs_r
    tile = tl.program_id(0) // programs_r
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_E), tl.cdiv(size_1, BLOCK_E)
    part = 0
    if not GATED:
        part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    in_part = tile - tl.where(part > 0, tiles_0, 0) - tl.where(part > 1, tiles_1, 0)
    start = tl.where(part > 0, size_0, 0) + tl.where(part > 1, size_1, 0)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    o_e = in_part * BLOCK_E + tl.arange(0, BLOCK_E)
    e, m_e = start + o_e, o_e < size
    k = tl.arange(0, BLOCK_K)
    # Weights do not depend on the kernel before, and the gate was written before the first layer.
    of_b = (b_Er, e, m_e, k, rank, stride_b)
    gate, up = (rows_of_b(b_Er, e, m_e, k, rank, stride_b), of_b), None
    if GATED:
        of_up = (b_Er, size_0 + e, m_e, k, rank, stride_b)
        up = (rows_of_b(b_Er, size_0 + e, m_e, k, rank, stride_b), of_up)
    at = start_r + first_r * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    row, is_mask = _rows(gate_R, at, R, of_group)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tensors = (y_RE, out_RF, h_RX, scaling, strides)
    for _ in tl.range(first_r, tiles_r, programs_r, num_stages=STAGES):
        next_at = at + programs_r * BLOCK_R
        next_row, next_is_mask = _rows(gate_R, next_at, R, of_group)
        if GATED or tl.max(is_mask.to(tl.int32), 0) > 0:
            is_stored = at < end if GATED else is_mask
            _add_rows(tensors, row, is_mask, is_stored, gate, up, (o_e, part, size_0), IS_WIDE, PRECISION)
        at, row, is_mask = next_at, next_row, next_is_mask


def run_expand(
    y_RE: Tensor,
    gate: Gate,
    h_RX: Tensor,
    b_Er: Tensor,
    sizes: tuple[int, ...],
    scaling: float | Tensor,
    *,
    out_RF: Tensor | None = None,
) -> None:
    """Add to the MASK rows of `y_RE`; or, with `out_RF`, leave it and store the SwiGLU of all rows."""
    num_rows, rank = len(y_RE), b_Er.shape[1]
    if num_rows == 0:
        return
    num_groups, adapters, few = 1, None, num_rows
    if isinstance(gate, RowGroups):
        num_groups = len(gate.starts) - (1 if out_RF is not None else 2)
        adapters = (scaling, len(sizes) * rank, sum(sizes), gate.order_R, gate.starts)
        # A group has fewer: rows that are no MASK are a group too.
        few = num_rows // 2
    sizes = (*sizes, 0, 0)[:3] if out_RF is None else (sizes[0], 0, 0)
    block_r = next((rows for rows in ROWS if few <= rows), ROWS[-1])
    block_k = min(MAX_RANKS, max(16, triton.next_power_of_2(rank)))
    tiles = sum(triton.cdiv(size, BLOCK_E) for size in sizes)
    programs_r = min(triton.cdiv(num_rows, block_r), max(1, PROGRAMS // tiles))
    stride_out = 0 if out_RF is None else out_RF.stride(0)
    expand_kernel[(programs_r * tiles, num_groups)](
        *(y_RE, out_RF, gate_of(gate), h_RX, b_Er, adapters, num_rows, sizes, rank),
        0.0 if isinstance(scaling, Tensor) else scaling,
        (y_RE.stride(0), stride_out, h_RX.stride(0), b_Er.stride(0)),
        programs_r,
        BLOCK_E=BLOCK_E,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        STAGES=1 if num_rows <= ROWS[-1] else STAGES,
        IS_WIDE=rank > block_k,
        PRECISION="ieee" if y_RE.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        **(rounds_as_written() if y_RE.dtype.itemsize == 2 else {}),
        **pdl_options(has_pdl(y_RE.device)),
    )
