"""A generated task of `idlm.tasks` as an endless data source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idlm.train.data.base import SOURCES, Encoder
from idlm.train.layout import Sample

if TYPE_CHECKING:
    from idlm.tasks import Task
    from idlm.train.config import DataConfig

SEED_SPAN = 2**40
"""Sample indices per seed: far more than any run reads, so that runs with different seeds share no sample index."""


class TaskSource:
    """Training split of a task; sample i is the task's sample `seed * SEED_SPAN + i`."""

    num_samples: int | None = None

    def __init__(self, task: Task, encoder: Encoder, *, seed: int) -> None:
        self.task = task
        self.encoder = encoder
        self.first = seed * SEED_SPAN

    def sample(self, index: int) -> Sample:
        generated = self.task.sample(self.first + index, "train")
        return self.encoder.pair(generated.prompt, generated.response, origin=f"{self.task.name} sample {index}")


@SOURCES.register("task")
def task_source(config: DataConfig, encoder: Encoder) -> TaskSource:
    """Build the task named by `data.task.name` with the settings of `data.task`."""
    from idlm.tasks import TASKS

    return TaskSource(TASKS.get(config.task)(**config.task_args), encoder, seed=config.seed)
