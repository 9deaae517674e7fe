"""A GPU that was requested and is not there: refused by every command, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from idlm.infer.build import resolve_device
from idlm.train.cli import main
from tests.errors import refused

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _training(target: Path) -> list[str]:
    return ["recipe=tiny", f"model.path={BASE}", f"output_dir={target}", "train.device=cuda", "train.steps=3"]


def test_training_is_refused_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run"
    assert main(_training(target)) == 2
    shown = capsys.readouterr().err
    assert "IDLM-0418: train.device='cuda'" in shown
    assert "train.device=auto" in shown
    assert not target.exists()


def test_a_plan_needs_no_gpu(tmp_path: Path) -> None:
    assert main([*_training(tmp_path / "run"), "dry_run=true"]) == 0


def test_an_engine_is_refused() -> None:
    refused("IDLM-0418: device='cuda:0'", resolve_device, "cuda:0")
    assert resolve_device("auto") == torch.device("cpu")


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    refused("IDLM-0418: device='cuda:2', but torch sees 2 GPUs", resolve_device, "cuda:2")
