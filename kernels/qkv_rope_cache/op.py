"""QK norm, rotary embedding and KV write. Contract in README.md.

R rows, J fused heads (N + 2K), Y rotated heads (N + K), N query heads, K KV heads, H head dim, h half of it,
S physical KV slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.kernels.backend import FP8, has_pdl, pdl_options, rounds_as_written, runs_kernels

LARGEST_FP8 = 448.0
FEW_ROWS = 128
"""With more rows a program has twice the heads and the warps: a head then has as many threads, and the sum of
its norm the same order. Four times as many take 92 us in place of 75 (8,192 rows of 48 heads, one H100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a pass's rows. `positions_R` int64, `inv_freq_h` fp32 radians per position,
    0 for dimensions that stay as they are, `scaling` a factor of the other cos and sin. `tables`:
    `rope_tables` if no kernel computes them."""

    positions_R: Tensor
    inv_freq_h: Tensor
    scaling: float
    tables: tuple[Tensor, Tensor] | None


def make_rope(positions_R: Tensor, inv_freq_h: Tensor, *, scaling: float = 1.0, dtype: torch.dtype) -> Rope:
    """Rotations of the rows, for all layers of a pass in `dtype`."""
    tables = None
    if not runs_kernels(positions_R):
        tables = rope_tables(positions_R, inv_freq_h, scaling=scaling, dtype=dtype)
    return Rope(positions_R=positions_R, inv_freq_h=inv_freq_h, scaling=scaling, tables=tables)


def rope_tables(
    positions_R: Tensor, inv_freq_h: Tensor, *, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Factors of a head and of its halves in turn, [R, 1, H], rounded to `dtype`: cos of both, and
    -sin and sin."""
    angles_R1h = (positions_R[:, None].float() * inv_freq_h)[:, None]
    scaling_h = torch.where(inv_freq_h == 0, 1.0, scaling)
    cos_R1h, sin_R1h = ((x_R1h * scaling_h).to(dtype) for x_R1h in (angles_R1h.cos(), angles_R1h.sin()))
    return torch.cat((cos_R1h, cos_R1h), dim=-1), torch.cat((-sin_R1h, sin_R1h), dim=-1)


def qkv_rope_cache(
    qkv_RJH: Tensor,
    k_cache_SKH: Tensor,
    v_cache_SKH: Tensor,
    *,
    rope: Rope,
    slot_mapping_R: Tensor,
    qk_norm_YH: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    heads_per_program: int | None = None,
    warps: int | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """q [R, N, H], a view of `qkv_RJH`, whose query heads are overwritten; k and v go to the caches.

    `slot_mapping_R`, int64: physical slot, or -1 for a row that writes nothing. Scales (fp32,
    both or none) belong to e4m3 caches, which store value / scale. The last three are launch parameters
    (None: chosen by the number of rows, and pdl if the device supports it)."""
    (num_rows, fused_heads, head_dim), num_kv_heads = qkv_RJH.shape, k_cache_SKH.shape[1]
    num_heads = fused_heads - 2 * num_kv_heads
    assert num_heads > 0 and head_dim % 2 == 0, f"{qkv_RJH.shape=} {k_cache_SKH.shape=}"
    assert qkv_RJH.stride(2) == k_cache_SKH.stride(2) == v_cache_SKH.stride(2) == 1, f"{qkv_RJH.stride()=}"
    assert (k_scale_K is None) == (v_scale_K is None), "scales of keys and values come together"
    caches, scales = (k_cache_SKH, v_cache_SKH), (k_scale_K, v_scale_K)
    if not runs_kernels(qkv_RJH):
        assert rope.tables is not None, f"{rope.positions_R.device=} {qkv_RJH.device=}"
        norm = None if qk_norm_YH is None else (qk_norm_YH, norm_eps)
        return plain_qkv_rope_cache(qkv_RJH, *caches, rope.tables, slot_mapping_R, norm, scales)
    import triton

    from idlm.kernels.qkv_rope_cache.kernel import qkv_rope_cache_kernel

    is_few = num_rows <= FEW_ROWS
    heads_per_program = heads_per_program or (4 if is_few else 8)
    norm_stride = 0 if qk_norm_YH is None else qk_norm_YH.stride(0)
    strides = (*qkv_RJH.stride()[:2], norm_stride, *k_cache_SKH.stride()[:2], *v_cache_SKH.stride()[:2])
    if num_rows:
        qkv_rope_cache_kernel[(num_rows * triton.cdiv(fused_heads, heads_per_program),)](
            *(qkv_RJH, qk_norm_YH, rope.positions_R, slot_mapping_R, rope.inv_freq_h, caches),
            *(None if k_scale_K is None else scales, strides, norm_eps, rope.scaling),
            N=num_heads,
            K=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_J=heads_per_program,
            BLOCK_h=triton.next_power_of_2(head_dim // 2),
            num_warps=warps or (1 if is_few else 2),
            **rounds_as_written(),
            **pdl_options(has_pdl(qkv_RJH.device) if pdl is None else pdl),
        )
    return qkv_RJH[:, :num_heads]


def plain_qkv_rope_cache(
    qkv_RJH: Tensor,
    k_cache_SKH: Tensor,
    v_cache_SKH: Tensor,
    tables: tuple[Tensor, Tensor],
    slot_mapping_R: Tensor,
    qk_norm: tuple[Tensor, float] | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The same in plain torch, rounded after each operation as in the kernel and in transformers."""
    num_kv_heads = k_cache_SKH.shape[1]
    num_rotated = qkv_RJH.shape[1] - num_kv_heads
    qk_RYH = _normed(qkv_RJH[:, :num_rotated], qk_norm)
    qk_RYH = _turned(qk_RYH, tables)
    num_heads = num_rotated - num_kv_heads
    slots, fresh = slot_mapping_R, (qk_RYH[:, num_heads:], qkv_RJH[:, num_rotated:])
    if bool((slot_mapping_R < 0).any()):
        is_written_R = slot_mapping_R >= 0
        slots, fresh = slot_mapping_R[is_written_R], (fresh[0][is_written_R], fresh[1][is_written_R])
    for cache_SKH, rows_RKH, scale_K in zip((k_cache_SKH, v_cache_SKH), fresh, scales, strict=True):
        written = rows_RKH if scale_K is None else rows_RKH.float() / scale_K[:, None]
        if cache_SKH.dtype == FP8:
            written = written.float().clamp(-LARGEST_FP8, LARGEST_FP8)
        cache_SKH[slots] = written.to(cache_SKH.dtype)
    qkv_RJH[:, :num_heads] = qk_RYH[:, :num_heads]
    return qkv_RJH[:, :num_heads]


def rotate_heads(x_RYH: Tensor, *, rope: Rope, norm_YH: Tensor | None = None, norm_eps: float = 1e-6) -> None:
    """Norm and rotate all heads of queries, or of keys, IN PLACE; bits equal those of `qkv_rope_cache`.

    `x_RYH` [R, Y, H] with contiguous heads; `norm_YH` has a row per head."""
    assert x_RYH.shape[2] % 2 == 0 and x_RYH.stride(2) == 1, f"{x_RYH.shape=} {x_RYH.stride()=}"
    if not runs_kernels(x_RYH):
        assert rope.tables is not None, f"{rope.positions_R.device=} {x_RYH.device=}"
        qk_norm = None if norm_YH is None else (norm_YH, norm_eps)
        x_RYH.copy_(_turned(_normed(x_RYH, qk_norm), rope.tables))
        return
    # All heads are queries, which are written in place. Without KV heads the caches are not written.
    no_cache = x_RYH.new_empty(0, 0, x_RYH.shape[2])
    qkv_rope_cache(
        *(x_RYH, no_cache, no_cache),
        rope=rope,
        slot_mapping_R=rope.positions_R,
        qk_norm_YH=norm_YH,
        norm_eps=norm_eps,
    )


def _normed(x_RYH: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    """RMSNorm of each head, rounded to the weight's dtype before it; the input without one."""
    if norm is None:
        return x_RYH
    normed_RYH = F.rms_norm(x_RYH.float(), x_RYH.shape[-1:], eps=norm[1]).to(norm[0].dtype)
    return (normed_RYH * norm[0]).to(x_RYH.dtype)


def _turned(x_RYH: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head; every product and sum is rounded."""
    cos_R1H, sin_R1H = tables
    turned_RYH = x_RYH.unflatten(-1, (2, -1)).flip(-2).flatten(-2).mul_(sin_R1H)
    return turned_RYH.add_(x_RYH * cos_R1H)
