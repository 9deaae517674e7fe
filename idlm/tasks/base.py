"""What every verifiable task offers: samples that are a pure function of their index, and a checker that reads text.

A task is a generator and a checker which share nothing but the language they speak. The checker re-executes the
prompt, so it judges a model's answer and a generator's mistake alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One problem and one reference solution, as plain text."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the checker thinks of a response."""

    correct: bool
    """Every step, the final answer and nothing else."""
    final_answer_correct: bool
    """The number after the last `####` alone; steps are not looked at."""
    first_bad_step: int | None
    """0-based step at which the response leaves the truth; the number of steps when only the ending is wrong."""
    reason: str
    """Empty when correct."""


class Task(Protocol):
    """A generated task. Implementations register a class in `TASKS`; `make_task` builds one from a level's name."""

    name: str

    def sample(self, index: int, split: str) -> TaskSample:
        """Return sample `index` (>= 0) of `split`: pure in (task configuration, split, index)."""
        ...

    def check(self, prompt: str, response: str) -> Verdict:
        """Re-execute the prompt's text and judge the response; no state is shared with the generator."""
        ...

    def split_of(self, prompt: str) -> Split:
        """Return the split that a prompt belongs to, whatever names, items and verbs it uses."""
        ...

    @staticmethod
    def surface_texts() -> Iterator[str]:
        """Yield texts which together contain every word of the task in every position (for the tokenizer)."""
        ...
