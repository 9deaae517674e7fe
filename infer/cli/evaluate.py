"""`idlm-eval`: a verifiable task, decoded by a decoder and its baseline side by side.

What imports torch is imported inside functions: help and refusals of keys must not wait for it.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.cli import command
from idlm.cli.help import CommandHelp, answers_flags
from idlm.config.compose import compose
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.generate import (
    describe_plugins,
    load_engine,
    require_model,
    take_accelerator_options,
    with_options,
)
from idlm.infer.cli.output import answer_file, exclusive_output
from idlm.infer.config import EvaluateConfig, refuse_empty
from idlm.semantics import Semantics

if TYPE_CHECKING:
    from idlm.infer.cli.evaluation import Evaluation
    from idlm.infer.engine import Engine
    from idlm.tasks import Task, TaskSample

AUTO = "auto"
HELP = CommandHelp(
    name="idlm-eval",
    usage="model=PATH [key=value ...]",
    summary="Decodes the prompts of a task whose answers a program can check, and prints exact match,\n"
    "acceptance and tokens per forward (TPF), next to those of a baseline (one token per pass).",
    examples=(
        "idlm-eval model=outputs/tiny task=ledger decoder=isd decoder.stride=4 sampling.temperature=0",
        "idlm-eval model=outputs/tiny_block decoder=block num=40 baseline=null sampling.temperature=0",
    ),
    keys=(
        "model",
        "task",
        "num",
        "baseline",
        "output",
        "sampling.temperature",
        "sampling.max_tokens",
        "device",
    ),
    flags={
        "decoder=NAME decoder.OPTION=VALUE": "how to decode: ar, isd or block; the options are at the end",
        "accelerator=[NAME,...]": "plug-ins that thin attention; the options are at the end",
    },
)


class Baseline(NamedTuple):
    """What is run beside: its name in the table, a decoder and that decoder's options."""

    name: str
    decoder: str
    options: dict[str, Any]


def run_evaluation(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if answers_flags(HELP, EvaluateConfig, arguments, plugins=describe_plugins):
        return 0
    decoder, options, rest = command.split_plugin_options(arguments, plugin="decoder", default=None)
    accelerator_options, rest = take_accelerator_options(rest)
    config = compose("eval", EvaluateConfig, rest)
    refuse_empty(config)
    require_model(config.model)
    settings = with_options(config.options(), accelerator_options)
    with exclusive_output(config.output, overwrite=config.overwrite):
        return _run(config, decoder, settings, options)


def _run(
    config: EvaluateConfig, decoder: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> int:
    """Evaluate, print the table, write the records. Status 1 when answers failed: their records say why."""
    from idlm.tasks import TASKS

    task = TASKS.get(config.task)(level=config.level)
    samples = _check(config, task)
    params = config.sampling.params()
    load = partial(load_engine, config.model, decoder, settings, options)
    name, evaluation, baseline = _evaluate(load, task, samples, params, baseline=config.baseline)
    results = {name: evaluation}
    if baseline is not None and (
        baseline.name == name or (baseline.decoder, baseline.options) == (name, options)
    ):
        print(f"baseline={baseline.name} is the decoder itself: nothing beside it", file=sys.stderr)
    elif baseline is not None:
        params = dataclasses.replace(params, decoder_options={}, tau=0.0)
        plain = settings | {"accelerators": {}}
        load = partial(load_engine, config.model, baseline.decoder, plain, baseline.options)
        results = {baseline.name: _evaluate(load, task, samples, params)[1], **results}
    print(table(results))
    if config.output is not None:
        _write(config.output, samples, config.sampling.n, results)
    return int(any(result.num_failed for result in results.values()))


def _check(config: EvaluateConfig, task: Task) -> list[TaskSample]:
    """The samples, after every mistake that can be found without a model."""
    from idlm.infer.cli.evaluation import task_samples
    from idlm.infer.decoders.base import DECODERS

    config.sampling.params()
    if config.baseline not in (None, AUTO):
        DECODERS.get(config.baseline)
    if config.num < 1:
        raise UserError("IDLM-0443", f"num={config.num} prompts", fix="give num >= 1")
    return task_samples(task, config.split, config.num)


def _evaluate(
    load: Callable[[], Engine],
    task: Task,
    samples: Sequence[TaskSample],
    params: SamplingParams,
    *,
    baseline: str | None = None,
) -> tuple[str, Evaluation, Baseline | None]:
    """Name of the engine's decoder and accelerators, figures, and the baseline meant, which is checked before
    anything is decoded. Its memory is free again afterwards: the next engine sizes its own.
    """
    import torch

    from idlm.infer.cli.answers import engine_name
    from idlm.infer.cli.evaluation import evaluate
    from idlm.infer.cli.progress import AnswerProgress, loading

    with loading():
        engine = load()
    try:
        beside, name = choose_baseline(baseline, engine.semantics), engine_name(engine)
        with AnswerProgress(name, total=len(samples) * params.n) as progress:
            result = evaluate(engine, task, samples, params, progress=progress)
    finally:
        engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return name, result, beside


def choose_baseline(given: str | None, semantics: Semantics) -> Baseline | None:
    """What `baseline=` means for a checkpoint; `auto` is its one token per pass. Raises UserError naming the
    key where the decoder named does not fit the checkpoint.
    """
    from idlm.infer.decoders.base import DECODERS, fitting_decoders

    if given is None:
        return None
    if given == AUTO:
        for name in fitting_decoders(semantics):
            options = DECODERS.get(name).baseline
            if options is not None:
                return Baseline(":".join((name, *map(str, options.values()))), name, dict(options))
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
        f"{'decoder':<{width}} {'law':<6} {'exact-match':>11} {'acceptance':>10} {'TPF':>6} {'tokens/s':>9}"
    ]
    for name, result in results.items():
        acceptance = "-" if result.acceptance_rate is None else f"{result.acceptance_rate:.3f}"
        lines.append(
            f"{name:<{width}} {result.exactness:<6} {result.exact_match:>11.3f} {acceptance:>10} "
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


if __name__ == "__main__":
    sys.exit(command.run(run_evaluation))
