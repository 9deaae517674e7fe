"""Best tokens of wanted rows on a GPU: the kernel against the library's dense product.

    python -m benchmarks.masked_logits [rows=32768] [share=0.25] [lengths=8192,32768,131072]
                                       [rounds=9] [record=true] [results=DIR]

bf16, LLaDA-8B's head (D 4096, V 126464), `share` of `rows` hidden states, scattered. `library` is the product
of the gathered rows alone, into a buffer that exists: no gather, no softmax. First the kernel must pass: its
tokens are the best of an fp64 product, within twice the error of the library's logits, and so are their
probabilities. Arms run in turn within a round. `lengths`: rows at which extra memory is measured. It needs a
GPU.
X wanted rows, Y rows that are checked, V vocabulary, D width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared import Report, defaults, numbers, parse_options, start
from benchmarks.stream import ms_in_turns
from idlm.kernels.masked_logits import Proposals, masked_logits

VOCABULARY, WIDTH = 126_464, 4096
FORBIDDEN_ID = 126_336
"""LLaDA's mask."""
DEFAULTS = defaults("rows=32768 share=0.25 lengths=8192,32768,131072 rounds=9 record=true")
CHECKED_ROWS = 512
WARM_UPS = 3
MB = 1e6
ARM = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Random hidden states, the wanted rows of them in order, and a head; logits of deviation 2."""

    hidden_RD: Tensor
    rows_X: Tensor
    weight_VD: Tensor
    forbidden_S: Tensor

    def proposals(self) -> Proposals:
        given = self.hidden_RD, self.rows_X, self.weight_VD
        return masked_logits(*given, forbidden_S=self.forbidden_S)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="masked_logits")
    share, report = float(options["share"]), Report("masked_logits", options)
    torch.manual_seed(0)
    weight_VD = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16).mul_(2 / WIDTH**0.5)
    problem = make_problem(int(options["rows"]), share, weight_VD)
    gate = check(problem)
    speeds(report, problem, share, gate=gate)
    for length in numbers(options["lengths"]):
        memory(report, make_problem(length, share, weight_VD), share, gate=gate)
    return 0 if gate else 1


def make_problem(num_rows: int, share: float, weight_VD: Tensor) -> Problem:
    torch.manual_seed(num_rows)
    num_wanted = max(1, round(share * num_rows))
    return Problem(
        hidden_RD=torch.randn(num_rows, WIDTH, device="cuda", dtype=torch.bfloat16),
        rows_X=torch.randperm(num_rows, device="cuda")[:num_wanted].sort().values,
        weight_VD=weight_VD,
        forbidden_S=torch.tensor([FORBIDDEN_ID], device="cuda"),
    )


def check(problem: Problem) -> bool:
    """Whether the kernel is right in its first `CHECKED_ROWS` rows."""
    rows_Y = problem.rows_X[:CHECKED_ROWS]
    hidden_YD = problem.hidden_RD[rows_Y]
    dense_YV = torch.nn.functional.linear(hidden_YD, problem.weight_VD).float()
    true_YV = _fp64_logits(hidden_YD, problem.weight_VD)
    dense_YV[:, FORBIDDEN_ID] = true_YV[:, FORBIDDEN_ID] = -torch.inf
    allowed = 2 * float((dense_YV - true_YV).nan_to_num(0.0).abs().max())
    log_mass_Y = true_YV.double().logsumexp(-1)
    best_Y = true_YV.amax(-1)
    one = problem.proposals()
    ids_Y, own_Y = one.token_X[: len(rows_Y)], one.own_X[: len(rows_Y)]
    chosen_Y = true_YV.gather(1, ids_Y[:, None])[:, 0]
    lost = float((best_Y - chosen_Y).max())
    error = float((own_Y.log() - (chosen_Y.double() - log_mass_Y)).abs().max())
    equal = float((ids_Y == dense_YV.argmax(-1)).double().mean())
    print(f"it loses {lost:.2e} and errs {error:.2e} of {allowed:.2e}; {equal:.2%} dense tokens")
    return lost <= allowed and error <= allowed + 1e-5


def _fp64_logits(hidden_YD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits of an fp64 product, in fp32, a slice of the vocabulary at a time."""
    wide_YD = hidden_YD.double()
    return torch.cat([(wide_YD @ part.double().T).float() for part in weight_VD.split(8192)], dim=1)


def speeds(report: Report, problem: Problem, share: float, *, gate: bool) -> None:
    gathered_XD = problem.hidden_RD[problem.rows_X]
    logits_XV = torch.empty(len(gathered_XD), VOCABULARY, device="cuda", dtype=torch.bfloat16)
    library = partial(torch.mm, gathered_XD, problem.weight_VD.T, out=logits_XV)
    calls: dict[str, Callable[[], Any]] = {ARM: problem.proposals, "library": library}
    for call in list(calls.values()) * WARM_UPS:
        call()
    ms = ms_in_turns(calls, int(report.options["rounds"]))
    case = {"arm": ARM, "rows": len(problem.hidden_RD), "share": share}
    report.add(case, "share_of_library", ms["library"] / ms[ARM], "x", gate_passed=gate)
    report.add(case, "ms", ms[ARM], "ms", baseline=ms["library"], gate_passed=gate)


def memory(report: Report, problem: Problem, share: float, *, gate: bool) -> None:
    """Peak memory beyond inputs and results."""
    found = problem.proposals()
    torch.cuda.synchronize()
    results = sum(one.nbytes for one in (found.token_X, found.own_X))
    del found
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    problem.proposals()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before - results) / MB
    case = {"arm": ARM, "rows": len(problem.hidden_RD), "share": share}
    report.add(case, "extra_memory_mb", extra, "MB", gate_passed=gate)


if __name__ == "__main__":
    start(measure, __doc__)
