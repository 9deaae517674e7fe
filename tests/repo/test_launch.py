"""Launchers compose once, hand every rank the same file, and are sound shell."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "recipes" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh") if path.name != "common.sh")


def dry(script: str, *arguments: str, **environment: str) -> str:
    merged = os.environ | {"DRY": "1", "GPUS": "8", "PYTHON": "python3"} | environment
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=merged, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launcher_is_strict_and_can_be_parsed(script: str) -> None:
    path = LAUNCH / script
    assert "set -euo pipefail" in path.read_text() and os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", ["qwen3_8b.sh", "qwen3_8b_lora.sh", "qwen3_32b.sh"])
def test_one_node_by_deepspeed(script: str) -> None:
    told = dry(script, "model.path=/m", "data.path=/d x.jsonl")
    words = shlex.split(told)
    assert "deepspeed.launcher.runner --num_gpus 8 --no_local_rank --module idlm.train.cli" in told
    assert words[-1].startswith("config=$("), "what is printed can be pasted"
    assert told.count("idlm.train.freeze") == 1
    assert f"recipe={script.removesuffix('.sh')} model.path=/m data.path=/d\\ x.jsonl" in told


def test_several_nodes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=8\nb slots=8\n")
    assert f"--hostfile {hosts}" in dry("qwen3_8b_multinode.sh", HOSTFILE=str(hosts))
    told = dry("torchrun.sh", NODES="2", RENDEZVOUS="a:29500", CONFIG="/shared/c.yaml")
    assert "--nnodes 2" in told and "config=/shared/c.yaml" in told
    with pytest.raises(subprocess.CalledProcessError):
        dry("torchrun.sh", NODES="2", RENDEZVOUS="a:29500")
    with pytest.raises(subprocess.CalledProcessError):
        dry("hosts.sh", HOSTFILE=str(tmp_path / "none"))


def test_slurm(tmp_path: Path) -> None:
    control = tmp_path / "scontrol"
    control.write_text("#!/bin/sh\necho node-1\necho node-2\n")
    control.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    told = dry(
        "slurm.sh",
        "recipe=qwen3_8b",
        LAUNCH_FOLDER=str(LAUNCH),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        **slurm,
    )
    assert told.startswith("srun ") and "--rdzv-endpoint node-1:29500" in told and "--nnodes 2" in told
