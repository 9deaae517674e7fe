"""The torch op against PyTorch's attention and a row-by-row reference. Slots that no row sees hold NaN."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from idlm.kernels.paged_attention import HeadShape, paged_attention, plan_attention
from tests.kernels.cases.paged_attention import (
    SCALE,
    Case,
    block,
    build,
    causal,
    error_ratio,
    random_sequences,
    tree,
)
from tests.kernels.references.paged_attention import paged_attention_reference


def shape_of(ratio: int = 2, dtype: torch.dtype = torch.float32) -> HeadShape:
    return HeadShape(num_heads=2 * ratio, num_kv_heads=2, head_dim=8, dtype=dtype)


def run_op(case: Case) -> torch.Tensor:
    plan = plan_attention(case.rows)
    return paged_attention(case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, plan, scale=SCALE)


def check(case: Case) -> None:
    o_RNH = run_op(case)
    assert o_RNH.shape == case.q_RNH.shape and error_ratio(case, o_RNH) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    sequences = random_sequences(rng, maximum=6, longest=40, chunk=9)
    shape = shape_of(rng.choice([1, 3]), torch.float64)
    case = build(sequences, shape, page_size=rng.choice([1, 4, 5]), padding=0, seed=seed)
    expected = paged_attention_reference(
        case.q_RNH, case.k_cache_SKH, case.v_cache_SKH, rows=case.rows, scale=SCALE
    )
    torch.testing.assert_close(run_op(case), expected, atol=1e-12, rtol=1e-12)


def test_uniform_rows_need_no_padding_and_block_rows_see_ahead() -> None:
    case = build([block(8, 4), causal(26, 4), causal(8, 4)], shape_of(), padding=0)
    assert plan_attention(case.rows).unpad_R is None
    check(case)


def test_many_slots_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idlm.kernels.paged_attention.plain.MAX_GATHERED_SLOTS", 50)
    case = build([causal(18, 2), causal(25, 5), causal(44, 1), causal(0, 7), tree(9)], shape_of())
    assert len(plan_attention(case.rows).groups) > 2
    check(case)


def test_long_chunks_and_contexts_do_not_pad_the_others() -> None:
    case = build([causal(0, 300)] + [causal(13, 7) for _ in range(20)], shape_of(), padding=0)
    padded_rows = sum(group.num_sequences * group.num_rows for group in plan_attention(case.rows).groups)
    assert padded_rows == case.rows.own_slots_R.numel()
    case = build([causal(1099, 1)] + [causal(19, 1) for _ in range(20)], shape_of())
    gathered = sum(group.slots_bs.numel() for group in plan_attention(case.rows).groups)
    assert gathered == 1100 + 20 * 20
    check(case)


def test_no_rows_and_unseen_slots_have_no_influence() -> None:
    nothing = build([[], []], shape_of(), padding=0)
    assert run_op(nothing).shape == nothing.q_RNH.shape
    case = build([causal(10, 3), tree(14), causal(20, 30)], shape_of())
    caches = {
        "k_cache_SKH": case.k_cache_SKH.nan_to_num(5.0),
        "v_cache_SKH": case.v_cache_SKH.nan_to_num(5.0),
    }
    assert torch.equal(run_op(case), run_op(replace(case, **caches)))
