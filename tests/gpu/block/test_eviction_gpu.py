"""The eviction benchmark on a CUDA device, tiny: every arm follows its trace in graphs and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.engine import eviction
from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.eviction_harness import EvictionArm, SteadyTrace, implied_rows
from benchmarks.engine.eviction_trace import synthetic_trace
from benchmarks.models import random_model
from benchmarks.results import read_rows

SIZE = 16
FULL = EvictionArm(name="full", stride=SIZE)
FOCUS = replace(FULL, name="focus", alpha=1.5)
ARMS = {
    "full": FULL,
    "clean": FOCUS,
    "unfrozen": replace(FOCUS, commit="unfrozen"),
    "no run-ahead": replace(FOCUS, num_inflight_steps=0),
    "no graphs": replace(FOCUS, graphs=False),
}


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_follows_its_trace(name: str) -> None:
    """A window asserts the decided positions of every lane at both ends."""
    arm, trace = ARMS[name], synthetic_trace(SIZE)
    model = random_model("tiny", device="cuda", dtype=torch.bfloat16, block_size=SIZE)
    load = Load(concurrency=24, context=64, num_tokens=1200, sampling=SAMPLING["T1"])
    found = SteadyTrace(model, arm, load, trace).window(2, 40)
    implied = implied_rows(trace, arm)
    assert found.traced_share > 0.9
    assert found.num_tokens / found.num_traced == pytest.approx(implied.tokens, rel=0.1)
    if arm.alpha is not None:
        assert found.requested.retained / found.num_tokens == pytest.approx(implied.suffix_per_token, rel=0.1)


@pytest.mark.alone
def test_parts_leave_their_rows(tmp_path: Path) -> None:
    small = ["model=tiny", f"block={SIZE}", "context=64", "batch=4", "rounds=1", "passes=16"]
    eviction.measure([*small, "parts=gate,throughput", f"results={tmp_path}"])
    rows = read_rows("eviction", results=tmp_path)
    assert {row["metric"] for row in rows} >= {"throughput_over_full_block"}
    [gate] = [row for row in rows if row["metric"] == "full_budget_error"]
    assert gate["gate_passed"]
