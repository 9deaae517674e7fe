"""Generated tasks with exact answers: the data source and the quality gauge of models small enough to train here."""

from __future__ import annotations

import difflib
from typing import Any

from idlm.errors import UserError
from idlm.registry import Registry
from idlm.tasks.base import Split, Task, TaskSample, Verdict

TASKS: Registry[Any] = Registry("task", "idlm.tasks")

__all__ = ["TASKS", "Split", "Task", "TaskSample", "Verdict", "make_task"]


def make_task(name: str, level: str, **knobs: Any) -> Task:
    """Build the task `name` at a preset `level`, with single knobs of its `Config` replaced.

    Raises `UserError` IDLM-0102 for an unknown task, IDLM-0220 for an unknown level, IDLM-0221 for an unknown knob and
    IDLM-0222 for a configuration that cannot work.
    """
    from dataclasses import fields, replace

    task_class = TASKS.get(name)
    if level not in task_class.LEVELS:
        raise UserError(
            "IDLM-0220",
            f"task {name!r} has no level {level!r}; its levels are {', '.join(sorted(task_class.LEVELS))}",
            fix="choose one of these levels",
        )
    known = [field.name for field in fields(task_class.Config)]
    for knob in knobs:
        if knob not in known:
            nearest = difflib.get_close_matches(knob, known, n=1)
            raise UserError(
                "IDLM-0221",
                f"task {name!r} has no knob {knob!r}; it has {', '.join(known)}",
                fix=f"write {nearest[0]!r}" if nearest else "use one of these names",
            )
    task: Task = task_class(replace(task_class.LEVELS[level], **knobs))
    return task
