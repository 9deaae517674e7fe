"""The full-quality benchmark on an untrained checkpoint: its arms, its rows, its refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.quality import full_quality
from benchmarks.quality.full_quality import OPTIONS, Arm, arms_of
from benchmarks.results import read_rows
from idlm.semantics import Semantics

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"


def test_arms_are_orders_by_blocks_and_only_probabilities_have_thresholds() -> None:
    arms = arms_of(
        OPTIONS | {"orders": "low_confidence,entropy", "block_lengths": "16,32", "thresholds": "0.5"}
    )
    low = [
        Arm(order="low_confidence", block_length=size, threshold=t) for size in (16, 32) for t in (None, 0.5)
    ]
    assert arms == [*low, *(Arm(order="entropy", block_length=size) for size in (16, 32))]
    assert arms[0].engine_options() == {"order": "low_confidence", "block_length": 16}
    assert Arm(order="random", block_length=8, cache="dual").engine_options()["cache"] == "dual"
    assert not any(arm.threshold for arm in arms_of(OPTIONS | {"thresholds": ""}))


def test_every_arm_gives_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a model answers nothing, which is status 1; thresholds decide more tokens per pass."""
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    Semantics(causality="full", logit_shift=False, mask_token_id=165, stop_token_ids=(2,)).save(model)
    arguments = [
        f"model={model}",
        f"results={tmp_path}",
        "device=cpu",
        "num=2",
        "max_tokens=8",
        "record=true",
    ]
    arguments += ["orders=low_confidence,random", "block_lengths=4", "thresholds=0.0"]
    assert full_quality.measure(arguments) == 1
    told = capsys.readouterr().out
    assert "2 held-out questions" in told
    rows = read_rows("full_quality", results=tmp_path)
    by_arm = {(row["case"]["order"], row["case"]["threshold"], row["metric"]): row for row in rows}
    assert all(row["case"]["cache"] == "none" and row["case"]["block_length"] == 4 for row in rows)
    exact = by_arm["low_confidence", "-", "exact_match"]
    assert (exact["value"], exact["gate_passed"]) == (0.0, False)
    assert by_arm["random", "-", "exact_match"]["gate_passed"] is None
    assert by_arm["low_confidence", "-", "tokens_per_forward"]["value"] == 1.0
    assert by_arm["low_confidence", 0.0, "tokens_per_forward"]["value"] > 2.0
