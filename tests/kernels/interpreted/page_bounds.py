"""The kernels of page_bounds in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases.page_bounds import Case


@pytest.mark.parametrize("seed", range(5))
def test_kernels_equal_the_definition(seed: int) -> None:
    Case(seed, (torch.float32, torch.bfloat16)[seed % 2]).check()


def test_keys_of_eight_bits() -> None:
    Case(7, torch.bfloat16, fp8=True).check()
