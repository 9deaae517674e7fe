"""Benchmarks of kernels on a CPU: their gates pass right arms and stop wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.kernels import masked_logits as logits_benchmark
from benchmarks.kernels import prefix_ranking as ranking_benchmark
from idlm.kernels.masked_logits import Proposals, masked_logits
from idlm.kernels.prefix_ranking import RankingPass, attention_share, rank_prefix


@pytest.mark.parametrize("fault", [None, "token_X", "own_X"])
def test_the_gate_of_masked_logits(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(*given: Any, route: str, **options: Any) -> Proposals:
        found = masked_logits(*given, **options)
        if route == "chunks" or fault is None:
            return found
        if fault == "own_X":
            return replace(found, own_X=found.own_X * 0.5)
        return replace(found, token_X=(found.token_X + 1) % 300)

    generator = torch.Generator().manual_seed(0)
    problem = logits_benchmark.Problem(
        hidden_RD=torch.randn(40, 32, generator=generator).bfloat16(),
        rows_X=torch.arange(0, 40, 4),
        weight_VD=(torch.randn(300, 32, generator=generator) / 4).bfloat16(),
        forbidden_S=torch.tensor([5]),
    )
    monkeypatch.setattr(logits_benchmark, "masked_logits", on_cpu)
    monkeypatch.setattr(logits_benchmark, "FORBIDDEN_ID", 5)
    assert logits_benchmark.check(problem) == {"chunks": True, "fused": fault is None}


@pytest.mark.parametrize("fault", [None, "share", "slot", "order"])
def test_the_gate_of_prefix_ranking(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_lists(ranking: RankingPass, lanes_B: torch.Tensor, slots_LZKC: torch.Tensor) -> None:
        rank_prefix(ranking, lanes_B, slots_LZKC)
        if fault == "slot":
            slots_LZKC[..., 0] = (slots_LZKC[..., 0] + 1) % ranking.max_slots
        elif fault == "order":
            slots_LZKC.copy_(slots_LZKC.flip(-1))

    def wrong_shares(*given: Any) -> torch.Tensor:
        return attention_share(*given) * (1.001 if fault == "share" else 1.0)

    options = ranking_benchmark.DEFAULTS | {"layers": "2", "k": "40"}
    problem = ranking_benchmark.make_problem(options, 2, 256, device="cpu")
    monkeypatch.setattr(ranking_benchmark, "rank_prefix", wrong_lists)
    monkeypatch.setattr(ranking_benchmark, "attention_share", wrong_shares)
    assert ranking_benchmark.check(problem) == (fault is None)
    assert problem.key_bytes == 2 * 2 * 256 * 8 * 128 * 2
