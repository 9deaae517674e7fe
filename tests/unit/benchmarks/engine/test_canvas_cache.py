"""The benchmark of canvas caches, tiny and on a CPU: the same decisions in all arms, and its rows."""

from __future__ import annotations

import torch

from benchmarks.engine.canvas_cache import (
    CanvasEngine,
    CanvasLoad,
    CanvasMeasured,
    Decisions,
)
from benchmarks.models import random_model

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
