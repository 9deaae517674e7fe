"""`idlm-eval`: exact match, acceptance and tokens per forward of a decoder on a task whose answers a program
can check, next to those of a baseline.

Modules that import torch are imported inside functions, so that help and configuration errors come at once.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.cli import command
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, EvaluateConfig, read_arguments
from idlm.infer.cli.output import answer_file, exclusive_output
from idlm.infer.cli.progress import engine_name
from idlm.infer.cli.prompts import PromptLine
from idlm.semantics import Semantics

if TYPE_CHECKING:
    from idlm.infer.cli.answers import AnswerProgress
    from idlm.infer.engine import Engine
    from idlm.tasks import Task, TaskSample, Verdict

AUTO = "auto"
NUM_SEEDS = 2**63


class Baseline(NamedTuple):
    """What is compared with: its name in the table, a decoder and the options of that decoder."""

    name: str
    decoder: str
    options: dict[str, Any]

    def beside(self, decoder: str, options: dict[str, Any]) -> Baseline:
        """Itself, with the options of the compared decoder that it keeps."""
        from idlm.infer.decoders.base import DECODERS

        kept = DECODERS.get(self.decoder).baseline_keeps if decoder == self.decoder else ()
        return self._replace(options={key: options[key] for key in kept if key in options} | self.options)

    def is_decoder(self, decoder: str, options: dict[str, Any]) -> bool:
        """Whether a decoder with these options is this baseline; None stands for an option's default."""
        given, own = ({k: v for k, v in each.items() if v is not None} for each in (options, self.options))
        return self.name == decoder or (decoder, given) == (self.decoder, own)


def main() -> int:
    """Console entry point."""
    return command.run(run_evaluation)


