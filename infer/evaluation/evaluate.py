"""`idlm-eval`: exact match, acceptance and tokens per forward of a decoder on a task whose answers a program
can check, next to those of a baseline and of other decoders.

Modules that import torch are imported inside functions, so that help and configuration errors come at once.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from idlm.cli import command
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.batch import AnswerProgress, AnswerRun, check_lines, figures
from idlm.infer.cli.config import EngineArguments, engine_name, read_arguments
from idlm.infer.cli.help import EngineHelp
from idlm.infer.cli.output import answer_file, exclusive_output
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.evaluation import arms
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.infer.evaluation.file_tasks import FILE_TASKS, FileTask
from idlm.tasks import TASKS, Grade, Task, TaskSample

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

NUM_SEEDS = 2**63
DEFAULT_NUM = 200
"""Prompts of a generated task."""

HELP = EngineHelp.of("idlm-eval", EvaluateConfig)


def main() -> int:
    return command.run(run_evaluation)


def run_evaluation(arguments: list[str]) -> int:
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config, engine_arguments = read_arguments("eval", EvaluateConfig, arguments)
    with exclusive_output(config.output, overwrite=config.overwrite):
        return _run(config, engine_arguments)


def _run(config: EvaluateConfig, arguments: EngineArguments) -> int:
    """Evaluate, print the table, write the records. Returns status 1 when answers failed."""
    if config.harness == "lm_eval":
        from idlm.infer.evaluation.lm_eval_run import run_lm_eval

        return run_lm_eval(config, arguments)
    task = load_task(config)
    samples = check_samples(config, task)

    def work(engine: Engine, params: SamplingParams) -> Evaluation:
        with AnswerProgress(engine_name(engine), total=len(samples) * params.n) as progress:
            return evaluate(engine, task, samples, params, progress=progress)

    results = arms.run_arms(config, arguments, work)
    print(table(results))
    if config.output is not None:
        _write(config.output, samples, config.sampling.n, results)
    for arm in arms.read_arms(config.compare):
        if arm.model is not None:
            _print_conversion(arm.arguments(arguments), arguments, config, results[arm.name])
    return int(any(done.error for result in results.values() for done in result.completions))


def _print_conversion(
    base: EngineArguments, own: EngineArguments, config: EvaluateConfig, evaluation: Evaluation
) -> None:
    """What changed since the base, by the base's own `evaluation`."""
    from idlm.infer.evaluation.conversion import measure_conversion

    answers = []
    for index, done in enumerate(evaluation.completions):
        prompt = evaluation.prompts[index // config.sampling.n]
        answers.append(([*prompt, *done.token_ids], range(len(prompt), len(prompt) + len(done.token_ids))))
    origin = f"its own answers to {config.task} at temperature {config.sampling.temperature:g}"
    found = measure_conversion(base, own, answers, origin=origin, max_tokens=config.sampling.max_tokens)
    print("\nThe checkpoint has no clean rows: it is not causal." if found is None else f"\n{found.text()}")


def load_task(config: EvaluateConfig) -> Task | FileTask:
    """The task of `task=`: generated, or read from the file `data=`. UserErrors of both."""
    name, is_file_task = config.task, config.task in FILE_TASKS.names()
    if is_file_task and config.data is not None:
        return FILE_TASKS.get(name).load(name, config.data, allow_code=config.allow_code)
    make = None if is_file_task else TASKS.get(name, others=FILE_TASKS.names())
    if make is None or config.data is not None:
        raise UserError(
            "IDLM-0485",
            f"task={name} {'reads a file of problems' if is_file_task else 'makes its problems itself'}, "
            f"and data={config.data}",
            fix="give data=FILE" if is_file_task else "leave data= out",
        )
    generated: Task = make(level=config.level)
    return generated


def check_samples(config: EvaluateConfig, task: Task | FileTask) -> list[TaskSample]:
    """Return the samples, after finding every mistake that can be found without a model."""
    from idlm.infer.decoders.base import DECODERS

    if config.baseline not in (None, arms.AUTO):
        DECODERS.get(config.baseline)
    arms.read_arms(config.compare)
    records = getattr(task, "records", None)
    maximum = DEFAULT_NUM if records is None else len(records)
    num = maximum if config.num is None else config.num
    if num < 1 or (records is not None and num > maximum):
        raise UserError(
            "IDLM-0443",
            f"num={num} prompts",
            fix=f"give num in [1, {maximum}]" if records else "give num >= 1",
        )
    return task_samples(task, config.split, num)


def table(results: dict[str, Evaluation]) -> str:
    """A line for each decoder, with 95 % confidence intervals; then differences to the first."""
    width = max(10, *map(len, results))
    lines = [
        f"{'decoder':<{width}} {'exactness':<9} {'exact-match':>11} {'95%-interval':>13} {'acceptance':>10} "
        f"{'TPF':>6} {'tokens/s':>9}"
    ]
    for name, result in results.items():
        acceptance = "-" if result.acceptance_rate is None else f"{result.acceptance_rate:.3f}"
        share = arms.share_interval(result.scores)
        lines.append(
            f"{name:<{width}} {result.exactness:<9} {result.exact_match:>11.3f} "
            f"{f'{share.low:.3f}-{share.high:.3f}':>13} {acceptance:>10} "
            f"{result.tokens_per_forward:>6.2f} {result.tokens_per_second:>9.0f}"
        )
    for name, result in results.items():
        lines += arms.cut_off_lines(name, result.completions)
    (first, reference), *others = results.items()
    for name, result in others:
        scores = result.scores, reference.scores
        lines.append(arms.difference_line(name, first, *scores, what="exact match", of="prompts"))
    return "\n".join(lines)


def _write(output: str, samples: Sequence[TaskSample], n: int, results: dict[str, Evaluation]) -> None:
    repeated = [sample for sample in samples for _ in range(n)]
    with answer_file(output) as answers:
        for name, result in results.items():
            for sample, done, verdict in zip(repeated, result.completions, result.verdicts, strict=True):
                record = {"decoder": name, "prompt": sample.prompt, "reference": sample.response}
                judged = {"verdict": dataclasses.asdict(verdict), "completion": figures(done)}
                answers.write(record | judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of one engine on one set of prompts. Failed answers count as wrong; `seconds` is wall time,
    `prompts` are token ids."""

    prompts: Sequence[Any]
    exact_match: float
    num_tokens: int
    num_forwards: int
    num_prompt_passes: int
    accepted_by_position: tuple[int, ...]
    tested_by_position: tuple[int, ...]
    seconds: float
    exactness: str
    completions: tuple[Completion, ...]
    verdicts: tuple[Grade, ...]

    @property
    def scores(self) -> list[float]:
        """For each prompt, the share of its answers that are correct."""
        n = len(self.verdicts) // len(self.prompts)
        correct = [verdict.correct for verdict in self.verdicts]
        return [sum(correct[start : start + n]) / n for start in range(0, len(correct), n)]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over passes, prompt passes included."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tested drafts; None without drafts."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def task_samples(task: Task | FileTask, split: str, num: int) -> list[TaskSample]:
    return [task.sample(index, split) for index in range(num)]


def evaluate(
    engine: Engine,
    task: Task | FileTask,
    samples: Sequence[TaskSample],
    params: SamplingParams,
    *,
    progress: AnswerProgress | None = None,
) -> Evaluation:
    """Decode all prompts as one batch and check every answer; prompt i has the given seed + i, modulo 2**63.
    Warns about failed answers. UserError for a prompt that the engine refuses, before anything is decoded."""
    encoded: Sequence[str | list[int]] = [sample.prompt for sample in samples]
    # Encoded once, together. If one is refused they stay texts, so that `check_lines` names it.
    with suppress(UserError):
        encoded = engine.encode([sample.prompt for sample in samples])
    lines = [
        PromptLine(
            location=f"prompt {i + 1}",
            request_id=str(i),
            prompt=prompt,
            params=params if params.seed is None else params.with_seed((params.seed + i) % NUM_SEEDS),
        )
        for i, prompt in enumerate(encoded)
    ]
    check_lines(engine, lines)
    start = time.perf_counter()
    completions = [done for _, done in AnswerRun(engine, iter(lines), progress=progress)]
    seconds = time.perf_counter() - start
    answered = [sample for sample in samples for _ in range(params.n)]
    # Threads, for tasks that check an answer in a process of its own.
    with ThreadPoolExecutor(getattr(task, "num_workers", 1)) as pool:
        verdicts = list(pool.map(partial(_verdict, task), answered, completions))
    errors = [done.error for done in completions if done.error is not None]
    if errors:
        failed = f"{len(errors)} of {len(completions)} answers failed and count as wrong"
        warnings.warn(f"decoder {engine.decoder.name}: {failed}; the first: {errors[0]}", stacklevel=2)
    return Evaluation(
        prompts=encoded,
        exact_match=sum(verdict.correct for verdict in verdicts) / len(verdicts),
        num_tokens=sum(len(done.token_ids) for done in completions),
        num_forwards=sum(done.num_forwards for done in completions),
        num_prompt_passes=sum(bool(done.token_ids) for done in completions),
        accepted_by_position=arms.sum_columns(done.accepted_by_position for done in completions),
        tested_by_position=arms.sum_columns(done.tested_by_position for done in completions),
        seconds=seconds,
        exactness=completions[0].exactness,
        completions=tuple(completions),
        verdicts=tuple(verdicts),
    )


def _verdict(task: Task | FileTask, sample: TaskSample, done: Completion) -> Grade:
    return task.grade(sample, done.text) if done.error is None else Grade(reason=done.error)


if __name__ == "__main__":
    sys.exit(main())
