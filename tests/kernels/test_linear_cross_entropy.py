"""The fused loss of a linear head on a CPU against its definition."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.linear_cross_entropy import (
    DIVERGENCES,
    chunk_rows,
    linear_cross_entropy,
    linear_distillation,
    linear_overlap,
    op,
    token_nll,
)
from tests.kernels.references.linear_cross_entropy import (
    linear_cross_entropy_reference,
    linear_distillation_reference,
)

SHAPES = [(0, 8, 4), (1, 1, 1), (63, 64, 8), (130, 101, 16)]
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}


def problem(num_rows, num_tokens, width, dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = {"dtype": dtype, "generator": generator, "requires_grad": True}
    hidden, weight = torch.randn(num_rows, width, **make), torch.randn(num_tokens, width, **make)
    bias = torch.randn(num_tokens, **make)
    labels = torch.randint(0, num_tokens, (num_rows,), generator=generator)
    return hidden, weight, bias, labels, torch.rand(num_rows, generator=generator)


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows_at_once", [None, 7])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_equal_the_reference(dtype, shape, rows_at_once, has_bias, monkeypatch) -> None:
    hidden, weight, bias, labels, coefficients = problem(*shape, dtype)
    if rows_at_once is not None:
        monkeypatch.setattr(op, "MAX_LOGITS_BYTES", rows_at_once * (shape[1] + 4) * dtype.itemsize)
    bias = bias if has_bias else None
    wanted = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    loss, nll = linear_cross_entropy(hidden, weight, labels, coefficients, bias_V=bias)
    expected, expected_nll = linear_cross_entropy_reference(hidden, weight, labels, coefficients, bias_V=bias)
    tolerance = {"atol": EXACT[dtype], "rtol": EXACT[dtype]}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(nll, expected_nll, **tolerance)
    assert not nll.requires_grad
    for mine, theirs in zip(gradients(3 * loss, wanted), gradients(3 * expected, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    alone = token_nll(hidden, weight, labels, bias_V=bias)
    torch.testing.assert_close(alone, nll, **tolerance)
    assert not alone.requires_grad


def test_frozen_parameters_take_no_gradient() -> None:
    hidden, weight, bias, labels, coefficients = problem(9, 20, 6, torch.float32)
    everything = gradients(
        linear_cross_entropy(hidden, weight, labels, coefficients, bias_V=bias)[0], (hidden, weight, bias)
    )
    for kept in range(3):
        inputs = [x if index == kept else x.detach() for index, x in enumerate((hidden, weight, bias))]
        loss, _ = linear_cross_entropy(*inputs[:2], labels, coefficients, bias_V=inputs[2])
        (gradient,) = gradients(loss, (inputs[kept],))
        assert torch.equal(gradient, everything[kept])
    loss, _ = linear_cross_entropy(hidden.detach(), weight.detach(), labels, coefficients)
    assert not loss.requires_grad
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, coefficients)[0].requires_grad


def test_a_tied_weight_gathers_both_gradients() -> None:
    _, weight, _, labels, coefficients = problem(9, 20, 6, torch.float64)
    ids = torch.arange(9) % 20
    loss, _ = linear_cross_entropy(weight[ids], weight, labels, coefficients)
    expected, _ = linear_cross_entropy_reference(weight[ids], weight, labels, coefficients)
    torch.testing.assert_close(gradients(loss, (weight,)), gradients(expected, (weight,)))


def test_under_autocast_a_float32_weight_gets_a_float32_gradient_as_exact_as_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 50 * 96 * 2)
    hidden, weight, _, labels, coefficients = problem(200, 90, 32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll = linear_cross_entropy(hidden, weight, labels, coefficients)
        plain_nll = torch.nn.functional.cross_entropy(
            torch.nn.functional.linear(hidden, weight), labels, reduction="none"
        )
    plain = (plain_nll * coefficients).sum()
    assert nll.dtype == torch.float32
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = gradients(linear_cross_entropy_reference(*wide, labels, coefficients)[0], wide)
    mine, theirs = gradients(loss, (hidden, weight)), gradients(plain, (hidden, weight))
    for own, other, true in zip(mine, theirs, truth, strict=True):
        assert own.dtype == torch.float32
        assert (own - true).norm() <= 2 * (other - true).norm()


def test_bfloat16_sums_over_many_chunks_stay_within_twice_pytorchs_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 128 * 96 * 2)
    hidden, weight, _, labels, coefficients = problem(2048, 96, 64, torch.bfloat16)
    loss, _ = linear_cross_entropy(hidden, weight, labels, coefficients)
    logits = torch.nn.functional.linear(hidden, weight).float()
    plain = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * coefficients).sum()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = gradients(linear_cross_entropy_reference(*wide, labels, coefficients)[0], wide)
    mine, theirs = gradients(loss, (hidden, weight)), gradients(plain, (hidden, weight))
    for own, other, true in zip(mine, theirs, truth, strict=True):
        assert (own - true).norm() <= 2 * (other - true).norm()


@pytest.mark.parametrize("rows_at_once", [1, 5, 1000])
def test_the_overlap_is_the_sum_of_minima(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 2 * rows_at_once * 32 * 8)
    draft, weight, bias, _, _ = problem(12, 31, 6, torch.float64)
    verify = problem(12, 31, 6, torch.float64, seed=1)[0]
    overlap = linear_overlap(draft, verify, weight, bias_V=bias)
    probs = [torch.softmax(hidden @ weight.T + bias, dim=-1) for hidden in (draft, verify)]
    torch.testing.assert_close(overlap, torch.minimum(*probs).sum(dim=-1))
    assert not overlap.requires_grad


@pytest.mark.parametrize("label", [-1, 20])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, _, labels, coefficients = problem(4, 20, 6, torch.float32)
    labels[2] = label
    with pytest.raises(AssertionError, match="vocabulary 20"):
        linear_cross_entropy(hidden, weight, labels, coefficients)


def test_a_loss_is_differentiated_once() -> None:
    hidden, weight, _, labels, coefficients = problem(4, 20, 6, torch.float32)
    loss, _ = linear_cross_entropy(hidden, weight, labels, coefficients)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="differentiated before"):
        loss.backward()


@pytest.mark.parametrize("num_rows", [0, 1, 129, 8192])
@pytest.mark.parametrize("row_bytes", [2, 303_872, 10**9])
def test_chunks_cover_the_rows_within_the_budget(num_rows: int, row_bytes: int) -> None:
    budget = 200_000_000
    rows = chunk_rows(num_rows, row_bytes, budget)
    assert rows >= 1
    assert rows == 1 or rows * row_bytes <= budget
    fewest = -(-num_rows // max(1, budget // row_bytes))
    assert -(-num_rows // rows) <= fewest + fewest // 4 + 1


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows_at_once", [None, 7])
def test_distillation_equals_the_reference(
    divergence, share, dtype, shape, rows_at_once, monkeypatch
) -> None:
    hidden, weight, bias, labels, coefficients = problem(*shape, dtype)
    verify = problem(*shape, dtype, seed=1)[0]
    if rows_at_once is not None:
        monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 2 * rows_at_once * (shape[1] + 4) * 8)
    how = {"divergence": divergence, "share": share, "bias_V": bias}
    loss, nll = linear_distillation(hidden, verify, weight, labels, coefficients, **how)
    expected, expected_nll = linear_distillation_reference(
        hidden, verify, weight, labels, coefficients, **how
    )
    tolerance = {"atol": EXACT[dtype], "rtol": EXACT[dtype]}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(nll, expected_nll, **tolerance)
    wanted = (hidden, weight, bias)
    for mine, theirs in zip(gradients(3 * loss, wanted), gradients(3 * expected, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    with torch.no_grad():
        again, _ = linear_distillation(hidden, verify, weight, labels, coefficients, **how)
    torch.testing.assert_close(again, loss.detach(), **tolerance)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_draft_that_equals_its_teacher_has_nothing_to_learn(divergence) -> None:
    hidden, weight, _, labels, coefficients = problem(9, 20, 6, torch.float64)
    how = {"divergence": divergence, "share": 1.0}
    loss, _ = linear_distillation(hidden, hidden, weight, labels, coefficients, **how)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert gradients(loss, (hidden,))[0].abs().max() < 1e-12
