"""recipes/launch/slurm.sh with stand-ins for srun, scontrol, Python and torchrun: saves and requeues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "recipes" / "launch"
# Like srun: runs the tasks, sends what it gets as SIGUSR2 to all their processes, and kills them at SIGTERM.
SRUN = """#!/usr/bin/env bash
set -m
shift
[ -z "${SRUN_CPUS_PER_TASK:-}" ] || echo "$SRUN_CPUS_PER_TASK CPUs" >> "$LOG"
trap 'again=1; kill -USR2 -- -$tasks' USR2
trap 'again=1; kill -KILL -- -$tasks' TERM
"$@" & tasks=$!
while again=; wait $tasks; status=$?; [ -n "$again" ]; do :; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) if [ "$2" = job ]; then printf '   Partition=x\\n   Command=%s/slurm.sh recipe=tiny\\n' "$FOLDER"
          else printf 'node-1\\nnode-2\\n'; fi ;;
    *) echo "scontrol $*" >> "$LOG" ;;
esac
"""
# Python, the module torch.distributed.run of which has a data worker, saves at SIGTERM and then fails.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
case $* in
    -c*) echo 29777; exit ;;
    *idlm.train.freeze*)
        echo "$OUT/launch/c.yaml"
        [ -z "${FREEZES:-}" ] || { touch "$FREEZES"; sleep 1; }
        exit ;;
esac
[ "${FINISHES:-0}" = 0 ] || exit "${STATUS:-0}"
save() {
    [ -n "${CRASHES:-}" ] || mkdir -p "$OUT/checkpoint-3"
    kill -0 $worker && echo "saved within $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >> "$LOG"
    kill $worker
    exit 1
}
sleep 60 & worker=$!
trap save TERM
echo started >> "$LOG"
wait $worker
echo "the data worker died" >> "$LOG"
"""


class Cluster:
    """A node with the stand-ins, a copy of the script as Slurm makes it, and what the stand-ins wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        (folder / "out" / "checkpoint-1").mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.script = shutil.copy(LAUNCH / "slurm.sh", folder / "slurm_script")
        self.job: subprocess.Popen[str] | None = None

    def start(self, **environment: str) -> subprocess.Popen[str]:
        known = {
            "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "GPUS": "8",
            "SLURM_SUBMIT_DIR": str(self.folder), "PYTHON": "python", "FOLDER": str(LAUNCH),
            "LOG": str(self.log), "OUT": str(self.folder / "out"),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
        }  # fmt: skip
        self.job = subprocess.Popen(
            ["bash", self.script, "recipe=tiny", "resume=never"], cwd=self.folder, text=True,
            env=os.environ | known | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self.job

    def signal_when_started(self, number: signal.Signals) -> None:
        assert self.job is not None
        while "started" not in self.lines() and self.job.poll() is None:
            time.sleep(0.01)
        self.job.send_signal(number)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    if made.job is not None:
        made.job.communicate(timeout=60)


def test_before_the_time_limit_the_run_saves_and_the_job_is_requeued(cluster: Cluster) -> None:
    job = cluster.start()
    cluster.signal_when_started(signal.SIGUSR1)
    shown, _ = job.communicate(timeout=60)
    assert cluster.lines()[-2:] == ["saved within 840", "scontrol requeue 7"], shown
    assert job.returncode == 1


def test_a_run_that_crashes_in_place_of_saving_is_not_requeued(cluster: Cluster) -> None:
    job = cluster.start(CRASHES="1")
    cluster.signal_when_started(signal.SIGUSR1)
    shown, _ = job.communicate(timeout=60)
    assert "without a new checkpoint: job 7 is not requeued" in shown
    assert "scontrol requeue 7" not in cluster.lines() and job.returncode == 1


@pytest.mark.parametrize(("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_before_the_run_begins_is_not_lost(
    cluster: Cluster, number: signal.Signals, is_requeued: bool
) -> None:
    marker = cluster.folder / "marker"
    job = cluster.start(FREEZES=str(marker), PORT="29500")
    while not marker.exists() and job.poll() is None:
        time.sleep(0.01)
    job.send_signal(number)
    shown, _ = job.communicate(timeout=60)
    assert "started" not in cluster.lines() and job.returncode == 143, shown
    assert (cluster.lines()[-1] == "scontrol requeue 7") == is_requeued


def test_a_terminated_job_saves_and_is_not_requeued(cluster: Cluster) -> None:
    job = cluster.start(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="90")
    cluster.signal_when_started(signal.SIGTERM)
    shown, _ = job.communicate(timeout=60)
    assert cluster.lines()[-1] == "saved within 90", shown


def test_a_finished_run_is_not_requeued_and_works_from_any_folder(cluster: Cluster) -> None:
    job = cluster.start(FINISHES="1", SLURM_CPUS_PER_TASK="12")
    shown, _ = job.communicate(timeout=60)
    assert job.returncode == 0, shown
    freeze, port, cpus, torchrun = cluster.lines()
    assert cpus == "12 CPUs"
    assert freeze == "-m idlm.train.freeze recipe=tiny resume=never"
    assert port.startswith("-c import socket")
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint node-1:29777 --rdzv-id 7"
    assert torchrun.endswith(
        f"--nproc-per-node 8 {rendezvous} -m idlm.train.cli config={cluster.folder}/out/launch/c.yaml"
    )


def test_a_requeued_job_resumes_despite_resume_never(cluster: Cluster) -> None:
    shown, _ = cluster.start(FINISHES="1", SLURM_RESTART_COUNT="1", PORT="29500").communicate(timeout=60)
    freeze, torchrun = cluster.lines()
    assert freeze.endswith("recipe=tiny resume=never resume=auto"), shown
    assert "--rdzv-endpoint node-1:29500" in torchrun


def test_a_dry_run_of_slurm_prints_its_command(cluster: Cluster) -> None:
    shown, _ = cluster.start(DRY="1").communicate(timeout=60)
    assert shown.startswith(
        f"srun --kill-on-bad-exit=1 {LAUNCH}/slurm_node.sh python -m torch.distributed.run --nnodes 2"
    )
    assert shown.count("idlm.train.freeze") == 1
