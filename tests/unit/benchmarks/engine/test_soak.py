"""The soak benchmark, tiny and on a CPU: pages come back under aborts, preemption and missing memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import soak
from benchmarks.results import read_rows
from idlm.infer.request import Request
from idlm.infer.scheduler import Scheduler

SMALL = ["requests=60", "device=cpu", "lanes=6", "shortages=0"]


def test_accelerators_leak_nothing_and_change_no_answer(tmp_path: Path) -> None:
    """Aborts, preemption and waiting leave the lists and rows of other sequences as they are."""
    name = "[focus,mage]"
    options = ["requests=28", "device=cpu", "lanes=6", "shortages=0", f"accelerator={name}"]
    assert soak.measure([*options, f"results={tmp_path}"]) == 0
    rows = {row["metric"]: row for row in read_rows("soak", results=tmp_path)}
    assert rows["leaked_pages"]["case"]["accelerator"] == name
    assert rows["equal_answers_share"]["value"] == 1
    assert rows["preemptions"]["value"] > 0 and rows["aborted_share"]["value"] > 0.1


def test_a_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished request that keeps a page which the prefix cache does not know is detected."""
    retire = Scheduler.retire

    def leaky(self: Scheduler, request: Request, *, invalidate: bool = False) -> None:
        retire(self, request, invalidate=invalidate)
        if self.pool._free and not self.running:
            self.pool._free.pop()

    monkeypatch.setattr(Scheduler, "retire", leaky)
    with pytest.raises(AssertionError):
        soak.measure([*SMALL, f"results={tmp_path}"])
