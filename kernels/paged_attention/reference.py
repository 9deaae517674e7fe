"""The definition of paged attention, one row at a time; slow on purpose. Formula in README.md.

B sequences, R rows fed this pass, W positions of a block, S physical KV slots, C visible slots of one row, N
query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import itertools

import torch

from idlm.kernels.paged_attention.types import AttentionRows, SlotLists


def paged_attention_reference(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    *,
    rows: AttentionRows,
    scale: float,
) -> torch.Tensor:
    """Return o_RNH in q's dtype; computed in fp32, or in fp64 when q is fp64."""
    compute_dtype = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
    group = q_RNH.shape[1] // k_cache_SKH.shape[1]
    bounds = rows.cu_rows.tolist()
    o_RNH = torch.empty_like(q_RNH)
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        for row in range(start, end):
            slots_C = _physical_slots(rows, sequence, row)
            k_CNH = k_cache_SKH[slots_C].to(compute_dtype).repeat_interleave(group, dim=1)
            v_CNH = v_cache_SKH[slots_C].to(compute_dtype).repeat_interleave(group, dim=1)
            scores_NC = torch.einsum("nh,cnh->nc", q_RNH[row].to(compute_dtype), k_CNH) * scale
            o_RNH[row] = torch.einsum("nc,cnh->nh", scores_NC.softmax(dim=-1), v_CNH).to(q_RNH.dtype)
    return o_RNH


def _physical_slots(rows: AttentionRows, sequence: int, row: int) -> torch.Tensor:
    limit, own = int(rows.limits_R[row]), int(rows.own_slots_R[row])
    branch_start = int(rows.branch_starts_R[row])
    visible = sorted(set(range(limit)) | set(range(branch_start, own + 1)))
    assert visible, f"row sees nothing: {row=} {limit=} {branch_start=} {own=}"
    return _physical(visible, rows.block_table[sequence], rows.page_size)


def sparse_attention_reference(
    q_BWNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    *,
    lists: SlotLists,
    scale: float,
) -> torch.Tensor:
    """Return o_BWNH in q's dtype, one row and head at a time; computed in fp32, or in fp64 when q is fp64."""
    compute_dtype = torch.float64 if q_BWNH.dtype == torch.float64 else torch.float32
    num_sequences, num_places, num_heads, _ = q_BWNH.shape
    group = num_heads // k_cache_SKH.shape[1]
    o_BWNH = torch.empty_like(q_BWNH)
    for b, w, n in itertools.product(range(num_sequences), range(num_places), range(num_heads)):
        listed = [slot for slot in lists.slots_BKC[b, n // group].tolist() if slot >= 0]
        own = range(int(lists.starts_B[b]), int(lists.limits_BW[b, w]))
        slots_C = _physical([*listed, *own], lists.block_table[b], lists.page_size)
        k_CH, v_CH = (
            cache_SKH[slots_C, n // group].to(compute_dtype) for cache_SKH in (k_cache_SKH, v_cache_SKH)
        )
        weights_C = (k_CH @ q_BWNH[b, w, n].to(compute_dtype) * scale).softmax(dim=-1)
        o_BWNH[b, w, n] = (weights_C @ v_CH).to(q_BWNH.dtype)
    return o_BWNH


def _physical(slots: list[int], pages_P: torch.Tensor, page_size: int) -> torch.Tensor:
    table = pages_P.tolist()
    physical = [table[slot // page_size] * page_size + slot % page_size for slot in slots]
    return torch.tensor(physical, dtype=torch.int64, device=pages_P.device)
