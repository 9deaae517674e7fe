"""The benchmark of mixed traffic, tiny and on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import read_rows
from benchmarks.serving import serve
from idlm.errors import UserError

SMALL = ["model=tiny", "device=cpu", "dtype=float32", "concurrency=4,2", "requests=6"]


def test_both_decoders_answer_the_load_and_leave_rows(tmp_path: Path) -> None:
    arguments = [*SMALL, "parts=mixed,regret", f"path={tmp_path / 'toy'}", f"results={tmp_path}"]
    assert serve.measure(arguments) == 0
    rows = read_rows("serve", results=tmp_path)
    rates = [row for row in rows if row["metric"] == "output_tokens_per_s"]
    assert [(row["case"]["decoder"], row["case"]["concurrency"]) for row in rates] == [
        ("ar", 4),
        ("ar", 2),
        ("isd", 4),
        ("isd", 2),
    ]
    assert [row["case"]["start"] for row in rates] == ["cold", "warm"] * 2
    assert all(row["gate_passed"] for row in rates)
    metrics = {row["metric"] for row in rows}
    assert metrics >= {"isd_over_ar", "graphs_captured_in_traffic", "ready_s", "controller_regret"}


def test_structured_output_is_compared_with_free_answers(tmp_path: Path) -> None:
    arguments = ["decoders=isd", "parts=structured", "concurrency=2", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 0
    rows = read_rows("serve", results=tmp_path)
    [ratio] = [row for row in rows if row["metric"] == "structured_over_unconstrained"]
    assert ratio["value"] > 0 and ratio["gate_passed"] and ratio["case"]["concurrency"] == 2
    loads = [row["case"]["load"] for row in rows if row["metric"] == "output_tokens_per_s"]
    assert loads == ["free", "structured"]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="IDLM-0107"):
        serve.measure([*SMALL, "parts=mixd"])