def run_evaluation(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if command.asks_for_help(arguments):
        from idlm.infer.cli.help import EVALUATE, print_command_help

        return print_command_help(EVALUATE, EvaluateConfig, arguments)
    config, engine_arguments = read_arguments("eval", EvaluateConfig, arguments)
    with exclusive_output(config.output, overwrite=config.overwrite):
        return _run(config, engine_arguments)


def _run(config: EvaluateConfig, arguments: EngineArguments) -> int:
    """Evaluate, print the table, write the records. Returns status 1 when answers failed; their records say
    why.
    """
    from idlm.tasks import TASKS

    task = TASKS.get(config.task)(level=config.level)
    samples = _check(config, task)
    params = config.sampling
    name, evaluation, baseline = _evaluate(arguments, task, samples, params, baseline=config.baseline)
    results = {name: evaluation}
    if baseline is not None:
        baseline = baseline.beside(name, arguments.options)
    if baseline is not None and baseline.is_decoder(name, arguments.options):
        print(f"baseline={baseline.name} is the decoder itself, so there is no comparison", file=sys.stderr)
    elif baseline is not None:
        params = dataclasses.replace(params, decoder_options={}, tau=0.0)
        plain = EngineArguments(
            model=arguments.model,
            decoder=baseline.decoder,
            settings=arguments.settings | {"accelerators": {}},
            options=baseline.options,
        )
        results = {baseline.name: _evaluate(plain, task, samples, params)[1], **results}
    print(table(results))
    if config.output is not None:
        _write(config.output, samples, config.sampling.n, results)
    return int(any(result.num_failed for result in results.values()))


def _check(config: EvaluateConfig, task: Task) -> list[TaskSample]:
    """Return the samples, after finding every mistake that can be found without a model."""
    from idlm.infer.decoders.base import DECODERS

    if config.baseline not in (None, AUTO):
        DECODERS.get(config.baseline)
    if config.num < 1:
        raise UserError("IDLM-0443", f"num={config.num} prompts", fix="give num >= 1")
    return task_samples(task, config.split, config.num)


def _evaluate(
    arguments: EngineArguments,
    task: Task,
    samples: Sequence[TaskSample],
    params: SamplingParams,
    *,
    baseline: str | None = None,
) -> tuple[str, Evaluation, Baseline | None]:
    """Return the name of the engine's decoder and accelerators, its figures, and the baseline, which is
    checked before anything is decoded. The engine's memory is free again afterwards, so that the next one can
    size its own.
    """
    import torch

    from idlm.infer.cli.answers import AnswerProgress

    engine = arguments.load()
    try:
        chosen, name = choose_baseline(baseline, engine.semantics), engine_name(engine)
        with AnswerProgress(name, total=len(samples) * params.n) as progress:
            result = evaluate(engine, task, samples, params, progress=progress)
    finally:
        engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return name, result, chosen


def choose_baseline(given: str | None, semantics: Semantics) -> Baseline | None:
    """The baseline that `baseline=` means for a checkpoint; `auto` decodes one token per pass. UserError if
    the decoder does not fit the checkpoint.
    """
    from idlm.infer.decoders.base import DECODERS, fitting_decoders

    if given is None:
        return None
    if given == AUTO:
        for name in fitting_decoders(semantics):
            options = DECODERS.get(name).baseline
            if options is not None:
                values = [str(value) for value in options.values() if value is not None]
                label = ":".join((name, *values)) if values or not options else f"{name}:one by one"
                return Baseline(label, name, dict(options))
        return None
    name, chosen = given, DECODERS.get(given)
    try:
        chosen(chosen.Config(), semantics)
    except UserError as error:
        raise UserError(
            error.code,
            f"baseline={name} does not fit the checkpoint: {error.message}",
            fix="leave baseline out (auto: one token per pass), or give baseline=null for none",
        ) from error
    return Baseline(name, name, {})


def table(results: dict[str, Evaluation]) -> str:
    """Plain text, one line per decoder."""
    width = max(10, *map(len, results))
    lines = [
        f"{'decoder':<{width}} {'exactness':<9} {'exact-match':>11} {'acceptance':>10} {'TPF':>6} "
        f"{'tokens/s':>9}"
    ]
    for name, result in results.items():
        acceptance = "-" if result.acceptance_rate is None else f"{result.acceptance_rate:.3f}"
        lines.append(
            f"{name:<{width}} {result.exactness:<9} {result.exact_match:>11.3f} {acceptance:>10} "
            f"{result.tokens_per_forward:>6.2f} {result.tokens_per_second:>9.0f}"
        )
    return "\n".join(lines)


def _write(output: str, samples: Sequence[TaskSample], n: int, results: dict[str, Evaluation]) -> None:
    from idlm.infer.cli.answers import figures

    prompts = [sample.prompt for sample in samples for _ in range(n)]
    with answer_file(output) as answers:
        for name, result in results.items():
            for prompt, done, verdict in zip(prompts, result.completions, result.verdicts, strict=True):
                answers.write(
                    {
                        "decoder": name,
                        "prompt": prompt,
                        "verdict": dataclasses.asdict(verdict),
                        "completion": figures(done),
                    }
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of one engine on one set of prompts. A failed answer (memory, logits) counts as wrong.

    `seconds` is the wall-clock time of decoding all prompts as a batch.
    """

    num_prompts: int
    exact_match: float
    final_answer_match: float
    num_tokens: int
    num_forwards: int
    num_prompt_passes: int
    accepted_by_position: tuple[int, ...]
    tested_by_position: tuple[int, ...]
    seconds: float
    exactness: str
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def num_failed(self) -> int:
        """Answers that ended with an error."""
        return sum(done.error is not None for done in self.completions)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over passes, prompt passes included."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def decode_tokens_per_forward(self) -> float:
        """The same without each prompt pass and its token, as in the closed forms of idlm.acceptance."""
        passes = self.num_forwards - self.num_prompt_passes
        return (self.num_tokens - self.num_prompt_passes) / passes if passes else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tested drafts; None without drafts."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Element j is the share of the tested drafts at position j + 1 that were accepted."""
        pairs = zip(self.accepted_by_position, self.tested_by_position, strict=True)
        return tuple(accepted / tested if tested else 0.0 for accepted, tested in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole batch."""
        return self.num_tokens / self.seconds


def task_samples(task: Task, split: str, num: int) -> list[TaskSample]:
    """The first `num` samples of a split."""
    return [task.sample(index, split) for index in range(num)]


def evaluate(
    engine: Engine,
    task: Task,
    samples: Sequence[TaskSample],
    params: SamplingParams,
    *,
    progress: AnswerProgress | None = None,
) -> Evaluation:
    """Decode all prompts as one batch and check every answer. Prompt i uses a given seed + i, modulo 2**63.

    Warns about failed answers. UserError for a prompt that the engine refuses, before anything is decoded.
    """
    from idlm.infer.cli.answers import AnswerRun, check_lines

    lines = [
        PromptLine(
            place=f"prompt {i + 1}",
            request_id=str(i),
            prompt=sample.prompt,
            params=params if params.seed is None else params.with_seed((params.seed + i) % NUM_SEEDS),
        )
        for i, sample in enumerate(samples)
    ]
    check_lines(engine, lines)
    start = time.perf_counter()
    completions = [done for _, done in AnswerRun(engine, iter(lines), progress=progress)]
    seconds = time.perf_counter() - start
    prompts = [sample.prompt for sample in samples for _ in range(params.n)]
    verdicts = [_verdict(task, prompt, done) for prompt, done in zip(prompts, completions, strict=True)]
    errors = [done.error for done in completions if done.error is not None]
    if errors:
        failed = f"{len(errors)} of {len(completions)} answers failed and count as wrong"
        warnings.warn(f"decoder {engine.decoder.name}: {failed}; the first: {errors[0]}", stacklevel=2)
    return Evaluation(
        num_prompts=len(samples),
        exact_match=sum(verdict.correct for verdict in verdicts) / len(verdicts),
        final_answer_match=sum(verdict.final_answer_correct for verdict in verdicts) / len(verdicts),
        num_tokens=sum(len(done.token_ids) for done in completions),
        num_forwards=sum(done.num_forwards for done in completions),
        num_prompt_passes=sum(bool(done.token_ids) for done in completions),
        accepted_by_position=_sum_columns([done.accepted_by_position for done in completions]),
        tested_by_position=_sum_columns([done.tested_by_position for done in completions]),
        seconds=seconds,
        exactness=completions[0].exactness,
        completions=tuple(completions),
        verdicts=tuple(verdicts),
    )


def _verdict(task: Task, prompt: str, done: Completion) -> Verdict:
    verdict = task.check(prompt, done.text)
    if done.error is None:
        return verdict
    return dataclasses.replace(verdict, correct=False, final_answer_correct=False, reason=done.error)


def _sum_columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[j] for row in rows if j < len(row)) for j in range(width))


if __name__ == "__main__":
    sys.exit(main())
