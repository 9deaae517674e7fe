"""Runs that a launcher was told to stop in a save: which of them count as bitwise equal."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.launched import Launched, bytes_in_staging, measure, verdicts
from idlm.errors import UserError

WHOLE = {"losses": [1.0], "weights": {"model.safetensors": "digest"}}
CASES = [("torchrun", "async"), ("deepspeed", "sync"), ("torchrun", "sync")]


class Told(Launched):
    """Runs whose results are given."""

    def reference(self, outcome: Any, name: str = "reference") -> dict[str, Any]:
        return WHOLE

    def stop_in_a_save(self, launcher: str, writer: str) -> str:
        return "" if (launcher, writer) == ("torchrun", "sync") else "ended with 1"

    def resumed(self, launcher: str, writer: str, outcome: Any) -> dict[str, Any]:
        return WHOLE if launcher == "torchrun" else WHOLE | {"losses": [1.0000001]}


def test_a_resumed_run_counts_if_it_was_stopped_in_a_save_and_all_is_equal(tmp_path: Path) -> None:
    runs = Told(folder=tmp_path, shape="small", layers=1, device="cpu")
    found = verdicts(runs, CASES, lambda run: WHOLE, together=2)
    equal, other, missed = sorted(found, key=lambda one: CASES.index((one.launcher, one.writer)))
    assert (equal.launcher, equal.writer, equal.complaint) == ("torchrun", "async", "")
    assert "losses" in other.complaint and "weights" not in other.complaint.partition("differ")[0]
    assert missed.complaint and not missed.told


def test_a_difference_is_laid_to_kernels_where_runs_left_alone_differ(tmp_path: Path) -> None:
    class Unsteady(Told):
        def reference(self, outcome: Any, name: str = "reference") -> dict[str, Any]:
            return WHOLE if name == "reference" else WHOLE | {"losses": [2.0]}

    runs = Unsteady(folder=tmp_path, shape="small", layers=1, device="cpu")
    equal, other = sorted(
        verdicts(runs, CASES[:2], lambda run: WHOLE, together=2), key=lambda one: one.complaint
    )
    assert not equal.complaint
    assert "the runs left alone differ too, in ['losses from step 1']" in other.complaint


def test_only_files_of_unpublished_checkpoints_count_as_a_running_save(tmp_path: Path) -> None:
    for name in ("checkpoint-2", ".checkpoint-4.staging-ab"):
        folder = tmp_path / name / "files" / "global_step4"
        folder.mkdir(parents=True)
        (folder / "part.pt").write_bytes(bytes(10))
    assert bytes_in_staging(tmp_path) == 10
    assert bytes_in_staging(tmp_path / "absent") == 0


@pytest.mark.parametrize("changed", [{"shape": "tiny"}, {"stops": "slurm:sync"}, {"stops": "torchrun"}])
def test_unknown_shapes_and_launchers_are_refused(changed: dict[str, str]) -> None:
    options = {"shape": "small", "stops": "torchrun:sync", "layers": "1", "device": "cpu", "place": ""}
    options["seconds"] = "60"
    with pytest.raises(UserError, match="IDLM-0107"):
        measure(options | changed, lambda run: {})


def test_the_first_verdict_does_not_wait_for_others(tmp_path: Path) -> None:
    told = threading.Event()

    class Slow(Told):
        def stop_in_a_save(self, launcher: str, writer: str) -> str:
            assert launcher == "deepspeed" or told.wait(timeout=60)
            return "ended with 1"

    runs = Slow(folder=tmp_path, shape="small", layers=1, device="cpu")
    found = verdicts(runs, CASES[:2], lambda run: WHOLE, together=2)
    assert next(found).launcher == "deepspeed"
    told.set()
    assert next(found).launcher == "torchrun"


def test_a_run_that_goes_on_after_all_time_is_killed_and_met_no_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Endless(Launched):
        def command(self, run: Path, launcher: str, writer: str, save_every: int) -> list[str]:
            return [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]

    runs = Endless(folder=tmp_path, shape="small", layers=1, device="cpu", seconds=2.0)
    assert runs.stop_in_a_save("torchrun", "sync") == ""
    assert "torchrun sync met no save: -9 begun" in capsys.readouterr().out
