"""Attention of blocks to listed slots per KV head and to their own block, in plain tensor operations.

What a kernel has to equal that reads listed slots only. Computed in fp32 (fp64 of fp64).
b sequences, W places of a block, X = C listed slots + W own ones, N query heads, K KV heads, G = N / K, H
head dim, S physical slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.infer.sparse.view import read


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLists:
    """What the rows of each block see. `listed_bKC`: physical slots before it, looked at where
    `is_listed_bKC`; `own_bW`: its own physical slots, of which a row at place i sees those where
    `sees_own_bWW[:, i]`, one at least.
    """

    listed_bKC: Tensor
    is_listed_bKC: Tensor
    own_bW: Tensor
    sees_own_bWW: Tensor


def sparse_attention(
    q_bWNH: Tensor,
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    lists: SlotLists,
    *,
    scale: float,
) -> Tensor:
    """Output [b, W, N, H] in the dtype of `q_bWNH`, which is that of the computation. `keys` and `values`: a
    cache [S, K, H] each, and what an eight-bit one is multiplied by [K].
    """
    num_sequences, num_places, num_heads, head_dim = q_bWNH.shape
    num_kv_heads = keys[0].shape[1]
    own_bKW = lists.own_bW[:, None].expand(-1, num_kv_heads, -1)
    physical_bKX = torch.cat((lists.listed_bKC, own_bKW), dim=-1)
    listed_bKWC = lists.is_listed_bKC[:, :, None].expand(-1, -1, num_places, -1)
    own_bKWW = lists.sees_own_bWW[:, None].expand(-1, num_kv_heads, -1, -1)
    sees_bKWX = torch.cat((listed_bKWC, own_bKWW), dim=-1)
    is_read_bKX1 = sees_bKWX.any(dim=2)[..., None]
    # A slot that no row sees may hold NaN, and 0 * NaN is NaN.
    k_bKXH = torch.where(is_read_bKX1, _per_head(*keys, physical_bKX), 0)
    v_bKXH = torch.where(is_read_bKX1, _per_head(*values, physical_bKX), 0)
    q_bKGWH = q_bWNH.view(num_sequences, num_places, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores_bKGWX = torch.einsum("bkgwh,bkxh->bkgwx", q_bKGWH, k_bKXH) * scale
    scores_bKGWX = scores_bKGWX.masked_fill(~sees_bKWX[:, :, None], float("-inf"))
    o_bKGWH = torch.einsum("bkgwx,bkxh->bkgwh", scores_bKGWX.softmax(dim=-1), v_bKXH)
    return o_bKGWH.permute(0, 3, 1, 2, 4).reshape(num_sequences, num_places, num_heads, head_dim)


def _per_head(cache_SKH: Tensor, scale_K: Tensor | None, physical_bKX: Tensor) -> Tensor:
    """Each KV head's own slots [b, K, X, H]."""
    num_kv_heads = cache_SKH.shape[1]
    heads_K1 = torch.arange(num_kv_heads, device=physical_bKX.device)[:, None]
    # As one list of slots and heads, whose scale lies beside each.
    flat_X1H = cache_SKH.reshape(-1, 1, cache_SKH.shape[-1])
    read_bKXH = read(flat_X1H, physical_bKX * num_kv_heads + heads_K1, None)[..., 0, :]
    return read_bKXH if scale_K is None else read_bKXH * scale_K[:, None, None]
