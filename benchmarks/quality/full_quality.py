"""Exact match of a full-diffusion model on held-out questions, by order, block length and threshold.

    python -m benchmarks.full_quality model=outputs/tiny_full [num=1000] [record=true]

Decoding is greedy on canvases of `max_tokens`. The baseline decides one token a pass in the first block
length, the most confident one first, and is judged: it must answer `ENOUGH` of the questions. Every question
counts once in every arm, so a difference is judged by the questions on which two arms disagree. `caches`
names values of `decoder.cache`, with "none" for a decoder without that option.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import ArmResult, arm_rows, binomial_error, engine_of, greedy
from benchmarks.results import append_rows
from benchmarks.shared import defaults, parse_options, start
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.decoders.full_orders import ORDERS
from idlm.infer.evaluation.evaluate import evaluate, task_samples
from idlm.tasks import TASKS, Task, TaskSample

OPTIONS = defaults(
    "model=outputs/tiny_full task=ledger level=tiny num=200 "
    "orders=low_confidence,random,entropy,topk_margin,maskgit_plus block_lengths=16,32,224 "
    "thresholds=0.7,0.9,0.95 caches=none max_tokens=224 batch=16 device=auto dtype=auto "
    "record=false"
)
ENOUGH = 0.8
NO_CACHE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How the masks of a canvas are decided: by `threshold`, else one in every pass."""

    order: str
    block_length: int
    cache: str = NO_CACHE
    threshold: float | None = None

    def engine_options(self) -> dict[str, Any]:
        """Decoder options of its engine."""
        cache = {} if self.cache == NO_CACHE else {"cache": self.cache}
        return {"order": self.order, "block_length": self.block_length, **cache}

    def request_options(self) -> dict[str, Any]:
        """Decoder options of its requests."""
        return {} if self.threshold is None else {"threshold": self.threshold}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ArmResult):
    """The answers of `arm`."""

    arm: Arm


def measure(arguments: list[str]) -> int:
    """Decode with every arm, print a table and record rows; returns 1 if the baseline answers too little."""
    options = parse_options(arguments, OPTIONS)
    arms = arms_of(options)
    task = TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", int(options["num"]))
    results = list(_results(options, arms, task, samples))
    print(table(results))
    if options["record"] == "true":
        append_rows("full_quality", rows(results), results=Path(options["results"]))
    return int(results[0].share < ENOUGH)


def arms_of(options: dict[str, str]) -> list[Arm]:
    """All arms, the baseline first; orders whose scores are no probabilities have no threshold. UserError
    IDLM-0107 for what is not a number, and for block lengths that do not divide `max_tokens`.
    """
    try:
        length, _ = int(options["max_tokens"]), int(options["num"])
        sizes = [int(one) for one in options["block_lengths"].split(",")]
        thresholds = [float(one) for one in options["thresholds"].split(",") if one]
    except ValueError as error:
        raise UserError(
            "IDLM-0107",
            f"num, max_tokens, block_lengths and thresholds are numbers: {error}",
            fix="num=200 max_tokens=224 block_lengths=16,32 thresholds=0.9",
        ) from error
    uneven = [size for size in sizes if size < 1 or length % size]
    if uneven:
        raise UserError(
            "IDLM-0107",
            f"block_lengths={uneven} do not divide max_tokens={length}",
            fix=f"give divisors of {length}, or another max_tokens",
        )
    arms = []
    for cache, order, size in itertools.product(
        options["caches"].split(","), options["orders"].split(","), sizes
    ):
        known = ORDERS.get(order, key="orders").has_threshold
        for threshold in (None, *(thresholds if known else ())):
            arms.append(Arm(order=order, block_length=size, cache=cache, threshold=threshold))
    return arms


def _results(
    options: dict[str, str], arms: Sequence[Arm], task: Task, samples: Sequence[TaskSample]
) -> Iterator[Result]:
    """Results of all arms, one engine for those that differ in the options of requests only."""
    for settings, members in itertools.groupby(arms, key=Arm.engine_options):
        engine = engine_of(options, "full", **settings)
        for arm in members:
            print(f"decoding: {settings} {arm.request_options()}", file=sys.stderr)
            evaluation = evaluate(engine, task, samples, greedy(options, arm.request_options()))
            marks = tuple(verdict.correct for verdict in evaluation.verdicts)
            yield Result(arm=arm, evaluation=evaluation, marks=marks)
        engine.close()
        del engine
        free_cached_memory()


def num_changed(result: Result, base: Result) -> tuple[int, int]:
    """Questions that only `result` answers, and those that only `base` answers."""
    pairs = list(zip(result.marks, base.marks, strict=True))
    return sum(mine and not theirs for mine, theirs in pairs), sum(
        theirs and not mine for mine, theirs in pairs
    )


def table(results: Sequence[Result]) -> str:
    """Plain text, one line per arm; gained and lost are questions, against the first arm."""
    num = results[0].evaluation.num_prompts
    lines = [
        f"{num} held-out questions; +- is one standard error",
        f"{'order':<15} {'block':>5} {'cache':<7} {'threshold':>9} {'exact match':>15} "
        f"{'gained':>6} {'lost':>5} {'TPF':>5} {'tokens/s':>9}",
    ]
    for result in results:
        arm, gained_lost = result.arm, num_changed(result, results[0])
        lines.append(
            f"{arm.order:<15} {arm.block_length:>5} {arm.cache:<7} {arm.threshold or '-':>9} "
            f"{100 * result.share:>7.1f} +- {100 * binomial_error(result.share, num):<4.1f} "
            f"{gained_lost[0]:>6} {gained_lost[1]:>5} "
            f"{result.evaluation.tokens_per_forward:>5.2f} {result.evaluation.tokens_per_second:>9.0f}"
        )
    return "\n".join(lines)


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Result rows; the baseline of every arm is the first one."""
    out: list[dict[str, Any]] = []
    base = results[0]
    for result in results:
        arm, num = result.arm, result.evaluation.num_prompts
        case = {
            "order": arm.order,
            "cache": arm.cache,
            "threshold": "-" if arm.threshold is None else arm.threshold,
            "block_length": arm.block_length,
            "questions": num,
        }
        gate = result.share >= ENOUGH if result is base else None
        out += arm_rows("full_quality", case, result, base, gate_passed=gate)
    return out


if __name__ == "__main__":
    start(measure, __doc__)
