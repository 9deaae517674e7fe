"""benchmarks.kernels.blocks.block_eviction on a CPU: its gate passes right kernels and stops wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.kernels.blocks import block_eviction as benchmark
from idlm.errors import UserError
from idlm.kernels import block_eviction, row_compaction


@pytest.mark.parametrize("fault", [None, "block_importance", "select_places", "compact_rows", "gather_rows"])
def test_the_gate(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = benchmark.make_problem(3, "cpu")

    def spoil(module: Any, change: Any) -> None:
        original = getattr(module, fault or "")
        monkeypatch.setattr(module, fault or "", lambda *given, **named: change(original(*given, **named)))

    if fault == "block_importance":
        spoil(block_eviction, lambda parts_BPW: parts_BPW * 1.01)
    elif fault == "select_places":
        spoil(block_eviction, lambda found: replace(found, kept_BW=~found.kept_BW))
    elif fault == "compact_rows":
        spoil(row_compaction, lambda found: replace(found, numbers_I=found.numbers_I.flip(0)))
    elif fault == "gather_rows":
        spoil(row_compaction, lambda found: [tensor + 1 for tensor in found])
    assert benchmark.check(problem) == (fault is None)
    for mine, plainly in benchmark.calls_of(problem).values():
        mine()
        plainly()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="IDLM-0543"):
        benchmark.measure([])
