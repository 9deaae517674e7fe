"""The interface of a verifiable task: samples that are a pure function of their index, and a checker of text.

The generator and the checker of a task share only the language of prompts and responses. The checker executes
the prompt again, so it detects mistakes of a model and of the generator alike.

A hash of a prompt's skeleton decides its split: renaming leaks no problem. The skeleton is the prompt with
entities, items and verbs replaced by canonical words. A sample of a split is found by rejection: candidates
come from the sample's own random stream until one hashes into the split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from random import Random
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
TEST_SHARE, VALIDATION_SHARE = 0.01, 0.01
Problem = TypeVar("Problem")
MAX_QUOTED = 80
"""Characters of a response that a verdict quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One problem and one reference solution, as plain text."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    correct: bool = False
    """Every step and the final answer are right, and there is nothing else."""
    final_answer_correct: bool = False
    """The number after the last `####` is right; steps do not count."""
    first_bad_step: int | None = None
    """The first wrong step, 0-based; the number of steps when only the ending is wrong."""
    reason: str = ""
    """Empty when correct."""


class UnreadablePromptError(Exception):
    """A prompt is not a problem with an answer; raised by the `execute` of `judge`."""


def judge(prompt: str, response: str, execute: Callable[[str], tuple[Sequence[Sequence[str]], str]]) -> Grade:
    """Compare `response` with a run of `prompt`. `execute` returns the accepted forms of every step, and the
    ending, whose last line is `#### answer`."""
    try:
        steps, ending = execute(prompt)
    except UnreadablePromptError as error:
        return Grade(reason=f"prompt: {error}")
    final_ok, position = response.endswith(ending.lstrip()), 0
    for idx, forms in enumerate(steps):
        matched = next((form for form in forms if response.startswith(form, position)), None)
        if matched is None:
            found = response[position : position + MAX_QUOTED]
            reason = f"step {idx}: found {found!r}, expected for example {forms[0]!r}"
            return Grade(final_answer_correct=final_ok, first_bad_step=idx, reason=reason)
        position += len(matched)
    if response[position:] != ending:
        reason = f"ending: found {response[position : position + MAX_QUOTED]!r}, expected {ending!r}"
        return Grade(final_answer_correct=final_ok, first_bad_step=len(steps), reason=reason)
    return Grade(correct=True, final_answer_correct=True)


def canonical_entity(idx: int) -> str:
    """Return the name that the `idx`-th entity has in a skeleton."""
    return f"E{chr(ord('a') + idx)}"


def split_of_skeleton(text: str) -> Split:
    value = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    if value < int(TEST_SHARE * 2**64):
        return "test"
    return "validation" if value < int((TEST_SHARE + VALIDATION_SHARE) * 2**64) else "train"


class Task(ABC, Generic[Problem]):
    """A generated task, whose problems are drawn at random: levels, knobs and splits. Subclasses are in
    `TASKS`."""

    name: ClassVar[str]
    check: Callable[[str, str], Grade]
    """Judge a response to a prompt."""
    LEVELS: ClassVar[Mapping[str, Any]]
    """Presets, dataclasses of all knobs with their `rules()`; the first one is the default."""

    def __init__(self, *, level: str | None = None, **knobs: Any) -> None:
        self.config = self._config(next(iter(self.LEVELS)) if level is None else level, knobs)

    def _config(self, level: str, knobs: Mapping[str, Any]) -> Any:
        """Return the preset `level` with some knobs replaced. UserError IDLM-0220: unknown level, IDLM-0221:
        unknown knob, IDLM-0222: broken rules."""
        if level not in self.LEVELS:
            raise UserError(
                "IDLM-0220",
                f"task {self.name!r} has no level {level!r}{did_you_mean(level, self.LEVELS)}",
                fix=f"choose one of: {', '.join(sorted(self.LEVELS))}",
            )
        preset = self.LEVELS[level]
        known = [field.name for field in fields(preset)]
        for knob in knobs:
            if knob not in known:
                raise UserError(
                    "IDLM-0221",
                    f"task {self.name!r} has no knob {knob!r}{did_you_mean(knob, known)}",
                    fix=f"use some of: {', '.join(known)}",
                )
        changes = {knob: tuple(value) if isinstance(value, list) else value for knob, value in knobs.items()}
        config = replace(preset, **changes)
        if broken := [text for text, holds in config.rules().items() if not holds]:
            fix = "make these hold: " + "; ".join(broken)
            raise UserError("IDLM-0222", f"{self.name} cannot use {config!r}", fix=fix)
        return config

    def sample(self, index: int, split: str) -> TaskSample:
        """Return sample `index` (>= 0) of `split`, a pure function of (task configuration, split, index): the
        first problem of its own random stream that lies there. Only
        `Random.random` is used on the stream: Python keeps its values stable across versions. UserError
        IDLM-0223: unknown split, IDLM-0224: negative index."""
        if split not in SPLITS:
            raise UserError(
                "IDLM-0223", f"split is {split!r}, allowed are {', '.join(SPLITS)}", fix="choose one of these"
            )
        if index < 0:
            raise UserError(
                "IDLM-0224", f"sample index is {index}, it must be 0 or more", fix="start counting at 0"
            )
        # The name of the configuration's class is in the key: another name redraws every problem.
        key = f"{self.name}|{self.config!r}|{split}|{index}"
        rng = Random(int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "big"))
        while True:
            problem = self.draw(rng)
            if split_of_skeleton(self.canonical_prompt(problem)) == split:
                return self.write(problem, rng.random)

    def grade(self, sample: TaskSample, response: str) -> Grade:
        """The verdict of `check` on an answer to a sample's prompt."""
        return self.check(sample.prompt, response)

    @abstractmethod
    def draw(self, rng: Random) -> Problem:
        """Draw a problem's structure, without words."""

    @staticmethod
    @abstractmethod
    def canonical_prompt(problem: Problem) -> str:
        """Return the skeleton of a problem's prompt."""

    @staticmethod
    @abstractmethod
    def surface_texts() -> Iterator[str]:
        """Yield texts that together contain every word of the task in every position (for the tokenizer)."""

    @abstractmethod
    def write(self, problem: Problem, random: Callable[[], float]) -> TaskSample:
        """Choose words and surface forms with `random` (uniform in [0, 1)) and write the sample."""


def draw_names(pool: Sequence[str], num: int, random: Callable[[], float]) -> list[str]:
    left = list(pool)
    return [left.pop(int(random() * len(left))) for _ in range(num)]
