"""Paged attention in plain torch, on any device: plan once per step, then gather and multiply per layer.

`problems`, `plan` and `run` make this module a back end (op.py). Contract and formula in README.md.
b sequences of a group, m rows and s slots they are padded to; R rows fed this pass, B sequences, P pages,
S physical KV slots, N query heads, K KV heads, G = N / K, H head dim."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from idlm.kernels.backend import FP8, gathered
from idlm.kernels.paged_attention.sparse import (
    Block,
    ListedRows,
    attend_lists,
    blocks_of,
    listed_rows,
    sums_before,
)
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, HeadShape

FEW_ROWS = 16
FEW_SLOTS = 512
MAX_GATHERED_SLOTS = 1 << 18


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
    rows: AttentionRows
    num_rows: int
    groups: tuple[_Group, ...]
    unpad_R: torch.Tensor | None
    """Index of each packed row in the concatenated padded rows of the groups; None: already in order."""
    listed: ListedRows | None = None
    blocks: tuple[Block, ...] = ()


def plan(
    rows: AttentionRows, shape: HeadShape | None = None, *, deterministic: bool = False, launch: Any = None
) -> AttentionPlan:
    """Group the sequences and build indices and masks, of the rows that belong to sequences.

    One host synchronisation reads their number, and another the sizes unless every sequence is small."""
    given, num_rows = rows, int(rows.cu_rows[-1])
    names = ("own_slots_R", "limits_R", "branch_starts_R")
    rows = replace(rows, **{name: getattr(rows, name)[:num_rows] for name in names})
    if rows.first_slots_R is not None:
        rows = replace(rows, first_slots_R=rows.first_slots_R[:num_rows])
    if num_rows == 0:
        return AttentionPlan(rows=given, num_rows=0, groups=(), unpad_R=None)
    rows_R = torch.arange(num_rows, device=rows.cu_rows.device)
    sequence_R = torch.searchsorted(rows.cu_rows[1:], rows_R, right=True)
    listed = None if rows.listed_B is None else listed_rows(rows, sequence_R)
    blocks = () if rows.starts_B is None else blocks_of(rows, sequence_R)
    if listed is not None:
        rows = _narrowed(rows, listed)
    groups, unpad_R = (_lone_rows(rows, sequence_R), None) if deterministic else _groups(rows, sequence_R)
    return AttentionPlan(
        rows=given, num_rows=num_rows, groups=groups, unpad_R=unpad_R, listed=listed, blocks=blocks
    )


def _narrowed(rows: AttentionRows, listed: ListedRows) -> AttentionRows:
    """The exact attention of listed rows is not used; it sees the row's own slot."""
    narrow_R = torch.zeros_like(rows.own_slots_R, dtype=torch.bool)
    narrow_R.index_fill_(0, listed.rows_bW.flatten(), True)
    return replace(
        rows,
        limits_R=torch.where(narrow_R, 0, rows.limits_R),
        branch_starts_R=torch.where(narrow_R, rows.own_slots_R, rows.branch_starts_R),
    )


def _groups(rows: AttentionRows, sequence_R: torch.Tensor) -> tuple[tuple[_Group, ...], torch.Tensor | None]:
    """Groups of sequences, and the index of each packed row in their rows (None: already in order)."""
    num_rows, num_sequences, device = len(sequence_R), rows.block_table.shape[0], sequence_R.device
    small = rows.max_rows <= FEW_ROWS and rows.max_slots <= FEW_SLOTS
    if small and num_sequences * rows.max_slots <= MAX_GATHERED_SLOTS:
        parts = [(torch.arange(num_sequences, device=device), rows.max_rows, rows.max_slots)]
        if num_rows == num_sequences * rows.max_rows:
            return (_rectangle(rows, *parts[0], packed=True),), None
    else:
        parts = _split(rows, sequence_R)
    base_B = torch.empty_like(rows.cu_rows[1:])
    offset = 0
    for sequences_b, max_rows, _ in parts:
        base_B[sequences_b] = offset + max_rows * torch.arange(sequences_b.numel(), device=device)
        offset += max_rows * sequences_b.numel()
    unpad_R = base_B[sequence_R] + torch.arange(num_rows, device=device) - rows.cu_rows[sequence_R]
    return tuple(_rectangle(rows, *part, packed=False) for part in parts), unpad_R


