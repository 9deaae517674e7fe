"""The torch op against a row-by-row reference; slots that must not be read hold NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from idlm.kernels.paged_attention import AttentionRows, paged_attention, plan_attention
from tests.kernels.references.paged_attention import paged_attention_reference

Row = tuple[int, int, int]
"""own slot, limit, branch start"""

DOT_SCALE = 0.3


@dataclass
class Case:
    q_RNH: torch.Tensor
    k_cache_SKH: torch.Tensor
    v_cache_SKH: torch.Tensor
    rows: AttentionRows


def causal(num_slots: int, num_rows: int) -> list[Row]:
    return [(own, own + 1, own + 1) for own in range(num_slots - num_rows, num_slots)]


def tree(num_slots: int, num_rows: int, rng: random.Random) -> list[Row]:
    """Random legal two-range rows: a limit at or below the row's own branch, which ends at the row itself."""
    rows = []
    for own in range(num_slots - num_rows, num_slots):
        branch_start = rng.randint(max(0, own - 3), own)
        rows.append((own, rng.randint(0, branch_start), branch_start))
    return rows


def build(
    sequences: list[list[Row]],
    *,
    kv_heads: int = 2,
    ratio: int = 2,
    head_dim: int = 8,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
) -> Case:
    """Lay the sequences over scattered pages; page 0 and every slot that no row sees hold `poison`."""
    generator = torch.Generator().manual_seed(len(sequences) * 1009 + ratio)
    seen = [
        {s for own, limit, start in rows for s in [*range(limit), *range(start, own + 1)]}
        for rows in sequences
    ]
    tops = [max(slots, default=-1) + 1 for slots in seen]
    num_pages = [-(-top // page_size) for top in tops]
    free = (torch.randperm(sum(num_pages), generator=generator) + 1).tolist()
    table = torch.zeros(len(sequences), max([*num_pages, 1]) + 2, dtype=torch.int64)
    shape = ((sum(num_pages) + 1) * page_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, poison, dtype=torch.float64) for _ in range(2))
    for sequence, slots in enumerate(seen):
        table[sequence, : num_pages[sequence]] = torch.tensor(
            [free.pop() for _ in range(num_pages[sequence])]
        )
        for slot in slots:
            physical = int(table[sequence, slot // page_size]) * page_size + slot % page_size
            k_cache[physical] = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
            v_cache[physical] = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
    flat = torch.tensor([row for rows in sequences for row in rows], dtype=torch.int64).reshape(-1, 3)
    q = torch.randn(len(flat), kv_heads * ratio, head_dim, generator=generator, dtype=torch.float64)
    rows = AttentionRows(
        cu_rows=torch.tensor([0, *[len(rows) for rows in sequences]]).cumsum(0),
        block_table=table,
        page_size=page_size,
        own_slots_R=flat[:, 0].contiguous(),
        limits_R=flat[:, 1].contiguous(),
        branch_starts_R=flat[:, 2].contiguous(),
        max_rows=max(map(len, sequences), default=0),
        max_slots=max(tops, default=0),
    )
    return Case(q.to(dtype), k_cache.to(dtype), v_cache.to(dtype), rows)


def run_op(case: Case) -> torch.Tensor:
    return paged_attention(
        case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan_attention(case.rows), scale=DOT_SCALE
    )


def exact(case: Case) -> torch.Tensor:
    q, k, v = (tensor.double() for tensor in (case.q_RNH, case.k_cache_SKH, case.v_cache_SKH))
    return paged_attention_reference(q, k, v, rows=case.rows, scale=DOT_SCALE)


def sdpa_error(case: Case, truth_RNH: torch.Tensor) -> float:
    """Largest error of PyTorch's own op, one row at a time over exactly the slots that the row sees."""
    rows, worst = case.rows, 0.0
    ratio = case.q_RNH.shape[1] // case.k_cache_SKH.shape[1]
    sequence_R = torch.repeat_interleave(torch.arange(len(rows.cu_rows) - 1), rows.cu_rows.diff())
    for r, (b, own, limit, start) in enumerate(
        zip(sequence_R, rows.own_slots_R, rows.limits_R, rows.branch_starts_R, strict=True)
    ):
        logical = torch.tensor(sorted({*range(int(limit)), *range(int(start), int(own) + 1)}))
        physical = rows.block_table[b, logical // rows.page_size] * rows.page_size + logical % rows.page_size
        k, v = (
            cache[physical].repeat_interleave(ratio, 1)[None].transpose(1, 2)
            for cache in (case.k_cache_SKH, case.v_cache_SKH)
        )
        o = F.scaled_dot_product_attention(case.q_RNH[r][None, :, None], k, v, scale=DOT_SCALE)
        worst = max(worst, (o[0, :, 0].double() - truth_RNH[r]).abs().max().item())
    return worst


def check(case: Case) -> None:
    truth = exact(case)
    o_RNH = run_op(case)
    assert o_RNH.shape == case.q_RNH.shape and o_RNH.dtype == case.q_RNH.dtype
    error = (o_RNH.double() - truth).abs().max().item()
    floor = torch.finfo(case.q_RNH.dtype).eps
    assert error <= 2 * max(sdpa_error(case, truth), floor), f"{error=}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize("num_slots", [1, 63, 64, 65])
def test_causal_prompt_equals_the_reference(num_slots: int, ratio: int, dtype: torch.dtype) -> None:
    try:
        check(build([causal(num_slots, num_slots)], ratio=ratio, dtype=dtype))
    except RuntimeError as error:
        # torch, on a CPU with AMX whose ATEN_CPU_CAPABILITY is below avx512.
        if "only supported when avx512" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ragged_batch_with_empty_sequences_and_a_long_chunk(page_size: int, ratio: int) -> None:
    check(
        build(
            [causal(9, 1), [], causal(40, 7), causal(90, 70), causal(65, 3), causal(20, 20), []],
            ratio=ratio,
            page_size=page_size,
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_tree_visibility(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [
        tree(n, rng.randint(1, n), rng) for n in (rng.randint(1, 40) for _ in range(rng.randint(1, 6)))
    ]
    check(build(sequences, ratio=rng.choice([1, 3]), page_size=rng.choice([1, 4, 5])))


def test_uniform_rows_need_no_padding_and_block_rows_see_ahead() -> None:
    block = [(own, 12, 99) for own in range(8, 12)]
    case = build([block, causal(30, 4), tree(12, 4, random.Random(1))])
    assert plan_attention(case.rows).unpad_R is None
    check(case)


def test_many_slots_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idlm.kernels.paged_attention.plain.MAX_GATHERED_SLOTS", 50)
    case = build([causal(20, 2), causal(30, 5), causal(45, 1), causal(7, 7), causal(60, 20)])
    assert len(plan_attention(case.rows).groups) > 2
    check(case)


def test_a_long_chunk_does_not_pad_the_decoding_sequences() -> None:
    case = build([causal(300, 300)] + [causal(20, 7) for _ in range(20)], head_dim=4)
    padded_rows = sum(group.num_sequences * group.num_rows for group in plan_attention(case.rows).groups)
    assert padded_rows == case.rows.own_slots_R.numel()
    check(case)


def test_a_long_context_does_not_pad_the_short_ones() -> None:
    case = build([causal(1100, 1)] + [causal(20, 1) for _ in range(20)], head_dim=4)
    gathered = sum(group.slots_bs.numel() for group in plan_attention(case.rows).groups)
    assert gathered == 1100 + 20 * 20
    check(case)


def test_no_rows() -> None:
    case = build([[], []])
    assert run_op(case).shape == case.q_RNH.shape


def test_unseen_slots_have_no_influence() -> None:
    sequences = [causal(13, 3), tree(21, 6, random.Random(7)), causal(50, 30)]
    assert torch.equal(run_op(build(sequences)), run_op(build(sequences, poison=5.0)))


def test_the_reference_against_a_hand_computed_row() -> None:
    case = build([[(3, 2, 3)]], kv_heads=1, ratio=1, dtype=torch.float64)
    physical = case.rows.block_table[0, 0] * 4 + torch.tensor([0, 1, 3])
    weights = (case.k_cache_SKH[physical, 0] @ case.q_RNH[0, 0] * DOT_SCALE).softmax(0)
    assert torch.allclose(exact(case)[0, 0], weights @ case.v_cache_SKH[physical, 0], atol=1e-14)
