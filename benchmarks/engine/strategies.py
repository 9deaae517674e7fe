"""Tokens per second of each rejection strategy against AR at several batch sizes, on this machine.

    python -m benchmarks.strategies model=outputs/tiny [record=true]

The default of `decoder.rejection_strategy` was chosen by this measurement. Greedy, prompts of the verifiable
task; every arm must give the answers of AR decoding, or its row has a failed gate.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.shared import Report, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import Evaluation, evaluate, task_samples
from idlm.tasks import TASKS, TaskSample

DEFAULTS = defaults("model=outputs/tiny device=auto record=false")
BATCH_SIZES = (1, 4, 16, 64)
STRIDE = 4
MAX_TOKENS = 320
REPEATS = 3
PASSES_PER_PROMPT_SET = 8


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    task = TASKS.get("ledger")(level="tiny")
    report = Report("strategies", options)
    for batch in BATCH_SIZES:
        samples = task_samples(task, "validation", max(batch, PASSES_PER_PROMPT_SET))
        baseline = _run(options, "ar", {}, batch, samples)
        for name in STRATEGIES.names():
            result = _run(options, "isd", {"stride": STRIDE, "rejection_strategy": name}, batch, samples)
            gate = [c.token_ids for c in result.completions] == [c.token_ids for c in baseline.completions]
            case = {"strategy": name, "stride": STRIDE, "batch": batch, "device": options["device"]}
            speed, base = result.tokens_per_second, baseline.tokens_per_second
            report.add(case, "tokens_per_second", speed, "tokens/s", baseline=base, gate_passed=gate)
    return 0


def _run(
    options: dict[str, str], decoder: str, choices: dict[str, Any], batch: int, samples: list[TaskSample]
) -> Evaluation:
    """The run of median speed among `REPEATS` runs."""
    engine = Engine.from_pretrained(
        options["model"], decoder, device=options["device"], max_num_seqs=batch, **choices
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    task = TASKS.get("ledger")(level="tiny")
    results = [evaluate(engine, task, samples, params) for _ in range(REPEATS)]
    middle = statistics.median_low(result.seconds for result in results)
    return next(result for result in results if result.seconds == middle)


if __name__ == "__main__":
    start(measure, __doc__)
