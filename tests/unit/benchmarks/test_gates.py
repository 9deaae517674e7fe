"""Benchmarks of kernels on a CPU: their gates pass right arms and stop wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.kernels import masked_logits as logits_benchmark
from idlm.kernels.masked_logits import Proposals
from tests.kernels.references.masked_logits import masked_logits_reference


@pytest.mark.parametrize("fault", [None, "token_X", "own_X"])
def test_the_gate_of_masked_logits(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(*given: Any, forbidden_S: torch.Tensor) -> Proposals:
        found = masked_logits_reference(*given, forbidden_ids=forbidden_S.tolist())
        if fault == "own_X":
            return replace(found, own_X=found.own_X * 0.5)
        return replace(found, token_X=(found.token_X + (fault is not None)) % 300)

    generator = torch.Generator().manual_seed(0)
    problem = logits_benchmark.Problem(
        hidden_RD=torch.randn(40, 32, generator=generator).bfloat16(),
        rows_X=torch.arange(0, 40, 4),
        weight_VD=(torch.randn(300, 32, generator=generator) / 4).bfloat16(),
        forbidden_S=torch.tensor([5]),
    )
    monkeypatch.setattr(logits_benchmark, "masked_logits", on_cpu)
    monkeypatch.setattr(logits_benchmark, "FORBIDDEN_ID", 5)
    assert logits_benchmark.check(problem) == (fault is None)
