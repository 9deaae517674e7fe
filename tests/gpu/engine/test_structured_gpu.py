"""Answers that match a grammar on a CUDA device: forward passes are graphs, which end with hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from tests.contracts import engines
from tests.contracts.engines import answers, assert_idle, build_engine
from tests.contracts.structured.test_structured import (
    CONSTRAINTS,
    PROMPTS,
    _check,
    _params,
    test_preempted_answers_do_not_change,
    toy,
)
from tests.law.structured import build_engine as build_law_engine
from tests.law.structured import draw_fits, write_structured_toy

pytest.importorskip("llguidance")
__all__ = ["test_preempted_answers_do_not_change", "toy"]
LEVEL, DRAWS = 1e-6 / 24, 2000
ISD: dict[str, Any] = {"stride": 4, "rejection_strategy": "tree"}


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engines, "DEVICE", {"device": "cuda", "graphs": "on"})
    yield
    torch.cuda.synchronize()


def test_passes_in_graphs_answer_as_eager_ones(toy: Path) -> None:
    """In one batch with requests without a constraint; a second round replays what the first captured."""
    wanted = build_engine(toy, "isd", **ISD, graphs="off").generate(PROMPTS, _params())
    engine = build_engine(toy, "isd", **ISD)
    for _ in range(2):
        found = engine.generate(PROMPTS, _params())
        assert answers(found) == answers(wanted)
        for completion, constraint in zip(found, CONSTRAINTS, strict=True):
            if completion.finish_reason == "stop":
                _check(completion, constraint)
    step = engine._parts.step
    assert isinstance(step, StaticStep)
    assert {shape.decides for shape in step._graphs} == {True, False}
    assert_idle(engine)


@pytest.mark.parametrize(("decoder", "options"), [("ar", {}), ("isd", ISD)])
def test_the_law_through_graphs(tmp_path: Path, decoder: str, options: dict[str, Any]) -> None:
    """Two grammars under three settings, and an answer without a constraint, share every pass."""
    directory = write_structured_toy(tmp_path)
    # Few lanes, because each number of sequences is captured anew: 240 s with 256 of them, mostly compiling.
    device = {"device": "cuda", "graphs": "on", "num_lanes": 32}
    found = draw_fits(directory, build_law_engine(directory, decoder, **device, **options), DRAWS)
    assert found.p_value >= LEVEL, found
    assert decoder == "ar" or 0.3 < found.acceptance < 0.9, found.acceptance
