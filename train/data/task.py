"""A generated task of `idlm.tasks` as an endless data source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idlm.train.data.base import SOURCES, Encoder
from idlm.train.layout import Sample

if TYPE_CHECKING:
    from idlm.tasks import Task
    from idlm.train.data.settings import DataConfig


class TaskSource:
    """A split of a task."""

    num_samples: int | None = None

    def __init__(self, task: Task, encoder: Encoder, split: str = "train") -> None:
        self.task, self.encoder, self.split = task, encoder, split

    def sample(self, index: int) -> Sample:
        generated = self.task.sample(index, self.split)
        return self.encoder.pair(
            generated.prompt, generated.response, origin=f"{self.task.name} sample {index}"
        )


@SOURCES.register("task")
def task_source(config: DataConfig, encoder: Encoder) -> TaskSource:
    """Build the task `data.task` at `data.level` with the knobs `data.task_args`."""
    from idlm.tasks import TASKS

    task = TASKS.get(config.task)(level=config.level, seed=config.seed, **config.task_args)
    return TaskSource(task, encoder, config.split)
