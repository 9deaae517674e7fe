"""What a line of the metrics is made of travels with a checkpoint, also to another number of ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.train.loop import metrics as window
from idlm.train.loop.metrics import SUMMED, MetricsWindow, restored
from idlm.train.step import StepLosses
from tests.tiny_training import stage_of

CPU = torch.device("cpu")


def step_of(seed: int) -> StepLosses:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randint(1, 99, shape, generator=generator) for shape in ((), (6,))]
    return StepLosses(
        stage=stage_of(2),
        counts=torch.tensor([40, 60]),
        sums=torch.rand(2, generator=generator),
        weights=torch.ones(2),
        is_weighted=True,
        overlap_sums=torch.zeros(1),
        overlap_counts=torch.zeros(1),
        num_tokens=whole[0],
        fed=whole[1],
    )


def window_of(*seeds: int) -> MetricsWindow:
    one = MetricsWindow(step=7, start=time.perf_counter())
    for seed in seeds:
        one.add(step_of(seed))
    return one


def stored(monkeypatch: pytest.MonkeyPatch, *windows: MetricsWindow) -> dict[str, Any]:
    """What ranks with these windows save, read again."""
    plain = [{name: getattr(one, name).tolist() for name in SUMMED} for one in windows]
    monkeypatch.setattr(window, "gather_objects", lambda value: plain)
    return json.loads(json.dumps(windows[0].gathered(seconds=3.0)))


def assert_equal(one: Tensor | None, other: Tensor | None) -> None:
    assert one is not None and other is not None
    assert one.dtype == other.dtype and torch.equal(one, other)


def test_every_rank_goes_on_with_its_own_window_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = window_of(0, 1), window_of(2, 3)
    saved = stored(monkeypatch, *windows)
    for rank, expected in enumerate(windows):
        found = restored(saved, step=9, rank=rank, world_size=2, device=CPU)
        expected.add(step_of(4))
        found.add(step_of(4))
        assert found.step == 7 and time.perf_counter() - found.start >= 3.0
        for name in ("counts", *SUMMED):
            assert_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_adds_up_to_the_same(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    windows = window_of(0, 1), window_of(2, 3)
    saved = stored(monkeypatch, *windows)
    found = [
        restored(saved, step=9, rank=rank, world_size=world_size, device=CPU) for rank in range(world_size)
    ]
    for one in found:
        assert_equal(one.counts, windows[0].counts)
    for name in SUMMED:
        total = sum(getattr(one, name) for one in windows)
        assert_equal(sum(getattr(one, name) for one in found), total)


def test_an_empty_window_starts_after_the_checkpoint() -> None:
    assert MetricsWindow(step=7, start=0.0).gathered(seconds=1.0) is None
    found = restored(None, step=9, rank=0, world_size=1, device=CPU)
    assert found.step == 9 and found.counts is None
