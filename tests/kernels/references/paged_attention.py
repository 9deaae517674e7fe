"""The definition of paged attention, one row at a time; slow on purpose. Formula in README.md.

B sequences, R rows fed this pass, S physical KV slots, C listed slots, s visible slots of one row, N query
heads, K KV heads, H head dim."""

from __future__ import annotations

import itertools
import math

import torch

from idlm.kernels.paged_attention.types import AttentionRows


def paged_attention_reference(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    *,
    rows: AttentionRows,
    scale: float,
    lists_BKC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return o_RNH in q's dtype; computed in fp32, or in fp64 when q is fp64."""
    o_RNH = torch.zeros_like(q_RNH)
    num_kv_heads = k_cache_SKH.shape[1]
    for b, row, head in _each(rows, num_kv_heads):
        physical_s = _physical(visible_slots(rows, b, row, head, lists_BKC), rows, b)
        k_sH, v_sH = (_wide(cache_SKH[physical_s, head], q_RNH) for cache_SKH in (k_cache_SKH, v_cache_SKH))
        heads = _query_heads(q_RNH, num_kv_heads, head)
        scores_Gs = _wide(q_RNH[row, heads], q_RNH) @ k_sH.T * scale
        o_RNH[row, heads] = (scores_Gs.softmax(dim=-1) @ v_sH).to(q_RNH.dtype)
    return o_RNH


def sums_before_reference(
    q_RNH: torch.Tensor, k_cache_SKH: torch.Tensor, *, rows: AttentionRows, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `BeforeBlock` holds after a layer, [R, N] each, in fp32, or in fp64 when q is fp64."""
    assert rows.starts_B is not None
    wide = _wide(q_RNH[..., 0], q_RNH)
    highest_RN, totals_RN = torch.full_like(wide, -math.inf), torch.zeros_like(wide)
    num_kv_heads = k_cache_SKH.shape[1]
    for b, row, head in _each(rows, num_kv_heads):
        num_before = min(int(rows.starts_B[b]), int(rows.limits_R[row]))
        if not _in_block(rows, b, row) or sees_list(rows, b, row) or num_before == 0:
            continue
        k_sH = _wide(k_cache_SKH[_physical(list(range(num_before)), rows, b), head], q_RNH)
        heads = _query_heads(q_RNH, num_kv_heads, head)
        scores_Gs = _wide(q_RNH[row, heads], q_RNH) @ k_sH.T * scale / math.log(2)
        highest_RN[row, heads] = scores_Gs.amax(dim=-1)
        totals_RN[row, heads] = torch.exp2(scores_Gs - scores_Gs.amax(dim=-1, keepdim=True)).sum(dim=-1)
    return highest_RN, totals_RN


def visible_slots(
    rows: AttentionRows, b: int, row: int, head: int, lists_BKC: torch.Tensor | None = None
) -> list[int]:
    """Logical slots that a row of sequence b sees through a KV head; at least one."""
    limit, own = int(rows.limits_R[row]), int(rows.own_slots_R[row])
    if lists_BKC is not None and sees_list(rows, b, row):
        assert rows.starts_B is not None
        listed = [slot for slot in lists_BKC[b, head].tolist() if slot >= 0]
        visible = [*listed, *range(int(rows.starts_B[b]), limit)]
    else:
        first = 0 if rows.first_slots_R is None else max(0, int(rows.first_slots_R[row]))
        visible = sorted({*range(first, limit), *range(int(rows.branch_starts_R[row]), own + 1)})
    assert visible, f"row sees nothing: {row=} {limit=} {own=}"
    return visible


def sees_list(rows: AttentionRows, b: int, row: int) -> bool:
    """Whether a row of sequence b sees a list in layers with lists."""
    return rows.listed_B is not None and bool(rows.listed_B[b]) and _in_block(rows, b, row)


def _in_block(rows: AttentionRows, b: int, row: int) -> bool:
    return rows.starts_B is not None and int(rows.own_slots_R[row]) >= int(rows.starts_B[b])


def _each(rows: AttentionRows, num_kv_heads: int) -> list[tuple[int, int, int]]:
    """Every sequence, row of it and KV head."""
    bounds = itertools.pairwise(rows.cu_rows.tolist())
    return [
        (b, *each)
        for b, (i, j) in enumerate(bounds)
        for each in itertools.product(range(i, j), range(num_kv_heads))
    ]


def _query_heads(q_RNH: torch.Tensor, num_kv_heads: int, head: int) -> slice:
    group = q_RNH.shape[1] // num_kv_heads
    return slice(head * group, (head + 1) * group)


def _wide(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if like.dtype == torch.float64 else torch.float32)


def _physical(slots: list[int], rows: AttentionRows, b: int) -> torch.Tensor:
    table, size = rows.block_table[b].tolist(), rows.page_size
    physical = [table[slot // size] * size + slot % size for slot in slots]
    return torch.tensor(physical, dtype=torch.int64, device=rows.block_table.device)
