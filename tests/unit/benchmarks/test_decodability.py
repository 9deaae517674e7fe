"""The decodability benchmark on an untrained checkpoint: what is judged, and its rows."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality import decodability
from benchmarks.quality.decodability import FOCUS, FULL, Arm, Bench, Result, is_above, keeps_quality
from benchmarks.results import read_rows
from idlm.infer.cli.evaluate import task_samples
from idlm.semantics import Semantics
from idlm.tasks import TASKS
from tests.unit.benchmarks.evaluations import evaluation_of

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"
SIZE = 8


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    Semantics(
        causality="block", logit_shift=False, block_size=SIZE, mask_token_id=165, stop_token_ids=(2,)
    ).save(model)
    small = ["device=cpu", "level=tiny", "num=3", "max_tokens=20", "batch=3"]
    return [f"model={model}", f"results={tmp_path}", *small]


def bench_of(arguments: list[str]) -> Bench:
    options = decodability.parse_options(arguments, decodability.OPTIONS)
    task = TASKS.get("ledger")(level="tiny")
    return Bench(options=options, task=task, samples=task_samples(task, "test", 3))


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


def test_every_part_leaves_its_rows(arguments: list[str], tmp_path: Path) -> None:
    decodability.measure([*arguments, "k=1,2", "thresholds=0.9,0.7", "record=true"])
    rows = read_rows("decodability", results=tmp_path)
    assert {row["metric"] for row in rows} >= {
        "exact_match",
        "standard_error_of_difference",
        "rows_per_token",
    }
    cases = [row["case"] for row in rows if row["metric"] == "exact_match"]
    assert {(case["arm"], case["k"], case["alpha"]) for case in cases} == {
        *((name, k, "-") for name in ("top", "random", "bottom") for k in (1, 2)),
        ("full", "-", "-"),
        ("focus", "-", 1.5),
    }
    assert {case["threshold"] for case in cases if case["arm"] == "focus"} == {0.9, 0.7}
