"""The eviction benchmark, tiny and on a CPU: all its parts, what it asserts, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import eviction
from benchmarks.engine.decoding.harness import SAMPLING, Load, random_model
from benchmarks.engine.unmasking.harness import EvictionArm, SteadyTrace, implied_rows
from benchmarks.engine.unmasking.replay import UnmaskingReplay
from benchmarks.engine.unmasking.synthetic import synthetic_trace
from benchmarks.engine.unmasking.trace import write_trace
from benchmarks.results import read_rows
from idlm.errors import UserError

SMALL = ["model=tiny", "device=cpu", "dtype=float32", "context=64", "rounds=1", "passes=10"]


def test_throughput_and_gate_leave_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "block=8,16", "batch=1", "parts=gate,throughput", f"results={tmp_path}"]
    figures = tmp_path / "figures"
    assert eviction.measure([*arguments, f"figures={figures}"]) == 0
    drawn = {path.name for path in figures.iterdir()}
    assert drawn == {f"eviction_block{size}_context64_synthetic.svg" for size in (8, 16)}
    rows = read_rows("eviction", results=tmp_path)
    assert {row["metric"] for row in rows} == {
        "full_budget_error",
        "tokens_per_second",
        "tokens_per_pass",
        "step_ms",
        "rows_per_token",
        "waiting_share",
        "padding_share",
        "graphs_captured",
        "full_block_share_of_matmul",
        "throughput_over_full_block",
    }
    ratios = [row for row in rows if row["metric"] == "throughput_over_full_block"]
    assert {(row["case"]["block"], row["case"]["commit"]) for row in ratios} == {
        (size, commit) for size in (8, 16) for commit in ("clean", "unfrozen")
    }
    assert all(row["case"]["trace"] == "synthetic" and row["floor"] > 0 for row in ratios)
    shares = [row for row in rows if row["metric"] == "tokens_per_pass"]
    assert {row["case"]["arm"] for row in shares} == {"full", "focus"}
    assert all(row["gate_passed"] for row in rows)
    assert capsys.readouterr().out.count("x of ") == 4


def test_the_other_parts_leave_their_rows(tmp_path: Path) -> None:
    parts = "parts=toggles,host_wait,host,selection,mage"
    few = ["context=16", "passes=4"]
    arguments = [*SMALL, *few, "block=8", "batch=2", "k=16", "exact_layers=1", parts, f"results={tmp_path}"]
    eviction.measure(arguments)
    rows = read_rows("eviction", results=tmp_path)
    assert {row["metric"] for row in rows} == {
        "toggle_gain",
        "over_host_wait",
        "steps_per_host_sync",
        "gpu_idle_share",
        "selection_share",
        "tokens_per_second",
        "focus_mage_over_better",
        "focus_mage_over_neither",
    }
    toggles = {row["case"]["toggle"] for row in rows if row["metric"] == "toggle_gain"}
    assert toggles == set(eviction.TOGGLES)


def steady(arm: EvictionArm, *, batch: int = 3) -> SteadyTrace:
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=8)
    load = Load(concurrency=batch, context=32, num_tokens=160, sampling=SAMPLING["T1"])
    return SteadyTrace(model, arm, load, synthetic_trace(8))


@pytest.mark.parametrize("commit", ["clean", "unfrozen"])
@pytest.mark.parametrize("graphs", [True, False])
def test_passes_compute_the_rows_that_the_trace_implies(commit: str, graphs: bool) -> None:
    """Over a window; without waits, rows asked for differ from those implied by where the window begins."""
    arm = EvictionArm(name="focus", stride=8, alpha=1.5, commit=commit, graphs=graphs)
    found, implied = steady(arm).window(1, 40), implied_rows(synthetic_trace(8), arm)
    assert found.num_tokens / found.num_traced == pytest.approx(implied.tokens, rel=0.1)
    assert found.asked.fed / found.num_tokens == pytest.approx(implied.prefix_per_token, rel=0.12)
    assert found.asked.kept / found.num_tokens == pytest.approx(implied.suffix_per_token, rel=0.12)
    assert found.asked.head / found.num_tokens == pytest.approx(implied.head / implied.tokens, rel=0.15)


def test_an_arm_that_leaves_the_trace_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that forgets a place decides fewer tokens a pass than its trace."""
    propose = UnmaskingReplay.propose

    def forgetful(self: UnmaskingReplay, *given: Any) -> Any:
        proposed, *others = propose(self, *given)
        confidence_BW = proposed.confidence_BW.clone()
        confidence_BW[:, 5] = 0
        return (replace(proposed, confidence_BW=confidence_BW), *others)

    monkeypatch.setattr(UnmaskingReplay, "propose", forgetful)
    with pytest.raises(AssertionError, match="not the places of the trace"):
        for num_passes in range(20, 40):
            steady(EvictionArm(name="full", stride=8)).window(1, num_passes)


def test_a_failed_gate_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "parity_error", lambda *given: 0.5)
    assert eviction.measure([*SMALL, "block=8", "batch=1", f"results={tmp_path}"]) == 1
    assert {row["metric"] for row in read_rows("eviction", results=tmp_path)} == {"full_budget_error"}


def test_a_recorded_trace_is_named_in_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_trace(synthetic_trace(8, num_blocks=8), path)
    arguments = [*SMALL, "block=8", "batch=1", "commit=clean", f"trace={path}", f"results={tmp_path}"]
    eviction.measure([*arguments, "parts=throughput"])
    assert {row["case"]["trace"] for row in read_rows("eviction", results=tmp_path)} == {"mine"}
    with pytest.raises(UserError, match=r"IDLM-0110.*line 1: block_size is 8"):
        eviction.measure([*arguments, "block=16"])
    lines = path.read_text().splitlines()
    block = json.loads(lines[2])
    block["decided"][0][0] = 8
    path.write_text("\n".join([*lines[:2], json.dumps(block), *lines[3:]]))
    with pytest.raises(UserError, match=r"IDLM-0110.*mine\.jsonl, line 3.*\[8\]"):
        eviction.measure(arguments)


@pytest.mark.parametrize("option", ["parts=gates", "commit=frozen"])
def test_unknown_parts_and_commits_are_refused(option: str) -> None:
    with pytest.raises(UserError, match="IDLM-0107"):
        eviction.measure([*SMALL, option])


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(UserError, match="IDLM-0110.*no trace 'none'"):
        eviction.measure([*SMALL, "trace=none"])
