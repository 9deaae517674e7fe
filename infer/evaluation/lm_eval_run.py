"""`idlm-eval harness=lm_eval`: a task of lm-eval, every decoder side by side. It does not import lm-eval."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from idlm.config.project import install_command
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.cli.output import answer_file
from idlm.infer.engine import Engine
from idlm.infer.evaluation.arms import cut_off_lines, difference_line, run_arms, share_interval
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.infer.evaluation.requests import EngineRequests

Scores = dict[tuple[str, str], list[float]]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One decoder: samples and metrics of lm-eval, the engine's answers, and the wall time in seconds."""

    samples: list[dict[str, Any]]
    metrics: dict[str, Any]
    completions: list[Completion]
    seconds: float


def run_lm_eval(config: EvaluateConfig, arguments: EngineArguments) -> int:
    """Run the task and print the table. Status 1 when answers failed. UserError IDLM-0486 without lm-eval."""
    try:
        from idlm.infer.evaluation.lm_eval_model import ProblemFiles, local_tasks
    except ModuleNotFoundError as error:
        raise UserError(
            "IDLM-0486",
            f"harness=lm_eval needs lm-eval, which is not installed ({error.name})",
            fix=f"install the extra eval: {install_command('eval')}; or leave harness= out",
        ) from error
    if config.data is None:
        raise UserError(
            "IDLM-0485",
            f"task={config.task} of lm-eval reads a file of problems, and data=null",
            fix="give data=FILE",
        )
    # The task's file, and the cache of its problems.
    with tempfile.TemporaryDirectory(prefix="idlm-eval-") as folder:
        files = ProblemFiles(config.data, config.fewshot_data, config.num_fewshot)
        task = local_tasks(config.task, files, folder)

        def work(engine: Engine, params: SamplingParams) -> ArmResult:
            is_chat = engine.settings.chat_template == "auto" and bool(engine.tokenizer.chat_template)
            requests, start = EngineRequests(engine, params, is_chat=is_chat), time.perf_counter()
            results = task.run(requests, config.num)
            seconds = time.perf_counter() - start
            return ArmResult(*task.combined(results), requests.completions, seconds)

        results = run_arms(config, arguments, work)
    print(table(results))
    if config.output is not None:
        with answer_file(config.output) as answers:
            for name, result in results.items():
                for sample in result.samples:
                    answers.write({"decoder": name, **json.loads(json.dumps(sample, default=str))})
    return int(any(done.error for result in results.values() for done in result.completions))


def scores_of(samples: list[dict[str, Any]]) -> Scores:
    found: Scores = defaultdict(list)
    for sample in sorted(samples, key=lambda each: each["doc_id"]):
        for metric in sample["metrics"]:
            if isinstance(sample[metric], int | float):
                found[metric, sample["filter"]].append(float(sample[metric]))
    return found


def table(results: dict[str, ArmResult]) -> str:
    """Every metric of every decoder, with its interval where scores are shares; then differences in pairs."""
    width = max(10, *map(len, results))
    lines = [
        f"{'decoder':<{width}} {'metric':<32} {'value':>7} {'95%-interval':>13} {'TPF':>6} {'tokens/s':>9}"
    ]
    scores = {name: scores_of(result.samples) for name, result in results.items()}
    for name, result in results.items():
        num_forwards = sum(done.num_forwards for done in result.completions)
        num_tokens = sum(len(done.token_ids) for done in result.completions)
        speed = ""
        if num_forwards:
            speed = f"{num_tokens / num_forwards:>6.2f} {num_tokens / result.seconds:>9.0f}"
        for key, value in result.metrics.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            mine, interval = scores[name].get((metric, kept), []), ""
            if mine and all(0 <= score <= 1 for score in mine):
                share = share_interval(mine)
                interval = f"{share.low:.3f}-{share.high:.3f}"
            lines.append(f"{name:<{width}} {key:<32} {value:>7.3f} {interval:>13} {speed}".rstrip())
    for name, result in results.items():
        lines += cut_off_lines(name, result.completions)
    first, *others = results
    for name in others:
        for pair, mine in scores[name].items():
            theirs, what = scores[first][pair], ",".join(pair)
            lines.append(difference_line(name, first, mine, theirs, what=what, of="problems"))
    return "\n".join(lines)
