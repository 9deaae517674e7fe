"""What the study reports: means over seeds, errors, and tables that do not mix."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import read_rows
from benchmarks.training.studies import study
from benchmarks.training.studies.study_arms import CONTROL
from benchmarks.training.studies.study_paper import efficiency
from benchmarks.training.studies.study_report import collect, report
from benchmarks.training.studies.study_worker import marks_of, marks_text, record_path


def test_marks_survive_a_record() -> None:
    marks = [True, False, False, True, False]
    assert marks_of(marks_text(marks), 5) == marks


def record_of(name: str, seed: int, marks: str, **changes: Any) -> dict[str, Any]:
    cell = {
        "task": "long",
        "decoder": "isd" if name.startswith("idlm") else "ar",
        "strategy": "cold" if name.startswith("idlm") else "ar",
        "temperature": 1.0,
        "stride": 3 if name.startswith("idlm") else 1,
        "exactness": "exact",
        "marks": marks_text([mark == "+" for mark in marks]),
        "num_tokens": 170,
        "num_forwards": 110,
        "num_prompt_passes": 10,
        "accepted": [40, 30] if name.startswith("idlm") else [],
        "tested": [50, 40] if name.startswith("idlm") else [],
        "seconds": 1.0,
        "num_failed": 0,
        "equal_to_ar": None,
    }
    machine = {
        "gpu": None,
        "num_gpus": 0,
        "torch": "2",
        "triton": None,
        "commit": None,
        "date": f"2026-1-{seed}",
    }
    return {
        "name": name,
        "seed": seed,
        "size": "toy",
        "steps": 5,
        "flops": 1.0,
        "num": len(marks),
        "trained": {"seconds": 1.5},
        "is_whole": True,
        "machine": machine,
        "cells": [cell | changes],
    }


def test_rows_are_means_over_seeds_beside_the_control(tmp_path: Path) -> None:
    records = [
        *(record_of(CONTROL, seed, marks) for seed, marks in enumerate(("++++", "+++-", "++--"))),
        *(record_of("idlm_3", seed, marks) for seed, marks in enumerate(("+++-", "++--", "++--"))),
    ]
    text = report(records, results=tmp_path, plots=tmp_path)
    found = {
        (row["case"]["arm"], row["metric"]): (row["value"], row["baseline"], row["case"]["seeds"])
        for row in read_rows("study", results=tmp_path)
    }
    assert found["idlm_3", "exact_match"] == (pytest.approx(7 / 12), pytest.approx(9 / 12), 3)
    shares = (3 / 4, 2 / 4, 2 / 4)
    deviation = math.sqrt(sum((share - 7 / 12) ** 2 for share in shares) / 2)
    assert found["idlm_3", "exact_match_se"][0] == pytest.approx(deviation / math.sqrt(3))
    assert found["idlm_3", "paired_difference"][0] == pytest.approx(-2 / 12)
    assert found["idlm_3", "acceptance_2"][0] == pytest.approx(0.75)
    assert found["idlm_3", "tokens_per_forward"][0] == pytest.approx(1.6)
    # Eq. 3 with P_1 = 0.8, P_2 = 0.6: (2 + 0.8) / (2 - 0.6) = 2.
    assert found["idlm_3", "eq3_ratio"][0] == pytest.approx(0.8)
    assert ("ar", "paired_difference") not in found
    assert "NOT  eq. 3: off by 0.200 at most, idlm_3 cold long T=1" in text
    assert "| 3 |  | 1.60 |  | 58.3 +- 8.3 |" in text and "Table 4: relaxed" not in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "study_efficiency.svg",
        "study_quality.svg",
        "study_tokens_per_forward.svg",
    }


def test_another_size_has_a_folder_and_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, record in (
        (tmp_path, record_of(CONTROL, 0, "++++")),
        (tmp_path / study.LARGE, record_of(CONTROL, 0, "++--") | {"size": "large"}),
    ):
        path = record_path(folder, 0, CONTROL)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record))
    assert study.study(["part=table", f"results={tmp_path}"]) == 0
    assert "49,289,600 parameters" in capsys.readouterr().out
    tables = [read_rows(bench, results=tmp_path) for bench in ("study", "study_large", "study_ablations")]
    matches = [[row["value"] for row in rows if row["metric"] == "exact_match"] for rows in tables]
    assert matches == [[1.0], [0.5], []]
    assert {row["case"].get("parameters") for row in tables[0]} == {None}
    assert {row["case"]["parameters"] for row in tables[1]} == {49_289_600}


def test_efficiency_is_that_of_the_paper() -> None:
    """Table 5: TPF / OH with one rate p for all drafts; it crosses 1 near p = 0.83 at N = 4 (section 2)."""
    for stride, p in ((2, 0.7), (4, 0.9), (8, 0.95)):
        tokens = 2 + sum(p**k for k in range(1, stride - 1))
        overhead = (3 * stride - 1 - stride * p ** (stride - 1)) / tokens
        assert efficiency([p] * (stride - 1)) == pytest.approx(tokens / (2 - p ** (stride - 1)) / overhead)
    assert efficiency([0.82] * 3) < 1 < efficiency([0.84] * 3)


def test_one_seed_has_the_error_of_its_problems() -> None:
    cells = collect([record_of(CONTROL, 0, "+++-")])
    [cell] = cells.values()
    assert cell.exact_match_se == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert cell.tokens_per_forward == pytest.approx(1.6)
