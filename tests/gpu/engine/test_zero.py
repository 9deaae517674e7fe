"""ZeRO-1, 2 and 3 over NCCL: each trains, saves, stops on a signal, resumes and exports, as one process does.

    python -m pytest tests/gpu/engine/test_zero.py -m gpu -s          (2 to 8 GPUs, or 1: then ZeRO with one
    process)

IDLM_ZERO_DEVICE=cpu IDLM_ZERO_PROCESSES=2 rehearses it without a GPU, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engine.zero_worker import STEPS

ROOT = Path(__file__).resolve().parents[3]
DEVICE = os.environ.get("IDLM_ZERO_DEVICE", "cuda")
PROCESSES = int(os.environ.get("IDLM_ZERO_PROCESSES", min(torch.cuda.device_count(), 8)))
BASE = ROOT / "recipes" / "assets" / "tiny_ar"
STAGES = {f"zero{stage}": f"train.zero_stage={stage}" for stage in (1, 2, 3)}
MIXED = "train.zero_stage=2,model.dtype=bfloat16"
ASYNC = "train.save=async,train.zero_stage=3"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(PROCESSES < 1, reason="torch sees no CUDA device"),
]


def start(folder: Path, num_processes: int, cases: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [
        str(num_processes),
        "-m",
        "tests.gpu.engine.zero_worker",
        str(folder),
        str(BASE),
        DEVICE,
        *cases,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of all processes, and of one process with as many micro-batches."""
    folder = tmp_path_factory.mktemp("zero")
    cases = [f"{name}:{changes}" for name, changes in {**STAGES, "mixed": MIXED, "async": ASYNC}.items()]
    many = start(folder, max(2, PROCESSES) if DEVICE == "cpu" else PROCESSES, cases)
    alone = start(folder, 1, [f"alone:train.accumulation={PROCESSES}"]) if PROCESSES > 1 else None
    found: dict[str, Any] = {}
    for process, number in ((many, PROCESSES), (alone, 1)):
        if process is not None:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output[-6000:]
            found |= json.loads((folder / f"results-{number}.json").read_text())
    for name, run in found.items():
        print(f"{name}: {run['seconds']:.1f} s, last losses {run['whole']['losses'][-1]}")
    return found


@pytest.mark.parametrize("name", [*STAGES, "mixed", "async"])
def test_a_stopped_run_resumes_and_exports(results: dict[str, Any], name: str) -> None:
    run = results[name]
    assert set(run["whole"]["weights"]) == {"model.safetensors", "stages/1-stride-2/model.safetensors"}
    assert len(run["whole"]["losses"]) == STEPS
    if PROCESSES == 1:
        assert run["status"] == [0]
        return
    assert run["status"] == [0, 143, 0], "done; stopped by SIGTERM after saving; done"
    assert run["broken"]["losses"] == run["whole"]["losses"], "bitwise"
    assert run["broken"]["weights"] == run["whole"]["weights"], "bitwise"


@pytest.mark.skipif(PROCESSES < 2, reason="needs two processes")
@pytest.mark.parametrize("name", list(STAGES))
def test_processes_and_micro_batches_are_the_same(results: dict[str, Any], name: str) -> None:
    for alone, together in zip(
        results["alone"]["whole"]["losses"], results[name]["whole"]["losses"], strict=True
    ):
        assert together == pytest.approx(alone, rel=1e-6, abs=1e-6)


def test_bfloat16_with_masters_follows_float32(results: dict[str, Any]) -> None:
    for exact, rounded in zip(
        results["zero2"]["whole"]["losses"], results["mixed"]["whole"]["losses"], strict=True
    ):
        assert rounded == pytest.approx(exact, rel=5e-2)
