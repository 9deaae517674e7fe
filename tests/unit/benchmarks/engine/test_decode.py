"""The decode benchmark, tiny and on a CPU: replay, counts, and all its parts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, Measured, SteadyEngine
from benchmarks.engine.decoding.replay import trace_of
from benchmarks.models import random_model
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
from idlm.errors import UserError
from idlm.infer.decoders.base import max_rows


@pytest.mark.parametrize(
    ("strategy", "stride", "sampling"), [("cold", 4, "T1"), ("branch", 4, "greedy"), ("branch", 2, "qwen3")]
)
def test_replayed_acceptance_gives_the_closed_forms_of_the_trace(
    strategy: str, stride: int, sampling: str
) -> None:
    """Random weights accept almost nothing, so the emitted tokens follow the trace alone."""
    model = random_model("tiny", device="cpu", dtype=torch.float32)
    arm = Arm(name="arm", strategy=strategy, stride=stride)
    load = Load(concurrency=32, context=8, num_tokens=60, sampling=SAMPLING[sampling])
    trace = trace_of("p0.90", stride)
    steady = SteadyEngine(model, arm, load, trace)
    measured = Measured(arm=arm, load=load, width=max_rows(steady.engine.decoder, 0))
    steady.measure(measured)
    formula = {"cold": tokens_per_forward_cold, "branch": tokens_per_forward_branch}[strategy]
    assert measured.tokens_per_forward() == pytest.approx(formula(trace.acceptance()), rel=0.05)


def test_without_a_trace_random_weights_accept_little() -> None:
    """Shows that the test above can fail."""
    model = random_model("tiny", device="cpu", dtype=torch.float32)
    load = Load(concurrency=8, context=8, num_tokens=12, sampling=SAMPLING["greedy"])
    arm = Arm(name="arm", strategy="branch")
    measured = Measured(arm=arm, load=load, width=1)
    SteadyEngine(model, arm, load, None).measure(measured)
    assert measured.tokens_per_forward() < 2


@pytest.mark.parametrize(("name", "stride"), [("missing", 4), ("p1.5", 4)])
def test_a_missing_trace_is_refused(name: str, stride: int) -> None:
    with pytest.raises(UserError, match="IDLM-0109"):
        trace_of(name, stride)
