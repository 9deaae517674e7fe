"""Shares and lists in plain torch, for CPUs and for fp64.

No shape depends on what a tensor holds. L layers, B sequences, b some of them, W positions of a block, S
slots, N query heads, K KV heads, G = N / K, H head dim, C listed slots."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.backend import LOG2_E, read_slots
from idlm.kernels.prefix_ranking.types import RankingPass

MAX_NUMBERS = 1 << 26
"""Scores, or elements of keys, in memory at a time."""
NOT_LISTED = -1


def attention_share(ranking: RankingPass, first_layer: int, num_layers: int) -> Tensor:
    """See `op.attention_share`."""
    num_heads, head_dim = ranking.q_LRNH.shape[2:]
    num_sequences, num_positions = ranking.rows_BW.shape
    per_slot = max(num_heads * num_positions, ranking.num_kv_heads * head_dim)
    sequences_B = torch.arange(num_sequences, device=ranking.starts_B.device)
    parts = sequences_B.split(max(1, MAX_NUMBERS // max(1, ranking.max_slots * per_slot)))
    shares = [
        torch.cat([_share(ranking, layer, sequences_b) for sequences_b in parts])
        for layer in range(first_layer, first_layer + num_layers)
    ]
    return torch.stack(shares)


def _share(ranking: RankingPass, layer: int, sequences_b: Tensor) -> Tensor:
    """Mean attention [b, K, S] of some sequences' queries in one layer; 0 from the block on."""
    q_RNH, num_kv_heads = ranking.q_LRNH[layer], ranking.num_kv_heads
    wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    slots_S = torch.arange(ranking.max_slots, device=q_RNH.device)
    is_before_bS = slots_S < ranking.starts_B[sequences_b, None]
    pages_bS = ranking.block_table_BP[sequences_b][:, slots_S // ranking.page_size]
    physical_bS = pages_bS * ranking.page_size + slots_S % ranking.page_size
    k_bSKH = read_slots(ranking.keys_LSKH[layer], physical_bS).to(wide)
    if ranking.k_scale_LK is not None:
        k_bSKH = k_bSKH * ranking.k_scale_LK[layer][:, None]
    # Slots that were never written may hold NaN, and 0 * NaN is NaN.
    k_bSKH = torch.where(is_before_bS[:, :, None, None], k_bSKH, 0)
    rows_bW = ranking.rows_BW[sequences_b]
    is_fed_bW, rows_bW = rows_bW >= 0, rows_bW.clamp(min=0)
    q_bWKGH = q_RNH[rows_bW].to(wide).unflatten(2, (num_kv_heads, -1))
    scores_bKGWS = torch.einsum("bwkgh,bskh->bkgws", q_bWKGH, k_bSKH) * (ranking.scale * LOG2_E)
    offset_bWN = ranking.max_LRN[layer, rows_bW] + ranking.sum_LRN[layer, rows_bW].log2()
    offset_bKGW1 = offset_bWN.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1)[..., None]
    is_counted_bWS = is_fed_bW[:, :, None] & is_before_bS[:, None]
    shares_bKGWS = torch.where(is_counted_bWS[:, None, None], (scores_bKGWS - offset_bKGW1).exp2(), 0)
    num_queries_b = is_fed_bW.sum(-1).clamp(min=1) * q_bWKGH.shape[3]
    return shares_bKGWS.sum((2, 3)) / num_queries_b[:, None, None]


def select_largest(
    scores_LBKS: Tensor, counts_B: Tensor, is_selected_B: Tensor, lanes_B: Tensor, slots_LZKC: Tensor
) -> None:
    """See `op.select_largest`."""
    num = slots_LZKC.shape[-1]
    slots_S = torch.arange(scores_LBKS.shape[-1], device=scores_LBKS.device)
    is_candidate_BKS = (slots_S < counts_B[:, None])[:, None]
    for scores_BKS, slots_ZKC in zip(scores_LBKS, slots_LZKC, strict=True):
        # The sort is stable: of equal scores the lower position comes first, which `topk` does not define.
        order_BKS = scores_BKS.masked_fill(~is_candidate_BKS, -torch.inf).argsort(
            dim=-1, descending=True, stable=True
        )
        is_best_BKS = torch.zeros_like(scores_BKS, dtype=torch.bool).scatter_(-1, order_BKS[..., :num], True)
        last = len(slots_S)
        best_BKS = torch.where(is_best_BKS & is_candidate_BKS, slots_S, last).sort(dim=-1).values[..., :num]
        best_BKC = torch.nn.functional.pad(best_BKS, (0, num - best_BKS.shape[-1]), value=last)
        best_BKC = torch.where(best_BKC < last, best_BKC, NOT_LISTED).to(slots_ZKC.dtype)
        slots_ZKC[lanes_B] = torch.where(is_selected_B[:, None, None], best_BKC, slots_ZKC[lanes_B])
