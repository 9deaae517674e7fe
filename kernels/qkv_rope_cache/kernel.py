"""The Triton kernel between the fused projection and attention: one program per row and group of heads.

Rounds step by step where transformers does, so that bf16 equals it: norm, weight, cos and sin, both
products of the rotation, their sum. R rows, J fused heads (N + 2K), H head dim, h half of it, S KV slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(x, dtype):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _halves(p, mask, HALF: tl.constexpr):
    low = tl.load(p, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(p + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_cache(p, low, high, mask, scale, HALF: tl.constexpr):
    dtype = p.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        # Clamped, because a value beyond the range of e4m3 may become NaN.
        low = tl.minimum(tl.maximum(low / scale, -448.0), 448.0)
        high = tl.minimum(tl.maximum(high / scale, -448.0), 448.0)
    tl.store(p, low.to(dtype), mask=mask)
    tl.store(p + HALF, high.to(dtype), mask=mask)


@triton.jit
def qkv_rope_cache_kernel(
    qkv_RJH,
    qk_norm_YH,
    positions_R,
    slot_mapping_R,
    inv_freq_h,
    caches,
    scales,
    strides,
    norm_eps,
    rope_scaling,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_h: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write q of its heads in place, and k and v of its heads to the caches unless the row's slot is -1.

    `strides`: of rows and heads of the projection, of the norm's heads, of slots and heads of both caches."""
    stride_row, stride_head, stride_norm, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head = strides
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (N + 2 * K + BLOCK_J - 1) // BLOCK_J
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = (tl.program_id(0) % GROUPS) * BLOCK_J + tl.arange(0, BLOCK_J)
    o_half = tl.arange(0, BLOCK_h)
    in_half = (o_half < HALF)[None, :]
    mask = (head < N + 2 * K)[:, None] & in_half
    is_rotated = (head < N + K)[:, None]
    dtype = qkv_RJH.dtype.element_ty
    # Positions and slots do not depend on the projection, so they are read before the wait.
    inv_freq = tl.load(inv_freq_h + o_half, mask=o_half < HALF, other=0.0)
    angle = tl.load(positions_R + row).to(tl.float32) * inv_freq
    scaling = tl.where(inv_freq == 0.0, 1.0, rope_scaling)
    cos = _round(tl.cos(angle) * scaling, dtype)[None, :]
    sin = _round(tl.sin(angle) * scaling, dtype)[None, :]
    slot = tl.load(slot_mapping_R + row).to(tl.int64)
    if qk_norm_YH is not None:
        p_norm = qk_norm_YH + head[:, None] * stride_norm + o_half[None, :]
        norm_low, norm_high = _halves(p_norm, mask & is_rotated, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_qkv = qkv_RJH + row * stride_row + head[:, None] * stride_head + o_half[None, :]
    low, high = _halves(p_qkv, mask, HALF)
    new_low, new_high = low, high
    if qk_norm_YH is not None:
        size = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + norm_eps)[:, None]
        # As for a whole row: fp32 weights are multiplied with what is not rounded.
        norm_dtype = qk_norm_YH.dtype.element_ty
        new_low = _round(_round(low * size, norm_dtype) * norm_low, dtype)
        new_high = _round(_round(high * size, norm_dtype) * norm_high, dtype)
    turned_low = _round(new_low * cos, dtype) - _round(new_high * sin, dtype)
    turned_high = _round(new_high * cos, dtype) + _round(new_low * sin, dtype)
    low = tl.where(is_rotated, _round(turned_low, dtype), low)
    high = tl.where(is_rotated, _round(turned_high, dtype), high)

    is_query = mask & (head < N)[:, None]
    tl.store(p_qkv, low.to(dtype), mask=is_query)
    tl.store(p_qkv + HALF, high.to(dtype), mask=is_query)
    is_key = mask & ((head >= N) & (head < N + K))[:, None] & (slot >= 0)
    is_value = mask & (head >= N + K)[:, None] & (slot >= 0)
    k_head, v_head = tl.maximum(head - N, 0), tl.maximum(head - N - K, 0)
    k_scale = tl.full([BLOCK_J, 1], 1.0, tl.float32)
    v_scale = k_scale
    if scales is not None:
        k_scale = tl.load(scales[0] + k_head, mask=k_head < K, other=1.0)[:, None]
        v_scale = tl.load(scales[1] + v_head, mask=v_head < K, other=1.0)[:, None]
    p_k = caches[0] + slot * stride_k_slot + k_head[:, None] * stride_k_head + o_half[None, :]
    _store_cache(p_k, low, high, is_key, k_scale, HALF)
    p_v = caches[1] + slot * stride_v_slot + v_head[:, None] * stride_v_head + o_half[None, :]
    _store_cache(p_v, low, high, is_value, v_scale, HALF)
