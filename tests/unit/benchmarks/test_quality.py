"""What the benchmarks of quality judge, and how sure a difference is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.quality import block_quality, decodability
from benchmarks.quality.arms import ArmResult, binomial_error, difference_error
from benchmarks.quality.decodability import FOCUS, FULL, is_above, keeps_quality
from idlm.infer.evaluation.evaluate import Evaluation


def result_of(marks: str, arm: Any = None, kind: type[ArmResult] = ArmResult, **more: Any) -> Any:
    """A result whose questions were answered right where `marks` has "+"."""
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
    return kind(arm=arm, evaluation=evaluation, marks=right, **more)


def test_two_points_are_allowed_at_the_judged_threshold_only() -> None:
    at = {threshold: block_quality.Arm(threshold=threshold) for threshold in (None, 0.5, 0.9)}
    base = result_of("+" * 96 + "-" * 4, at[None])
    assert block_quality.passes(result_of("+" * 94 + "-" * 6, at[0.9]), base) is True
    assert block_quality.passes(result_of("+" * 93 + "-" * 7, at[0.9]), base) is False
    assert block_quality.passes(result_of("-" * 100, at[0.5]), base) is None


def test_a_difference_is_as_sure_as_the_questions_are_alike() -> None:
    """With the same questions wrong the difference has no error; with different ones the two errors add."""
    base, same, other = (result_of(marks) for marks in ("++--" * 25, "++--" * 25, "+-+-" * 25))
    assert difference_error(same, base) == 0
    assert difference_error(other, base) == pytest.approx(2**0.5 * binomial_error(0.5, 100))


def test_what_is_judged_of_focus() -> None:
    base, focus = decodability.Arm(name=FULL), decodability.Arm(name=FOCUS, accelerators={"focus": {}})

    def found(num_wrong: int, arm: decodability.Arm) -> Any:
        marks = "+" * (100 - num_wrong) + "-" * num_wrong
        return result_of(marks, arm, decodability.Result, rows_per_token=1.0)

    full = found(4, base)
    assert keeps_quality(found(6, focus), full) is True
    assert keeps_quality(found(7, focus), full) is False
    assert keeps_quality(found(100, replace(focus, threshold=0.7)), full) is None
    assert is_above(full, found(20, base)) and not is_above(full, found(5, base))
