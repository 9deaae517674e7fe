"""The benchmark of the harness on the bundled base: its row, and what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality.eval import measure
from benchmarks.results import read_rows

BASE = Path(__file__).parents[4] / "recipes/assets/tiny_ar"


def test_a_row_for_each_concurrency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"model={BASE}", "device=cpu", "num=3", "max_tokens=4", "concurrency=1,2", "dtype=float32"]
    assert measure([*small, f"results={tmp_path}", "record=true"]) == 0
    rows = read_rows("eval", results=tmp_path)
    assert [row["case"] for row in rows] == [
        {"task": "ledger", "concurrency": concurrency, "decoder": "ar"} for concurrency in (1, 2)
    ]
    assert {row["metric"] for row in rows} == {"harness_overhead"}
    assert all(row["value"] > 0 and row["gate_passed"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
