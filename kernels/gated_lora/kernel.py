"""The Triton kernels of gated LoRA: shrink to the rank in fixed shares of the width, expand and add.

Tiles of rows without a MASK row return at once, so a prompt's chunk costs nothing. Shares are added by the
second kernel in their order; there are no atomics. Contract in README.md.

R rows, D input width, E output width, r rank, X ranks of all P parts (P r), S shares of the width.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _prefetch(p_rows, num_bytes):
    """Ask for that much of every row in the L2 cache; nobody waits."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [p_rows.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def shrink_kernel(
    x_RD,
    is_mask_R,
    a_XD,
    partial_SRX,
    R,
    X,
    D,
    stride_x,
    stride_a,
    SPLITS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Share of A x^T of one tile of rows and ranks, over one share of the width."""
    tiles_r = tl.cdiv(R, BLOCK_R)
    row = (tl.program_id(0) % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    split = tl.program_id(0) // tiles_r % SPLITS
    o_x = tl.program_id(0) // tiles_r // SPLITS * BLOCK_X + tl.arange(0, BLOCK_X)
    o_column = tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(D, BLOCK_D)
    first, end = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    p_row = a_XD + tl.minimum(o_x, X - 1).to(tl.int64) * stride_a
    if PDL:
        if PREFETCH:
            ITEM: tl.constexpr = a_XD.dtype.element_ty.primitive_bitwidth // 8
            count = tl.minimum(end * BLOCK_D, D) - first * BLOCK_D
            if count > 0:
                _prefetch(p_row + first * BLOCK_D, tl.full([BLOCK_X], 0, tl.int32) + count * ITEM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_mask = (tl.load(is_mask_R + row, mask=row < R, other=0) != 0) & (row < R)
    if tl.max(is_mask.to(tl.int32), 0) == 0:
        return
    p_a = p_row[:, None] + o_column[None, :]
    p_x = x_RD + row[:, None] * stride_x + o_column[None, :]
    acc = tl.zeros([BLOCK_X, BLOCK_R], dtype=tl.float32)
    for i in tl.range(first, end, num_stages=STAGES):
        m_column = (i * BLOCK_D + o_column < D)[None, :]
        a = tl.load(p_a + i * BLOCK_D, mask=m_column, other=0.0)
        x = tl.load(p_x + i * BLOCK_D, mask=is_mask[:, None] & m_column, other=0.0)
        acc = tl.dot(a, x.T, acc, input_precision=PRECISION)
    at = (split * R + row[:, None]) * X + o_x[None, :]
    tl.store(partial_SRX + at, acc.T, mask=is_mask[:, None] & (o_x < X)[None, :])


@triton.jit
def expand_kernel(
    y_RE,
    is_mask_R,
    partial_SRX,
    b_Er,
    R,
    X,
    size_0,
    size_1,
    size_2,
    rank,
    scaling,
    stride_y,
    stride_b,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += scaling * B h of the MASK rows of one tile; no other row is read or written."""
    tiles_r = tl.cdiv(R, BLOCK_R)
    row = (tl.program_id(0) % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    tile = tl.program_id(0) // tiles_r
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_E), tl.cdiv(size_1, BLOCK_E)
    part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    in_part = tile - tl.where(part > 0, tiles_0, 0) - tl.where(part > 1, tiles_1, 0)
    start = tl.where(part > 0, size_0, 0) + tl.where(part > 1, size_1, 0)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    o_e = in_part * BLOCK_E + tl.arange(0, BLOCK_E)
    e, m_e = start + o_e, o_e < size
    o_rank = tl.arange(0, BLOCK_K)
    p_row = b_Er + tl.minimum(e, start + size - 1).to(tl.int64) * stride_b
    if PDL:
        if PREFETCH:
            ITEM: tl.constexpr = b_Er.dtype.element_ty.primitive_bitwidth // 8
            _prefetch(p_row, tl.full([BLOCK_E], 0, tl.int32) + rank * ITEM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_mask = (tl.load(is_mask_R + row, mask=row < R, other=0) != 0) & (row < R)
    if tl.max(is_mask.to(tl.int32), 0) == 0:
        return
    dtype = y_RE.dtype.element_ty
    acc = tl.zeros([BLOCK_E, BLOCK_R], dtype=tl.float32)
    for first in tl.range(0, rank, BLOCK_K, num_stages=STAGES):
        k = first + o_rank
        m_k = (k < rank)[None, :]
        b = tl.load(
            b_Er + e.to(tl.int64)[:, None] * stride_b + k[None, :], mask=m_e[:, None] & m_k, other=0.0
        )
        p_h = partial_SRX + row[:, None] * X + part * rank + k[None, :]
        h = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
        for s in tl.static_range(SPLITS):
            h += tl.load(p_h + (tl.zeros([], tl.int64) + s) * R * X, mask=is_mask[:, None] & m_k, other=0.0)
        acc = tl.dot(b, h.to(dtype).T, acc, input_precision=PRECISION)
    gain = (acc.T.to(dtype).to(tl.float32) * scaling).to(dtype).to(tl.float32)
    p_y = y_RE + row[:, None] * stride_y + e[None, :]
    mask = is_mask[:, None] & m_e[None, :]
    y = tl.load(p_y, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y, (y + gain).to(dtype), mask=mask)
