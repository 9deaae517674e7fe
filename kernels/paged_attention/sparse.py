"""Attention of blocks whose rows see listed slots, and the sums before blocks, in plain torch. Contract in
README.md.

B sequences, b those with listed rows, R rows, W positions of a block, X = C listed slots + O own, P pages, S
physical KV slots, s slots before a block, m rows of it, N query heads, K KV heads, G = N / K, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, SlotLists

FP8 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRows:
    """The rows that see lists; places without a row repeat their sequence's last one."""

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
    if rows.listed_B is None:
        return None
    counts_B = torch.zeros_like(rows.cu_rows[1:])
    counts_B.scatter_add_(0, sequence_R, (in_block(rows, sequence_R) & rows.listed_B[sequence_R]).long())
    sequences_b = counts_B.nonzero()[:, 0]
    if not len(sequences_b):
        return None
    ends_b = rows.cu_rows[1:][sequences_b]
    places_W = torch.arange(int(counts_B.max()), device=sequence_R.device)
    rows_bW = torch.minimum((ends_b - counts_B[sequences_b])[:, None] + places_W, ends_b[:, None] - 1)
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
    if rows.starts_B is None:
        return ()
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
    """Output [b, W, N, H] of the rows that see lists; `caches`: keys and values, each with its scales."""
    assert rows.starts_B is not None
    (keys, k_scale_K), (values, v_scale_K) = caches
    lists = SlotLists(
        slots_BKC=lists_BKC[listed.sequences_b].long(),
        block_table=rows.block_table[listed.sequences_b],
        page_size=rows.page_size,
        starts_B=rows.starts_B[listed.sequences_b],
        limits_BW=listed.limits_bW,
    )
    q_bWNH, num_own = q_RNH[listed.rows_bW], listed.num_own
    return sparse_attention(
        q_bWNH, keys, values, lists, scale=scale, k_scale_K=k_scale_K, v_scale_K=v_scale_K, num_own=num_own
    )


def sparse_attention(
    q_BWNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    lists: SlotLists,
    *,
    scale: float,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
    num_own: int | None = None,
) -> torch.Tensor:
    """Return o_BWNH (q's dtype) of one block per sequence, whose rows see listed slots and their own block.

    `num_own`: slots of the block, W if not given. Computed in fp32 (fp64 of fp64). Shapes depend on the
    arguments' shapes only and nothing waits for the device, so a CUDA graph can hold it. A slot that no row
    sees may hold NaN.
    """
    num_sequences, num_places, num_heads, head_dim = q_BWNH.shape
    num_kv_heads = k_cache_SKH.shape[1]
    own_slots = torch.arange(num_places if num_own is None else num_own, device=q_BWNH.device)
    own_BO = lists.starts_B[:, None] + own_slots
    slots_BKX = torch.cat((lists.slots_BKC, own_BO[:, None].expand(-1, num_kv_heads, -1)), dim=-1)
    listed_BKWC = (lists.slots_BKC >= 0)[:, :, None].expand(-1, -1, num_places, -1)
    sees_own_BWO = own_BO[:, None] < lists.limits_BW[:, :, None]
    sees_BKWX = torch.cat((listed_BKWC, sees_own_BWO[:, None].expand(-1, num_kv_heads, -1, -1)), dim=-1)
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


def gathered(
    cache_SKH: torch.Tensor, slots_X: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [X, K, H] of a cache, in `dtype`."""
    if cache_SKH.dtype != FP8:
        return cache_SKH.index_select(0, slots_X)
    # By bytes: not every device gathers eight-bit floats.
    cached_XKH = cache_SKH.view(torch.uint8).index_select(0, slots_X).view(FP8)
    if scale_K is None:
        return cached_XKH.to(dtype)
    return (cached_XKH.to(torch.float32) * scale_K[:, None]).to(dtype)
