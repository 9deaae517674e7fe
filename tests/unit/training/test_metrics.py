"""Sums that no line of the metrics shows yet travel with a checkpoint, also to another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.train.loop.progress import MetricsWindow, Progress
from idlm.train.step import StepLosses
from tests.tiny_training import stage_of


def step_of(seed: int) -> StepLosses:
    generator = torch.Generator().manual_seed(seed)
    return StepLosses(
        stage=stage_of(2),
        is_logged=False,
        counts=torch.tensor([40, 60]),
        sums=torch.rand(2, generator=generator),
        overlap_sums=torch.zeros(1),
        overlap_counts=torch.zeros(1),
        fed=torch.randint(1, 99, (6,), generator=generator),
    )


def resumed(folder: Path, saved: dict[str, Any], rank: int) -> MetricsWindow:
    """The window of a rank that resumes at step 9."""
    progress: Any = Progress(folder / "metrics.jsonl", console=SimpleNamespace(is_terminal=False))
    args = SimpleNamespace(device=torch.device("cpu"), process_index=rank)
    state = SimpleNamespace(
        stateful_callbacks={"Progress": json.loads(json.dumps(saved))},
        global_step=9,
        is_world_process_zero=rank == 0,
    )
    progress.on_train_begin(args, state, None)
    return progress._window


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_window_adds_up_to_the_same(tmp_path: Path, world_size: int) -> None:
    progress = Progress(tmp_path / "metrics.jsonl", console=None)
    progress._window = MetricsWindow(step=7, start=0.0)
    for seed in (0, 1):
        progress._window.add(step_of(seed))
    progress.gather()
    found = [resumed(tmp_path, progress.state(), rank) for rank in range(world_size)]
    for one in found:
        assert one.step == 7 and torch.equal(one.counts, torch.tensor([80, 120]))
    for name in ("sums", "fed"):
        expected = getattr(progress._window, name)
        total = sum(getattr(one, name) for one in found)
        assert total.dtype == expected.dtype and torch.equal(total, expected)


def test_an_empty_window_starts_after_the_checkpoint(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl", console=None)
    progress.gather()
    found = resumed(tmp_path, progress.state(), 0)
    assert found.step == 9 and found.counts is None
