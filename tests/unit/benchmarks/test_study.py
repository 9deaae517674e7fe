"""The study: what its records say as rows, and a toy run of an arm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import read_rows
from benchmarks.training import study
from benchmarks.training.study import ARMS, CHAINS
from benchmarks.training.study_report import CONTROL, read_records


def record_of(name: str, seed: int, marks: str) -> dict[str, Any]:
    is_isd = name.startswith("idlm")
    cell = {"task": "long", "decoder": "isd" if is_isd else "ar", "strategy": "cold" if is_isd else "ar"}
    cell |= {"temperature": 1.0, "stride": 3 if is_isd else 1, "exactness": "exact", "equal_to_ar": None}
    cell |= {"marks": f"{sum((mark == '+') << index for index, mark in enumerate(marks)):x}", "seconds": 1.0}
    cell |= {"num_tokens": 170, "num_forwards": 110, "num_prompt_passes": 10}
    cell |= {"accepted": [40, 30], "tested": [50, 40]} if is_isd else {"accepted": [], "tested": []}
    machine = {"gpu": None, "num_gpus": 0, "torch": "2", "triton": None, "commit": None}
    machine |= {"date": f"2026-1-{seed}"}
    record = {"name": name, "seed": seed, "size": "toy", "steps": 5, "flops": 1.0, "num": len(marks)}
    return record | {"trained": {"seconds": 1.5}, "is_whole": True, "machine": machine, "cells": [cell]}


def test_rows_are_means_over_seeds_beside_the_control(tmp_path: Path) -> None:
    records = [
        *(record_of(CONTROL, seed, marks) for seed, marks in enumerate(("++++", "+++-", "++--"))),
        *(record_of("idlm_4", seed, marks) for seed, marks in enumerate(("+++-", "++--", "++--"))),
    ]
    for record in records:
        path = tmp_path / "study" / f"{record['seed']}_{record['name']}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record))
    assert study.measure(["part=table", f"results={tmp_path}", f"plots={tmp_path}"]) == 0
    found = {
        (row["case"]["arm"], row["metric"]): (row["value"], row["baseline"], row["case"]["seeds"])
        for row in read_rows("study", results=tmp_path)
    }
    assert found["idlm_4", "exact_match"] == (pytest.approx(7 / 12), pytest.approx(9 / 12), 3)
    shares = (3 / 4, 2 / 4, 2 / 4)
    deviation = math.sqrt(sum((share - 7 / 12) ** 2 for share in shares) / 2)
    assert found["idlm_4", "exact_match_se"][0] == pytest.approx(deviation / math.sqrt(3))
    assert found["idlm_4", "paired_difference"][0] == pytest.approx(-2 / 12)
    assert found["idlm_4", "acceptance_2"][0] == pytest.approx(0.75)
    assert found["idlm_4", "tokens_per_forward"][0] == pytest.approx(1.6)
    # Eq. 3 with P_1 = 0.8, P_2 = 0.6: (2 + 0.8) / (2 - 0.6) = 2.
    assert found["idlm_4", "eq3_ratio"][0] == pytest.approx(0.8)
    assert ("ar", "paired_difference") not in found
    assert len(list(tmp_path.glob("study_*.svg"))) == 2


@pytest.mark.sweep
def test_a_toy_run_leaves_records(tmp_path: Path) -> None:
    small = ["size=toy", "device=cpu", "base_steps=4", "num=1", "batch=4", "max_tokens=8"]
    options = [f"folder={tmp_path / 'runs'}", f"results={tmp_path}"]
    assert study.measure(["arms=base,idlm_4", *small, *options]) == 0
    records = read_records(tmp_path)
    assert [record["name"] for record in records] == ["base", "idlm_4"]
    for record in records:
        found = [(cell["strategy"], cell["temperature"], cell["task"]) for cell in record["cells"]]
        cells = ARMS[record["name"]].cells
        assert sorted(found) == sorted(
            (one.label, one.temperature, chain) for one in cells for chain in CHAINS
        )
        shares = [cell["equal_to_ar"] for cell in record["cells"] if cell["temperature"] == 0]
        assert shares == [1.0] * len(shares)
