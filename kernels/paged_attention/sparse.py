"""Attention of blocks whose rows see listed slots, in plain torch on any device. Contract in README.md.

B sequences, W positions of a block, X = C listed slots + W own, P pages, S physical KV slots, N query heads,
K KV heads, G = N / K, H head dim.
"""

from __future__ import annotations

import torch

from idlm.kernels.paged_attention.op import gathered
from idlm.kernels.paged_attention.types import SlotLists


def sparse_attention(
    q_BWNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    lists: SlotLists,
    *,
    scale: float,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return o_BWNH (q's dtype) of one block per sequence, whose rows see listed slots and their own block.

    Computed in fp32 (fp64 of fp64). Shapes depend on the arguments' shapes only and nothing waits for the
    device, so a CUDA graph can hold it. A slot that no row sees may hold NaN.
    """
    num_sequences, num_places, num_heads, head_dim = q_BWNH.shape
    num_kv_heads = k_cache_SKH.shape[1]
    own_BW = lists.starts_B[:, None] + torch.arange(num_places, device=q_BWNH.device)
    slots_BKX = torch.cat((lists.slots_BKC, own_BW[:, None].expand(-1, num_kv_heads, -1)), dim=-1)
    listed_BKWC = (lists.slots_BKC >= 0)[:, :, None].expand(-1, -1, num_places, -1)
    sees_own_BWW = own_BW[:, None] < lists.limits_BW[:, :, None]
    sees_BKWX = torch.cat((listed_BKWC, sees_own_BWW[:, None].expand(-1, num_kv_heads, -1, -1)), dim=-1)
    slots_BKX = slots_BKX.clamp(0, lists.block_table.shape[1] * lists.page_size - 1)
    pages_BKX = lists.block_table.gather(1, slots_BKX.flatten(1) // lists.page_size).view_as(slots_BKX)
    physical_BKX = pages_BKX * lists.page_size + slots_BKX % lists.page_size
    # A mask is not enough for slots that no row sees: 0 * NaN is NaN.
    is_seen_BKX1 = sees_BKWX.any(dim=2)[..., None]
    k_BKXH, v_BKXH = (
        torch.where(is_seen_BKX1, _gathered_by_head(cache_SKH, physical_BKX, scale_K, q_BWNH.dtype), 0)
        for cache_SKH, scale_K in ((k_cache_SKH, k_scale_K), (v_cache_SKH, v_scale_K))
    )
    q_BKGWH = q_BWNH.to(k_BKXH.dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores_BKGWX = torch.einsum("bkgwh,bkxh->bkgwx", q_BKGWH, k_BKXH) * scale
    scores_BKGWX = scores_BKGWX.masked_fill(~sees_BKWX[:, :, None], float("-inf"))
    o_BKGWH = torch.einsum("bkgwx,bkxh->bkgwh", scores_BKGWX.softmax(dim=-1), v_BKXH)
    o_BWNH = o_BKGWH.permute(0, 3, 1, 2, 4).reshape(num_sequences, num_places, num_heads, head_dim)
    return o_BWNH.to(q_BWNH.dtype)


def _gathered_by_head(
    cache_SKH: torch.Tensor, physical_BKX: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [B, K, X, H] of which each KV head has its own, in fp32 (fp64 if `dtype` is fp64)."""
    num_kv_heads, head_dim = cache_SKH.shape[1:]
    heads_K1 = torch.arange(num_kv_heads, device=physical_BKX.device)[:, None]
    rows_Y = (physical_BKX * num_kv_heads + heads_K1).flatten()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    read_YH = gathered(cache_SKH.reshape(-1, head_dim), rows_Y, None, wide).to(wide)
    read_BKXH = read_YH.view(*physical_BKX.shape, head_dim)
    return read_BKXH if scale_K is None else read_BKXH * scale_K[:, None, None]
