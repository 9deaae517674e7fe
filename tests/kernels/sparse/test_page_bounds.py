"""Bounds of keys and page scores in plain torch against their definition; kernels compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases.sparse.page_bounds import check


@pytest.mark.parametrize("seed", range(9))
def test_plain_torch_equals_the_definition(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
    check(seed, dtype, device="cpu", fp8=seed in (3, 7))


TYPES = dict.fromkeys(("sequences_I", "slots_I", "ends_B", "block_table", "rows_BW", "starts_B"), "*i64")
TYPES |= dict.fromkeys(("keys_SKH", "min_CKH", "largest_CKH", "q_RNH"), "*bf16")
TYPES |= {"is_piece_I": "*i1", "k_scale_K": "*fp32", "scores_BKP": "*fp32", "num_pages": "i32"}
TYPES |= dict.fromkeys(("stride_slot", "stride_head", "stride_piece", "stride_table", "stride_row"), "i32")


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bounds_kernel", "score_kernel"])
def test_the_kernels_compile_for_hopper(name: str) -> None:
    pytest.importorskip("triton")
    from idlm.kernels.page_bounds import kernel, op
    from tests.kernels.hopper_compiler import compile_for_hopper

    constants: dict[str, Any] = {"H": 128, "PAGE": 32, "SIZE": 16, "BLOCK_H": 128}
    if name == "bounds_kernel":
        constants |= {"SCALED": False, "k_scale_K": None, "BLOCK_F": 16}
    else:
        constants |= {"W": 32, "K": 8, "G": 4, "PIECES": 1, "TILES": op.TILES, "BLOCK_W": 32}
        constants |= {"BLOCK_M": op.BLOCK_M, "BLOCK_P": op.BLOCK_P}
    made = compile_for_hopper(getattr(kernel, name), TYPES, constants, num_warps=4)
    assert made.spilled_bytes == 0 and made.registers <= 128
