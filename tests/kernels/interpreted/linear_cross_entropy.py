"""The Triton kernels of the fused loss, in the interpreter: started by test_interpreted.py.

Memory around every row is NaN, so that a wrong read is detected."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from idlm.kernels.linear_cross_entropy import kernel, linear_cross_entropy, op

SIZES = [1, 7, kernel.TILE, kernel.TILE + 1, 2 * kernel.TILE + 77]


def rows_in_poison(num_rows: int, num_tokens: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(the whole memory, the logits in it)."""
    memory = torch.full((num_rows + 2, num_tokens + 13), float("nan"))
    logits = memory[1:-1, 5 : 5 + num_tokens]
    logits.copy_(3 * torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)))
    return memory, logits


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_statistics_and_gradient(num_tokens: int) -> None:
    memory, logits = rows_in_poison(3, num_tokens)
    labels = torch.tensor([0, num_tokens - 1, num_tokens // 2])
    coefficients = torch.tensor([0.5, 0.0, -2.0])
    plain = logits.clone().requires_grad_()
    expected = functional.cross_entropy(plain, labels, reduction="none")
    (gradient,) = torch.autograd.grad((expected * coefficients).sum(), plain)
    nll = torch.empty(3)
    op._softmax_inplace(logits, labels, None, nll)
    assert torch.equal(logits, plain), "without coefficients the logits stay"
    torch.testing.assert_close(nll, expected.detach(), atol=5e-6, rtol=1e-6)
    op._softmax_inplace(logits, labels, coefficients, nll)
    torch.testing.assert_close(logits, gradient, atol=2e-6, rtol=1e-5)
    assert memory.isnan().sum() == memory.numel() - logits.numel(), "nothing is written outside the rows"


def test_labels_outside_give_nan_and_read_nothing_else() -> None:
    _, logits = rows_in_poison(3, 40)
    nll = torch.empty(3)
    op._softmax_inplace(logits, torch.tensor([-1, 40, 4]), torch.ones(3), nll)
    assert nll.isnan().tolist() == [True, True, False]


def test_tokens_that_cannot_be_drawn_cost_nothing() -> None:
    _, logits = rows_in_poison(2, 2 * kernel.TILE)
    logits[:, : kernel.TILE + 3] = float("-inf")
    labels = torch.tensor([kernel.TILE + 3, 2 * kernel.TILE - 1])
    expected, nll = functional.cross_entropy(logits, labels, reduction="none"), torch.empty(2)
    op._softmax_inplace(logits, labels, torch.ones(2), nll)
    torch.testing.assert_close(nll, expected)
    assert not logits[:, : kernel.TILE].any()


@pytest.mark.parametrize("num_tokens", [5, kernel.TILE + 1])
def test_overlap(num_tokens: int) -> None:
    (_, draft), (_, verify) = (rows_in_poison(4, num_tokens, seed=seed) for seed in (0, 1))
    overlap = torch.empty(4)
    op._overlap(draft, verify, overlap)
    expected = torch.minimum(draft.softmax(-1), verify.softmax(-1)).sum(-1)
    torch.testing.assert_close(overlap, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("divergence", ["kl", "overlap"])
@pytest.mark.parametrize("num_tokens", [1, kernel.TILE // 2, kernel.TILE // 2 + 1])
def test_distillation(
    num_tokens: int, divergence: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (memory, draft), (_, verify) = (rows_in_poison(3, num_tokens, seed=seed) for seed in (0, 1))
    if num_tokens > 7:
        verify[:, 3:5] = float("-inf")
    labels = torch.tensor([0, num_tokens - 1, num_tokens // 2])
    coefficients = torch.tensor([0.5, 0.0, -2.0])
    teacher = op._Teacher(verify, verify, None, divergence, share)
    expected, found = ([torch.empty(3), torch.empty(3)] for _ in range(2))
    before = draft.clone()
    op._distilled_inplace(draft, verify, labels, None, *found, teacher)
    assert torch.equal(draft, before), "without coefficients the logits stay"
    op._distilled_inplace(draft, verify, labels, coefficients, *found, teacher)
    monkeypatch.setattr(op, "runs_kernels", lambda _: False)
    op._distilled_inplace(before, verify, labels, coefficients, *expected, teacher)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft, before, atol=2e-6, rtol=1e-5)
    assert memory.isnan().sum() == memory.numel() - draft.numel(), "nothing is written outside the rows"


@pytest.mark.sweep_but(3)
@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("num_values", [0, 1, kernel.SCALE_TILE, kernel.SCALE_TILE + 1])
def test_scaling(factor: float, num_values: int) -> None:
    memory = torch.randn(num_values + 1)
    expected = torch.cat([memory[:-1] * factor, memory[-1:]])
    op._scale(memory[:-1], torch.tensor(factor))
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_the_op_on_these_kernels(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(num_rows, 8, generator=generator), torch.randn(37, 8, generator=generator)
    labels = torch.randint(0, 37, (num_rows,), generator=generator)
    coefficients = torch.rand(num_rows, generator=generator)
    results = []
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 2 * 40 * 4)
    for uses_kernels in (False, True):
        monkeypatch.setattr(op, "runs_kernels", lambda _, answer=uses_kernels: answer)
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss, nll = linear_cross_entropy(*inputs, labels, coefficients)
        results.append((loss.detach(), nll, *torch.autograd.grad(2 * loss, inputs)))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
