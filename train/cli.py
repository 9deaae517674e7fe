"""`idlm-train`: `idlm-train +recipe=tiny`, `idlm-train +recipe=qwen3_8b model.path=... data.path=...
[resume=auto]`.

Exit status: 0 done, 2 a mistake in input or configuration, 130 / 143 stopped by SIGINT / SIGTERM after
saving. The only module of training that may know the engine: it hands its samples to the report.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.train.report import Sampler

USER_ERROR_STATUS = 2


def main(argv: list[str] | None = None, *, sampler: Sampler | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    # A spinning OpenMP pool collapses four-fold beside a busy neighbour; it must be set before torch is
    # loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        return _run(argv, sampler)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR_STATUS


def _run(argv: list[str], sampler: Sampler | None) -> int:
    from rich.console import Console

    from idlm.compose import compose
    from idlm.log import get_logger
    from idlm.train.config import TrainConfig

    get_logger()
    config = compose("train", TrainConfig, argv)
    console = Console()

    from idlm.train.pipeline import run_training

    outcome = run_training(config, console=console, sampler=sampler)
    if outcome.signal is not None:
        _say_how_to_resume(console, argv, outcome.last_step)
        return 128 + outcome.signal
    if outcome.report is not None:
        console.print(f"report: {outcome.report}", highlight=False, soft_wrap=True)
    return 0


def _say_how_to_resume(console: Any, argv: list[str], step: int) -> None:
    kept = [argument for argument in argv if not argument.startswith("resume=")]
    command = shlex.join(["idlm-train", *kept, "resume=auto"])
    console.print(
        f"stopped and saved at step {step}; to continue:\n{command}", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main())
