"""The command line of training: `idlm-train recipe=tiny`, `idlm-train recipe=qwen3_8b model.path=...
data.path=...`.

Exit status: 0 done, 2 a mistake in the input or the configuration, 130 and 143 stopped by SIGINT and SIGTERM
after saving. This is the only module of training that imports the engine, which generates the samples of the
report.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.cli import command
from idlm.cli.help import CommandHelp, print_help
from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.infer.engine import Engine
    from idlm.train.config.schema import TrainConfig
    from idlm.train.planning.report import Measurement, Sampler, SampleReport

SAMPLE_TOKENS = 512
HELP = CommandHelp(
    name="idlm-train",
    usage="[recipe=NAME] [key=value ...]",
    summary="Converts an AR checkpoint into an I-DLM or a block diffusion model, or trains an AR base.\n"
    "A run writes a checkpoint and a report to output_dir; started again, it goes on where it stopped.",
    examples=(
        "idlm-train recipe=tiny",
        "idlm-train recipe=qwen3_8b model.path=/models/Qwen3-8B data.path=chats.jsonl dry_run=true",
    ),
    keys=(
        *(
            "model.path",
            "data.path",
            "output_dir",
            "dry_run",
            "resume",
            "train.learning_rate",
            "train.epochs",
        ),
        *("train.steps", "train.batch_size", "train.global_batch", "train.max_length", "train.device"),
    ),
    has_recipes=True,
)


def main(argv: list[str] | None = None, *, sampler: Sampler | None = None) -> int:
    """Run the command line; returns the exit status."""
    return command.run(lambda arguments: _run(arguments, sampler), argv)


def _run(argv: list[str], sampler: Sampler | None) -> int:
    from idlm.config.compose import compose
    from idlm.log import get_logger, rank
    from idlm.train.config.schema import TrainConfig, missing_keys, refuse_problems

    if command.asks_for_help(argv):
        return print_help(HELP, TrainConfig, argv)
    get_logger()
    config = compose("train", TrainConfig, argv)
    if not config.dry_run:
        # Checked before torch is imported. The dry run lists these with all other problems.
        refuse_problems(missing_keys(config))
    from rich.console import Console

    console = Console()
    if config.dry_run:
        from idlm.train.planning.dry_run import dry_run

        if rank() == 0:
            dry_run(config, console=console, arguments=argv)
        return 0

    from idlm.train.config.trainer_arguments import num_processes

    if num_processes() == 1:
        # Importing the rest of training takes ten seconds.
        from idlm.train.checkpoint.resume import finished_text
        from idlm.train.config.check import check_config

        check_config(config)
        finished = finished_text(config)
        if finished is not None:
            console.print(finished, highlight=False, soft_wrap=True, markup=False)
            return 0

    from idlm.train.pipeline import run_training

    outcome = run_training(config, console=console, sampler=sampler or engine_sampler(config))
    if outcome.signal is not None:
        _print_how_to_resume(console, argv, outcome.last_step)
        return 128 + outcome.signal
    if outcome.report is not None:
        console.print(f"report: {outcome.report}", highlight=False, soft_wrap=True)
    return 0


def engine_sampler(config: TrainConfig) -> Sampler:
    """Return a function that generates greedily from the published checkpoint, with every decoder that fits.

    The prompts are held-out prompts of a task, or the first ones of a file. If the engine fails, the report
    has no samples: the checkpoint is published before.
    """

    def sample(directory: Path, num_samples: int) -> SampleReport:
        from idlm.train.planning.estimate import is_out_of_memory
        from idlm.train.planning.report import SampleReport

        try:
            return _generate(config, directory, num_samples)
        except UserError as error:
            problem = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = "out of memory: " + str(error).partition("\n")[0]
        print(f"the report has no samples: {problem}", file=sys.stderr)
        return SampleReport(problem=problem)

    return sample


def _generate(config: TrainConfig, directory: Path, num_samples: int) -> SampleReport:
    from idlm.contracts import SamplingParams
    from idlm.infer.decoders.base import fitting_decoders
    from idlm.infer.engine import Engine
    from idlm.semantics import Semantics
    from idlm.train.planning.report import SampleReport, SampleText

    params = SamplingParams(temperature=0, max_tokens=SAMPLE_TOKENS)
    measurements: list[Measurement] = []
    texts: list[SampleText] = []
    for decoder in fitting_decoders(Semantics.load(directory)):
        engine = Engine.from_pretrained(directory, decoder, device=config.train.device)
        prompts, judge = _prompts(config, engine, num_samples)
        done = engine.generate(prompts, params)
        verdicts = [judge(place, completion.text) for place, completion in enumerate(done)]
        measurements.append(_measure(decoder, done, verdicts))
        if not texts:
            shown = [p if isinstance(p, str) else engine.tokenizer.decode(p) for p in prompts]
            texts = [
                SampleText(prompt=prompt, response=completion.text, verdict=verdict or "")
                for prompt, completion, verdict in zip(shown, done, verdicts, strict=True)
            ]
    return SampleReport(samples=tuple(texts), measurements=tuple(measurements))


def _prompts(
    config: TrainConfig, engine: Engine, num_samples: int
) -> tuple[list[str | list[int]], Callable[[int, str], str | None]]:
    """Return the prompts, and a judge `(place, answer) -> verdict`, which gives None without a checker."""
    from idlm.train.data.base import JudgedSource, has_splits, make_encoder, open_source

    data = replace(config.data, split="validation") if has_splits(config.data.source) else config.data
    source = open_source(data, make_encoder(data, engine.tokenizer, None), output_dir=config.output_dir)
    places = range(num_samples if source.num_samples is None else min(num_samples, source.num_samples))
    if isinstance(source, JudgedSource):
        return [source.question(place) for place in places], source.verdict
    samples = [source.sample(place) for place in places]
    prompts = [sample.token_ids[: max(1, int(sample.supervised.argmax()))].tolist() for sample in samples]
    return prompts, lambda place, answer: None


def _measure(decoder: str, done: Sequence[Any], verdicts: Sequence[str | None]) -> Measurement:
    from idlm.train.data.base import CORRECT
    from idlm.train.planning.report import Measurement

    tested = sum(sum(completion.tested_by_position) for completion in done)
    accepted = sum(sum(completion.accepted_by_position) for completion in done)
    num_forwards = sum(completion.num_forwards for completion in done)
    is_judged = all(verdict is not None for verdict in verdicts)
    return Measurement(
        decoder=decoder,
        exact_match=sum(verdict == CORRECT for verdict in verdicts) / len(done) if is_judged else None,
        acceptance_rate=accepted / tested if tested else None,
        tokens_per_forward=sum(len(c.token_ids) for c in done) / num_forwards if num_forwards else None,
    )


def _print_how_to_resume(console: Any, argv: list[str], step: int) -> None:
    from idlm.train.config.trainer_arguments import num_processes

    kept = [argument for argument in argv if not argument.startswith("resume=")]
    how = f"to continue:\n{shlex.join(['idlm-train', *kept, 'resume=auto'])}"
    if num_processes() > 1:
        how = f"to continue, start the same launcher with {num_processes()} processes and resume=auto"
    console.print(f"stopped and saved at step {step}; {how}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
