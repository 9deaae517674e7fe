"""A stop signal that reaches the whole process group does not kill the data workers of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Dataset

from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.loop.trainer import IdlmTrainer

ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


class WorkerIds(Dataset[int]):
    """Every item is the process that made it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_data_workers_outlive_the_signals_that_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = DataLoaderShard(
        WorkerIds(), num_workers=1, prefetch_factor=1, worker_init_fn=lambda worker: None
    )
    monkeypatch.setattr(SavingTrainer, "get_train_dataloader", lambda self: seeded, raising=False)
    items = iter(IdlmTrainer.get_train_dataloader(object.__new__(IdlmTrainer)))
    worker = int(next(items))
    assert worker != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker, number)
    assert [int(item) for item in items] == [worker] * 7


FAILS_WITH_ITS_LOADER_OPEN = """
from accelerate.data_loader import DataLoaderShard
from tests.unit.data.files.test_data_workers import WorkerIds
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.loop.trainer import IdlmTrainer

loader = DataLoaderShard(WorkerIds(), num_workers=1, worker_init_fn=lambda worker: None)
SavingTrainer.get_train_dataloader = lambda self: loader
items = iter(IdlmTrainer.get_train_dataloader(object.__new__(IdlmTrainer)))
next(items)
raise RuntimeError("planted")
"""


@pytest.mark.sweep
def test_a_run_that_fails_with_its_loader_open_ends() -> None:
    # Its workers ignore the signal by which multiprocessing would end them.
    command = [sys.executable, "-c", FAILS_WITH_ITS_LOADER_OPEN]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 1 and "planted" in done.stderr
