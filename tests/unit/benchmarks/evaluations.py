"""An evaluation that only says which questions were answered right."""

from __future__ import annotations

from idlm.infer.evaluation.evaluate import Evaluation


def evaluation_of(marks: str) -> tuple[Evaluation, tuple[bool, ...]]:
    """The evaluation, and what each question's mark says; "+" is right."""
    right = tuple(mark == "+" for mark in marks)
    evaluation = Evaluation(
        num_prompts=len(right),
        exact_match=sum(right) / len(right),
        num_tokens=1,
        num_forwards=1,
        num_prompt_passes=1,
        accepted_by_position=(),
        tested_by_position=(),
        seconds=1.0,
        exactness="exact",
        completions=(),
        verdicts=(),
    )
    return evaluation, right
