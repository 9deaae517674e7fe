"""The decodability benchmark: what is judged."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality.decodability import FOCUS, FULL, Arm, Result, is_above, keeps_quality
from tests.unit.benchmarks.evaluations import evaluation_of


def result_of(marks: str, arm: Arm) -> Result:
    evaluation, right = evaluation_of(marks)
    return Result(arm=arm, evaluation=evaluation, marks=right, rows_per_token=1.0)


def test_what_is_judged() -> None:
    base, focus = Arm(name=FULL), Arm(name=FOCUS, accelerators={"focus": {}})
    full = result_of("+" * 96 + "-" * 4, base)
    assert keeps_quality(result_of("+" * 94 + "-" * 6, focus), full) is True
    assert keeps_quality(result_of("+" * 93 + "-" * 7, focus), full) is False
    assert keeps_quality(result_of("-" * 100, replace(focus, threshold=0.7)), full) is None
    assert is_above(full, result_of("+" * 80 + "-" * 20, base))
    assert not is_above(full, result_of("+" * 95 + "-" * 5, base))
