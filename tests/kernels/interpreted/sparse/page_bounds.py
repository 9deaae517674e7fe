"""The kernels of page_bounds in Triton's interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.page_bounds import op
from tests.kernels.cases.sparse.page_bounds import check

# Columns after the head dim have bounds of infinity, and no part in the sum.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize("seed", range(5))
def test_the_kernels_equal_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "TILES", 1 + seed % 2)
    dtype = torch.float16 if seed % 2 else torch.float32
    check(seed, dtype, device="cpu", fp8=seed % 4 == 3, pages=3)
