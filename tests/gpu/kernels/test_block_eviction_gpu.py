"""The kernels of block_eviction on a CUDA device against the definition."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.block_eviction import block_importance
from tests.kernels.cases.sparse.block_eviction import SHAPES, check_importance, make_layer

Shape = tuple[int, int, int, int, int, int]
LARGE: Shape = (9, 32, 32, 8, 128, 32)
CASES: list[tuple[Shape, torch.dtype, torch.dtype | None, bool]] = [
    *((shape, torch.bfloat16, None, number % 2 > 0) for number, shape in enumerate([*SHAPES, LARGE])),
    (LARGE, torch.bfloat16, torch.float8_e4m3fn, False),
    (SHAPES[2], torch.bfloat16, torch.float8_e4m3fn, True),
    (SHAPES[2], torch.float16, None, False),
    (SHAPES[2], torch.float32, None, True),
]


@pytest.mark.parametrize(("shape", "dtype", "kv_dtype", "over_block"), CASES, ids=str)
def test_importance_equals_the_definition(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None, over_block: bool
) -> None:
    check_importance(make_layer(shape, dtype, kv_dtype=kv_dtype, device="cuda", over_block=over_block))


def test_a_sequence_has_the_same_bits_in_any_company() -> None:
    layer = make_layer(LARGE, torch.bfloat16, device="cuda")
    options = {"is_query_BW": layer.is_query_BW, "is_key_BW": layer.is_key_BW}
    together_BPW = block_importance(layer.q_RNH, layer.rows_BW, layer.keys, scale=layer.scale, **options)
    for b in range(9):
        table_BP, starts_B = layer.keys.block_table_BP[b : b + 1], layer.keys.starts_B[b : b + 1]
        keys = type(layer.keys)(
            keys_SKH=layer.keys.keys_SKH,
            scale_K=None,
            block_table_BP=table_BP,
            page_size=layer.keys.page_size,
            starts_B=starts_B,
        )
        own = {name: column_BW[b : b + 1] for name, column_BW in options.items()}
        alone_BPW = block_importance(layer.q_RNH, layer.rows_BW[b : b + 1], keys, scale=layer.scale, **own)
        assert torch.equal(alone_BPW[0], together_BPW[b])
