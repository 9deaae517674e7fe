"""A generated task of `idlm.tasks` as an endless data source."""

from __future__ import annotations

from typing import ClassVar

from idlm.tasks import TASKS
from idlm.train.config.data import DataConfig
from idlm.train.data.base import CORRECT, SOURCES, Encoder
from idlm.train.data.layout import Sample


@SOURCES.register("task")
class TaskSource:
    """A split of the task `data.task` at `data.level`, changed by `data.task_args`."""

    is_endless: ClassVar[bool] = True
    has_splits: ClassVar[bool] = True
    num_samples: int | None = None

    def __init__(self, config: DataConfig, encoder: Encoder) -> None:
        self.task = TASKS.get(config.task)(level=config.level, seed=config.seed, **config.task_args)
        self.encoder, self.split = encoder, config.split

    def sample(self, index: int) -> Sample:
        made = self.task.sample(index, self.split)
        return self.encoder.pair(made.prompt, made.response, origin=f"{self.task.name} sample {index}")

    def question(self, index: int) -> str:
        return str(self.task.sample(index, self.split).prompt)

    def verdict(self, index: int, answer: str) -> str:
        """`correct`, or what is wrong with the answer to question `index`."""
        return self.task.check(self.question(index), answer).reason or CORRECT
