"""Bounds of keys and page scores in plain torch against their definition; kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.page_bounds import Bounds, PagedSlots, Pieces, page_scores, write_bounds
from tests.kernels.cases.sparse.page_bounds import check
from tests.kernels.hopper_compiler import assert_unspilled


@pytest.mark.parametrize("seed", range(9))
def test_plain_torch_equals_the_definition(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
    check(seed, dtype, device="cpu", fp8=seed in (3, 7))


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys_SKH, minimum, largest = (empty(rows, 8, 128, dtype=torch.bfloat16) for rows in (2048, 129, 129))
    bounds, slots = Bounds(minimum, largest, 16), PagedSlots(empty(2, 32), 32)
    pieces = Pieces(empty(4), empty(4), empty(4, dtype=torch.bool))
    q_RNH = empty(64, 32, 128, dtype=torch.bfloat16)

    def run() -> None:
        write_bounds(keys_SKH, None, bounds, pieces, empty(2), slots)
        page_scores(q_RNH, empty(2, 32), bounds, empty(2), slots, page=16, num_pages=64)

    made = assert_unspilled(run, "bounds_kernel", "score_kernel")
    assert all(each.registers <= 128 for each in made)
