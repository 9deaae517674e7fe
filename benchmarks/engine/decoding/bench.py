"""Model, measured rates, options and results that the parts of the decode benchmark share.

Shapes: R rows of a pass, D input width of a projection.
"""

from __future__ import annotations

import timeit
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, Measured, weights_of
from benchmarks.engine.decoding.trace import Trace
from benchmarks.results import result_row
from benchmarks.stream import Timer
from idlm.infer.models.loader import LoadedModel


@dataclass(slots=True, kw_only=True)
class Bench:
    """Model, measured rates and options of all parts; parts append to the lists."""

    model: LoadedModel
    stream: float
    contexts: list[int]
    concurrency: list[int]
    strides: list[int]
    strategies: list[str]
    sampling: str
    traces: dict[int, Trace]
    rounds: int
    num_tokens: int
    least_tokens: int
    num_passes: int
    measured: list[Measured] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    floors: dict[tuple[int, int], float] = field(default_factory=dict)
    linears: dict[int, float] = field(default_factory=dict)

    def load(self, concurrency: int, context: int) -> Load:
        """The load of a round; few sequences emit more tokens each, so that the trace averages out."""
        return Load(
            concurrency=concurrency,
            context=context,
            num_tokens=max(self.num_tokens, self.least_tokens // concurrency),
            sampling=SAMPLING[self.sampling],
        )

    def trace(self, arm: Arm) -> Trace | None:
        """The trace that replaces the verdicts on the arm's drafts; None for AR."""
        return None if arm.decoder == "ar" else self.traces[arm.stride]

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        """Append one result row and a line that is printed at the end."""
        case = {**case, "sampling": self.sampling}
        self.rows.append(result_row("decode", case, metric, value, unit, **more))
        baseline = more.get("baseline")
        against = "" if baseline is None else f" against {baseline:.4g}"
        name = " ".join(f"{key}={value}" for key, value in case.items())
        self.lines.append(f"{metric:32s} {value:10.4g} {unit}{against}  {name}")


def linears_ms(model: LoadedModel, num_rows: int, *, rounds: int, num_head_rows: int | None = None) -> float:
    """Time of all linears of a pass by `F.linear`, replayed as one graph. `num_head_rows`: rows that need
    logits, None for all.
    """
    *weights, head = weights_of(model)
    inputs_RD = {
        width: torch.randn(num_rows, width, device=model.device, dtype=model.dtype)
        for width in {weight.shape[1] for weight in (*weights, head)}
    }

    def library() -> None:
        for weight in weights:
            F.linear(inputs_RD[weight.shape[1]], weight)
        F.linear(inputs_RD[head.shape[1]][:num_head_rows], head)

    if model.device.type == "cuda":
        return Timer(rounds=rounds, bytes_per_us=0.0).us_per_call([library]) / 1e3
    return 1e3 * timeit.timeit(library, number=1)
