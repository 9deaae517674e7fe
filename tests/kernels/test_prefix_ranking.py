"""The ranking of prefixes in plain torch against its definition; its kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.prefix_ranking import Sizes, check_selection, hard_scores, make_case

SIZES = (
    Sizes(),
    Sizes(layers=1, sequences=1, places=1, kv_heads=1, group=1, max_slots=40, page_size=1, listed=3),
    Sizes(sequences=5, places=7, group=3, head_dim=24, page_size=8, max_slots=120, listed=130),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_plain_torch_equals_the_definition(seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    make_case(seed, sizes, dtype, fp8=seed == 3 and dtype != torch.float64).check()


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_scores_are_listed(seed: int) -> None:
    scores_LBKS = hard_scores(seed, (2, 4, 2, 333))
    for counts, num in (([333, 0, 57, 5], 9), ([300, 100, 17, 5], 400)):
        check_selection(scores_LBKS, counts, num, device="cpu")
