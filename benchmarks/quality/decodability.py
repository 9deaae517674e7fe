"""Whether a trained model answers as well with FOCUS as in full blocks, by threshold.

    python -m benchmarks.decodability model=outputs/tiny_block32 [level=p4] [num=500] [record=true]

It needs a block-diffusion checkpoint (recipes tiny_block32, tiny_deep32). Decoding is greedy on held-out
questions, the same in every arm, in blocks of the model's size. `rows_per_token` counts rows after layer 1,
clean blocks that are stored included, prompts left out. A difference is one of paired answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import ArmResult, Measured, add_arm, difference_error, engine_of, greedy
from benchmarks.shared import Report, defaults, parse_options, start
from idlm.infer.accelerators.focus import FocusConfig
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.tasks import TASKS, Task, TaskSample
from idlm.text.tokenizer import encode_prompt

OPTIONS = defaults(
    "model=outputs/tiny_block32 task=ledger level=p4 num=500 thresholds=0.9,0.8,0.7 "
    "max_tokens=288 batch=500 device=auto dtype=auto graphs=off record=false"
)
FULL, FOCUS = "full", "focus"
JUDGED, ALLOWED_LOSS = 0.9, 0.02
"""FOCUS as it is by default loses no more than so much at this threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ArmResult):
    """The answers of `arm`, and its rows after layer 1 for each emitted token."""

    rows_per_token: float


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    report, task = Report("decodability", options), TASKS.get(options["task"])(level=options["level"])
    samples = task_samples(task, "test", int(options["num"]))
    is_preserved = True
    for threshold in map(float, options["thresholds"].split(",")):
        base = decoded(options, task, samples, FULL, threshold)
        found = decoded(options, task, samples, FOCUS, threshold)
        for result in (base, found):
            add(report, options, samples, result, base)
        # Not a gate of the rows: tables leave out rows whose gate failed, and this answer is a finding.
        is_preserved &= threshold != JUDGED or found.share >= base.share - ALLOWED_LOSS
    print("" if is_preserved else f"FAILED: FOCUS does not retain quality at threshold {JUDGED}")
    return int(not is_preserved)


def decoded(
    options: dict[str, str], task: Task, samples: Sequence[TaskSample], name: str, threshold: float
) -> Result:
    accelerators: dict[str, Any] = {FOCUS: {}} if name == FOCUS else {}
    settings: dict[str, Any] = {"graphs": options["graphs"], "prefix_cache": False}
    with engine_of(options, "block", accelerators=accelerators, **settings) as engine:
        evaluation = evaluate(engine, task, samples, greedy(options, {"threshold": threshold}))
        num_rows = block_rows(engine, samples, evaluation)
        del engine
    evicts = name == FOCUS
    case = {"arm": name, "threshold": threshold, "alpha": FocusConfig().alpha if evicts else "-"}
    case |= {"commit": "clean" if evicts else "-"}
    rows_per_token = num_rows / max(1, evaluation.num_tokens)
    return Result(arm=case, evaluation=evaluation, rows_per_token=rows_per_token)


def add(
    report: Report, options: dict[str, str], samples: Sequence[TaskSample], result: Result, base: Result
) -> None:
    further: tuple[Measured, ...] = (
        ("standard_error_of_difference", difference_error(result, base), "share", None),
        ("rows_per_token", result.rows_per_token, "rows", base.rows_per_token),
    )
    case = result.arm | {"questions": len(samples), "model": Path(options["model"]).name}
    add_arm(report, case, result, base, *further)


def block_rows(engine: Engine, samples: Sequence[TaskSample], evaluation: Evaluation) -> int:
    """Rows after layer 1 of all blocks that were decided, and of those that were stored when they were clean
    (all but the last of each answer). Without an accelerator that drops rows, every pass computes a block."""
    size = engine.semantics.block_size
    assert engine.tokenizer is not None and size is not None
    prompts = [len(encode_prompt(engine.tokenizer, sample.prompt)) for sample in samples]
    if engine.row_counts.requested.retained:
        return engine.row_counts.requested.retained - sum(length // size * size for length in prompts)
    answers = [len(done.token_ids) for done in evaluation.completions]
    ends = zip(prompts, answers, strict=True)
    num_blocks = sum(-(-(prompt + answer) // size) - prompt // size for prompt, answer in ends)
    return size * (engine.row_counts.num_pairs + num_blocks - len(prompts))


if __name__ == "__main__":
    start(measure, __doc__)
