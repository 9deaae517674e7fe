"""What `idlm-eval` costs on top of its engine, by task and concurrency.

    python -m benchmarks.eval model=PATH task=gsm8k data=gsm8k_test.jsonl [concurrency=64] [record=true]

`harness_overhead` is the time of an evaluation outside the engine's steps (prompts are encoded, queued,
answers collected and judged), over the time in them. The first prompts are answered once before. It passes if
no answer failed. Tasks that run programs count their sandboxes too.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from benchmarks.quality.arms import engine_of
from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.infer.evaluation.evaluate import check_samples, evaluate, load_task
from idlm.infer.evaluation.file_tasks import FileTask
from idlm.tasks import Task, TaskSample

OPTIONS = defaults(
    "model=outputs/tiny decoder=ar task=ledger data= allow_code=false num= concurrency=64 "
    "max_tokens=512 temperature=0 device=auto dtype=auto record=false"
)


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, OPTIONS)
    config = EvaluateConfig(
        model=options["model"],
        task=options["task"],
        data=options["data"] or None,
        num=int(options["num"]) if options["num"] else None,
        allow_code=options["allow_code"] == "true",
    )
    task = load_task(config)
    samples = check_samples(config, task)
    params = SamplingParams(
        temperature=float(options["temperature"]), max_tokens=int(options["max_tokens"]), seed=1
    )
    report = Report("eval", options)
    for concurrency in options["concurrency"].split(","):
        with engine_of(options | {"batch": concurrency}, options["decoder"]) as engine:
            evaluate(engine, task, samples[: int(concurrency)], params)
            inside, outside, num_failed = timed(engine, task, samples, params)
            del engine
        print(f"{len(samples)} prompts, {inside:.2f} s in the engine, {outside:.2f} s outside", flush=True)
        case = {"task": options["task"], "concurrency": int(concurrency), "decoder": options["decoder"]}
        report.add(case, "harness_overhead", outside / inside, "share", gate_passed=num_failed == 0)
    return report.status


def timed(
    engine: Engine, task: Task | FileTask, samples: list[TaskSample], params: SamplingParams
) -> tuple[float, float, int]:
    """Seconds in the engine's steps and outside them, and how many answers failed."""
    inside, step = 0.0, engine.step

    def timed_step() -> Any:
        nonlocal inside
        start = time.perf_counter()
        try:
            return step()
        finally:
            inside += time.perf_counter() - start

    start = time.perf_counter()
    with patch.object(engine, "step", timed_step):
        result = evaluate(engine, task, samples, params)
    return inside, time.perf_counter() - start - inside, result.num_failed


if __name__ == "__main__":
    start(measure, __doc__)
