"""The torch path of lists, and of sums before blocks, against slow references; unseen slots hold NaN.

tests/kernels/interpreted/sparse/listed_attention.py checks the kernels alike.
"""

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
    dense_listed,
    empty_before,
    random_listed,
)

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
