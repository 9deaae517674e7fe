"""The interface of a verifiable task: samples that are a pure function of their index, and a checker of text.

The generator and the checker of a task share only the language of prompts and responses. The checker executes
the prompt again, so it finds mistakes of a model and of the generator alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

Split = Literal["train", "validation", "test"]
MAX_QUOTED = 80
"""Characters of a response that a verdict quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One problem and one reference solution, as plain text."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
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


def judge(
    prompt: str, response: str, execute: Callable[[str], tuple[Sequence[Sequence[str]], str]]
) -> Verdict:
    """Compare `response` with a run of `prompt`. `execute` returns the accepted forms of every step, and the
    ending, whose last line is `#### answer`."""
    try:
        steps, ending = execute(prompt)
    except UnreadablePromptError as error:
        return Verdict(reason=f"prompt: {error}")
    final_ok, position = response.endswith(ending.lstrip()), 0
    for idx, forms in enumerate(steps):
        matched = next((form for form in forms if response.startswith(form, position)), None)
        if matched is None:
            found = response[position : position + MAX_QUOTED]
            reason = f"step {idx}: found {found!r}, expected for example {forms[0]!r}"
            return Verdict(final_answer_correct=final_ok, first_bad_step=idx, reason=reason)
        position += len(matched)
    if response[position:] != ending:
        reason = f"ending: found {response[position : position + MAX_QUOTED]!r}, expected {ending!r}"
        return Verdict(final_answer_correct=final_ok, first_bad_step=len(steps), reason=reason)
    return Verdict(correct=True, final_answer_correct=True)


class Task(Protocol):
    """A generated task. Implementations register a class in `TASKS` and are built from a level and knobs."""

    name: ClassVar[str]

    def sample(self, index: int, split: str) -> TaskSample:
        """Return sample `index` (>= 0) of `split`, a pure function of (task configuration, split, index)."""
        ...

    def check(self, prompt: str, response: str) -> Verdict: ...

    @staticmethod
    def surface_texts() -> Iterator[str]:
        """Yield texts that together contain every word of the task in every position (for the tokenizer)."""
        ...
