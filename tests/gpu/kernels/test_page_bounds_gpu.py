"""Bounds of keys and page scores on a CUDA device against their definition."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.sparse.page_bounds import check


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 24), (torch.float16, 24), (torch.float32, 128)],
    ids=str,
)
def test_random_cases_equal_the_definition(dtype: torch.dtype, head_dim: int) -> None:
    for seed in range(12):
        check(seed, dtype, device="cuda", fp8=seed % 4 == 3, head_dim=head_dim, pages=3 + 20 * (seed % 3))
