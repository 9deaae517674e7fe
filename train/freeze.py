"""`python -m idlm.train.freeze [overrides]`: compose a training configuration once, for all ranks.

Checks it, writes `<output_dir>/launch/config-<hash>.yaml` and prints that path, which the launcher hands to
all ranks as `config=PATH`. Ranks that composed for themselves could differ by a file of their machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from idlm import command
from idlm.compose import compose
from idlm.disk import telling_of_disk
from idlm.train.config import TrainConfig
from idlm.train.config_check import check_config
from idlm.train.resume import config_hash, config_text

LAUNCH_FOLDER = "launch"


def freeze(overrides: list[str]) -> Path:
    """The file that was written; the same configuration gives the same file."""
    config = compose("train", TrainConfig, overrides)
    check_config(config)
    path = Path(config.output_dir).absolute() / LAUNCH_FOLDER / f"config-{config_hash(config)}.yaml"
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    with telling_of_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(config_text(config), encoding="utf-8")
        os.replace(aside, path)
    return path


def main(arguments: list[str]) -> int:
    print(freeze(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
