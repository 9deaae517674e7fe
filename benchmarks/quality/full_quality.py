"""Exact match of a full-diffusion model on held-out questions, by order, block length and threshold.

    python -m benchmarks.full_quality model=outputs/tiny_full [num=1000] [record=true]

Decoding is greedy on canvases of `max_tokens`. The baseline decides one token a pass in the first block
length, the most confident one first, and is judged: it must answer `ENOUGH` of the questions. Every question
counts once in every arm, so a difference is judged by the questions on which two arms disagree. `caches`
names values of `decoder.cache`, with "none" for a decoder without that option."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.arms import add_arm, results_of
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from idlm.infer.decoders.full_config import ORDERS
from idlm.infer.evaluation.evaluate import task_samples
from idlm.tasks import TASKS

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
        cache = {} if self.cache == NO_CACHE else {"cache": self.cache}
        return {"order": self.order, "block_length": self.block_length, **cache}

    def request_options(self) -> dict[str, Any]:
        return {} if self.threshold is None else {"threshold": self.threshold}


def measure(arguments: list[str]) -> int:
    options, base = parse_options(arguments, OPTIONS), None
    report, num = Report("full_quality", options), int(options["num"])
    task = TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", num)
    for result in results_of(options, "full", arms_of(options), task, samples):
        arm: Arm = result.arm
        base = base or result
        case = {
            "order": arm.order,
            "cache": arm.cache,
            "threshold": "-" if arm.threshold is None else arm.threshold,
            "block_length": arm.block_length,
            "questions": num,
        }
        add_arm(report, case, result, base, gate=result.share >= ENOUGH if result is base else None)
        pairs = list(zip(result.marks, base.marks, strict=True))
        lost, gained = pairs.count((False, True)), pairs.count((True, False))
        print(f"against the first arm {gained} questions are gained and {lost} lost", flush=True)
    return report.status


def arms_of(options: dict[str, str]) -> list[Arm]:
    """All arms, the baseline first; orders whose scores are no probabilities have no threshold."""
    thresholds = [float(one) for one in options["thresholds"].split(",") if one]
    caches, orders = options["caches"].split(","), options["orders"].split(",")
    return [
        Arm(order=order, block_length=size, cache=cache, threshold=threshold)
        for cache, order, size in itertools.product(caches, orders, numbers(options["block_lengths"]))
        for threshold in (
            None,
            *(thresholds if ORDERS.get(order, key="orders").has_threshold else ()),
        )
    ]


if __name__ == "__main__":
    start(measure, __doc__)
