"""Libraries that some settings of a run need, and that not every run has."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from idlm.config.project import install_command
from idlm.train.config.schema import TrainConfig


def tracker_problems(config: TrainConfig) -> Iterator[str]:
    """Libraries of trackers that are set and cannot be imported."""
    wanted = {
        "wandb": (config.wandb.mode != "disabled", f"wandb.mode={config.wandb.mode}", "pip install wandb"),
        "torch.utils.tensorboard": (
            config.tensorboard.enabled,
            "tensorboard.enabled=true",
            install_command("tensorboard"),
        ),
    }
    for module, (is_set, option, command) in wanted.items():
        if is_set:
            try:
                importlib.import_module(module)
            except ImportError as error:
                yield f"{option}: {error}; install it: {command}, or leave the option out"
