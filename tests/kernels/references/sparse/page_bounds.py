"""The definition of both ops: one piece, one page, one KV head at a time.

Quest (Query-Aware Sparsity, ICML 2024), section 3.3: a page keeps the least and the largest key of each
channel; its score is the upper bound of a query's product with any of its keys. Averaged over the queries of
a block and of a KV head, as MAGE's paper adapts it.
H head dim, W rows fed, G heads of a KV head, F slots."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.page_bounds.op import PagedSlots


def bounds_reference(
    keys_SKH: Tensor, k_scale_K: Tensor | None, slots: PagedSlots, sequence: int, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Least and largest key [K, H] of the slots from `first` to before `end` of a sequence, in fp32."""
    keys = []
    for slot in range(first, end):
        page = int(slots.block_table_BP[sequence, slot // slots.page_size])
        key_KH = keys_SKH[page * slots.page_size + slot % slots.page_size].float()
        keys.append(key_KH if k_scale_K is None else key_KH * k_scale_K[:, None])
    k_FKH = torch.stack(keys)
    return k_FKH.amin(0), k_FKH.amax(0)


def score_reference(q_WGH: Tensor, min_H: Tensor, largest_H: Tensor) -> Tensor:
    """Mean over queries of the largest product that a key within the bounds can have."""
    bound_WGH = torch.maximum(q_WGH.double() * min_H.double(), q_WGH.double() * largest_H.double())
    return bound_WGH.sum(-1).mean()
