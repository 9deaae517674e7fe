"""Best tokens of wanted rows on a GPU: both routes against the library's dense product.

    python -m benchmarks.masked_logits [rows=32768] [share=0.25] [lengths=8192,32768,131072]
                                       [rounds=9] [record=true] [results=DIR]

bf16, LLaDA-8B's head (D 4096, V 126464), `share` of `rows` hidden states, scattered. `library` is the product
of the gathered rows alone, into a buffer that exists: no gather, no softmax. First every arm must pass: its
tokens are the best of an fp64 product, within twice the error of the library's logits, and so are their
probabilities. Arms run in turn within a round. `lengths`: rows at which extra memory is measured. It needs a
GPU.
X wanted rows, Y rows that are checked, V vocabulary, D width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from idlm.kernels.masked_logits import Proposals, masked_logits

VOCABULARY, WIDTH = 126_464, 4096
FORBIDDEN_ID = 126_336
"""LLaDA's mask."""
DEFAULTS = defaults("rows=32768 share=0.25 lengths=8192,32768,131072 rounds=9 record=true")
CHECKED_ROWS = 512
WARM_UPS = 3
MB = 1e6
MAX_EXTRA_MB = (128 << 20) / MB
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Random hidden states, the wanted rows of them in order, and a head; logits of deviation 2."""

    hidden_RD: Tensor
    rows_X: Tensor
    weight_VD: Tensor
    forbidden_S: Tensor

    def proposals(self, route: str) -> Proposals:
        """One call of the op."""
        given = self.hidden_RD, self.rows_X, self.weight_VD
        return masked_logits(*given, forbidden_S=self.forbidden_S, route=route)


def measure(arguments: list[str]) -> int:
    """Print and record correctness, times and memory; returns the exit status."""
    options = parse_options(arguments, DEFAULTS, needs_gpu="masked_logits")
    num_rows, share = int(options["rows"]), float(options["share"])
    weight_VD = make_head()
    problem = make_problem(num_rows, share, weight_VD)
    arms: dict[str, Call] = {
        "chunks": partial(problem.proposals, "chunks"),
        "fused": partial(problem.proposals, "fused"),
    }
    gates = check(problem)
    rows = speeds(problem, arms, gates, share, rounds=int(options["rounds"]))
    for length in (int(one) for one in options["lengths"].split(",")):
        rows += memory(make_problem(length, share, weight_VD), gates, length, share)
    save("masked_logits", rows, options)
    return 0 if all(gates.values()) else 1


def make_head() -> Tensor:
    """A random head."""
    torch.manual_seed(0)
    weight_VD = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
    return weight_VD.mul_(2 / WIDTH**0.5)


def make_problem(num_rows: int, share: float, weight_VD: Tensor) -> Problem:
    """Rows scattered at random."""
    torch.manual_seed(num_rows)
    num_wanted = max(1, round(share * num_rows))
    return Problem(
        hidden_RD=torch.randn(num_rows, WIDTH, device="cuda", dtype=torch.bfloat16),
        rows_X=torch.randperm(num_rows, device="cuda")[:num_wanted].sort().values,
        weight_VD=weight_VD,
        forbidden_S=torch.tensor([FORBIDDEN_ID], device="cuda"),
    )


def check(problem: Problem) -> dict[str, bool]:
    """Whether each arm is right in its first `CHECKED_ROWS` rows."""
    rows_Y = problem.rows_X[:CHECKED_ROWS]
    hidden_YD = problem.hidden_RD[rows_Y]
    dense_YV = torch.nn.functional.linear(hidden_YD, problem.weight_VD).float()
    true_YV = _fp64_logits(hidden_YD, problem.weight_VD)
    dense_YV[:, FORBIDDEN_ID] = true_YV[:, FORBIDDEN_ID] = -torch.inf
    allowed = 2 * float((dense_YV - true_YV).nan_to_num(0.0).abs().max())
    log_mass_Y = true_YV.double().logsumexp(-1)
    best_Y = true_YV.amax(-1)
    found = {route: problem.proposals(route) for route in ("chunks", "fused")}
    gates = {}
    for name, one in found.items():
        ids_Y, own_Y = one.token_X[: len(rows_Y)], one.own_X[: len(rows_Y)]
        chosen_Y = true_YV.gather(1, ids_Y[:, None])[:, 0]
        lost = float((best_Y - chosen_Y).max())
        error = float((own_Y.log() - (chosen_Y.double() - log_mass_Y)).abs().max())
        gates[name] = lost <= allowed and error <= allowed + 1e-5
        equal = float((ids_Y == dense_YV.argmax(-1)).double().mean())
        print(f"{name:12s} loses {lost:.2e} and errs {error:.2e} of {allowed:.2e}; {equal:.2%} dense tokens")
    return gates


def _fp64_logits(hidden_YD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits of an fp64 product, in fp32, a slice of the vocabulary at a time."""
    wide_YD = hidden_YD.double()
    return torch.cat([(wide_YD @ part.double().T).float() for part in weight_VD.split(8192)], dim=1)


def speeds(
    problem: Problem, arms: dict[str, Call], gates: dict[str, bool], share: float, *, rounds: int
) -> list[dict[str, Any]]:
    """Time of every arm and its share of the library's rate, as rows."""
    gathered_XD = problem.hidden_RD[problem.rows_X]
    logits_XV = torch.empty(len(gathered_XD), VOCABULARY, device="cuda", dtype=torch.bfloat16)
    library = partial(torch.mm, gathered_XD, problem.weight_VD.T, out=logits_XV)
    ms = times({"library": library, **arms}, rounds=rounds)
    flops = 2 * len(gathered_XD) * VOCABULARY * WIDTH
    print(f"{'library':12s} {ms['library']:9.3f} ms {flops / ms['library'] / 1e9:6.0f} TFLOP/s")
    rows = []
    for name in arms:
        ratio, case = ms["library"] / ms[name], {"arm": name, "rows": len(problem.hidden_RD), "share": share}
        verdict = "" if gates[name] else "  WRONG"
        print(f"{name:12s} {ms[name]:9.3f} ms {ratio:6.3f} of the library{verdict}", flush=True)
        rows += [
            _row(case, "share_of_library", ratio, "x", gates[name]),
            _row(case, "ms", ms[name], "ms", gates[name], baseline=ms["library"]),
        ]
    return rows


def _row(
    case: dict[str, Any], metric: str, value: float, unit: str, gate: bool, **options: Any
) -> dict[str, Any]:
    return result_row("masked_logits", case, metric, value, unit, gate_passed=gate, **options)


def times(calls: dict[str, Call], *, rounds: int) -> dict[str, float]:
    """Median milliseconds of every call; all of them run in turn within a round."""
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            measured[name].append(float(start.elapsed_time(end)))
    return {name: statistics.median(each) for name, each in measured.items()}


def memory(problem: Problem, gates: dict[str, bool], length: int, share: float) -> list[dict[str, Any]]:
    """Peak memory of both routes beyond inputs and results, as rows."""
    rows = []
    for route in ("chunks", "fused"):
        found = problem.proposals(route)
        torch.cuda.synchronize()
        results = sum(one.nbytes for one in (found.token_X, found.own_X))
        del found
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        problem.proposals(route)
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before - results) / MB
        case = {"arm": route, "rows": length, "share": share}
        print(f"{route:12s} {length:7d} rows {extra:8.1f} MB of {MAX_EXTRA_MB:.1f}", flush=True)
        rows.append(_row(case, "extra_memory_mb", extra, "MB", gates[route]))
    return rows


if __name__ == "__main__":
    start(measure, __doc__)
