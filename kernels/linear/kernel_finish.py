"""Epilogue of the skinny linear: scale, bias, gated LoRA, SwiGLU, each rounded as the separate ops round it,
and the store.

With gated LoRA, tiles of h = A x have their own programs, the first of the grid. Each adds to the counters of
all output tiles, and the last program of an output tile waits for them after its product. Programs start in
the order of their ids and a tile of h never waits, so the wait ends.

R rows, E output width, X ranks of h: those of gate, then those of up. `outputs`: outputs and rows of a tile,
each with its mask."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.backend import INTERPRETED
from idlm.kernels.gated_lora.kernel import rounded_gain, rows_of_b
from idlm.kernels.swiglu.kernel import rounded_swiglu

IN_INTERPRETER: tl.constexpr = tl.constexpr(INTERPRETED)
IN_FLIGHT: tl.constexpr = tl.constexpr(4)
"""Number of parts that are loaded ahead."""
H_TILE: tl.constexpr = tl.constexpr(1 << 16)
"""A tile of h adds this to the counter of every output tile, and a split adds 1."""


@triton.jit
def p_of_part(partials, tile, splits, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr):
    """Pointer to the product of a tile's first split; the products of the others follow."""
    at = tl.arange(0, BLOCK_E)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    return partials + tile.to(tl.int64) * splits * (SLOTS * BLOCK_E * BLOCK_R) + at


@triton.jit
def store_part(acc, acc_up, p_part, split, splits, SLOTS: tl.constexpr):
    """Store the product of one split for the last program of its tile."""
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    if splits > 1:
        tl.store(p_part + split * (SLOTS * SIZE), acc)
        if SLOTS == 2:
            tl.store(p_part + split * (SLOTS * SIZE) + SIZE, acc_up)


@triton.jit
def sum_of_parts(acc, acc_up, p_part, splits, SLOTS: tl.constexpr):
    """The products of all splits, added in their order; `acc` if there is one split."""
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    if splits > 1:
        acc = tl.zeros(acc.shape, dtype=tl.float32)
        acc_up = tl.zeros(acc.shape, dtype=tl.float32)
        for first in range(0, splits, IN_FLIGHT // SLOTS):
            for s in tl.static_range(IN_FLIGHT // SLOTS):
                # Other multiprocessors wrote these: .cg reads past this one's L1 cache.
                p, is_part = p_part + (first + s) * (SLOTS * SIZE), first + s < splits
                acc += tl.load(p, mask=is_part, other=0.0, cache_modifier=".cg")
                if SLOTS == 2:
                    acc_up += tl.load(p + SIZE, mask=is_part, other=0.0, cache_modifier=".cg")
    return acc, acc_up


@triton.jit
def _rounded(acc, scale_E, bias_E, first, outputs, dtype):
    """The product as a linear returns it: scaled, biased, rounded; in fp32 again. `first`: the first
    output's number."""
    e, m_e = outputs[0], outputs[1]
    if scale_E is not None:
        acc = acc * tl.load(scale_E + first + e, mask=m_e, other=0.0)[:, None]
    if bias_E is not None:
        acc = acc + tl.load(bias_E + first + e, mask=m_e, other=0.0).to(tl.float32)[:, None]
    return acc.to(dtype).to(tl.float32)


@triton.jit
def _store(y, y_RE, outputs, stride_y):
    """Write [BLOCK_E, BLOCK_R]; previous steps have rounded, so this rounds at most once."""
    e, m_e, row, m_row = outputs
    mask = m_row[:, None] & m_e[None, :]
    tl.store(y_RE + row[:, None] * stride_y + e[None, :], y.to(y_RE.dtype.element_ty).T, mask=mask)


@triton.jit
def finish(acc, acc_up, y_RE, scale_E, bias_E, outputs, E, stride_y, GATED: tl.constexpr):
    """Epilogue and store; every step rounds as the separate torch ops do."""
    dtype = y_RE.dtype.element_ty
    y = _rounded(acc, scale_E, bias_E, 0, outputs, dtype)
    if GATED:
        up = _rounded(acc_up, scale_E, bias_E, E, outputs, dtype)
        y = rounded_swiglu(y, up, dtype)
    _store(y, y_RE, outputs, stride_y)


@triton.jit
def _late(x):
    """The same value, computed here: an operand goes to shared memory, and is waited for, where it is
    computed."""
    if not IN_INTERPRETER:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=False,
            pack=32 // x.dtype.primitive_bitwidth,
        )
    return x


@triton.jit
def _with_gain(y, b, h, is_mask, scaling, dtype, PRECISION: tl.constexpr):
    """round(y + gain) in MASK rows, y in others, whose h may be NaN; [BLOCK_E, BLOCK_R] fp32."""
    gain = rounded_gain(tl.dot(_late(b), _late(h).T, input_precision=PRECISION), scaling, dtype)
    return tl.where(is_mask[None, :], (y + gain).to(dtype).to(tl.float32), y)


@triton.jit
def finish_with_lora(
    products,
    y_RE,
    bias_E,
    counters,
    adapter,
    at,
    E,
    stride_y,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`finish` of a SwiGLU with scaling * B h added to MASK rows of gate and up; or, where `is_h`, the store
    of a tile of h. `count`: of the tile's counter when its last split was added to it."""
    dtype = y_RE.dtype.element_ty
    acc, acc_up, p_part, splits = products
    is_h, count, tile, outputs = at
    e, m_e, row, m_row = outputs
    gate_R, h_RX, b_Er, rank, scaling, stride_b = adapter
    BLOCK_E: tl.constexpr = acc.shape[0]
    tiles_h, tiles_e = tl.cdiv(rank, BLOCK_E), tl.cdiv(E, BLOCK_E)
    if is_h:
        acc, acc_up = sum_of_parts(acc, acc_up, p_part, splits, 2)
        _store(acc, h_RX, outputs, 2 * rank)
        _store(acc_up, h_RX + rank, outputs, 2 * rank)
        tl.store(counters + tile, 0)
        tl.debug_barrier()
        other = tl.arange(0, BLOCK_T)
        tl.atomic_add(counters + tiles_h + other, H_TILE, mask=other < tiles_e, sem="release", scope="gpu")
    else:
        while count < tiles_h * H_TILE:
            count = tl.atomic_add(counters + tile, 0, sem="acquire", scope="gpu")
        tl.store(counters + tile, 0)
        # All loads are issued before any value is used. Others wrote h: .cg reads past the L1 cache.
        k = tl.arange(0, BLOCK_K)
        m_h = m_row[:, None] & (k < rank)[None, :]
        p_h = h_RX + row[:, None] * (2 * rank) + k[None, :]
        h = tl.load(p_h, mask=m_h, other=0.0, cache_modifier=".cg")
        b = rows_of_b(b_Er, e, m_e, k, rank, stride_b)
        h_up = tl.load(p_h + rank, mask=m_h, other=0.0, cache_modifier=".cg")
        b_up = rows_of_b(b_Er, E + e, m_e, k, rank, stride_b)
        is_mask = (tl.load(gate_R + row, mask=m_row, other=0) != 0) & m_row
        acc, acc_up = sum_of_parts(acc, acc_up, p_part, splits, 2)
        gate = _rounded(acc, None, bias_E, 0, outputs, dtype)
        gate = _with_gain(gate, b, h, is_mask, scaling, dtype, PRECISION)
        up = _rounded(acc_up, None, bias_E, E, outputs, dtype)
        up = _with_gain(up, b_up, h_up, is_mask, scaling, dtype, PRECISION)
        _store(rounded_swiglu(gate, up, dtype), y_RE, outputs, stride_y)
