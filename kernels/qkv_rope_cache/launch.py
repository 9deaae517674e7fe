"""The launch of the kernel. R rows, J fused heads, H head dim, K KV heads, S physical KV slots."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from idlm.kernels.backend import rounds_as_written
from idlm.kernels.qkv_rope_cache.kernel import qkv_rope_cache_kernel
from idlm.kernels.qkv_rope_cache.types import Rope


def run(
    qkv_RJH: Tensor,
    caches: tuple[Tensor, Tensor],
    *,
    rope: Rope,
    slot_mapping_R: Tensor,
    qk_norm_YH: Tensor | None,
    norm_eps: float,
    scales: tuple[Tensor | None, Tensor | None],
    heads_per_program: int,
    warps: int,
    pdl: bool,
) -> None:
    """Launch the kernel; the arguments are those of the op."""
    (k_cache_SKH, v_cache_SKH), (k_scale_K, v_scale_K) = caches, scales
    num_kv_heads = k_cache_SKH.shape[1]
    num_rows, fused_heads, head_dim = qkv_RJH.shape
    groups = triton.cdiv(fused_heads, heads_per_program)
    options = rounds_as_written() | ({"launch_pdl": True} if pdl else {})
    if num_rows:
        qkv_rope_cache_kernel[(num_rows * groups,)](
            qkv_RJH,
            qkv_RJH if qk_norm_YH is None else qk_norm_YH,
            rope.positions_R,
            slot_mapping_R,
            rope.inv_freq_h,
            k_cache_SKH,
            v_cache_SKH,
            rope.inv_freq_h if k_scale_K is None else k_scale_K,
            rope.inv_freq_h if v_scale_K is None else v_scale_K,
            qkv_RJH.stride(0),
            qkv_RJH.stride(1),
            0 if qk_norm_YH is None else qk_norm_YH.stride(0),
            k_cache_SKH.stride(0),
            k_cache_SKH.stride(1),
            v_cache_SKH.stride(0),
            v_cache_SKH.stride(1),
            norm_eps,
            rope.scaling,
            N=fused_heads - 2 * num_kv_heads,
            K=num_kv_heads,
            HALF=head_dim // 2,
            HAS_NORM=qk_norm_YH is not None,
            HAS_SCALE=k_scale_K is not None,
            IS_FP8=k_cache_SKH.dtype == torch.float8_e4m3fn,
            BLOCK_J=heads_per_program,
            BLOCK_h=triton.next_power_of_2(head_dim // 2),
            PDL=pdl,
            num_warps=warps,
            **options,
        )
