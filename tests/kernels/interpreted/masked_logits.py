"""The kernel of `masked_logits` in the interpreter: started by test_interpreted.py.

float32 and float16: the interpreter has no bfloat16."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.masked_logits import launch as launch_module
from idlm.kernels.masked_logits import masked_logits
from tests.kernels.cases.masked_logits import SHAPES, Case, check_nonfinite, check_ties

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN", "ignore:divide by zero")


@pytest.fixture(autouse=True)
def _small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tma = getattr(request, "param", True)
    tiles = launch_module.LogitsLaunch(block_x=16, block_d=32, warps=4, stages=1, group=2, tma=tma)
    monkeypatch.setattr(launch_module, "choose", lambda *_, **__: tiles)


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("_small_tiles", [True, False], ids=["tma", "pointers"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_kernel_equals_the_definition(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    Case(shape, dtype).check()


def test_ties_and_rows_without_a_distribution() -> None:
    check_ties("cpu", torch.float16)
    check_nonfinite("cpu", torch.float16)


def test_tiles_without_a_wanted_row_are_not_computed() -> None:
    """Their rows are all -1; the hidden states that a computed tile would read are NaN."""
    case = Case(SHAPES[1], torch.float32)
    rows_X = torch.full((64,), -1)
    rows_X[40] = case.rows_X[0]
    hidden_RD, _, weight_VD = case.arguments()
    found = masked_logits(hidden_RD, rows_X, weight_VD)
    one = masked_logits(hidden_RD, case.rows_X[:1], weight_VD)
    assert found.token_X.nonzero().tolist() in ([[40]], []) and found.token_X[40] == one.token_X[0]
    assert not found.is_nonfinite_X.any()


def test_no_row_is_wanted() -> None:
    hidden, weight = torch.randn(3, 16), torch.randn(20, 16)
    found = masked_logits(hidden, torch.empty(0, dtype=torch.int64), weight, entropy=True)
    assert len(found.token_X) == len(found.own_X) == 0
    found = masked_logits(hidden, torch.full((4,), -1), weight)
    assert not found.token_X.any() and not found.own_X.any() and not found.is_nonfinite_X.any()
