"""Bounds of keys and page scores on a CUDA device against their definition.

python -m pytest tests/gpu/kernels/sparse/test_page_bounds_gpu.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.sparse.page_bounds import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 24), (torch.float16, 24), (torch.float32, 128)],
    ids=str,
)
def test_random_cases_equal_the_definition(dtype: torch.dtype, head_dim: int) -> None:
    for seed in range(12):
        check(seed, dtype, device="cuda", fp8=seed % 4 == 3, head_dim=head_dim, pages=3 + 20 * (seed % 3))
