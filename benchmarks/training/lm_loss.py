"""Loss of the language-model head, forward and backward: memory and time against the unfused loss on a GPU.

    python -m benchmarks.lm_loss [record=true]

Unfused is `cross_entropy(linear(hidden, weight).float())` in bfloat16; `pip install liger-kernel` adds Liger.
The error of every arm against float64 may be at most twice the unfused error, in the loss and both gradients,
else its rows have a failed gate. It needs a GPU. M rows, D width, V vocabulary."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.shared import Report, defaults, parse_options, start
from benchmarks.stream import matmul_rate, ms_in_turns
from idlm.kernels.linear_cross_entropy import linear_cross_entropy

NUM_ROWS, VOCABULARY = 8192, 151_936
WIDTHS = (4096, 1024)
WARM_UPS, REPEATS = 2, 7
REFERENCE_ROWS = 1024
SLACK = 1e-6
MB = 1e6
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`hidden` [M, D] and `weight` [V, D], bfloat16 with gradients; `labels` [M]; logits of deviation 2."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, defaults("record=false"), needs_gpu="lm_loss")
    report, rate = Report("lm_loss", options), matmul_rate()
    for width in WIDTHS:
        problem = make_problem(width)
        arms: dict[str, Loss] = {"unfused": unfused, "idlm": fused}
        if importlib.util.find_spec("liger_kernel") is not None:
            arms["liger"] = liger()
        extra, errors = _checked(problem, arms)
        ms = ms_in_turns({name: partial(one_pass, problem, loss) for name, loss in arms.items()}, REPEATS)
        shape = {"rows": NUM_ROWS, "vocabulary": VOCABULARY, "width": width, "dtype": "bfloat16"}
        floor = 6 * NUM_ROWS * VOCABULARY * width / rate * 1e3
        for name in arms:
            print(f"{name} errors of loss and gradients: {errors[name]}")
            case = {"arm": name, **shape}
            gate = is_exact(errors[name], errors["unfused"])
            baseline = extra["unfused"]
            report.add(case, "extra_memory_mb", extra[name], "MB", baseline=baseline, gate_passed=gate)
            report.add(case, "speedup_vs_unfused", ms["unfused"] / ms[name], "x", gate_passed=gate)
            against = {"baseline": ms["unfused"], "floor": floor}
            report.add(case, "ms", ms[name], "ms", gate_passed=gate, **against)
    return 0


def is_exact(mine: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    """Whether errors are at most twice those of the unfused loss, plus a slack for float32 sums."""
    return all(own <= 2 * other + SLACK for own, other in zip(mine, theirs, strict=True))


def make_problem(width: int) -> Problem:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(NUM_ROWS, width, **options)
    weight = torch.randn(VOCABULARY, width, **options) * (2 / width**0.5)
    labels = torch.randint(0, VOCABULARY, (NUM_ROWS,), device="cuda")
    return Problem(hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), labels=labels)


def unfused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of a training loop without a fused kernel."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    coefficients = torch.full((len(labels),), 1 / len(labels), device=labels.device)
    return linear_cross_entropy(hidden, weight, labels, coefficients)[0]


def liger() -> Loss:
    """Liger's fused linear cross-entropy with its defaults."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: module(weight, hidden, labels)


def _checked(
    problem: Problem, arms: dict[str, Loss]
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    truth = reference(problem)
    errors, extra = {}, {}
    for name, loss in arms.items():
        for _ in range(WARM_UPS):
            one_pass(problem, loss)
        extra[name] = extra_memory(problem, loss)
        value = one_pass(problem, loss, stores_gradients=True)
        errors[name] = errors_of(problem, value, truth)
        forget_gradients(problem)
    return extra, errors


def one_pass(problem: Problem, loss: Loss, *, stores_gradients: bool = False) -> Tensor:
    value = loss(problem.hidden, problem.weight, problem.labels)
    value.backward()
    if not stores_gradients:
        forget_gradients(problem)
    return value.detach()


def forget_gradients(problem: Problem) -> None:
    """Clear the gradients, as an optimizer does before the next step."""
    problem.hidden.grad = problem.weight.grad = None


def extra_memory(problem: Problem, loss: Loss) -> float:
    """MB that a pass allocates at its peak, beyond its inputs and outputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = one_pass(problem, loss, stores_gradients=True)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated()
    assert problem.weight.grad is not None and problem.hidden.grad is not None and value.numel() == 1
    forget_gradients(problem)
    gradients = problem.weight.nbytes + problem.hidden.nbytes
    assert kept - before >= gradients, f"{kept=} {before=} {gradients=}"
    return (peak - before - gradients) / MB


def reference(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden, gradient of weight) in float64, a chunk of rows at a time."""
    weight = problem.weight.detach().double()
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    grad_weight, grad_hidden = torch.zeros_like(weight), []
    for rows in torch.arange(NUM_ROWS, device=weight.device).split(REFERENCE_ROWS):
        hidden, labels = problem.hidden.detach()[rows].double(), problem.labels[rows]
        log_probs = (hidden @ weight.T).log_softmax(dim=-1)
        total -= log_probs.gather(1, labels[:, None]).sum()
        gradient = log_probs.exp_()
        gradient[torch.arange(len(rows), device=weight.device), labels] -= 1
        grad_hidden.append(gradient @ weight / NUM_ROWS)
        grad_weight.addmm_(gradient.T, hidden, alpha=1 / NUM_ROWS)
    return total / NUM_ROWS, torch.cat(grad_hidden), grad_weight


def errors_of(problem: Problem, value: Tensor, truth: tuple[Tensor, Tensor, Tensor]) -> tuple[float, ...]:
    """Relative root-mean-square errors of loss and gradients."""
    found = (value, problem.hidden.grad, problem.weight.grad)
    return tuple(
        float((mine.double() - true).norm() / true.norm())  # type: ignore[union-attr]
        for mine, true in zip(found, truth, strict=True)
    )


if __name__ == "__main__":
    start(measure, __doc__)
