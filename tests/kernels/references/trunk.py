"""The definitions of the ops between attention and products, in fp32 or, for fp64 input, fp64, row by row.
Formulas in the READMEs of gated_lora, linear, qkv_rope_cache, rms_norm and swiglu.

R rows, D input width, E output width, F ffn width, r rank, P parts of a fused projection, J fused heads (N +
2K), N query heads, K KV heads, H head dim, h half of it, S physical KV slots."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_reference(x_RD: Tensor, weight_ED: Tensor, *, bias_E: Tensor | None = None) -> Tensor:
    """x W^T + bias, [R, E], not rounded."""
    dtype = torch.promote_types(x_RD.dtype, torch.float32)
    y_RE = x_RD.to(dtype) @ weight_ED.to(dtype).T
    return y_RE if bias_E is None else y_RE + bias_E.to(dtype)


def linear_swiglu_reference(x_RD: Tensor, weight_ED: Tensor, *, bias_E: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [R, F]; the first F rows of the weight are the gate's."""
    gate_RF, up_RF = linear_reference(x_RD, weight_ED, bias_E=bias_E).chunk(2, dim=-1)
    return gate_RF * torch.sigmoid(gate_RF) * up_RF


def gated_lora_reference(
    y_RE: Tensor,
    x_RD: Tensor,
    is_mask_R: Tensor,
    a_PrD: Tensor,
    b_Er: Tensor,
    *,
    sizes: tuple[int, ...],
    scaling: float,
) -> Tensor:
    """y + scaling * B A x in MASK rows, y elsewhere; not rounded."""
    dtype = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    result_RE = y_RE.to(dtype).clone()
    for row in range(len(x_RD)):
        if is_mask_R[row]:
            parts = zip(a_PrD.to(dtype), b_Er.to(dtype).split(sizes), strict=True)
            gain = torch.cat([b_er @ (a_rD @ x_RD[row].to(dtype)) for a_rD, b_er in parts])
            result_RE[row] += scaling * gain
    return result_RE


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
    scaling_h = torch.where(inv_freq_h == 0, 1.0, rope_scaling).to(dtype)
    cos, sin = angles_R1h.cos() * scaling_h, angles_R1h.sin() * scaling_h
    low, high = qk_RYH.chunk(2, dim=-1)
    qk_RYH = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    for row, slot in enumerate(slot_mapping_R.tolist()):
        if slot >= 0:
            k_cache_SKH[slot] = qk_RYH[row, rotated - num_kv_heads :].to(k_cache_SKH.dtype)
            v_cache_SKH[slot] = v_RKH[row].to(v_cache_SKH.dtype)
    return qk_RYH[:, : rotated - num_kv_heads]


def add_rms_norm_reference(
    x_RD: Tensor, residual_RD: Tensor | None, weight_D: Tensor, *, eps: float, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """(normed, residual), neither rounded."""
    dtype = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    sum_RD = x_RD.to(dtype) if residual_RD is None else x_RD.to(dtype) + residual_RD.to(dtype)
    size_RD = torch.cat(
        [part.square().mean(dim=-1, keepdim=True).expand_as(part) for part in sum_RD.chunk(groups, dim=1)],
        dim=1,
    )
    return sum_RD / (size_RD + eps).sqrt() * weight_D.to(dtype), sum_RD


def swiglu_reference(gate_up_RE: Tensor) -> Tensor:
    """silu(gate) * up, [R, F], of [R, 2F]; not rounded."""
    dtype = torch.float64 if gate_up_RE.dtype == torch.float64 else torch.float32
    gate_RF, up_RF = gate_up_RE.to(dtype).chunk(2, dim=-1)
    return gate_RF * torch.sigmoid(gate_RF) * up_RF
