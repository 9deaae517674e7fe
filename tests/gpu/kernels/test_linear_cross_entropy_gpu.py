"""The fused loss on a CUDA device: random shapes against float64, and no wait for the device in a step."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from idlm.errors import UserError
from idlm.kernels.linear_cross_entropy import (
    DIVERGENCES,
    linear_cross_entropy,
    linear_distillation,
    linear_overlap,
    op,
    token_nll,
)
from idlm.train.objectives.base import TermRequest
from idlm.train.step import BodyAndHead, LossGuard
from tests.kernels.references.linear_cross_entropy import (
    linear_cross_entropy_reference,
    linear_distillation_reference,
)
from tests.tiny_training import batch_of, random_sample, stage_of, tiny_model, tiny_objective

SHAPES_PER_SEED = 16
SLACK = {torch.bfloat16: 2e-3, torch.float32: 2e-6}
"""One rounding of the result in its own dtype, relative to the norm."""


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm().clamp_min(1e-12))


def plain_loss(hidden, weight, bias, labels, coefficients):
    logits = functional.linear(hidden, weight, bias).float()
    return (functional.cross_entropy(logits, labels, reduction="none") * coefficients).sum()


def check_shape(draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, width = draw.choice([1, 2, 63, 128, 129, 500, 1111]), draw.choice([8, 40, 64, 257, 512])
    num_tokens = draw.choice([2, 33, 1000, 4096, 8191, 8193, 30_011, 50_257])
    autocasts = draw.random() < 0.25
    dtype = torch.float32 if autocasts or draw.random() < 0.3 else torch.bfloat16
    compute = torch.bfloat16 if autocasts else dtype
    # A bfloat16 sum of weight gradients is rounded once per chunk, so tiny chunks are for float32 sums.
    rows_at_once = draw.choice([128, 256, 10_000] if dtype == torch.bfloat16 else [1, 50, 128, 10_000])
    case = f"{num_rows=} {width=} {num_tokens=} {autocasts=} {dtype=} {rows_at_once=}"
    torch.manual_seed(draw.randrange(1 << 30))
    options = {"device": "cuda", "dtype": dtype}
    hidden, weight = torch.randn(num_rows, width, **options), torch.randn(num_tokens, width, **options)
    weight *= 2 / width**0.5
    bias = torch.randn(num_tokens, **options) if draw.random() < 0.3 else None
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    labels = torch.randint(0, num_tokens, (num_rows,), device="cuda")
    coefficients = torch.rand(num_rows, device="cuda")
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", rows_at_once * (num_tokens + 8) * compute.itemsize)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
        loss, nll = linear_cross_entropy(hidden, weight, labels, coefficients, bias_V=bias)
        plain = plain_loss(hidden, weight, bias, labels, coefficients)
        alone = token_nll(hidden, weight, labels, bias_V=bias)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth, true_nll = linear_cross_entropy_reference(
        wide[0], wide[1], labels, coefficients, bias_V=None if bias is None else wide[2]
    )
    pairs = [(loss, plain, truth)]
    pairs += zip(
        *(
            torch.autograd.grad(2.5 * total, of)
            for total, of in ((loss, inputs), (plain, inputs), (truth, wide))
        )
    )
    torch.testing.assert_close(alone, nll, atol=2e-2 if compute == torch.bfloat16 else 1e-5, rtol=0)
    torch.testing.assert_close(
        nll.double(), true_nll, atol=1e-1 if compute == torch.bfloat16 else 1e-4, rtol=0
    )
    for mine, theirs, true in pairs:
        assert mine.dtype == theirs.dtype
        assert relative(mine, true) <= 2 * relative(theirs, true) + SLACK[compute], case


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_are_as_exact_as_pytorch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    for _ in range(SHAPES_PER_SEED):
        check_shape(draw, monkeypatch)


@pytest.mark.parametrize("num_tokens", [33, 8193, 50_257])
def test_the_overlap_is_the_sum_of_minima(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 256 * num_tokens * 4)
    torch.manual_seed(0)
    draft, verify, weight = (torch.randn(n, 64, device="cuda") for n in (300, 300, num_tokens))
    probs = [(hidden.double() @ weight.double().T).softmax(dim=-1) for hidden in (draft, verify)]
    overlap = linear_overlap(draft, verify, weight)
    torch.testing.assert_close(overlap.double(), torch.minimum(*probs).sum(dim=-1), atol=1e-4, rtol=1e-3)


def test_a_label_outside_the_vocabulary_gives_nan_and_touches_nothing() -> None:
    hidden, weight = torch.randn(4, 64, device="cuda"), torch.randn(1000, 64, device="cuda")
    labels = torch.tensor([0, 1000, -100, 1 << 40], device="cuda")
    _, nll = linear_cross_entropy(hidden, weight, labels, torch.ones(4, device="cuda"))
    assert nll.isnan().tolist() == [False, True, True, True]


@pytest.fixture
def _no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def one_step(model, objective, batch, stage, guard):
    request = TermRequest(stage=stage, coefficients=torch.ones(2, device="cuda") * 0.5, want_overlap=True)
    terms = BodyAndHead(model).terms(
        model,
        batch,
        "idlm_sdpa",
        lambda head, hidden: objective.terms(head, hidden, batch, request),
    )
    guard.begin(1, num_micro_batches=1)
    guard.note(terms.loss, batch)
    terms.loss.backward()
    return terms


def test_a_step_never_waits_for_the_device(tmp_path, request: pytest.FixtureRequest) -> None:
    model, objective, stage = tiny_model("qwen3").cuda(), tiny_objective(), stage_of(3)
    batch = batch_of([random_sample(1, prompt=4, response=20)], objective, stage)
    batch = {name: value.cuda() for name, value in batch.items()}
    guard = LossGuard(tmp_path)
    one_step(model, objective, batch, stage, guard)
    request.getfixturevalue("_no_waiting")
    terms = one_step(model, objective, batch, stage, guard)
    torch.cuda.set_sync_debug_mode("default")
    guard.check()
    assert terms.loss.isfinite()
    guard.begin(2, num_micro_batches=1)
    guard.note(terms.loss * float("nan"), batch)
    with pytest.raises(UserError, match="IDLM-0503"):
        guard.check()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 33, 8), torch.float32),
        ((129, 8193, 64), torch.float32),
        ((129, 8193, 64), torch.bfloat16),
        ((500, 50_257, 128), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_distillation_on_the_gpu(
    shape: tuple[int, int, int], divergence: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    num_rows, num_tokens, width = shape
    draft, verify = (torch.randn(num_rows, width, device="cuda", dtype=dtype) for _ in range(2))
    weight = (torch.randn(num_tokens, width, device="cuda") * 2 / width**0.5).to(dtype)
    labels = torch.randint(0, num_tokens, (num_rows,), device="cuda")
    coefficients, how = torch.rand(num_rows, device="cuda"), {"divergence": divergence, "share": 0.6}
    draft.requires_grad_()
    monkeypatch.setattr(op, "MAX_LOGITS_BYTES", 256 * num_tokens * 2)
    loss, nll = linear_distillation(draft, verify, weight, labels, coefficients, **how)
    (mine,) = torch.autograd.grad(loss, draft)
    wide = draft.detach().double().requires_grad_()
    truth, true_nll = linear_distillation_reference(
        wide, verify.double(), weight.double(), labels, coefficients, **how
    )
    (expected,) = torch.autograd.grad(truth, wide)
    plain = draft.detach().requires_grad_()
    (other,) = torch.autograd.grad(
        linear_distillation_reference(plain, verify, weight, labels, coefficients, **how)[0], plain
    )
    slack = SLACK[dtype]
    assert relative(loss, truth) <= 20 * slack
    assert relative(nll, true_nll) <= 20 * slack
    assert relative(mine, expected) <= 2 * relative(other, expected) + 4 * slack
