"""`train.save=async`, `train.max_minutes`, the report: what a run leaves that stops, fails or lacks memory.

Deaths of processes while a thread writes are in test_zero.py."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.checkpoint import verify
from idlm.train import cli
from idlm.train.checkpoint import writer as writing
from idlm.train.checkpoint.writer import CheckpointWriter
from idlm.train.loop import trainer as training
from idlm.train.report import SampleReport
from tests.integration.training.stopped_runs import assert_same_weights, ctrl_c_after, num_floats
from tests.integration.training.test_train_tiny import arguments, metrics_of

STAGES = "[{stride: 2, steps: 3}, {stride: 3, steps: 3}]"
EVERY = {"train.stages": STAGES, "train.save_every": 1, "train.save": "sync"}
ASYNC = EVERY | {"train.save": "async"}


@pytest.fixture(scope="module")
def sync_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sync") / "out"
    assert cli.main(arguments(base, output, **EVERY)) == 0
    return output


def checkpoints(output: Path) -> list[str]:
    found = sorted((output / "run").glob("checkpoint-*"))
    for path in found:
        verify(path, sealed=True)
    assert not list((output / "run").glob(".*.staging-*"))
    return [path.name for path in found]


def test_a_thread_writes_the_same_checkpoints(base: Path, sync_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with ctrl_c_after(2):
        assert cli.main(arguments(base, output, **ASYNC)) == 130
    assert checkpoints(output) == ["checkpoint-2", "checkpoint-3"]
    assert cli.main(arguments(base, output, **ASYNC)) == 0
    assert metrics_of(output) == metrics_of(sync_run)
    assert_same_weights(output / "model.safetensors", sync_run / "model.safetensors")
    assert checkpoints(output) == checkpoints(sync_run) == ["checkpoint-5", "checkpoint-6"]
    for name in ("checkpoint-5", "checkpoint-6"):
        ours, theirs = (run / "run" / name for run in (output, sync_run))
        assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
        assert_same_weights(ours / "model.safetensors", theirs / "model.safetensors")
        first, second = (torch.load(path / "optimizer.pt", weights_only=True) for path in (ours, theirs))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.sweep
def test_a_full_disk_ends_the_run_at_the_next_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, writers = torch.save, set()

    def full(state: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        writers.add(threading.current_thread().name)
        if Path(f).name == "optimizer.pt":
            raise OSError(28, "No space left on device")
        plain(state, f, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    output = tmp_path / "out"
    # The step after the failure waits for it: it is seen in that step, not at the next save.
    monkeypatch.setattr(training.IdlmTrainer, "compute_loss", after_save(training.IdlmTrainer.compute_loss))
    assert cli.main(arguments(base, output, **ASYNC | {"train.save_every": 3})) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0301" in shown and "checkpoint-3" in shown and "No space left" in shown
    assert "save checkpoint-3" in writers
    assert checkpoints(output) == []
    assert metrics_of(output)[-1]["step"] == 4


def after_save(plain: Any) -> Any:
    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.writer._thread is not None:
            self.writer._thread.join(timeout=60)
        return plain(self, *args, **kwargs)

    return computed


@pytest.mark.sweep
def test_a_run_that_fails_finishes_the_save_in_flight(
    base: Path, sync_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    plain = torch.save

    def slow(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(timeout=60)
        plain(*args, **kwargs)

    monkeypatch.setattr(torch, "save", slow)
    output = tmp_path / "out"
    trained = training.IdlmTrainer.training_step

    def failing(self: Any, *args: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            assert self.writer._thread.is_alive(), "training goes on while the thread writes"
            may_write.set()
            raise RuntimeError("power cut")
        return trained(self, *args)

    monkeypatch.setattr(writing, "LINGER_SECONDS", 60.0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(training.IdlmTrainer, "training_step", failing)
        cli.main(arguments(base, output, **ASYNC | {"train.save_every": 3}))
    assert checkpoints(output) == ["checkpoint-3"]
    assert cli.main(arguments(base, output, **ASYNC)) == 0
    assert_same_weights(output / "model.safetensors", sync_run / "model.safetensors")


@pytest.mark.sweep
def test_a_run_ends_before_its_time_is_over_and_goes_on(
    base: Path,
    sync_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ten seconds pass between two looks at the clock, of which there is one a step."""
    now = iter(range(20, 1000, 10))
    monkeypatch.setattr(training, "seconds_since_start", lambda: float(next(now)))
    output, changes = tmp_path / "out", {"train.stages": STAGES, "train.save": "async"}
    # Steps end at 20, 30, 40 s; at 40 s another step of 10 s and the end of the process fit no more in 60 s.
    assert cli.main(arguments(base, output, **changes, **{"train.max_minutes": 1})) == cli.TIME_UP_STATUS
    assert checkpoints(output) == ["checkpoint-3"]
    assert "stopped and saved at step 3" in capsys.readouterr().out
    assert cli.main(arguments(base, output, **changes)) == 0
    assert metrics_of(output) == metrics_of(sync_run)
    assert_same_weights(output / "model.safetensors", sync_run / "model.safetensors")


def test_a_signal_while_a_thread_saves_names_the_step_that_was_saved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = training.StopRequests.on_step_end

    def hear(self: Any, args: Any, state: Any, control: Any, **options: Any) -> Any:
        if state.global_step == 3:
            self._note(signal.SIGTERM, None)
        return listen(self, args, state, control, **options)

    monkeypatch.setattr(training.StopRequests, "on_step_end", hear)
    monkeypatch.setattr(CheckpointWriter, "is_saving", True)
    output, changes = tmp_path / "out", ASYNC | {"train.save_every": 2}
    assert cli.main(arguments(base, output, **changes)) == 128 + signal.SIGTERM
    assert checkpoints(output) == ["checkpoint-2"]
    assert "stopped at step 3, saved at step 2; to continue" in capsys.readouterr().out


@pytest.mark.sweep
def test_the_engine_of_the_report_finds_no_memory_of_training(base: Path, tmp_path: Path) -> None:
    left: list[int] = []

    def sampler(directory: Path, num_samples: int) -> SampleReport:
        left.append(num_floats())
        return SampleReport()

    before = num_floats()
    changes = {"train.stages": "[{stride: 2, steps: 2}]", "report.enabled": "true"}
    assert cli.main(arguments(base, tmp_path / "out", **changes), sampler=sampler) == 0
    assert left[0] - before < 1000, "a model of 27,872 parameters was trained"


@pytest.mark.sweep
def test_out_of_memory_costs_the_report_and_not_the_status(
    base: Path, sync_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: Any, **kwargs: Any) -> Path:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("idlm.train.pipeline.report_run", short)
    output = tmp_path / "out"
    changes = {"train.stages": STAGES, "report.enabled": "true"}
    assert cli.main(arguments(base, output, **changes)) == 0
    assert_same_weights(output / "model.safetensors", sync_run / "model.safetensors")
    assert json.loads((output / "run" / "finished.json").read_text())["num_steps"] == 6
    assert not (output / "report.md").exists()
