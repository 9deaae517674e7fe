"""Random steps for the tests of paged attention: packed rows, scattered pages, NaN in unreadable memory.

Besides slots that no row sees, the rows after the last sequence are poison too: NaN queries and row numbers
out of range. B sequences, R rows fed this pass, S physical KV slots, N query heads, K KV heads, H head
dim, m rows and s slots of one sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from idlm.kernels.paged_attention import AttentionRows, HeadShape

Row = tuple[int, int, int]
"""own slot, limit, branch start; the own slots of a sequence ascend by one"""

SCALE = 0.3
FAR = 1 << 30
GARBAGE = 1 << 40
OTHER_ORDERS = {torch.float32: 4}
"""Permutations of the head's dimensions in which PyTorch's error is measured too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step of one layer. `rows` and `q_RNH` end in padding rows."""

    rows: AttentionRows
    shape: HeadShape
    q_RNH: Tensor
    k_cache_SKH: Tensor
    v_cache_SKH: Tensor


def causal(start: int, num_rows: int) -> list[Row]:
    return [(own, own + 1, own + 1) for own in range(start, start + num_rows)]


def cold(start: int) -> list[Row]:
    """`[pending, M, M, M]`."""
    return [*causal(start, 1), *((start + i, start + 1, start + 1) for i in (1, 2, 3))]


def steady(start: int) -> list[Row]:
    """`[pending, d, d, d, M, M, M]`: the masks follow the last draft."""
    return [*causal(start, 4), *((start + i, start + 4, start + 4) for i in (4, 5, 6))]


def tree(start: int) -> list[Row]:
    """The same rows, but the masks follow `pending` and do not see the drafts."""
    return [*causal(start, 4), *((start + i, start + 1, start + 4) for i in (4, 5, 6))]


def branch(start: int) -> list[Row]:
    """`[pending, d, d, d]` and one group of three masks on each of them."""
    groups = [(start + 4 + 3 * g + i, start + g + 1, start + 4 + 3 * g) for g in range(4) for i in range(3)]
    return [*causal(start, 4), *groups]


def block(start: int, num_rows: int) -> list[Row]:
    """A diffusion block: every row sees all of it."""
    return [(start + i, start + num_rows, FAR) for i in range(num_rows)]


def far_branch(start: int) -> list[Row]:
    """A row that sees a short prefix and itself, with a gap that no row sees."""
    return [(start, start // 3, start)]


def build(
    sequences: list[list[Row]],
    shape: HeadShape,
    *,
    page_size: int = 4,
    padding: int = 3,
    seed: int = 0,
    device: str = "cpu",
    spare_rows: int = 0,
    spare_slots: int = 0,
    window: int | None = None,
) -> Case:
    """A case on scattered pages. `spare_*`: how far the host's bounds exceed the truth; `window` of rows."""
    generator = torch.Generator().manual_seed(seed)
    tops = [max((max(own + 1, limit) for own, limit, _ in rows), default=0) for rows in sequences]
    num_pages = [-(-top // page_size) for top in tops]
    free = torch.randperm(sum(num_pages), generator=generator) + 1
    columns = max([*num_pages, 1]) + 1 + -(-spare_slots // page_size)
    table = torch.zeros(len(sequences), columns, dtype=torch.int64)
    for b, (count, pages) in enumerate(zip(num_pages, free.split(num_pages), strict=True)):
        table[b, :count] = pages
    flat = torch.tensor([row for rows in sequences for row in rows], dtype=torch.int64).reshape(-1, 3)
    flat = torch.cat([flat, torch.full((padding, 3), GARBAGE)])
    own, limit, start = (flat[:, i].contiguous().to(device) for i in range(3))
    rows = AttentionRows(
        cu_rows=torch.tensor([0, *map(len, sequences)]).cumsum(0).to(device),
        block_table=table.to(device),
        page_size=page_size,
        own_slots_R=own,
        limits_R=limit,
        branch_starts_R=start,
        max_rows=max(map(len, sequences), default=0) + spare_rows,
        max_slots=max(tops, default=0) + spare_slots,
    )
    rows = rows if window is None else in_windows(rows, window)
    num_slots = (sum(num_pages) + 1) * page_size
    caches = []
    for salt in (1, 2):
        drawn = torch.randn(
            num_slots, shape.num_kv_heads, shape.head_dim, generator=generator.manual_seed(seed + salt)
        )
        caches.append(drawn.to(device=device, dtype=shape.dtype))
    seen_S = torch.zeros(num_slots, dtype=torch.bool, device=device)
    for b in range(len(sequences)):
        visible_ms, physical_s = visible(rows, b)
        seen_S[physical_s[visible_ms.any(dim=0)]] = True
    for cache in caches:
        cache[~seen_S] = float("nan")
    # As in the engine: the queries are the first heads of the rows of one fused product.
    fused = torch.randn(
        len(flat), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator
    ).to(device=device, dtype=shape.dtype)
    fused[len(flat) - padding :] = float("nan")
    return Case(
        rows=rows,
        shape=shape,
        q_RNH=fused[:, : shape.num_heads],
        k_cache_SKH=caches[0],
        v_cache_SKH=caches[1],
    )


def in_windows(rows: AttentionRows, window: int) -> AttentionRows:
    """Positions of a branch follow what is before it."""
    own, start = rows.own_slots_R, rows.branch_starts_R
    return rows.in_windows(window, torch.where(start > own, own, rows.limits_R + own - start))


def visible(rows: AttentionRows, b: int) -> tuple[Tensor, Tensor]:
    """Logical slots that each row of sequence b sees [m, s], and their physical slots [s]."""
    start, end = int(rows.cu_rows[b]), int(rows.cu_rows[b + 1])
    own, limit, first = (
        tensor[start:end, None] for tensor in (rows.own_slots_R, rows.limits_R, rows.branch_starts_R)
    )
    num_slots = int(torch.maximum(own + 1, limit).max()) if end > start else 0
    slots_s = torch.arange(num_slots, device=rows.cu_rows.device)
    physical_s = rows.block_table[b, slots_s // rows.page_size] * rows.page_size + slots_s % rows.page_size
    below_ms = slots_s < limit
    if rows.first_slots_R is not None:
        below_ms &= slots_s >= rows.first_slots_R[start:end, None]
    return below_ms | ((slots_s >= first) & (slots_s <= own)), physical_s


def dense(case: Case, dtype: torch.dtype) -> Tensor:
    """PyTorch's own attention, one sequence at a time, computed in `dtype`; 0 in the padding."""
    rows, group = case.rows, case.shape.group
    o_RNH = torch.zeros(case.q_RNH.shape, dtype=dtype, device=case.q_RNH.device)
    for b in range(rows.cu_rows.numel() - 1):
        visible_ms, physical_s = visible(rows, b)
        if not visible_ms.numel():
            continue
        is_used = visible_ms.any(dim=0)
        k, v = (
            cache[physical_s[is_used]].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)[None]
            for cache in (case.k_cache_SKH, case.v_cache_SKH)
        )
        fed = slice(int(rows.cu_rows[b]), int(rows.cu_rows[b + 1]))
        q = case.q_RNH[fed].to(dtype).transpose(0, 1)[None]
        mask = visible_ms[:, is_used]
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)
        o_RNH[fed] = o[0].transpose(0, 1)
    return o_RNH


def error_ratio(case: Case, o_RNH: Tensor) -> float:
    """Error against float64 over that of PyTorch in the case's dtype, the larger of largest and root mean
    square; infinite if padding is not 0.

    PyTorch's error counts as at least that of rounding, which it can be below only by chance. In float32,
    where sums of products dominate the error, it is the worst over some orders of the head's dimensions: the
    largest error differs by a factor of two from one order to another."""
    truth = dense(case, torch.float64)
    fed = int(case.rows.cu_rows[-1])
    if o_RNH.dtype != case.shape.dtype or not o_RNH.isfinite().all() or o_RNH[fed:].any():
        return float("inf")
    if not fed:
        return 0.0
    mine = o_RNH[:fed].double() - truth[:fed]
    theirs = [
        dense(other, case.shape.dtype)[:fed].double() - truth[:fed]
        for other in (case, *(reordered(case, seed) for seed in range(OTHER_ORDERS.get(case.shape.dtype, 0))))
    ]
    eps = torch.finfo(case.shape.dtype).eps
    their_largest = torch.stack([error.abs().max() for error in theirs]).max()
    largest = mine.abs().max() / torch.maximum(their_largest, eps * truth.abs().max())
    their_squares = torch.stack([error.square().mean() for error in theirs]).max()
    squares, truth_squares = mine.square().mean(), truth[:fed].square().mean()
    root = (squares / torch.maximum(their_squares, (0.2 * eps) ** 2 * truth_squares)).sqrt()
    return float(torch.maximum(largest, root))


def reordered(case: Case, seed: int) -> Case:
    """The same step with the dimensions of queries and keys in another order, which changes rounding only."""
    order = torch.randperm(case.shape.head_dim, generator=torch.Generator().manual_seed(seed))
    order = order.to(case.q_RNH.device)
    return replace(case, q_RNH=case.q_RNH[..., order], k_cache_SKH=case.k_cache_SKH[..., order])


def fixed_content(case: Case, b: int) -> Case:
    """The step with keys, values and queries of sequence b that depend on its logical slots only."""
    generator = torch.Generator().manual_seed(99)
    _, physical_s = visible(case.rows, b)
    for cache in (case.k_cache_SKH, case.v_cache_SKH):
        drawn = torch.randn(4000, *cache.shape[1:], generator=generator)
        cache[physical_s] = drawn[: len(physical_s)].to(cache)
    queries = torch.randn(4000, *case.q_RNH.shape[1:], generator=generator)
    fed = slice(int(case.rows.cu_rows[b]), int(case.rows.cu_rows[b + 1]))
    case.q_RNH[fed] = queries[case.rows.own_slots_R[fed].cpu()].to(case.q_RNH)
    return case


def random_sequences(rng: random.Random, *, maximum: int, longest: int, chunk: int) -> list[list[Row]]:
    """Decoding sequences in all layouts, empty ones and chunks of prompts, in any order."""
    sequences: list[list[Row]] = []
    for _ in range(rng.randint(1, maximum)):
        start = rng.choice([0, rng.randint(0, 40), rng.randint(0, longest)])
        kind = rng.randrange(9)
        sequences.append(
            [[], cold(start), steady(start), tree(start), branch(start), causal(start, 1)][kind]
            if kind < 6
            else block(start, rng.randint(1, 33))
            if kind == 6
            else far_branch(start)
            if kind == 7
            else causal(start, rng.randint(1, chunk))
        )
    return sequences
