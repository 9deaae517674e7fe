"""The eviction benchmark, tiny and on a CPU: rows, the trace behind them, and its limit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.eviction_harness import EvictionArm, SteadyTrace, implied_rows
from benchmarks.engine.eviction_trace import synthetic_trace
from benchmarks.models import random_model


def steady(arm: EvictionArm, *, batch: int = 3) -> SteadyTrace:
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=8)
    load = Load(concurrency=batch, context=32, num_tokens=160, sampling=SAMPLING["T1"])
    return SteadyTrace(model, arm, load, synthetic_trace(8))


@pytest.mark.parametrize(("commit", "graphs"), [("clean", True), ("unfrozen", False)])
def test_passes_compute_the_rows_that_the_trace_implies(commit: str, graphs: bool) -> None:
    """Over a window; without waits, rows requested differ from those implied by where the window begins."""
    arm = EvictionArm(name="focus", stride=8, alpha=1.5, commit=commit, graphs=graphs)
    found, implied = steady(arm).window(1, 40), implied_rows(synthetic_trace(8), arm)
    assert found.num_tokens / found.num_traced == pytest.approx(implied.tokens, rel=0.1)
    assert found.requested.fed / found.num_tokens == pytest.approx(implied.prefix_per_token, rel=0.12)
    assert found.requested.retained / found.num_tokens == pytest.approx(implied.suffix_per_token, rel=0.12)
    assert found.requested.head / found.num_tokens == pytest.approx(implied.head / implied.tokens, rel=0.15)
