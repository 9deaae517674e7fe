"""What `idlm-eval` costs beside its engine, by task and concurrency.

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
from benchmarks.results import result_row
from benchmarks.shared import defaults, parse_options, save, start
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
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
    """Evaluate once for each concurrency, print and record; returns 1 if an answer failed."""
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
    rows, is_whole = [], True
    print(f"{'task':<12} {'concurrency':>11} {'prompts':>8} {'engine s':>9} {'outside s':>9} {'overhead':>9}")
    for concurrency in options["concurrency"].split(","):
        engine = engine_of(options | {"batch": concurrency}, options["decoder"])
        evaluate(engine, task, samples[: int(concurrency)], params)
        inside, outside, num_failed = timed(engine, task, samples, params)
        engine.close()
        del engine
        free_cached_memory()
        is_whole &= num_failed == 0
        print(
            f"{options['task']:<12} {concurrency:>11} {len(samples):>8} {inside:>9.2f} {outside:>9.2f} "
            f"{outside / inside:>9.1%}"
        )
        case = {"task": options["task"], "concurrency": int(concurrency), "decoder": options["decoder"]}
        overhead = result_row(
            "eval", case, "harness_overhead", outside / inside, "share", gate_passed=num_failed == 0
        )
        rows.append(overhead)
    save("eval", rows, options)
    return int(not is_whole)


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
