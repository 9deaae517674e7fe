"""One run of `benchmarks.memory`: its options, its deadline, and the tasks that it gives to processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.canvas import report
from benchmarks.engine.canvas.child import ArmFailedError, run_child
from benchmarks.engine.canvas.native import NATIVE_ARMS
from benchmarks.engine.canvas.tasks import Task

MIN_SECONDS = 15.0
"""Nothing is started with less time than this."""


@dataclass(slots=True)
class Session:
    """One run: its options, what it could not measure, and its rows to come.

    A row names the GPU, and asking for the name may leave a context of this process on it. So rows are made
    after the last measurement.
    """

    options: dict[str, str]
    deadline: float
    pending: list[Callable[[], list[dict[str, Any]]]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def listed(self, key: str) -> list[str]:
        """The values of an option with commas."""
        return [value for value in self.options[key].split(",") if value]

    def task(self, kind: str, model: str, **fields: Any) -> Task:
        """A task on the run's device."""
        return Task(
            kind=kind, model=model, device=self.options["device"], dtype=self.options["dtype"], **fields
        )

    def ask(self, task: Task) -> dict[str, Any] | None:
        """The answer of a task in a fresh process; None, with a printed reason, if there is none."""
        label = (
            " ".join(
                str(part) for part in (task.kind, task.model, task.arm, f"share={task.prompt_share}") if part
            )
            + (f" cap={task.cap_gib:g}" if task.cap_gib else "")
            + (" expandable" if task.expandable else "")
        )
        seconds = min(self.deadline - time.monotonic(), float(self.options["timeout_s"]))
        if seconds < MIN_SECONDS:
            self.absent[label] = "no time left; raise budget_s or choose fewer parts"
            return None
        start = time.monotonic()
        try:
            answer = run_child(task, timeout_s=seconds)
        except ArmFailedError as error:
            self.absent[label] = str(error)
            print(f"{label}: {error}", flush=True)
            return None
        print(f"{label}: {short(answer)} ({time.monotonic() - start:.0f} s)", flush=True)
        return answer

    def allocators(self, arm: str) -> list[str]:
        """Both allocators for arms of libraries; our arms hold one workspace, so one allocator is enough."""
        chosen = self.listed("allocators")
        return chosen if arm in NATIVE_ARMS else chosen[:1]

    def later(self, make: Callable[..., list[dict[str, Any]]], *arguments: Any) -> None:
        """Make rows at the end of the run."""
        self.pending.append(lambda: make(*arguments))

    def rows(self) -> list[dict[str, Any]]:
        """All rows, and what follows from those of L_max."""
        rows = [row for make in self.pending for row in make()]
        for model in self.listed("models"):
            own = [row for row in rows if row["case"].get("model") == model]
            if known := report.recorded_l_max(own, Path(self.options["results"])):
                rows += report.over_rows(known, self.command(model))
        return rows

    def command(self, model: str) -> str:
        """The command that rows of a model name."""
        return report.command_of(model, is_quick=self.options["quick"] == "true")


def short(answer: dict[str, Any]) -> str:
    """The answer without long lists."""
    shown = {key: value for key, value in answer.items() if key not in ("points", "probes")}
    return ", ".join(f"{key}={value}" for key, value in shown.items() if value not in ("", {}))
