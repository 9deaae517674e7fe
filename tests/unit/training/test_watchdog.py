"""What stops a run: a loss that is not finite, and ranks that the watchdog names by their heartbeats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from idlm.errors import UserError
from idlm.log import progress_count
from idlm.train.loop import watchdog as watchdog_module
from idlm.train.loop.watchdog import (
    SILENT_SECONDS,
    SLOW_FACTOR,
    Heartbeat,
    PeerStatus,
    Watchdog,
    _host,
    watching,
)
from idlm.train.objectives.base import Terms
from idlm.train.objectives.curriculum import Stage
from idlm.train.step import LossGuard, TrainingStep
from tests.errors import refused


def watchdog_that_saw(*beats: Heartbeat, hang_seconds: float = 100.0) -> Watchdog:
    watchdog = Watchdog(None, rank=0, world_size=1 + len(beats), hang_seconds=hang_seconds)
    for beat in beats:
        watchdog.seen[beat.rank] = PeerStatus(beat)
    return watchdog


def beat(rank: int, *, step: int = 0, phase: str = "compute", pid: int = 0, host: str = "far") -> Heartbeat:
    return Heartbeat(rank=rank, pid=pid or os.getpid(), host=host, step=step, phase=phase)


def named(watchdog: Watchdog) -> tuple[str, list[int]] | None:
    verdict = watchdog._judge()
    return None if verdict is None else (verdict[0], [culprit.rank for culprit in verdict[1]])


def test_a_process_that_ended_here_is_named_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    watchdog = watchdog_that_saw(
        beat(1, pid=gone.pid, host=_host()), beat(2, pid=gone.pid, host="another machine")
    )
    shown = named(watchdog)
    assert shown is not None and shown[1] == [1], "the same number on another machine means nothing"
    watchdog.seen[1].heartbeat.is_done = True
    assert named(watchdog) is None, "a rank that finished may go"


def test_silence_is_named_after_its_time_and_failures_at_once() -> None:
    watchdog = watchdog_that_saw(beat(1), beat(2))
    watchdog.seen[2].alive_at -= SILENT_SECONDS + 1
    shown = named(watchdog)
    assert shown is not None and shown[1] == [2] and "silent" in shown[0]
    watchdog = watchdog_that_saw(beat(1), beat(2, step=6))
    watchdog.seen[2].heartbeat.failure_message = "IDLM-0301: no space"
    shown = named(watchdog)
    assert shown is not None and shown[1] == [2]
    assert "rank 2" in shown[0] and "step 7" in shown[0] and "IDLM-0301: no space" in shown[0]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([("compute", 5), ("data", 5), ("compute", 5)], [1]),
        ([("compute", 5), ("compute", 4), ("data", 5)], [1]),
        ([("compute", 5), ("compute", 5), ("compute", 5)], [0, 1, 2]),
        ([("data", 6), ("save", 6), ("data", 6)], [1]),
    ],
)
def test_the_rank_furthest_behind_hangs(indices: list[tuple[str, int]], expected: list[int]) -> None:
    watchdog = watchdog_that_saw(*(beat(rank) for rank in (1, 2)))
    for rank, (phase, step) in enumerate(indices):
        watchdog.seen[rank].heartbeat.phase, watchdog.seen[rank].heartbeat.step = phase, step
        watchdog.seen[rank].moved_at -= watchdog.hang_seconds * (SLOW_FACTOR if phase == "save" else 1) + 1
    shown = named(watchdog)
    assert shown is not None and shown[1] == expected


def test_files_may_take_longer_than_steps() -> None:
    watchdog = watchdog_that_saw(beat(1, phase="save"))
    for known in watchdog.seen.values():
        known.moved_at -= watchdog.hang_seconds + 1
    assert named(watchdog) is None


def test_a_rank_that_hangs_ends_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    statuses = []

    def end(status: int) -> None:
        statuses.append(status)
        watchdog._ending.set()
        ended.set()

    monkeypatch.setattr(watchdog_module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", end)

    def the_line_that_hangs() -> None:
        assert ended.wait(20)

    with watching(0.05) as watchdog:
        watchdog.move("compute", 3)
        the_line_that_hangs()
    shown = capfd.readouterr().err
    assert statuses == [watchdog_module.STATUS]
    assert "rank 0" in shown and "step 4, compute hangs" in shown
    assert "the_line_that_hangs" in shown


def test_errors_pass_through_and_the_thread_ends() -> None:
    with pytest.raises(UserError, match="IDLM-0503"), watching(100.0) as watchdog:
        raise UserError("IDLM-0503", "a bad loss", fix="none")
    assert watchdog.mine.failure_message == "IDLM-0503: a bad loss"
    with pytest.raises(ZeroDivisionError), watching(100.0) as watchdog:
        _ = 1 / 0
    assert "ZeroDivisionError" in watchdog.mine.failure_message
    with watching(100.0) as watchdog:
        assert watchdog._thread.is_alive()
    deadline = time.monotonic() + 5
    while watchdog._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not watchdog._thread.is_alive() and watchdog.mine.is_done


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_end_of_the_launcher_is_one_signal(monkeypatch: pytest.MonkeyPatch, is_stopping: bool) -> None:
    """A rank that saves because of a signal is not sent a second one, which would end the save."""
    watchdog, sent = watchdog_that_saw(), list[int]()
    watchdog.launcher, watchdog.is_stopping = os.getpid(), lambda: is_stopping
    monkeypatch.setattr(watchdog_module.os, "kill", lambda pid, number: sent.append(number))
    watchdog._follow_launcher()
    watchdog._follow_launcher()
    assert sent == ([] if is_stopping else [signal.SIGTERM])


def test_a_pass_without_gradients_is_progress() -> None:
    """An evaluation, and the pass that balances the losses of a step, may outlast the patience."""
    step, before = TrainingStep.__new__(TrainingStep), progress_count()
    step.forward = lambda model, batch, compute: Terms(sums=torch.zeros(1))  # type: ignore[method-assign]
    step.model = torch.nn.Identity()
    step.objective = SimpleNamespace(terms=lambda **_: None)  # type: ignore[assignment]
    for _ in range(3):
        step.evaluate(Stage(index=0, stride=2, num_steps=1, clean_weight=0.0), {})
    assert progress_count() == before + 3


def batch(item: int) -> dict[str, torch.Tensor]:
    return {"item_ids": torch.tensor([item])}


def guarded(run_dir: Path) -> tuple[LossGuard, torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    guard, optimizer = LossGuard(run_dir), torch.optim.AdamW([weight])
    guard.watch(optimizer)
    guard.watch(optimizer)
    return guard, weight, optimizer


@pytest.mark.parametrize(("value", "index"), [("nan", 0), ("inf", 2), ("-inf", 1)])
def test_one_bad_micro_batch_is_enough(value: str, index: int, tmp_path: Path) -> None:
    guard, weight, optimizer = guarded(tmp_path / "run")
    guard.begin(7, num_micro_batches=3)
    for number in range(3):
        guard.note(torch.tensor(float(value) if number == index else 1.0), batch(10 + number))
    refused(rf"became {value} at step 7, data items \[{10 + index}\]", optimizer.step)
    assert torch.equal(weight, torch.ones(3))
    shown = json.loads((tmp_path / "run/bad-loss-step-7-rank-0.json").read_text())
    assert [part["item_ids"] for part in shown["micro_batches"]] == [[10], [11], [12]]
    assert shown["micro_batches"][index]["loss"] == value


def test_a_step_that_the_optimizer_skips_is_judged_too(tmp_path: Path) -> None:
    guard, _, _ = guarded(tmp_path)
    guard.begin(1, num_micro_batches=2)
    guard.note(torch.tensor(float("nan")), batch(0))
    guard.check()
    guard.note(torch.tensor(1.0), batch(1))
    refused("IDLM-0503", guard.check)


def test_a_step_that_deepspeed_left_out_ends_the_run(tmp_path: Path) -> None:
    guard, _, optimizer = guarded(tmp_path)
    guard.begin(3, num_micro_batches=1)
    guard.note(torch.tensor(1.0), batch(7))
    guard.check_skipped(optimizer)
    guard.check_skipped(SimpleNamespace(overflow=False))
    error = refused(r"IDLM-0503.*gradients.*step 3.*\[7", guard.check_skipped, SimpleNamespace(overflow=True))
    assert str(tmp_path) in error.fix


def test_finite_losses_pass_and_a_new_step_starts_afresh(tmp_path: Path) -> None:
    guard, weight, optimizer = guarded(tmp_path)
    guard.begin(1, num_micro_batches=1)
    guard.note(torch.tensor(float("nan")), batch(0))
    guard.begin(2, num_micro_batches=2)
    guard.note(torch.tensor(3.0), batch(1))
    guard.note(torch.tensor(-4.0), batch(2))
    optimizer.step()
    assert not torch.equal(weight, torch.ones(3))
    assert not list(tmp_path.iterdir())
