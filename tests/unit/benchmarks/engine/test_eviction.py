"""The eviction benchmark, tiny and on a CPU: rows, the trace behind them, and its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.eviction_harness import EvictionArm, SteadyTrace, UnmaskingReplay, implied_rows
from benchmarks.engine.eviction_trace import (
    RowCounts,
    limit_ms,
    synthetic_trace,
)
from benchmarks.models import model_spec, random_model
from benchmarks.stream import Rates
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.models.loader import LoadedModel
from idlm.semantics import Semantics


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


def test_an_arm_that_leaves_the_trace_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that forgets a position decides fewer tokens a pass than its trace."""
    propose = UnmaskingReplay.propose

    def forgetful(self: UnmaskingReplay, *given: Any) -> Any:
        proposed, *others = propose(self, *given)
        confidence_BW = proposed.confidence_BW.clone()
        confidence_BW[:, 5] = 0
        return (proposed._replace(confidence_BW=confidence_BW), *others)

    monkeypatch.setattr(UnmaskingReplay, "propose", forgetful)
    with pytest.raises(AssertionError, match="not the positions of the trace"):
        for num_passes in range(20, 40):
            steady(EvictionArm(name="full", stride=8)).window(1, num_passes)


def sdar_8b() -> LoadedModel:
    spec, device = model_spec("qwen3-8b"), torch.device("meta")
    return LoadedModel(
        trunk=DenseTrunk(spec, device=device, dtype=torch.bfloat16),
        spec=spec,
        local=spec,
        semantics=Semantics(mask_token_id=0, causality="block", block_size=32, logit_shift=False),
        architecture="Qwen3ForCausalLM",
        dtype=torch.bfloat16,
        device=device,
        directory=Path("none"),
    )


@pytest.mark.parametrize(
    ("context", "batch", "paper", "clean"),
    [(1024, 1, 1.0, 1.0), (1024, 32, 3.9, 3.2), (1024, 128, 3.97, 3.24), (4096, 128, 2.81, 2.47)],
)
def test_limits_follow_from_rows_and_rates(context: int, batch: int, paper: float, clean: float) -> None:
    """2.13 tokens a pass, 15.0 rows a token without eviction, 3.12 and 4.12 with it."""
    model, rates = sdar_8b(), Rates(stream=4.23e12, product=785e12)

    def minimum(retained: float, *, fed: float = 20, head: float = 4.1, committed: float = 2.13) -> float:
        rows = RowCounts(fed=fed, retained=retained, head=head, tokens=2.13, committed=committed)
        return limit_ms(model, rows, batch=batch, slots=context + 32, rates=rates)

    full = minimum(32, fed=32, head=17)
    assert full / minimum(3.12 * 2.13, committed=0) == pytest.approx(paper, abs=0.02)
    assert full / minimum(3.12 * 2.13) == pytest.approx(clean, abs=0.02)
    if (context, batch) == (1024, 128):
        assert full == pytest.approx(85.5, abs=0.1)
