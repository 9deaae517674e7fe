"""The torch path of lists, and of sums before blocks, against slow references; unseen slots hold NaN.

tests/kernels/interpreted/sparse/listed_attention.py checks the kernels alike."""

from __future__ import annotations

import random

import pytest
import torch

from idlm.kernels.paged_attention import HeadShape, paged_attention, plan_attention
from tests.kernels.cases.paged_attention import SCALE
from tests.kernels.cases.sparse.listed_attention import (
    ListedCase,
    assert_before,
    build_listed,
    dense_before,
    dense_listed,
    empty_before,
    random_listed,
)
from tests.kernels.references.paged_attention import paged_attention_reference, sums_before_reference

WIDE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float64)


def case_of(seed: int, shape: HeadShape = WIDE) -> ListedCase:
    rng = random.Random(seed)
    sequences = random_listed(rng, maximum=4, longest=60, chunk=9, size=rng.choice([1, 4, 8]))
    return build_listed(sequences, shape, num_listed=rng.choice([1, 7, 20]), seed=seed, full=seed % 3 == 0)


def arguments(listed: ListedCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return listed.case.q_RNH, listed.case.k_cache_SKH, listed.case.v_cache_SKH


@pytest.mark.parametrize("seed", range(15))
def test_lists_and_sums_equal_the_definition(seed: int) -> None:
    listed = case_of(seed)
    before = empty_before(listed)
    plan = plan_attention(listed.rows)
    o_RNH = paged_attention(*arguments(listed), plan, scale=SCALE, lists_BKC=listed.lists_BKC, before=before)
    torch.testing.assert_close(o_RNH, dense_listed(listed, torch.float64), atol=1e-12, rtol=1e-12)
    assert_before(listed, before, 1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_fast_truth_is_the_reference(seed: int) -> None:
    listed = case_of(seed)
    expected = paged_attention_reference(
        *arguments(listed), rows=listed.rows, scale=SCALE, lists_BKC=listed.lists_BKC
    )
    torch.testing.assert_close(dense_listed(listed, torch.float64), expected, atol=1e-12, rtol=1e-12)
    highest_RN, totals_RN = sums_before_reference(*arguments(listed)[:2], rows=listed.rows, scale=SCALE)
    found = dense_before(listed)
    torch.testing.assert_close(found[0], highest_RN)
    torch.testing.assert_close(found[1], totals_RN.log2() + highest_RN)
