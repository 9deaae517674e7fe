"""Launchers compose once, hand every rank the same file, and are sound shell."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "recipes" / "launch"
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
def test_one_node_by_torchrun_which_waits_for_a_save(script: str) -> None:
    shown = dry(script, "model.path=/m", "data.path=/d x.jsonl")
    words = shlex.split(shown)
    assert "torch.distributed.run --standalone --nproc-per-node 8 -m idlm.train.cli" in shown
    assert words[-1].startswith("config=$("), "what is printed can be pasted"
    assert shown.count("idlm.train.freeze") == 1
    assert f"recipe={script.removesuffix('.sh')} model.path=/m data.path=/d\\ x.jsonl" in shown


def test_several_nodes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=8\nb slots=8\n")
    shown = dry("qwen3_8b_multinode.sh", HOSTFILE=str(hosts), PORT="29501")
    assert f"--hostfile {hosts} --master_port 29501" in shown
    shown = dry("torchrun.sh", NODES="2", RENDEZVOUS="a:29500", CONFIG="/shared/c.yaml")
    assert "--nnodes 2" in shown and "config=/shared/c.yaml" in shown
    with pytest.raises(subprocess.CalledProcessError):
        dry("torchrun.sh", NODES="2", RENDEZVOUS="a:29500")
    with pytest.raises(subprocess.CalledProcessError):
        dry("hosts.sh", HOSTFILE=str(tmp_path / "none"))


def test_variables_of_the_launchers_reach_other_nodes(tmp_path: Path) -> None:
    """DeepSpeed's runner reads the file that DS_ENV_FILE names, in the home folder and in this one."""
    (tmp_path / "hosts.txt").write_text("a slots=8\nb slots=8\n")
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = idlm.train.freeze ] && echo "$FROZEN" || cat "$DS_ENV_FILE"\n')
    python.chmod(0o755)
    shown = dry(
        "hosts.sh", DRY="0", PORT="1", PYTHON=str(python), FROZEN=str(tmp_path / "c.yaml"),
        HOME=str(tmp_path), HOSTFILE=str(tmp_path / "hosts.txt"), OMP_NUM_THREADS="3",
    )  # fmt: skip
    lines = dict(line.split("=", 1) for line in shown.splitlines())
    assert (lines["OMP_NUM_THREADS"], lines["OMP_WAIT_POLICY"], lines["MINE"]) == ("3", "passive", "1")
    assert {"HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"} <= set(lines)


@pytest.mark.parametrize("odd", ['it\'s a "b" $HOME `x`', "é (1) #[2]", "a b"])
def test_paths_arrive_as_they_are_written(tmp_path: Path, odd: str) -> None:
    folder = tmp_path / odd
    folder.mkdir()
    python, frozen, given = folder / "python", folder / "c.yaml", f"data.path={folder / 'd.jsonl'}"
    freezes = '[ "$2" = idlm.train.freeze ] && set -- "$FROZEN"'
    python.write_text(f'#!/bin/sh\n{freezes}\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "FROZEN": str(frozen)}
    assert dry("one_node.sh", given, **settings, DRY="0").splitlines()[-1] == f"config={frozen}"
    printed = dry("one_node.sh", given, **settings)
    pasted = subprocess.run(
        ["bash", "-c", printed], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    assert pasted.stdout.splitlines()[-1] == f"config={frozen}"
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=8\nb slots=8\n")
    if odd == "a b":
        shown = dry("hosts.sh", given, **settings, HOSTFILE=str(hosts), DRY="0", PORT="1")
        assert shown.splitlines()[-1] == f"config={frozen}"
    else:
        with pytest.raises(subprocess.CalledProcessError, match="status 2") as caught:
            dry("hosts.sh", given, **settings, HOSTFILE=str(hosts), DRY="0", PORT="1")
        assert f"cannot pass on the path {frozen}" in caught.value.stderr
