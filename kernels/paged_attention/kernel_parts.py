"""Parts of walks that several items share: the function that writes one, and the kernel that adds them.

A part is the result of a share of a tile's walk, for each packed row: the weighted sum of values, the sum of
weights, and the maximum that both are relative to. README.md has the reasons, planning.py the records.

N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

import triton
import triton.language as tl

from idlm.kernels.paged_attention.kernel_plan import RECORD

NOTHING: tl.constexpr = tl.constexpr(-1e30)
"""Maximum of no scores; finite, so that a row that has seen nothing yet gives exp2(-inf - it), not NaN."""


@triton.jit
def add_split(acc, total, highest, o, o_total, o_highest):
    """Add one more split to a running sum; splits in which a row sees nothing change no bit of it.

    fma is explicit because the compiler could choose differently in the two kernels that do this."""
    new_highest = tl.maximum(highest, o_highest)
    shrink, weight = tl.exp2(highest - new_highest), tl.exp2(o_highest - new_highest)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), o * weight[:, None])
    return acc, tl.fma(total, shrink, o_total * weight), new_highest


@triton.jit
def add_sums(sums, other):
    """Add another split to the sums of weights and maxima of rows."""
    highest = tl.maximum(sums[1], other[1])
    weight = tl.exp2(other[1] - highest)
    return tl.fma(sums[0], tl.exp2(sums[1] - highest), other[0] * weight), highest


@triton.jit
def _in_half(acc, total, highest):
    """The same part with `acc` in [-2, 2] of float16: a power of two of each row moves into its maximum.

    float16 has 11 bits of the largest value of a row, and the bfloat16 output 8. The range of the power makes
    parts of different size comparable in float32; a part above 2^76 is infinite, and below 2^-64 it is 0."""
    largest = tl.max(tl.abs(acc), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((largest >> 23) - 127, -40), 60)
    shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return acc * shrink[:, None], total * shrink, highest + exponent.to(tl.float32)


@triton.jit
def store_sums(partial_sums, part, target, total, highest, K: tl.constexpr):
    """Store the sum of weights and the maximum of each row of a part, interleaved."""
    in_tile, kv_head = target
    BLOCK_M: tl.constexpr = total.shape[0]
    at = (part.to(tl.int64) * K + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(partial_sums + at * 2, total, mask=in_tile)
    tl.store(partial_sums + at * 2 + 1, highest, mask=in_tile)


@triton.jit
def write_before(out, rows, heads, in_tile, total, highest, N: tl.constexpr):
    """Write the sums before the block of packed rows."""
    at = rows * N + heads
    tl.store(out.totals_RN + at, total, mask=in_tile)
    tl.store(out.highest_RN + at, tl.where(total > 0, highest, float("-inf")), mask=in_tile)


@triton.jit
def store_part(parts, part, target, acc, total, highest, K: tl.constexpr, H: tl.constexpr):
    """Store a part of a tile. `target`: its rows and its KV head."""
    in_tile, kv_head = target
    BLOCK_M: tl.constexpr = acc.shape[0]
    columns = tl.arange(0, acc.shape[1])
    if parts.o.dtype.element_ty == tl.float16:
        acc, total, highest = _in_half(acc, total, highest)
    store_sums(parts.sums, part, target, total, highest, K)
    at = (part.to(tl.int64) * K + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_o, mask = at[:, None] * H + columns[None, :], in_tile[:, None] & (columns < H)[None, :]
    tl.store(parts.o + at_o, acc.to(parts.o.dtype.element_ty), mask=mask)


@triton.jit
def _sum_in_order(
    parts, first_m, num_parts, in_tile, columns, STRIDE: tl.constexpr, H: tl.constexpr, STAGES: tl.constexpr
):
    """Output [m, h] of rows of a tile from its parts, added one by one, STRIDE rows apart."""
    mask = in_tile[:, None] & (columns < H)[None, :]
    acc = tl.zeros([first_m.shape[0], columns.shape[0]], dtype=tl.float32)
    total = tl.zeros([first_m.shape[0]], dtype=tl.float32)
    highest = tl.full([first_m.shape[0]], NOTHING, dtype=tl.float32)
    for i in tl.range(0, num_parts, num_stages=STAGES):
        at = first_m + i * STRIDE
        o_total = tl.load(parts.sums + at * 2, mask=in_tile, other=0.0, cache_modifier=".cg")
        o_highest = tl.load(parts.sums + at * 2 + 1, mask=in_tile, other=NOTHING, cache_modifier=".cg")
        at_o = at[:, None] * H + columns[None, :]
        o = tl.load(parts.o + at_o, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        acc, total, highest = add_split(acc, total, highest, o, o_total, o_highest)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _sum_at_once(
    parts, first_m, num_parts, in_tile, columns, STRIDE: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr
):
    """The same sum in another order: PARTS parts at a time, with one wait for all of them."""
    acc = tl.zeros([first_m.shape[0], columns.shape[0]], dtype=tl.float32)
    total = tl.zeros([first_m.shape[0]], dtype=tl.float32)
    highest = tl.full([first_m.shape[0]], NOTHING, dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = first_m[None, :] + part[:, None] * STRIDE
        mask = in_tile[None, :] & (part < num_parts)[:, None]
        o_total = tl.load(parts.sums + at * 2, mask=mask, other=0.0, cache_modifier=".cg")
        o_highest = tl.load(parts.sums + at * 2 + 1, mask=mask, other=NOTHING, cache_modifier=".cg")
        at_o = at[:, :, None] * H + columns[None, None, :]
        mask_o = mask[:, :, None] & (columns < H)[None, None, :]
        o = tl.load(parts.o + at_o, mask=mask_o, other=0.0, cache_modifier=".cg").to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(o_highest, 0))
        shrink, weight = tl.exp2(highest - new_highest), tl.exp2(o_highest - new_highest[None, :])
        acc = acc * shrink[:, None] + tl.sum(o * weight[:, :, None], 0)
        total = total * shrink + tl.sum(o_total * weight, 0)
        highest = new_highest
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _add_before(sums, first_m, num_parts, in_tile, STRIDE: tl.constexpr, PARTS: tl.constexpr):
    """Sums before the block of rows of a tile from those of its parts, PARTS at a time."""
    total = tl.zeros([first_m.shape[0]], dtype=tl.float32)
    highest = tl.full([first_m.shape[0]], NOTHING, dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = first_m[None, :] + part[:, None] * STRIDE
        mask = in_tile[None, :] & (part < num_parts)[:, None]
        totals = tl.load(sums + at * 2, mask=mask, other=0.0, cache_modifier=".cg")
        highests = tl.load(sums + at * 2 + 1, mask=mask, other=NOTHING, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(highests, 0))
        added = tl.sum(totals * tl.exp2(highests - new_highest[None, :]), 0)
        total = tl.fma(total, tl.exp2(highest - new_highest), added)
        highest = new_highest
    return total, highest


@triton.jit
def combine_kernel(
    o_RNH,
    tiles,
    v_scale_K,
    before,
    parts,
    strides,
    SHAPE: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of BLOCK_M of the TILE_M packed rows of one tile and KV head that was split into items.

    PARTS: how many parts are added at once; 1 adds them in order, as fixed splits need. `before`: where the
    sums before the block go; None: they are not wanted. `strides`: of rows and heads of the output."""
    K: tl.constexpr = SHAPE.num_kv_heads
    G: tl.constexpr = SHAPE.group
    H: tl.constexpr = SHAPE.head_dim
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, record = tl.program_id(0) % K, tiles + tl.program_id(0) // K * RECORD
    count, row = tl.load(record + 20), tl.load(record + 21)
    first_part, num_parts = tl.load(record + 22), tl.load(record + 23)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m, columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    in_tile = m < count * G
    if tl.program_id(1) * BLOCK_M >= count * G:
        return
    at = (first_part.to(tl.int64) * K + kv_head) * TILE_M + m
    STRIDE: tl.constexpr = K * TILE_M
    if PARTS > 1:
        o = _sum_at_once(parts, at, num_parts, in_tile, columns, STRIDE, H, PARTS)
    else:
        o = _sum_in_order(parts, at, num_parts, in_tile, columns, STRIDE, H, STAGES)
    if v_scale_K is not None:
        o = o * tl.load(v_scale_K + kv_head)
    rows, heads = (row + m // G).to(tl.int64), kv_head * G + m % G
    if before is not None:
        total, highest = _add_before(parts.before, at, num_parts, in_tile, STRIDE, PARTS)
        write_before(before, rows, heads, in_tile, total, highest, K * G)
    at = rows[:, None] * strides[0] + heads[:, None] * strides[1] + columns[None, :]
    mask = in_tile[:, None] & (columns < H)[None, :]
    tl.store(o_RNH + at, o.to(o_RNH.dtype.element_ty), mask=mask)
