"""The kernels of block_eviction in Triton's interpreter, which has no bfloat16: started by
test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.sparse.block_eviction import SHAPES, check_importance, make_layer

DTYPES = [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float8_e4m3fn)]


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_importance_equals_the_reference(
    number: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    over_block = number % 2 == 1
    check_importance(make_layer(SHAPES[number], dtype, kv_dtype=kv_dtype, over_block=over_block))
