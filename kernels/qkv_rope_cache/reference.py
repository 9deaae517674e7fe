"""The definition of the op, in fp32 or, for fp64 input, fp64, row by row. Formula in README.md.

R rows, J fused heads (N + 2K), N query heads, K KV heads, H head dim, h half of it, S physical KV slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def qkv_rope_cache_reference(
    qkv_RJH: Tensor,
    k_cache_SKH: Tensor,
    v_cache_SKH: Tensor,
    *,
    positions_R: Tensor,
    slot_mapping_R: Tensor,
    inv_freq_h: Tensor,
    rope_scaling: float = 1.0,
    qk_norm_YH: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """q [R, N, H], not rounded; k and v are written to the caches. Y is N + K."""
    dtype = torch.float64 if qkv_RJH.dtype == torch.float64 else torch.float32
    num_kv_heads = k_cache_SKH.shape[1]
    rotated = qkv_RJH.shape[1] - num_kv_heads
    rows = qkv_RJH.to(dtype)
    qk_RYH, v_RKH = rows[:, :rotated], rows[:, rotated:]
    if qk_norm_YH is not None:
        size_RY1 = qk_RYH.square().mean(dim=-1, keepdim=True)
        qk_RYH = qk_RYH / (size_RY1 + norm_eps).sqrt() * qk_norm_YH.to(dtype)
    angles_R1h = (positions_R[:, None].float() * inv_freq_h)[:, None].to(dtype)
    cos, sin = angles_R1h.cos() * rope_scaling, angles_R1h.sin() * rope_scaling
    low, high = qk_RYH.chunk(2, dim=-1)
    qk_RYH = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    for row, slot in enumerate(slot_mapping_R.tolist()):
        if slot >= 0:
            k_cache_SKH[slot] = qk_RYH[row, rotated - num_kv_heads :].to(k_cache_SKH.dtype)
            v_cache_SKH[slot] = v_RKH[row].to(v_cache_SKH.dtype)
    return qk_RYH[:, : rotated - num_kv_heads]
