"""The command line of training: `idlm-train recipe=tiny`, `idlm-train recipe=qwen3_8b model.path=...
data.path=...`.

Exit status: 0 done, 2 a mistake in the input or the configuration; after saving, 85 at the end of
train.max_minutes, 130 and 143 stopped by SIGINT and SIGTERM."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from idlm.cli import command
from idlm.cli.help import CommandHelp
from idlm.train.config.schema import TrainConfig, missing_keys, refuse_problems

if TYPE_CHECKING:
    from idlm.train.pipeline import RunOutcome
    from idlm.train.report import Sampler

TIME_UP_STATUS = 85
"""The status by which HTCondor recognises a job that has saved its state and is to continue."""
HELP = CommandHelp.of("idlm-train", TrainConfig, has_recipes=True)


def main(argv: list[str] | None = None, *, sampler: Sampler | None = None) -> int:
    """Run the command line; returns the exit status."""
    return command.run(lambda arguments: _run(arguments, sampler), argv)


def _run(argv: list[str], sampler: Sampler | None) -> int:
    from idlm.config.compose import compose
    from idlm.log import get_logger, num_processes, rank

    if command.has_help_flag(argv):
        return HELP.print(argv)
    get_logger()
    config = compose("train", TrainConfig, argv)
    if not config.dry_run:
        # Checked before torch is imported. The dry run lists these with all other problems.
        refuse_problems(missing_keys(config))
    if config.train.sizes != "given":
        with command.importing():
            command.leave_out_unused()
            from idlm.train.planning.sizes import with_sizes

        config = with_sizes(config)
    from rich.console import Console

    console = Console()
    if config.dry_run:
        with command.importing():
            command.leave_out_unused()
            from idlm.train.planning.dry_run import dry_run
            from idlm.train.sampler import require_engine

        if rank() == 0:
            dry_run(config, console=console, arguments=argv, check=require_engine)
        return 0

    if num_processes() == 1:
        # Importing the rest of training takes seconds.
        with command.importing():
            from idlm.train.check import check_config
            from idlm.train.checkpoint.resume import finished_text

        check_config(config)
        finished = finished_text(config)
        if finished is not None:
            console.print(finished, highlight=False, soft_wrap=True, markup=False)
            return 0

    with command.importing():
        command.leave_out_unused()
        from idlm.train.pipeline import run_training
        from idlm.train.sampler import require_engine

    require_engine(config)
    if sampler is None and (config.report.enabled or config.eval.num_prompts):
        from idlm.train.sampler import engine_sampler

        sampler = engine_sampler(config)
    outcome = run_training(config, console=console, sampler=sampler)
    if outcome.signal is not None or outcome.is_time_up:
        _print_how_to_resume(console, argv, outcome)
        return TIME_UP_STATUS if outcome.signal is None else 128 + outcome.signal
    if outcome.report is not None:
        console.print(f"report: {outcome.report}", highlight=False, soft_wrap=True)
    return 0


def _print_how_to_resume(console: Any, argv: list[str], outcome: RunOutcome) -> None:
    from idlm.log import num_processes

    kept = [argument for argument in argv if not argument.startswith("resume=")]
    how = f"to continue:\n{shlex.join(['idlm-train', *kept, 'resume=auto'])}"
    if num_processes() > 1:
        how = f"to continue, start the same launcher with {num_processes()} processes and resume=auto"
    step, saved = outcome.last_step, outcome.saved_step
    where = f"and saved at step {step}" if saved == step else f"at step {step}, saved at step {saved}"
    console.print(f"stopped {where}; {how}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
