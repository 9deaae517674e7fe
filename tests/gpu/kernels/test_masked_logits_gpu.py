"""`masked_logits` on a CUDA device against the definition, at the head of LLaDA-8B, and beyond
2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from idlm.kernels.masked_logits import WORKSPACE_BYTES, masked_logits
from tests.kernels.cases.masked_logits import SHAPES, Case, check_nonfinite, check_ties

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD = (126_464, 4096)
SLACK_BYTES = 2 << 20


def scattered(num_rows: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a quarter of their rows in order, and LLaDA-8B's head; logits of deviation 2."""
    torch.manual_seed(seed)
    hidden_RD = torch.randn(num_rows, HEAD[1], device="cuda", dtype=torch.bfloat16)
    weight_VD = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16) * (2 / HEAD[1] ** 0.5)
    rows_X = torch.randperm(num_rows, device="cuda")[: num_rows // 4].sort().values
    return hidden_RD, rows_X, weight_VD


CASES = [(shape, torch.bfloat16) for shape in (*SHAPES, (200, 777, 136))] + [
    (shape, dtype) for shape in (SHAPES[0], SHAPES[3]) for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_it_equals_the_definition(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    Case(shape, dtype, device="cuda").check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_that_no_descriptor_describes(dtype: torch.dtype) -> None:
    Case(SHAPES[3], dtype, device="cuda", padding=9).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_rows_without_a_distribution(dtype: torch.dtype) -> None:
    check_ties("cuda", dtype)
    check_nonfinite("cuda", dtype)


def library(hidden_RD: torch.Tensor, rows_X: torch.Tensor, weight_VD: torch.Tensor) -> tuple[Any, Any]:
    """Tokens and probabilities by the library's product, whose ties are not those of the op."""
    probs_XV = torch.nn.functional.linear(hidden_RD[rows_X], weight_VD).float().softmax(-1)
    own_X, token_X = probs_XV.max(-1)
    return token_X, own_X.double()


def test_it_agrees_with_the_library_at_a_real_head() -> None:
    hidden_RD, rows_X, weight_VD = scattered(1300)
    found = masked_logits(hidden_RD, rows_X, weight_VD)
    token_X, own_X = library(hidden_RD, rows_X, weight_VD)
    # Sums in another order may round a logit to its neighbour in bf16.
    is_equal_X = token_X == found.token_X
    assert is_equal_X.double().mean() > 0.95
    torch.testing.assert_close(found.own_X[is_equal_X], own_X[is_equal_X], atol=1e-4, rtol=0.15)


def test_memory_does_not_grow_with_the_rows() -> None:
    for num_rows in (4096, 65_536):
        hidden_RD, rows_X, weight_VD = scattered(num_rows)
        masked_logits(hidden_RD, rows_X[:600], weight_VD)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = masked_logits(hidden_RD, rows_X, weight_VD)
        torch.cuda.synchronize()
        assert len(found.token_X) == len(rows_X)
        # Beside the results, a few numbers for each wanted row.
        extra = torch.cuda.max_memory_allocated() - before - 64 * len(rows_X)
        assert extra <= WORKSPACE_BYTES + SLACK_BYTES, f"{num_rows=} {extra=}"


def test_rows_beyond_31_bits() -> None:
    """600,000 rows of 4,096 numbers are 2.46e9; all but the wanted ones are NaN."""
    num_rows, width = 600_000, 4096
    hidden_RD = torch.full((num_rows, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    rows_X = torch.tensor([0, 524_287, 524_288, 599_998, 599_999, -1, 3], device="cuda")
    torch.manual_seed(0)
    weight_VD = torch.randn(1000, width, device="cuda", dtype=torch.bfloat16) / 16
    small_XD = torch.randn(len(rows_X), width, device="cuda", dtype=torch.bfloat16)
    is_row_X = rows_X >= 0
    hidden_RD[rows_X[is_row_X]] = small_XD[is_row_X]
    positions_X = torch.where(is_row_X, torch.arange(len(rows_X), device="cuda"), -1)
    far, near = (
        masked_logits(hidden, rows, weight_VD)
        for hidden, rows in ((hidden_RD, rows_X), (small_XD, positions_X))
    )
    assert torch.equal(far.token_X, near.token_X) and torch.equal(far.own_X, near.own_X)
    assert not far.is_nonfinite_X.any()


def test_as_many_wanted_rows() -> None:
    """600,000 wanted rows at once, of which the last ones are checked."""
    torch.manual_seed(0)
    hidden_RD = torch.randn(600_000, 64, device="cuda", dtype=torch.bfloat16)
    weight_VD = torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16) / 4
    rows_X = torch.arange(len(hidden_RD), device="cuda")
    found = masked_logits(hidden_RD, rows_X, weight_VD)
    is_equal_X = found.token_X[-4096:] == library(hidden_RD, rows_X[-4096:], weight_VD)[0]
    assert is_equal_X.double().mean() > 0.98
    assert not found.is_nonfinite_X.any() and (found.own_X > 0).all()


def test_nothing_waits_for_the_device_and_a_graph_replays() -> None:
    hidden_RD, rows_X, weight_VD = scattered(1024)
    expected = masked_logits(hidden_RD, rows_X, weight_VD)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked_logits(hidden_RD, rows_X, weight_VD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = masked_logits(hidden_RD, rows_X, weight_VD)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found.token_X, expected.token_X) and torch.equal(found.own_X, expected.own_X)
