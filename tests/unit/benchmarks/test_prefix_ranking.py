"""benchmarks.kernels.prefix_ranking on a CPU: its gate passes right lists and stops wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels import prefix_ranking as benchmark
from idlm.kernels.prefix_ranking import RankingPass, attention_share, rank_prefix

OPTIONS = benchmark.DEFAULTS | {"layers": "2", "k": "40"}


@pytest.mark.parametrize("fault", [None, "share", "slot", "order"])
def test_the_gate(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_lists(ranking: RankingPass, lanes_B: torch.Tensor, slots_LZKC: torch.Tensor) -> None:
        rank_prefix(ranking, lanes_B, slots_LZKC)
        if fault == "slot":
            slots_LZKC[..., 0] = (slots_LZKC[..., 0] + 1) % ranking.max_slots
        elif fault == "order":
            slots_LZKC.copy_(slots_LZKC.flip(-1))

    def wrong_shares(*given: Any) -> torch.Tensor:
        return attention_share(*given) * (1.001 if fault == "share" else 1.0)

    problem = benchmark.make_problem(OPTIONS, 2, 256, device="cpu")
    monkeypatch.setattr(benchmark, "rank_prefix", wrong_lists)
    monkeypatch.setattr(benchmark, "attention_share", wrong_shares)
    assert benchmark.check(problem) == (fault is None)
    assert problem.key_bytes == 2 * 2 * 256 * 8 * 128 * 2
