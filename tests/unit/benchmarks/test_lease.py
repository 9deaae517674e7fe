"""The runner of commands on a lent machine: limits, streams, logs."""

import tarfile
from pathlib import Path

import pytest

from benchmarks.lease import main, read_plan
from idlm.errors import UserError

LEASES = Path(__file__).resolve().parents[3] / "benchmarks" / "leases"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, plan: str, seconds: str = "60") -> dict[str, str]:
    (folder / "plan.txt").write_text(plan)
    words = [f"plan={folder / 'plan.txt'}", f"out={folder}", f"seconds={seconds}"]
    monkeypatch.setattr("sys.argv", ["lease", *words])
    assert main() == 0
    with tarfile.open(folder / "lease.tgz") as packed:
        packed.extractall(folder, filter="data")
    return {path.name: path.read_text() for path in (folder / "lease").iterdir()}


def test_streams_run_at_the_same_time_and_keep_their_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stream waits for a file of the other one."""
    wait = "until [ -e $RESULTS/%s ]; do sleep 0.05; done; echo on $CUDA_VISIBLE_DEVICES"
    first, second = wait % "b", wait % "a"
    plan = f"# two GPUs\n[0]\n50 touch $RESULTS/a\n50 {first}\n\n[3]\n50 touch $RESULTS/b; {second}; exit 4\n"
    found = run(monkeypatch, tmp_path, plan)
    assert (found["0_004.log"], found["3_007.log"]) == ("on 0\n", "on 3\n")
    said = capsys.readouterr().out
    assert "status 4" in said and "on 3" in said


def is_alive(pid: str) -> bool:
    """Whether the process runs; one that ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("start", ["setsid", "env -u IDLM_LEASE_STEP"], ids=["its group", "the mark"])
def test_a_late_command_is_stopped_with_what_it_started(
    start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with a process that has left `start`."""
    plan = f"[0]\n3 {start} sleep 1000 & echo $! > $RESULTS/pid; sleep 1000\n50 touch $RESULTS/next"
    found = run(monkeypatch, tmp_path, plan)
    assert "next" in found and not is_alive(found["pid"].strip())
    assert "stopped" in capsys.readouterr().out


def test_nothing_begins_after_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "x" not in run(monkeypatch, tmp_path, "[0]\n900 sleep 900\n900 touch $RESULTS/x", seconds="6")


@pytest.mark.parametrize(
    "plan", ["5 a command above every heading", "[0]\nls", "[0]\nfive ls", "[zero]\n5 ls"]
)
def test_a_line_that_is_no_step_is_refused(plan: str) -> None:
    with pytest.raises(UserError, match="line [12] of the plan"):
        read_plan(plan)


@pytest.mark.parametrize("path", sorted(LEASES.glob("*.txt")), ids=lambda path: path.stem)
def test_plans_fit_into_ten_minutes(path: Path) -> None:
    for steps in read_plan(path.read_text()):
        assert sum(step.seconds for step in steps) <= 570
