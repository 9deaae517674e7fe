"""The definition of paged attention, one row at a time; slow on purpose. Formula in README.md.

R rows fed this pass, S physical KV slots, C visible slots of one row, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import itertools

import torch

from idlm.kernels.paged_attention.types import AttentionRows


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
    table = rows.block_table[sequence].tolist()
    size = rows.page_size
    physical = [table[slot // size] * size + slot % size for slot in visible]
    return torch.tensor(physical, dtype=torch.int64, device=rows.cu_rows.device)
