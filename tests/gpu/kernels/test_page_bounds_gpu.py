"""The kernels of page_bounds on a GPU against their definition.

python -m pytest tests/gpu/kernels/test_page_bounds_gpu.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.page_bounds import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_equal_the_definition(dtype: torch.dtype) -> None:
    for seed in range(40):
        Case(seed, dtype, device="cuda").check()


def test_keys_of_eight_bits() -> None:
    for seed in range(40):
        Case(seed, torch.bfloat16, device="cuda", fp8=True).check()
