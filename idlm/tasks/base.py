"""What a verifiable task offers: samples that are a pure function of their index, a checker that reads text.

A task is a generator and a checker which share nothing but the language they speak. The checker re-executes
the prompt, so it judges a model's answer and a generator's mistake alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

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
    """0-based step that leaves the truth; the number of steps when only the ending is wrong."""
    reason: str
    """Empty when correct."""


class Task(Protocol):
    """A generated task. Implementations register a class in `TASKS` and are built from a level and knobs."""

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


ConfigT = TypeVar("ConfigT")


def resolve_config(name: str, levels: Mapping[str, ConfigT], level: str, knobs: Mapping[str, Any]) -> ConfigT:
    """Return the preset `level` of task `name` with single knobs replaced.

    Raises `UserError` IDLM-0220 for an unknown level, IDLM-0221 for an unknown knob; the configuration class
    itself raises IDLM-0222 for values that cannot work.
    """
    if level not in levels:
        raise UserError(
            "IDLM-0220",
            f"task {name!r} has no level {level!r}{did_you_mean(level, levels)}",
            fix=f"choose one of: {', '.join(sorted(levels))}",
        )
    preset: Any = levels[level]
    known = [field.name for field in fields(preset)]
    for knob in knobs:
        if knob not in known:
            raise UserError(
                "IDLM-0221",
                f"task {name!r} has no knob {knob!r}{did_you_mean(knob, known)}",
                fix=f"use some of: {', '.join(known)}",
            )
    changes = {knob: tuple(value) if isinstance(value, list) else value for knob, value in knobs.items()}
    changed: ConfigT = replace(preset, **changes)
    return changed
