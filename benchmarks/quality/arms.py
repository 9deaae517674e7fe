"""What the benchmarks of quality share: greedy answers of one arm after another, and their result rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.shared import Report
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import Evaluation, evaluate
from idlm.tasks import Task, TaskSample

Measured = tuple[str, float, str, float | None]
"""Metric, value, unit and baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """The answers of an arm."""

    arm: Any
    evaluation: Evaluation

    @property
    def marks(self) -> tuple[bool, ...]:
        """Which questions were answered exactly."""
        return tuple(verdict.correct for verdict in self.evaluation.verdicts)

    @property
    def share(self) -> float:
        return self.evaluation.exact_match


@contextmanager
def engine_of(options: dict[str, str], decoder: str, **settings: Any) -> Iterator[Engine]:
    """The engine of a benchmark's `model`, `device`, `dtype` and `batch`, with further keywords; its memory
    is free afterwards, if the caller deletes its own name of it."""
    sizes: dict[str, Any] = {"max_num_seqs": int(options["batch"]), **settings}
    engine = Engine.from_pretrained(
        options["model"], decoder, device=options["device"], dtype=options["dtype"], **sizes
    )
    yield engine
    engine.close()
    del engine
    free_cached_memory()


def greedy(options: dict[str, str], decoder_options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=int(options["max_tokens"]), seed=1, decoder_options=decoder_options
    )


def results_of(
    options: dict[str, str],
    decoder: str,
    arms: Iterable[Any],
    task: Task,
    samples: Sequence[TaskSample],
    **settings: Any,
) -> Iterator[ArmResult]:
    """The answers of arms in turn, from one engine for those that differ in the options of requests only."""
    for own, members in itertools.groupby(arms, key=lambda arm: arm.engine_options()):
        with engine_of(options, decoder, **settings, **own) as engine:
            for arm in members:
                params = greedy(options, arm.request_options())
                yield ArmResult(arm=arm, evaluation=evaluate(engine, task, samples, params))
            del engine


def binomial_error(share: float, num: int) -> float:
    """Standard error of a share of `num` questions."""
    return math.sqrt(share * (1 - share) / num)


def difference_error(result: ArmResult, base: ArmResult) -> float:
    """Standard error of `result.share - base.share` over the same questions."""
    differences = [mine - theirs for mine, theirs in zip(result.marks, base.marks, strict=True)]
    mean = sum(differences) / len(differences)
    return math.sqrt(sum((one - mean) ** 2 for one in differences)) / len(differences)


def add_arm(
    report: Report,
    case: dict[str, Any],
    result: ArmResult,
    base: ArmResult,
    *further: Measured,
    gate: bool | None = None,
) -> None:
    """Result rows of an arm, compared with `base`: quality, speed, and `further` metrics."""
    evaluation = result.evaluation
    measured: tuple[Measured, ...] = (
        ("exact_match", result.share, "share", base.share),
        ("standard_error", binomial_error(result.share, len(evaluation.prompts)), "share", None),
        ("tokens_per_forward", evaluation.tokens_per_forward, "tokens", 1.0),
        ("tokens_per_second", evaluation.tokens_per_second, "tokens/s", base.evaluation.tokens_per_second),
        *further,
    )
    facts: dict[str, Any] = {"gate_passed": gate, "exactness": evaluation.exactness}
    for metric, value, unit, baseline in measured:
        report.add(case, metric, value, unit, baseline=baseline, **facts)
