"""Generated tasks with exact answers: training data and a measure of quality for small models."""

from __future__ import annotations

from typing import Any

from idlm.registry import Registry
from idlm.tasks.base import Split, Task, TaskSample, Verdict

TASKS: Registry[Any] = Registry("task", "idlm.tasks")
"""Task classes by name; `TASKS.get("ledger")(level="tiny", seed=1)` builds one; more keywords are knobs."""

__all__ = ["TASKS", "Split", "Task", "TaskSample", "Verdict"]
