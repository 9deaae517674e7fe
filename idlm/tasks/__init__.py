"""Generated tasks with exact answers: training data and a measure of quality for small models."""

from __future__ import annotations

from typing import Any

from idlm.registry import Registry
from idlm.tasks.base import Grade, Split, Task, TaskSample

TASKS: Registry[Any] = Registry("task", "idlm.tasks")
"""Task classes by name; `TASKS.get("ledger")(level="tiny", seed=1)` builds one; more keywords are knobs."""

__all__ = ["TASKS", "Grade", "Split", "Task", "TaskSample"]