def _lone_rows(rows: AttentionRows, sequence_R: torch.Tensor) -> tuple[_Group, ...]:
    """A group for each row, with the slots that it sees and no others: its result depends on nothing else."""
    groups = []
    for row, sequence in enumerate(sequence_R.tolist()):
        row_1 = torch.tensor([row], device=sequence_R.device)
        own, limit, start = (int(one[row]) for one in (rows.own_slots_R, rows.limits_R, rows.branch_starts_R))
        slots_s = torch.arange(max(own + 1, limit), device=sequence_R.device)
        first = 0 if rows.first_slots_R is None else int(rows.first_slots_R[row])
        is_below_s = (slots_s >= first) & (slots_s < limit)
        slots_s = slots_s[is_below_s | ((slots_s >= start) & (slots_s <= own))]
        pages_s = rows.block_table[sequence][slots_s // rows.page_size]
        groups.append(
            _Group(
                num_sequences=1,
                num_rows=1,
                num_slots=len(slots_s),
                rows_bm=row_1,
                slots_bs=pages_s * rows.page_size + slots_s % rows.page_size,
                visible_bms=torch.ones(1, 1, len(slots_s), dtype=torch.bool, device=sequence_R.device),
            )
        )
    return tuple(groups)


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
            max_rows, max_slots = (max(sizes[sequence][axis] for sequence in part) for axis in (0, 1))
            parts.append((torch.tensor(part, device=counts_B.device), max_rows, max_slots))
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
    below_bms = slots_s < rows.limits_R[rows_bm][:, :, None]
    if rows.first_slots_R is not None:
        below_bms &= slots_s >= rows.first_slots_R[rows_bm][:, :, None]
    visible_bms |= below_bms
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
    if deterministic and device.type != "cpu":
        found.append("the products of the library are not batch-invariant on this device")
    if shape.kv_dtype not in (None, shape.dtype, FP8):
        found.append(f"takes a cache of {shape.dtype} or {FP8}, got {shape.kv_dtype}")
    return found


def run(
    q_RNH: torch.Tensor,
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
    plan: AttentionPlan,
    *,
    scale: float,
    out: torch.Tensor | None,
    lists_BKC: torch.Tensor | None,
    before: BeforeBlock | None,
) -> torch.Tensor:
    """See `op.paged_attention`; `caches`: keys and values, each with its scales. Rows after the last sequence
    are not read and become 0."""
    if before is not None:
        sums_before(q_RNH, caches[0], plan.blocks, scale, before)
    padded = [_attend(q_RNH, caches, group, scale) for group in plan.groups]
    o_XNH = padded[0] if len(padded) == 1 else torch.cat([*padded, q_RNH[:0]])
    o_RNH = o_XNH if plan.unpad_R is None else o_XNH.index_select(0, plan.unpad_R)
    if plan.listed is not None:
        assert lists_BKC is not None
        o_bWNH = attend_lists(q_RNH, caches, plan.listed, plan.rows, lists_BKC, scale)
        o_RNH = o_RNH.index_copy(0, plan.listed.rows_bW.flatten(), o_bWNH.flatten(0, 1))
    if out is None and plan.num_rows == len(q_RNH):
        return o_RNH
    out = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=q_RNH.device) if out is None else out
    out[: plan.num_rows] = o_RNH
    out[plan.num_rows :] = 0
    return out


def _attend(
    q_RNH: torch.Tensor,
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
    group: _Group,
    scale: float,
) -> torch.Tensor:
    """Return [b * m, N, H] of one group; `caches`: keys and values, each with its scales."""
    b, m, s = group.num_sequences, group.num_rows, group.num_slots
    num_heads, head_dim = q_RNH.shape[1:]
    num_kv_heads = caches[0][0].shape[1]
    per_kv_head = num_heads // num_kv_heads
    q_XNH = q_RNH[: b * m] if group.rows_bm is None else q_RNH.index_select(0, group.rows_bm)
    k_bKsH, v_bKsH = (
        gathered(cache_SKH, group.slots_bs, scale_K, q_RNH.dtype)
        .view(b, s, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache_SKH, scale_K in caches
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


def _bias(group: _Group, dtype: torch.dtype, repeats: int) -> torch.Tensor:
    """Additive mask [b, 1, repeats * m, s], cached for all layers: SDPA would convert a bool mask in each."""
    key = (dtype, repeats)
    if key not in group.bias:
        bias_bms = torch.zeros(group.visible_bms.shape, dtype=dtype, device=group.visible_bms.device)
        bias_bms.masked_fill_(~group.visible_bms, float("-inf"))
        group.bias[key] = bias_bms.repeat(1, repeats, 1).unsqueeze(1)
    return group.bias[key]
