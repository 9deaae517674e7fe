"""Copies of training state in host memory, one save at a time, and the time that is left for a save."""

from __future__ import annotations

import collections
import signal
import threading
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from transformers import Trainer

from idlm.cli.command import Terminated
from idlm.errors import UserError
from idlm.train.checkpoint import writer as writing
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.checkpoint.writer import CheckpointWriter
from idlm.train.loop import trainer as trainer_module
from idlm.train.loop.trainer import EXIT_SECONDS, StopRequests, TimeLimit, seconds_since_start


def copied(writer: CheckpointWriter, state: Any) -> Any:
    """What a thread would write."""
    found: list[Any] = []
    writer.put(Path("part"), state, found.append)
    for write in writer._writes:
        write()
    writer._writes.clear()
    return found[0]


def storages(path: Path) -> list[int]:
    """Sizes of the storages in a file of torch."""
    with zipfile.ZipFile(path) as file:
        return [entry.file_size for entry in file.infolist() if "/data/" in entry.filename]


def test_a_copy_is_what_torch_would_have_written(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    state: Any = collections.OrderedDict(
        whole=flat, part=flat[3:7].view(2, 2).t(), empty=torch.empty(0, 3), half=torch.ones(3).bfloat16(),
        nested=[{"step": torch.tensor(4)}, (1, 2.5)], weight=torch.nn.Parameter(torch.ones(2)),
    )  # fmt: skip
    state._metadata = {"version": 2}
    writer = CheckpointWriter("async")
    made = copied(writer, state)
    torch.save(state, tmp_path / "plain")
    torch.save(made, tmp_path / "copy")
    plain, copy = (torch.load(tmp_path / name, weights_only=True) for name in ("plain", "copy"))
    torch.testing.assert_close(copy, plain, rtol=0, atol=0)
    assert type(made) is type(state) and made._metadata == state._metadata
    assert isinstance(made["weight"], torch.nn.Parameter)
    assert made["part"].stride() == state["part"].stride()
    assert made["part"].untyped_storage().data_ptr() == made["whole"].untyped_storage().data_ptr()
    assert storages(tmp_path / "copy") == storages(tmp_path / "plain"), "a shared one once, as a whole"
    flat.zero_()
    assert made["whole"].tolist() == list(range(12)), "training goes on and changes the state"


def test_the_next_save_uses_the_memory_of_the_one_before() -> None:
    writer = CheckpointWriter("async")
    first = copied(writer, {"a": torch.zeros(5), "b": torch.zeros(7)})
    second = copied(writer, {"a": torch.ones(5), "b": torch.ones(9)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["b"].tolist() == [1.0] * 9


def test_memory_of_the_first_save_is_allocated_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the allocation of pinned memory, which lasts until training has gone on."""
    writer, may_continue, events = CheckpointWriter("async"), threading.Event(), []
    allocate = writing._host_buffer

    def slow(buffer: writing.Buffer) -> torch.Tensor:
        assert may_continue.wait(timeout=60)
        events.append(f"allocated {buffer.num_bytes}")
        return allocate(buffer)

    monkeypatch.setattr(writing, "_host_buffer", slow)
    written: list[Any] = []
    with writer.expecting():
        writer.put(tmp_path / "part", {"a": torch.zeros(3), "b": torch.ones(2)}, written.append)
    events.append("step")
    may_continue.set()
    writer.begin()
    assert events == ["step", "allocated 12", "allocated 8"] and not written
    assert copied(writer, {"a": torch.ones(3), "b": torch.zeros(2)})["a"].tolist() == [1.0] * 3
    assert len(events) == 3, "the save finds its memory"
    assert copied(writer, {"a": torch.ones(3), "b": torch.zeros(9)})["b"].tolist() == [0.0] * 9
    assert events[3:] == ["allocated 36"], "other sizes than expected are allocated by the save"


def test_a_run_that_fails_leaves_no_thread_that_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter it would abort the process, whose status would not say why it ended."""
    writer, started, may_continue = CheckpointWriter("async"), threading.Event(), threading.Event()
    allocate = writing._host_buffer

    def slow(buffer: writing.Buffer) -> torch.Tensor:
        started.set()
        assert may_continue.wait(timeout=60)
        return allocate(buffer)

    monkeypatch.setattr(writing, "_host_buffer", slow)
    with pytest.raises(UserError), writer.lingering():
        with writer.expecting():
            writer.put(Path("part"), [torch.zeros(3), torch.ones(2)], lambda _: None)
        assert started.wait(timeout=60)
        threading.Timer(0.2, may_continue.set).start()
        raise UserError("IDLM-0503", "weights", fix="none")
    assert writer._allocating is not None and not writer._allocating.is_alive()
    assert len(writer._buffers) == 1, "only what was under way is allocated"


@pytest.mark.parametrize("num_sharing", [1, 8])
def test_ranks_of_a_host_share_its_memory(num_sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "host_memory", lambda: (8000, 8000))
    writer, written = CheckpointWriter("async", num_sharing=num_sharing), []
    writer.put(Path("part"), torch.zeros(250), written.append)
    assert len(written) == (num_sharing == 8), "8 times 1000 bytes do not fit: written at once"
    assert len(writer._writes) == (num_sharing == 1)


def test_a_save_waits_for_the_one_before_and_raises_its_error(tmp_path: Path) -> None:
    writer, may_continue, events = CheckpointWriter("async"), threading.Event(), []

    def slow(state: Any) -> None:
        assert may_continue.wait(timeout=60)
        events.append("written")
        raise MemoryError("no memory")

    writer.begin()
    writer.put(tmp_path / "part", torch.zeros(2), slow)
    writer.publish(tmp_path, tmp_path, ExitStack(), lambda: None, lambda: None)
    assert not events and not writer.has_failed
    threading.Timer(0.2, may_continue.set).start()
    with pytest.raises(MemoryError):
        writer.begin()
    assert events == ["written"] and not writer.times
    writer.begin()
    writer.publish(tmp_path, tmp_path, ExitStack(), lambda: events.append("whole"), lambda: None)
    writer.wait()
    assert events == ["written", "whole"] and len(writer.times) == 1


@pytest.mark.parametrize(
    ("mode", "times", "over_at"),
    [("sync", [], 100), ("sync", [30.0, 5.0], 170), ("async", [30.0], 140)],
    ids=["no save yet", "longest save", "a running save and one more"],
)
def test_the_time_limit_leaves_room_for_a_step_and_a_save(
    mode: str, times: list[float], over_at: float
) -> None:
    """Of 220 s, 15 are for the end of the process and 10 for another step."""
    writer, clock = CheckpointWriter(mode), iter(range(0, 1000, 10))
    writer.times = times
    limit = TimeLimit(
        (210 + EXIT_SECONDS - 5) / 60, writer, assumed_save=100.0, elapsed=lambda: float(next(clock))
    )
    assert next(now for now in range(0, 1000, 10) if limit.is_over()) == over_at


def test_the_age_of_the_process_needs_no_date_of_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """In LXC the date of the boot is that of the container, and processes count from the machine's boot."""
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 1e9)
    age, boot = seconds_since_start(), psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 86_400)
    assert seconds_since_start() == pytest.approx(age, abs=1)


def test_a_signal_and_an_error_come_before_the_end_of_time() -> None:
    writer = CheckpointWriter("sync")
    limit = TimeLimit(0.01, writer, assumed_save=0.0, elapsed=lambda: 60.0)
    stop, control = StopRequests(writer, limit), SimpleNamespace(should_save=False)
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert stop.is_time_up and stop.received is None and control.should_save
    stop.received = 15
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert not stop.is_time_up and stop.received == 15
    writer._failure = MemoryError("no memory")
    with pytest.raises(MemoryError):
        stop.on_step_end(None, None, control)  # type: ignore[arg-type]


def test_a_signal_that_another_rank_has_heard_is_the_first_one_here_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The own copy of it comes a moment later, into the save."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heard = iter([int(signal.SIGTERM)])
    monkeypatch.setattr(trainer_module, "highest", lambda own: next(heard, own))
    stop, control = StopRequests(), SimpleNamespace(should_save=False)
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert control.should_save and stop.received == signal.SIGTERM
    now += 0.5
    stop._note(signal.SIGTERM, None)
    now += 5.0
    with pytest.raises(Terminated):
        stop._note(signal.SIGTERM, None)


@pytest.mark.parametrize("is_due", [False, True], ids=["no save is due", "the last step's save"])
def test_a_signal_while_a_thread_saves_asks_for_no_other_save(tmp_path: Path, is_due: bool) -> None:
    writer, may_continue = CheckpointWriter("async"), threading.Event()
    stop = StopRequests(writer)
    stop._note(signal.SIGTERM, None)
    writer.begin()
    writer.put(tmp_path / "part", torch.zeros(2), lambda state: may_continue.wait(timeout=60))
    writer.publish(tmp_path, tmp_path, ExitStack(), lambda: None, lambda: None)
    control = SimpleNamespace(should_save=is_due)
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert control.should_training_stop and control.should_save == is_due
    may_continue.set()
    writer.wait()
    control = SimpleNamespace(should_save=False)
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert control.should_training_stop and control.should_save


def test_a_signal_during_a_save_that_training_waits_for_ends_the_run_with_it() -> None:
    stop, control = StopRequests(CheckpointWriter("sync")), SimpleNamespace(should_training_stop=False)
    stop.on_save(None, None, control)  # type: ignore[arg-type]
    assert not control.should_training_stop
    stop._note(signal.SIGTERM, None)
    stop.on_save(None, None, control)  # type: ignore[arg-type]
    assert control.should_training_stop and stop.received == signal.SIGTERM


def test_tied_weights_are_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(Trainer, "_issue_warnings_after_load", lambda self, result: shown.append(result))
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4), "norm": nn.LayerNorm(2)})
    model["head"].weight = model["embed"].weight
    trainer = object.__new__(SavingTrainer)
    trainer.model = model
    trainer._issue_warnings_after_load(_IncompatibleKeys(["head.weight", "norm.weight"], ["other"]))
    assert shown == [_IncompatibleKeys(["norm.weight"], ["other"])]
