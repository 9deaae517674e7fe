"""The interface of a verifiable task: samples that are a pure function of their index, and a checker of text.

The generator and the checker of a task share only the language of prompts and responses. The checker executes
the prompt again, so it finds mistakes of a model and of the generator alike.
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
    """The checker's judgement of a response."""

    correct: bool = False
    """Every step and the final answer are right, and there is nothing else."""
    final_answer_correct: bool = False
    """The number after the last `####` is right; steps do not count."""
    first_bad_step: int | None = None
    """The first wrong step, 0-based; the number of steps when only the ending is wrong."""
    reason: str = ""
    """Empty when correct."""


class Task(Protocol):
    """A generated task. Implementations register a class in `TASKS` and are built from a level and knobs."""

    name: str

    def sample(self, index: int, split: str) -> TaskSample:
        """Return sample `index` (>= 0) of `split`, a pure function of (task configuration, split, index)."""
        ...

    def check(self, prompt: str, response: str) -> Verdict:
        """Execute the prompt's text again and judge the response."""
        ...

    def split_of(self, prompt: str) -> Split:
        """Return the split of a prompt; names, items and verbs make no difference."""
        ...

    @staticmethod
    def surface_texts() -> Iterator[str]:
        """Yield texts that together contain every word of the task in every position (for the tokenizer)."""
        ...


ConfigT = TypeVar("ConfigT")


def resolve_config(name: str, levels: Mapping[str, ConfigT], level: str, knobs: Mapping[str, Any]) -> ConfigT:
    """Return the preset `level` of task `name` with some knobs replaced.

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


def check_rules(name: str, config: Any, rules: Mapping[str, bool]) -> None:
    """Raise `UserError` IDLM-0222 naming the rules of task `name` that a configuration breaks."""
    if broken := [text for text, holds in rules.items() if not holds]:
        raise UserError(
            "IDLM-0222", f"{name} cannot use {config!r}", fix="make these hold: " + "; ".join(broken)
        )
