"""Paged attention in plain torch, on any device: plan once per step, then gather and multiply per layer.

`plan_attention` computes everything that does not depend on the layer. `problems`, `plan` and `run` make this
module a back end (backends.py). Contract and formula in README.md.
b sequences of a group, m rows and s slots they are padded to; R rows fed this pass, B sequences, P pages,
S physical KV slots, N query heads, K KV heads, G = N / K, H head dim; W positions of a block, X = C listed
slots + W own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from idlm.kernels.paged_attention.types import AttentionRows, HeadShape, SlotLists

__all__ = ["AttentionPlan", "AttentionRows", "paged_attention", "plan_attention", "sparse_attention"]

FEW_ROWS = 16
FEW_SLOTS = 512
MAX_GATHERED_SLOTS = 1 << 18
FP8 = torch.float8_e4m3fn
Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Factors of keys and values by KV head; None is 1."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Sequences of similar size, padded to one rectangle of m rows and s slots."""

    num_sequences: int
    num_rows: int
    num_slots: int
    rows_bm: torch.Tensor | None
    """Flat [b * m] packed row of each padded row; None if the packed rows already are the rectangle."""
    slots_bs: torch.Tensor
    """Flat [b * s] physical slots to gather."""
    visible_bms: torch.Tensor
    bias: dict[tuple[torch.dtype, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The plan that all layers of one step share. Built by `plan_attention`; opaque to the caller."""

    backend: ClassVar[str] = "torch"
    num_rows: int
    groups: tuple[_Group, ...]
    unpad_R: torch.Tensor | None
    """Index of each packed row in the concatenated padded rows of the groups; None: already in order."""


def plan_attention(rows: AttentionRows) -> AttentionPlan:
    """Group the sequences and build indices and masks.

    No host synchronisation if every sequence is small (a decoding step); otherwise one, to read the sizes.
    """
    num_rows, num_sequences = rows.own_slots_R.shape[0], rows.block_table.shape[0]
    device = rows.cu_rows.device
    if num_rows == 0:
        return AttentionPlan(num_rows=0, groups=(), unpad_R=None)
    rows_R = torch.arange(num_rows, device=device)
    sequence_R = torch.searchsorted(rows.cu_rows[1:], rows_R, right=True)
    small = rows.max_rows <= FEW_ROWS and rows.max_slots <= FEW_SLOTS
    if small and num_sequences * rows.max_slots <= MAX_GATHERED_SLOTS:
        parts = [(torch.arange(num_sequences, device=device), rows.max_rows, rows.max_slots)]
        if num_rows == num_sequences * rows.max_rows:
            return AttentionPlan(
                num_rows=num_rows, groups=(_rectangle(rows, *parts[0], packed=True),), unpad_R=None
            )
    else:
        parts = _split(rows, sequence_R)
    base_B = torch.empty_like(rows.cu_rows[1:])
    offset = 0
    for sequences_b, most_rows, _ in parts:
        base_B[sequences_b] = offset + most_rows * torch.arange(sequences_b.numel(), device=device)
        offset += most_rows * sequences_b.numel()
    return AttentionPlan(
        num_rows=num_rows,
        groups=tuple(_rectangle(rows, *part, packed=False) for part in parts),
        unpad_R=base_B[sequence_R] + rows_R - rows.cu_rows[sequence_R],
    )


def _split(rows: AttentionRows, sequence_R: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
    """Sequences by power-of-two size class: (sequence ids, most rows, most slots); empty ones are dropped."""
    counts_B = rows.cu_rows.diff()
    slots_R = torch.maximum(rows.limits_R, rows.own_slots_R + 1)
    slots_B = torch.zeros_like(counts_B).scatter_reduce_(0, sequence_R, slots_R, "amax")
    sizes = torch.stack((counts_B, slots_B), dim=1).tolist()
    classes: dict[tuple[int, int], list[int]] = {}
    for sequence, (num_rows, num_slots) in enumerate(sizes):
        if num_rows:
            key = (max(num_rows, FEW_ROWS) - 1).bit_length(), (max(num_slots, FEW_SLOTS) - 1).bit_length()
            classes.setdefault(key, []).append(sequence)
    parts = []
    for members in classes.values():
        step = max(1, MAX_GATHERED_SLOTS // max(sizes[sequence][1] for sequence in members))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            most_rows, most_slots = (max(sizes[sequence][axis] for sequence in part) for axis in (0, 1))
            parts.append((torch.tensor(part, device=counts_B.device), most_rows, most_slots))
    return parts


def _rectangle(
    rows: AttentionRows, sequences_b: torch.Tensor, num_rows: int, num_slots: int, *, packed: bool
) -> _Group:
    """Indices and visibility of one group; `packed`: its padded rows are the packed rows, in order."""
    device = sequences_b.device
    starts_b = rows.cu_rows[sequences_b]
    last_b = (rows.cu_rows[sequences_b + 1] - 1).clamp(min=0)
    # A padded row repeats its sequence's last row, so that it sees a slot and stays finite.
    rows_bm = torch.minimum(starts_b[:, None] + torch.arange(num_rows, device=device), last_b[:, None])

    slots_s = torch.arange(num_slots, device=device)
    visible_bms = slots_s >= rows.branch_starts_R[rows_bm][:, :, None]
    visible_bms &= slots_s <= rows.own_slots_R[rows_bm][:, :, None]
    visible_bms |= slots_s < rows.limits_R[rows_bm][:, :, None]
    pages_bs = rows.block_table[sequences_b][:, slots_s // rows.page_size]
    physical_bs = pages_bs * rows.page_size + slots_s % rows.page_size
    # A slot that no row sees may hold NaN, and 0 * NaN is NaN: gather a visible slot in its place.
    seen_bs = visible_bms.any(dim=1)
    first_seen_b1 = seen_bs.to(torch.uint8).argmax(dim=1, keepdim=True)
    physical_bs = torch.where(seen_bs, physical_bs, physical_bs.gather(1, first_seen_b1))
    return _Group(
        num_sequences=sequences_b.numel(),
        num_rows=num_rows,
        num_slots=num_slots,
        rows_bm=None if packed else rows_bm.flatten(),
        slots_bs=physical_bs.flatten(),
        visible_bms=visible_bms,
    )


def problems(shape: HeadShape, *, deterministic: bool, device: torch.device) -> list[str]:
    """Every reason why this back end cannot compute such heads; empty when it can."""
    found = []
    if deterministic:
        found.append("pads sequences to groups of similar size, so results are not batch-invariant")
    if shape.kv_dtype not in (None, shape.dtype, FP8):
        found.append(f"takes a cache of {shape.dtype} or {FP8}, got {shape.kv_dtype}")
    return found


def plan(
    rows: AttentionRows, shape: HeadShape, *, deterministic: bool = False, launch: Any = None
) -> AttentionPlan:
    """The plan of the rows that belong to sequences; one host synchronisation reads their number."""
    num_fed = int(rows.cu_rows[-1])
    names = ("own_slots_R", "limits_R", "branch_starts_R")
    return plan_attention(replace(rows, **{name: getattr(rows, name)[:num_fed] for name in names}))


def run(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [R, N, H], in `out` if given; rows after the last sequence are not read and become 0."""
    num_fed, scales = plan.num_rows, (k_scale_K, v_scale_K)
    o_RNH = paged_attention(q_RNH[:num_fed], k_cache_SKH, v_cache_SKH, plan, scale=scale, scales=scales)
    if out is None and num_fed == q_RNH.shape[0]:
        return o_RNH
    out = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=q_RNH.device) if out is None else out
    out[:num_fed] = o_RNH
    out[num_fed:] = 0
    return out


def paged_attention(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    scales: Scales = (None, None),
) -> torch.Tensor:
    """Return o_RNH (fresh memory, q's dtype) of one layer, whose new keys and values are already cached."""
    assert q_RNH.shape[0] == plan.num_rows, f"{q_RNH.shape=} {plan.num_rows=}"
    if not plan.groups:
        return torch.empty_like(q_RNH)
    padded = [_attend(q_RNH, (k_cache_SKH, v_cache_SKH), group, scale, scales) for group in plan.groups]
    o_XNH = padded[0] if len(padded) == 1 else torch.cat(padded)
    return o_XNH if plan.unpad_R is None else o_XNH.index_select(0, plan.unpad_R)


def _attend(
    q_RNH: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    group: _Group,
    scale: float,
    scales: Scales,
) -> torch.Tensor:
    """Return [b * m, N, H] of one group."""
    b, m, s = group.num_sequences, group.num_rows, group.num_slots
    num_heads, head_dim = q_RNH.shape[1:]
    num_kv_heads = caches[0].shape[1]
    per_kv_head = num_heads // num_kv_heads
    q_XNH = q_RNH if group.rows_bm is None else q_RNH.index_select(0, group.rows_bm)
    k_bKsH, v_bKsH = (
        _gathered(cache_SKH, group.slots_bs, scale_K, q_RNH.dtype)
        .view(b, s, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache_SKH, scale_K in zip(caches, scales, strict=True)
    )
    if m > FEW_ROWS or per_kv_head == 1:
        o_bNmH = F.scaled_dot_product_attention(
            q_XNH.reshape(b, m, num_heads, head_dim).transpose(1, 2),
            k_bKsH,
            v_bKsH,
            attn_mask=_bias(group, q_RNH.dtype, 1),
            scale=scale,
            enable_gqa=per_kv_head > 1,
        )
        return o_bNmH.transpose(1, 2).reshape(b * m, num_heads, head_dim)
    # Query heads that share a KV head become rows of it, so that keys and values are not repeated.
    q_bKGmH = q_XNH.reshape(b, m, num_kv_heads, per_kv_head, head_dim).permute(0, 2, 3, 1, 4)
    o_bKXH = F.scaled_dot_product_attention(
        q_bKGmH.reshape(b, num_kv_heads, per_kv_head * m, head_dim),
        k_bKsH,
        v_bKsH,
        attn_mask=_bias(group, q_RNH.dtype, per_kv_head),
        scale=scale,
    )
    o_bmKGH = o_bKXH.reshape(b, num_kv_heads, per_kv_head, m, head_dim).permute(0, 3, 1, 2, 4)
    return o_bmKGH.reshape(b * m, num_heads, head_dim)


def _gathered(
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


def _bias(group: _Group, dtype: torch.dtype, repeats: int) -> torch.Tensor:
    """Additive mask [b, 1, repeats * m, s], kept for all layers: SDPA would convert a bool mask in each."""
    key = (dtype, repeats)
    if key not in group.bias:
        bias_bms = torch.zeros(group.visible_bms.shape, dtype=dtype, device=group.visible_bms.device)
        bias_bms.masked_fill_(~group.visible_bms, float("-inf"))
        group.bias[key] = bias_bms.repeat(1, repeats, 1).unsqueeze(1)
    return group.bias[key]


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
    read_YH = _gathered(cache_SKH.reshape(-1, head_dim), rows_Y, None, wide).to(wide)
    read_BKXH = read_YH.view(*physical_BKX.shape, head_dim)
    return read_BKXH if scale_K is None else read_BKXH * scale_K[:, None, None]
