"""Random steps with lists: blocks in work beside their clean rows and other sequences, NaN in unseen slots.

B sequences, R rows fed this pass, C listed slots, S physical KV slots, N query heads, K KV heads, H head
dim, m rows and s slots of one sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from idlm.kernels.paged_attention import AttentionRows, BeforeBlock, HeadShape
from tests.kernels.cases.paged_attention import (
    FAR,
    SCALE,
    Case,
    Row,
    build,
    causal,
    random_sequences,
    visible,
)

ANY_LIST = 1 << 30
"""What lists of other sequences hold."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A sequence: rows before its block from slot `start - num_clean`, then the block's rows at `indices`."""

    start: int
    indices: tuple[int, ...]
    size: int
    num_clean: int = 0
    listed: bool = True

    def rows(self) -> list[Row]:
        """The clean rows are a block of their own; all positions see the block up to the last one that is fed
        or stored."""
        first = self.start - self.num_clean
        clean = [(first + i, self.start, FAR) for i in range(self.num_clean)]
        return clean + [(self.start + index, self.start + self.size, FAR) for index in self.indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCase:
    """A case whose rows have starts and lists."""

    case: Case
    lists_BKC: Tensor | None

    @property
    def rows(self) -> AttentionRows:
        return self.case.rows


def build_listed(
    sequences: list[list[Row] | Work],
    shape: HeadShape,
    *,
    num_listed: int,
    seed: int = 0,
    device: str = "cpu",
    full: bool = False,
    page_size: int = 4,
    padding: int = 3,
    spare_rows: int = 0,
    spare_slots: int = 0,
) -> ListedCase:
    """A case of sequences; `full`: lists hold as many slots as they can. No listed sequence: no lists."""
    case = build(
        [each.rows() if isinstance(each, Work) else each for each in sequences],
        shape,
        page_size=page_size,
        padding=padding,
        seed=seed,
        device=device,
        spare_rows=spare_rows,
        spare_slots=spare_slots,
    )
    generator = torch.Generator().manual_seed(seed + 77)
    lists_BKC = torch.full((len(sequences), shape.num_kv_heads, num_listed), ANY_LIST, dtype=torch.int32)
    for b, each in enumerate(sequences):
        if isinstance(each, Work) and each.listed:
            for head in range(shape.num_kv_heads):
                maximum = min(num_listed, each.start)
                drawn = int(torch.randint(0, maximum + 1, (1,), generator=generator))
                chosen = torch.randperm(each.start, generator=generator)[: maximum if full else drawn]
                lists_BKC[b, head] = -1
                lists_BKC[b, head, : len(chosen)] = chosen.sort().values
    listed_B = torch.tensor([isinstance(each, Work) and each.listed for each in sequences], device=device)
    starts_B = torch.tensor(
        [each.start if isinstance(each, Work) else 0 for each in sequences], device=device
    )
    has_lists = bool(listed_B.any())
    rows = replace(
        case.rows,
        starts_B=starts_B,
        listed_B=listed_B if has_lists else None,
        num_listed=num_listed if has_lists else 0,
    )
    found = ListedCase(case=replace(case, rows=rows), lists_BKC=lists_BKC.to(device) if has_lists else None)
    _poison(found)
    return found


def _poison(listed: ListedCase) -> None:
    """NaN in slots that no row sees through a KV head."""
    case = listed.case
    seen_SK = torch.zeros(case.k_cache_SKH.shape[:2], dtype=torch.bool, device=case.q_RNH.device)
    for b in range(len(case.rows.cu_rows) - 1):
        sees_Kms, physical_s = visible_by_head(listed, b)
        seen_SK[physical_s] |= sees_Kms.any(dim=1).T
    for cache in (case.k_cache_SKH, case.v_cache_SKH):
        cache[~seen_SK] = float("nan")


def visible_by_head(listed: ListedCase, b: int) -> tuple[Tensor, Tensor]:
    """Logical slots that each row of sequence b sees per KV head [K, m, s]; their physical slots [s]."""
    rows, num_kv_heads = listed.rows, listed.case.shape.num_kv_heads
    visible_ms, physical_s = visible(rows, b)
    sees_Kms = visible_ms.expand(num_kv_heads, -1, -1).clone()
    no_rows = not len(physical_s)
    if no_rows or listed.lists_BKC is None or rows.listed_B is None or not rows.listed_B[b]:
        return sees_Kms, physical_s
    assert rows.starts_B is not None
    fed = slice(int(rows.cu_rows[b]), int(rows.cu_rows[b + 1]))
    start, num_slots = int(rows.starts_B[b]), len(physical_s)
    slots_s = torch.arange(num_slots, device=physical_s.device)
    in_block_m = rows.own_slots_R[fed] >= start
    own_ms = (slots_s >= start) & (slots_s < rows.limits_R[fed, None])
    for head in range(num_kv_heads):
        list_C = listed.lists_BKC[b, head].long()
        is_listed_s = torch.zeros(num_slots + 1, dtype=torch.bool, device=physical_s.device)
        is_listed_s[list_C] = True
        sees_Kms[head] = torch.where(in_block_m[:, None], is_listed_s[:-1] | own_ms, sees_Kms[head])
    return sees_Kms, physical_s


def dense_listed(listed: ListedCase, dtype: torch.dtype) -> Tensor:
    """PyTorch's own attention, one sequence and KV head at a time, computed in `dtype`; 0 in the padding."""
    case, group = listed.case, listed.case.shape.group
    o_RNH = torch.zeros(case.q_RNH.shape, dtype=dtype, device=case.q_RNH.device)
    for b in range(len(case.rows.cu_rows) - 1):
        sees_Kms, physical_s = visible_by_head(listed, b)
        fed = slice(int(case.rows.cu_rows[b]), int(case.rows.cu_rows[b + 1]))
        for head, sees_ms in enumerate(sees_Kms if sees_Kms.numel() else ()):
            is_used_s = sees_ms.any(dim=0)
            used = physical_s[is_used_s]
            k_sH, v_sH = (cache[used, head].to(dtype) for cache in (case.k_cache_SKH, case.v_cache_SKH))
            heads = slice(head * group, (head + 1) * group)
            q_GmH = case.q_RNH[fed, heads].to(dtype).transpose(0, 1)
            o_GmH = functional.scaled_dot_product_attention(
                q_GmH[None],
                k_sH.expand(1, group, -1, -1),
                v_sH.expand(1, group, -1, -1),
                attn_mask=sees_ms[:, is_used_s],
                scale=SCALE,
            )[0]
            o_RNH[fed, heads] = o_GmH.transpose(0, 1)
    return o_RNH


def listed_error_ratio(listed: ListedCase, o_RNH: Tensor) -> float:
    """As `error_ratio` of cases without lists, for bfloat16 and float16."""
    truth, own = dense_listed(listed, torch.float64), dense_listed(listed, listed.case.shape.dtype)
    fed = int(listed.rows.cu_rows[-1])
    if o_RNH.dtype != own.dtype or not o_RNH.isfinite().all() or o_RNH[fed:].any():
        return float("inf")
    if not fed:
        return 0.0
    eps = torch.finfo(own.dtype).eps
    mine, theirs = o_RNH.double() - truth, own.double() - truth
    largest = mine.abs().max() / torch.maximum(theirs.abs().max(), eps * truth.abs().max())
    minimum = (0.2 * eps) ** 2 * truth[:fed].square().mean()
    root = (mine[:fed].square().mean() / torch.maximum(theirs[:fed].square().mean(), minimum)).sqrt()
    return float(torch.maximum(largest, root))


def empty_before(listed: ListedCase) -> BeforeBlock:
    """Buffers with poison, so that what is not written is detected."""
    q_RNH = listed.case.q_RNH
    highest_RN, totals_RN = torch.full((2, *q_RNH.shape[:2]), float("nan"), device=q_RNH.device)
    return BeforeBlock(highest_RN=highest_RN, totals_RN=totals_RN)


def dense_before(listed: ListedCase) -> tuple[Tensor, Tensor]:
    """What `BeforeBlock` holds, in float64: maximum, and logarithm (base 2) of the sum with it."""
    case, rows, group = listed.case, listed.rows, listed.case.shape.group
    assert rows.starts_B is not None
    size = (2, *case.q_RNH.shape[:2])
    highest_RN, logs_RN = torch.full(size, -torch.inf, dtype=torch.float64, device=case.q_RNH.device)
    for b in range(len(rows.cu_rows) - 1):
        start, first, end = int(rows.starts_B[b]), int(rows.cu_rows[b]), int(rows.cu_rows[b + 1])
        _, physical_s = visible(rows, b)
        if start == 0 or first == end or (rows.listed_B is not None and bool(rows.listed_B[b])):
            continue
        in_block_m = rows.own_slots_R[first:end] >= start
        k_sNH = case.k_cache_SKH[physical_s[:start]].double().repeat_interleave(group, dim=1)
        q_mNH = case.q_RNH[first:end][in_block_m].double()
        scores_mNs = torch.einsum("mnh,snh->mns", q_mNH, k_sNH) * (SCALE * LOG2_E)
        highest_RN[first:end][in_block_m] = scores_mNs.amax(dim=-1)
        logs_RN[first:end][in_block_m] = torch.logsumexp(scores_mNs / LOG2_E, dim=-1) * LOG2_E
    return highest_RN, logs_RN


def assert_before(listed: ListedCase, before: BeforeBlock, tolerance: float) -> None:
    """`tolerance`: of maximum and logarithm, in units of log2."""
    highest_RN, logs_RN = dense_before(listed)
    has_none = highest_RN == -torch.inf
    assert (before.highest_RN[has_none] == -torch.inf).all() and (before.totals_RN[has_none] == 0).all()
    found = before.highest_RN.double()[~has_none], before.totals_RN.double()[~has_none].log2()
    torch.testing.assert_close(found[0], highest_RN[~has_none], atol=tolerance, rtol=0)
    torch.testing.assert_close(found[0] + found[1], logs_RN[~has_none], atol=tolerance, rtol=0)


def random_listed(
    rng: random.Random, *, maximum: int, longest: int, chunk: int, size: int = 32
) -> list[list[Row] | Work]:
    """Blocks in work, listed or not, at any slot; with clean rows, dropped rows and other sequences."""
    sequences: list[list[Row] | Work] = []
    for _ in range(rng.randint(1, maximum)):
        kind = rng.randrange(6)
        start = rng.choice([0, rng.randint(0, 40), rng.randint(0, longest)])
        indices: list[int] = list(range(size))
        if kind == 0:
            sequences.append(rng.choice([[], causal(start, rng.randint(1, chunk))]))
            continue
        if kind == 1:
            indices = sorted(rng.sample(indices, rng.randint(0, size)))
        num_clean = rng.choice([0, 0, min(start, size), rng.randint(0, min(start, chunk))])
        sequences.append(
            Work(
                start=start,
                indices=tuple(indices),
                size=size,
                num_clean=num_clean,
                listed=rng.random() < 0.7,
            )
        )
    if rng.random() < 0.3:
        sequences += random_sequences(rng, maximum=2, longest=longest, chunk=chunk)
    return sequences
