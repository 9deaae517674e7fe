"""Attention of blocks whose rows see listed slots, and the sums before blocks, in plain torch. Contract in
README.md.

B sequences, b those with listed rows, R rows, W positions of a block, X = C listed slots + O own, P pages, S
physical KV slots, s slots before a block, m rows of it, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from idlm.kernels.backend import LOG2_E, gathered
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRows:
    """The rows that see lists; positions without a row repeat their sequence's last one."""

    sequences_b: torch.Tensor
    rows_bW: torch.Tensor
    limits_bW: torch.Tensor
    num_own: int
    """Slots of the blocks that some row sees; more than W where rows were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rows of one sequence's block, from `first_row` on, and the slots before it."""

    first_row: int
    sees_ms: torch.Tensor
    physical_s: torch.Tensor


def listed_rows(rows: AttentionRows, sequence_R: torch.Tensor) -> ListedRows | None:
    """The rows that see lists; None if no row does. Waits for the device."""
    assert rows.listed_B is not None
    counts_B = torch.zeros_like(rows.cu_rows[1:])
    counts_B.scatter_add_(0, sequence_R, (in_block(rows, sequence_R) & rows.listed_B[sequence_R]).long())
    sequences_b = counts_B.nonzero()[:, 0]
    if not len(sequences_b):
        return None
    ends_b = rows.cu_rows[1:][sequences_b]
    positions_W = torch.arange(int(counts_B.max()), device=sequence_R.device)
    rows_bW = torch.minimum((ends_b - counts_B[sequences_b])[:, None] + positions_W, ends_b[:, None] - 1)
    assert rows.starts_B is not None
    limits_bW = rows.limits_R[rows_bW]
    num_own = int((limits_bW - rows.starts_B[sequences_b, None]).max())
    return ListedRows(sequences_b=sequences_b, rows_bW=rows_bW, limits_bW=limits_bW, num_own=num_own)


def in_block(rows: AttentionRows, sequence_R: torch.Tensor) -> torch.Tensor:
    """Which rows do not lie before their sequence's block, bool [R]; they are its last ones."""
    assert rows.starts_B is not None
    return rows.own_slots_R >= rows.starts_B[sequence_R]


def blocks_of(rows: AttentionRows, sequence_R: torch.Tensor) -> tuple[Block, ...]:
    """The blocks whose rows see no lists and that have slots before them. Waits for the device."""
    assert rows.starts_B is not None
    in_block_R = in_block(rows, sequence_R)
    found = []
    for b, (start, end) in enumerate(zip(rows.starts_B.tolist(), rows.cu_rows[1:].tolist(), strict=True)):
        num_rows = int((in_block_R & (sequence_R == b)).sum())
        if not num_rows or not start or (rows.listed_B is not None and bool(rows.listed_B[b])):
            continue
        slots_s = torch.arange(start, device=sequence_R.device)
        pages_s = rows.block_table[b, slots_s // rows.page_size]
        found.append(
            Block(
                first_row=end - num_rows,
                sees_ms=slots_s < rows.limits_R[end - num_rows : end, None],
                physical_s=pages_s * rows.page_size + slots_s % rows.page_size,
            )
        )
    return tuple(found)


def sums_before(
    q_RNH: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor | None],
    blocks: tuple[Block, ...],
    scale: float,
    before: BeforeBlock,
) -> None:
    """Write the sums over the slots before each block; `keys`: the cache and its scales."""
    before.highest_RN.fill_(float("-inf"))
    before.totals_RN.zero_()
    for block in blocks:
        fed = slice(block.first_row, block.first_row + len(block.sees_ms))
        k_sKH = gathered(keys[0], block.physical_s, keys[1], q_RNH.dtype).float()
        q_mKGH = q_RNH[fed].float().unflatten(1, (k_sKH.shape[1], -1))
        scores_mNs = torch.einsum("mkgh,skh->mkgs", q_mKGH, k_sKH).flatten(1, 2) * (scale * LOG2_E)
        scores_mNs = scores_mNs.masked_fill(~block.sees_ms[:, None], float("-inf"))
        highest_mN = scores_mNs.amax(dim=-1)
        totals_mN = torch.exp2(scores_mNs - highest_mN[..., None]).sum(dim=-1)
        before.highest_RN[fed] = highest_mN
        before.totals_RN[fed] = torch.where(highest_mN > float("-inf"), totals_mN, 0)


def attend_lists(
    q_RNH: torch.Tensor,
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
    listed: ListedRows,
    rows: AttentionRows,
    lists_BKC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Output [b, W, N, H] (q's dtype) of the rows that see lists; `caches`: keys and values, each with its
    scales. Computed in fp32 (fp64 of fp64). A slot that no row sees may hold NaN."""
    assert rows.starts_B is not None
    num_kv_heads = caches[0][0].shape[1]
    slots_bKC = lists_BKC[listed.sequences_b].long()
    own_bO = rows.starts_B[listed.sequences_b][:, None] + torch.arange(listed.num_own, device=q_RNH.device)
    slots_bKX = torch.cat((slots_bKC, own_bO[:, None].expand(-1, num_kv_heads, -1)), dim=-1)
    num_positions = listed.rows_bW.shape[1]
    listed_bKWC = (slots_bKC >= 0)[:, :, None].expand(-1, -1, num_positions, -1)
    sees_own_bWO = own_bO[:, None] < listed.limits_bW[:, :, None]
    sees_bKWX = torch.cat((listed_bKWC, sees_own_bWO[:, None].expand(-1, num_kv_heads, -1, -1)), dim=-1)
    table_bP, size = rows.block_table[listed.sequences_b], rows.page_size
    slots_bKX = slots_bKX.clamp(0, table_bP.shape[1] * size - 1)
    pages_bKX = table_bP.gather(1, slots_bKX.flatten(1) // size).view_as(slots_bKX)
    physical_bKX = pages_bKX * size + slots_bKX % size
    # A mask is not enough for slots that no row sees: 0 * NaN is NaN.
    is_seen_bKX1 = sees_bKWX.any(dim=2)[..., None]
    k_bKXH, v_bKXH = (
        torch.where(is_seen_bKX1, _gathered_by_head(cache_SKH, physical_bKX, scale_K, q_RNH.dtype), 0)
        for cache_SKH, scale_K in caches
    )
    q_bKGWH = q_RNH[listed.rows_bW].to(k_bKXH.dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores_bKGWX = torch.einsum("bkgwh,bkxh->bkgwx", q_bKGWH, k_bKXH) * scale
    scores_bKGWX = scores_bKGWX.masked_fill(~sees_bKWX[:, :, None], float("-inf"))
    o_bKGWH = torch.einsum("bkgwx,bkxh->bkgwh", scores_bKGWX.softmax(dim=-1), v_bKXH)
    return o_bKGWH.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q_RNH.dtype)


def _gathered_by_head(
    cache_SKH: torch.Tensor, physical_bKX: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [b, K, X, H] of which each KV head has its own, in fp32 (fp64 if `dtype` is fp64)."""
    num_kv_heads, head_dim = cache_SKH.shape[1:]
    heads_K1 = torch.arange(num_kv_heads, device=physical_bKX.device)[:, None]
    rows_Y = (physical_bKX * num_kv_heads + heads_K1).flatten()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    read_YH = gathered(cache_SKH.reshape(-1, head_dim), rows_Y, None, wide).to(wide)
    read_bKXH = read_YH.view(*physical_bKX.shape, head_dim)
    return read_bKXH if scale_K is None else read_bKXH * scale_K[:, None, None]
