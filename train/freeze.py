"""`python -m idlm.train.freeze [overrides]`: compose and check a training configuration once for all
ranks.

Writes `<output_dir>/launch/config-<hash>.yaml` and prints that path, which the launcher passes to all ranks
as `config=PATH`. Ranks that compose on their own could differ by a file of their machine."""

from __future__ import annotations

import sys
from pathlib import Path

from idlm.cli import command
from idlm.config.compose import compose
from idlm.files.disk import replace_text
from idlm.train.check import check_config
from idlm.train.checkpoint.resume import config_hash, config_text
from idlm.train.config.schema import TrainConfig

LAUNCH_FOLDER = "launch"


def freeze(overrides: list[str]) -> Path:
    """Write the configuration and return its path; the same configuration gives the same file."""
    config = compose("train", TrainConfig, overrides)
    if config.train.sizes == "auto":
        from idlm.train.planning.sizes import with_sizes

        config = with_sizes(config)
    check_config(config)
    path = Path(config.output_dir).absolute() / LAUNCH_FOLDER / f"config-{config_hash(config)}.yaml"
    replace_text(path, config_text(config))
    return path


def main(arguments: list[str]) -> int:
    print(freeze(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
