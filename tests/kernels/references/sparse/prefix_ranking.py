"""The definition of the ops in fp32 (fp64 of fp64): one layer, sequence and KV head at a time.

MAGE (ICML 2026 workshop AdaptFM), equation 2 at the first step, which is equation 3: softmax over the slots
before the block, averaged over the block's queries and the heads of a KV head, and the k largest of them.
L layers, R rows, N query heads, S slots before a block, W rows fed, G heads of a KV head, H head dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.kernels.prefix_ranking.op import RankingPass


def prefix_scores(ranking: RankingPass, layer: int, sequence: int, kv_head: int) -> Tensor:
    """Scaled scores [W, G, S] of the rows fed, from the queries and keys alone."""
    dtype = torch.float64 if ranking.q_LRNH.dtype == torch.float64 else torch.float32
    group = ranking.q_LRNH.shape[2] // ranking.num_kv_heads
    rows = [row for row in ranking.rows_BW[sequence].tolist() if row >= 0]
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q_WGH = torch.stack([ranking.q_LRNH[layer, row, heads].to(dtype) for row in rows])
    keys = []
    for slot in range(int(ranking.starts_B[sequence])):
        page = int(ranking.block_table_BP[sequence, slot // ranking.page_size])
        key_H = ranking.keys_LSKH[layer, page * ranking.page_size + slot % ranking.page_size, kv_head]
        keys.append(key_H.to(dtype))
    k_SH = torch.stack(keys) if keys else q_WGH.new_empty(0, q_WGH.shape[-1])
    if ranking.k_scale_LK is not None:
        k_SH = k_SH * ranking.k_scale_LK[layer, kv_head]
    return q_WGH @ k_SH.T * ranking.scale


def prefix_sums_reference(ranking: RankingPass) -> tuple[Tensor, Tensor]:
    """What `max_LRN` and `sum_LRN` are defined to be; NaN for rows that nothing may read."""
    shape = ranking.q_LRNH.shape[:3]
    max_LRN, sum_LRN = torch.full(shape, math.nan), torch.full(shape, math.nan)
    group = ranking.q_LRNH.shape[2] // ranking.num_kv_heads
    for sequence in range(len(ranking.starts_B)):
        rows = [row for row in ranking.rows_BW[sequence].tolist() if row >= 0]
        if not rows or not bool(ranking.ranks_B[sequence]):
            continue
        for layer in range(len(ranking.q_LRNH)):
            for kv_head in range(ranking.num_kv_heads):
                scores_WGS = prefix_scores(ranking, layer, sequence, kv_head) / math.log(2)
                heads = slice(kv_head * group, (kv_head + 1) * group)
                if scores_WGS.shape[-1] == 0:
                    max_LRN[layer, rows, heads], sum_LRN[layer, rows, heads] = -torch.inf, 0.0
                    continue
                max_WG = scores_WGS.amax(-1)
                max_LRN[layer, rows, heads] = max_WG.float()
                sum_LRN[layer, rows, heads] = (scores_WGS - max_WG[..., None]).exp2().sum(-1).float()
    return max_LRN.to(ranking.q_LRNH.device), sum_LRN.to(ranking.q_LRNH.device)


def attention_share_reference(ranking: RankingPass, layer: int, sequence: int, kv_head: int) -> Tensor:
    """Mean attention [S] to the slots before the block; does not use `max_LRN` and `sum_LRN`."""
    return prefix_scores(ranking, layer, sequence, kv_head).softmax(dim=-1).mean((0, 1))


def select_reference(scores_S: Tensor, num: int) -> list[int]:
    """Positions of the `num` largest scores, ascending; of equal scores the lower position is taken first."""
    scores = scores_S.tolist()
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return sorted(ranked[:num])
