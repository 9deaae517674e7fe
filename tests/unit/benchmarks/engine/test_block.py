"""The benchmark of block diffusion, tiny and on a CPU: replay, counts, and all its parts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.block_harness import Answers, BlockArm, pass_cost, whole_answers
from benchmarks.engine.decoding.harness import SAMPLING, Load
from benchmarks.engine.decoding.replay import Trace, trace_of
from benchmarks.models import random_model

SIZE, CONTEXT = 8, 16


def answers_of(trace: Trace, *, fused: bool, sampling: str = "T1") -> Answers:
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=SIZE)
    load = Load(concurrency=4, context=CONTEXT, num_tokens=2 * SIZE, sampling=SAMPLING[sampling])
    return whole_answers(model, BlockArm(name="arm", stride=SIZE, fused=fused), load, trace)


@pytest.mark.parametrize("sampling", ["T1", "qwen3"])
def test_answers_take_the_passes_of_the_trace(sampling: str) -> None:
    """Whatever the confidence of random weights; without fused commits another pass stores a clean block."""
    trace = trace_of("p0.53", SIZE)
    separate = answers_of(trace, fused=False, sampling=sampling)
    assert separate.num_passes == separate.num_expected
    assert separate.num_tokens == 4 * 2 * SIZE


def test_fused_commits_save_a_pass_per_block() -> None:
    trace = Trace(name="two", num_drafts=SIZE - 1, accepted=(1,))
    fused, separate = answers_of(trace, fused=True), answers_of(trace, fused=False)
    # Two are decided in each pass; 0, 2, 4 or 6 of the first block are fixed, and 16 tokens are wanted.
    assert fused.num_expected == (4 + 4) + (3 + 4 + 4) + (2 + 4 + 4) + (1 + 4 + 4)
    # All blocks but an answer's last are stored.
    assert separate.num_passes == separate.num_expected == fused.num_expected + 1 + 2 + 2 + 2
    assert fused.num_passes <= fused.num_expected + 1


def test_the_cost_of_a_pass_follows_its_rows() -> None:
    model = random_model("tiny", device="cpu", dtype=torch.float32, block_size=SIZE)
    spec = model.spec
    work = pass_cost(model, num_sequences=2, rows=16, slots=10)
    heads = spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.width * spec.head_dim * (heads + spec.num_heads) + 3 * spec.width * spec.ffn_width
    head = spec.width * spec.vocab_size
    assert work.linears(16, 8) == 2 * (16 * spec.num_layers * layer + 8 * head)
    assert work.attention_flops == 2 * 2 * 16 * 10 * spec.num_heads * spec.head_dim * spec.num_layers
