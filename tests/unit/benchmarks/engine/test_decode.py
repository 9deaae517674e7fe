"""Benchmarks of decoding, tiny and on a CPU: all arms replay the same decisions, and their counts follow."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.block_harness import Answers, BlockArm, whole_answers
from benchmarks.engine.canvas_cache import (
    CanvasEngine,
    CanvasLoad,
    CanvasMeasured,
    Decisions,
)
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


LOAD = CanvasLoad(canvas=48, answer=24, block=8, passes=3, num_blocks=2)


def test_every_arm_makes_the_decisions_of_the_first() -> None:
    model = random_model("tiny_llada", device="cpu", dtype=torch.float32)
    decisions = Decisions(LOAD, model.device)
    answers = {}
    for cache in (None, "dual", "prefix", "delayed"):
        engine = CanvasEngine(model, LOAD, cache, decisions, graphs=True)
        measured = CanvasMeasured(load=LOAD)
        engine.measure(measured)
        assert len(measured.rounds[0]) == LOAD.num_blocks * LOAD.passes
        if cache is None:
            # Eight positions in three passes.
            assert decisions.chosen_SW[:-1].sum(-1).tolist() == [3, 3, 2, 3, 3, 2]
        else:
            assert measured.num_replayed == LOAD.num_blocks * LOAD.block
            assert 0 < measured.num_equal <= measured.num_replayed
        answers[cache] = engine.engine.table.tokens_ZL[0, LOAD.num_prompt :][: LOAD.num_blocks * LOAD.block]
    expected = answers[None]
    for tokens in answers.values():
        assert torch.equal(tokens, expected)
    chosen_BPW = decisions.chosen_SW[:-1].view(LOAD.num_blocks, LOAD.passes, LOAD.block)
    tokens_BPW = decisions.tokens_SW[:-1].view_as(chosen_BPW)
    assert torch.equal((tokens_BPW * chosen_BPW).sum(1).flatten(), expected)
