"""Penalties, biases and bans on a GPU: replayed graphs whose counts go on, and the law."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.state.sequence_state import LogitChanges
from idlm.kernels.logit_changes import ChangedRows, KnownTokens
from tests.contracts.engines import CYCLE, answers, build_engine, prompts_of, write_foreseeing_toy
from tests.kernels.drafts.changed_rows import Passes
from tests.law import harness
from tests.law.changes.law import SETTINGS, fits
from tests.law.changes.test_changed_answers import LENGTHS, greedy_params

LEVEL = 1e-6 / 512
DRAWS = 2_000


def test_a_captured_pass_counts_what_later_passes_emit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph is replayed with other tokens, and nothing waits for the device."""
    passes = Passes(5, "cuda", num_drafts=3, has_holes=False)
    first = passes.known([[0, 0, 0]] * 6)
    known = KnownTokens(*(tensor.clone() for tensor in first if tensor is not None))
    lanes_B = torch.arange(5, device="cuda")
    rows = ChangedRows(lanes_B, torch.zeros_like(lanes_B), known.num_known_Z[:5].clone())
    logits_XV = torch.zeros(5, 61, device="cuda")
    given_XV = 4 * torch.randn_like(logits_XV)
    passes.changes.apply(logits_XV, known, rows, lanes_B)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes.changes.apply(logits_XV, known, rows, lanes_B)
    for _ in range(4):
        logits_XV.copy_(given_XV)
        graph.replay()
        found_XV = logits_XV.clone()
        eager = LogitChanges(6, passes.changes.lanes.counts_ZL.shape[1], torch.device("cuda"))
        eager.admit(passes.requests)
        logits_XV.copy_(given_XV)
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.apply(logits_XV, known, rows, lanes_B)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found_XV, logits_XV)
        passes.emit()
        for mine, new in zip(known, passes.known([[0, 0, 0]] * 6), strict=True):
            assert mine is not None and new is not None
            mine.copy_(new)
        rows.positions_X.copy_(known.num_known_Z[:5])


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_greedy_answers_in_graphs_are_those_of_ar(tmp_path: Path, on_the_gpu: None, strategy: str) -> None:
    """A second round replays what the first captured; passes without changes have graphs of their own."""
    toy = write_foreseeing_toy(tmp_path)
    prompts = prompts_of(LENGTHS, vocab_size=CYCLE)
    expected = build_engine(toy, "ar", graphs="off", deterministic=True).generate(prompts, greedy_params())
    options = {"rejection_strategy": strategy, "max_num_seqs": 3, "num_pages": 24, "deterministic": True}
    engine = build_engine(toy, "isd", stride=4, **options)
    for _ in range(2):
        assert answers(engine.generate(prompts, greedy_params())) == answers(expected)
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    assert {shape.changes for shape in step._graphs} == {True, False}


@pytest.mark.parametrize(("strategy", "stride"), [("tree", 4), ("branch", 4), ("alternate", 4), ("cold", 2)])
def test_the_changed_law_through_graphs(tmp_path: Path, on_the_gpu: None, strategy: str, stride: int) -> None:
    toy = harness.write_law_toy(tmp_path)
    options = {"stride": stride, "rejection_strategy": strategy, "num_lanes": 32}
    engine = harness.build_engine(toy, "isd", **options)
    sampled = harness.sample(engine, SETTINGS, DRAWS, per_request=50)
    assert not harness.misfits(fits(toy, sampled), LEVEL)
