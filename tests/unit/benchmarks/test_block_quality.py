"""The block-quality benchmark on an untrained checkpoint: comparisons, counts and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.quality import block_quality
from benchmarks.quality.arms import binomial_error, difference_error
from benchmarks.quality.block_quality import Arm, Result, passes
from benchmarks.results import read_rows
from idlm.semantics import Semantics
from tests.block_reference import SlowBlocks
from tests.unit.benchmarks.evaluations import evaluation_of

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"


def result_of(marks: str, threshold: float | None = None) -> Result:
    evaluation, right = evaluation_of(marks)
    return Result(arm=Arm(threshold=threshold), evaluation=evaluation, marks=right)


def test_two_points_are_allowed_at_the_judged_threshold_only() -> None:
    base = result_of("+" * 96 + "-" * 4)
    assert passes(result_of("+" * 94 + "-" * 6, 0.9), base) is True
    assert passes(result_of("+" * 93 + "-" * 7, 0.9), base) is False
    assert passes(result_of("-" * 100, 0.5), base) is None


def test_a_difference_is_as_sure_as_the_questions_are_alike() -> None:
    """With the same questions wrong the difference has no error; with different ones the two errors add."""
    base, same, other = (result_of(marks) for marks in ("++--" * 25, "++--" * 25, "+-+-" * 25))
    assert difference_error(same, base) == 0
    assert difference_error(other, base) == pytest.approx(2**0.5 * binomial_error(0.5, 100))


def test_every_arm_is_decoded_as_the_slow_reference_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These answers have no near ties, which the benchmark itself may have.
    monkeypatch.setattr(
        block_quality, "SlowBlocks", lambda model, rules, allows_ties: SlowBlocks(model, rules)
    )
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    Semantics(
        causality="block",
        logit_shift=False,
        block_size=5,
        mask_token_id=165,
        stop_token_ids=(2,),
    ).save(model)
    arguments = [f"model={model}", f"results={tmp_path}", "device=cpu", "num=3", "max_tokens=9"]
    assert block_quality.measure([*arguments, "thresholds=0.2,0.9", "reference=1", "record=true"]) == 0
    rows = read_rows("block_quality", results=tmp_path)
    equal = [row["value"] for row in rows if row["metric"] == "equal_to_reference"]
    assert equal == [1.0] * 4
    passes_of = {
        (row["case"]["strategy"], row["case"]["threshold"]): row["value"]
        for row in rows
        if row["metric"] == "tokens_per_forward"
    }
    assert passes_of["low_confidence_dynamic", 0.2] > passes_of["low_confidence_dynamic", 1.0]
    judged = [row["gate_passed"] for row in rows if row["case"]["threshold"] == 0.9]
    assert judged
    assert all(judged)
