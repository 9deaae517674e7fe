"""Stopping a training run of this process, and comparing what two runs have left."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from idlm.train import cli
from idlm.train.loop.trainer import IdlmTrainer
from tests.errors import ctrl_c_raises


@contextmanager
def ctrl_c_after(num_steps: int) -> Iterator[None]:
    """A Ctrl-C in the optimizer step behind the first `num_steps`."""
    plain = IdlmTrainer.training_step

    def interrupted(self: IdlmTrainer, *args: Any) -> torch.Tensor:
        if self.state.global_step == num_steps:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *args)

    with ctrl_c_raises(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(IdlmTrainer, "training_step", interrupted)
        yield


def train_with_a_stop(arguments: list[str], *, after: int) -> None:
    """A run that Ctrl-C ends in the step behind the first `after`, and that is started again."""
    with ctrl_c_after(after):
        assert cli.main(arguments) == 130
    assert cli.main(arguments) == 0


@contextmanager
def failing_after(num_steps: int) -> Iterator[None]:
    """A crash in the optimizer step behind the first `num_steps`."""
    plain = IdlmTrainer.training_step

    def failing(self: IdlmTrainer, *args: Any) -> torch.Tensor:
        if self.state.global_step == num_steps:
            raise RuntimeError("power cut")
        return plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IdlmTrainer, "training_step", failing)
        yield


def assert_same_weights(one: Path, other: Path) -> None:
    """Two safetensors files hold the same bits."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def num_floats() -> int:
    """Elements of all floating tensors of this process."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in tensors if value.is_floating_point())
