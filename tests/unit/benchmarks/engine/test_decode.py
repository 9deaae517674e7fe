"""Benchmarks of decoding, tiny and on a CPU: all arms replay the same decisions, and their counts follow."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.block_harness import Answers, BlockArm, whole_answers
from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, Measured, SteadyEngine
from benchmarks.engine.decoding.replay import Trace, trace_of
from benchmarks.models import random_model
from idlm.acceptance import tokens_per_forward_branch, tokens_per_forward_cold
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


SIZE, CONTEXT = 8, 16


def answers_of(trace: Trace, *, fused: bool, sampling: str = "T1") -> Answers:
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=SIZE)
    load = Load(concurrency=4, context=CONTEXT, num_tokens=2 * SIZE, sampling=SAMPLING[sampling])
    return whole_answers(model, BlockArm(name="arm", stride=SIZE, fused=fused), load, trace)


def test_fused_commits_save_a_pass_per_block() -> None:
    trace = Trace(name="two", num_drafts=SIZE - 1, accepted=(1,))
    fused, separate = answers_of(trace, fused=True), answers_of(trace, fused=False)
    # Two are decided in each pass; 0, 2, 4 or 6 of the first block are fixed, and 16 tokens are wanted.
    assert fused.num_expected == (4 + 4) + (3 + 4 + 4) + (2 + 4 + 4) + (1 + 4 + 4)
    # All blocks but an answer's last are stored.
    assert separate.num_passes == separate.num_expected == fused.num_expected + 1 + 2 + 2 + 2
    assert fused.num_passes <= fused.num_expected + 1
