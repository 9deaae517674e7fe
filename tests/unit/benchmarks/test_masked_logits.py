"""benchmarks.kernels.masked_logits on a CPU: its gates pass right arms and stop wrong ones.

X wanted rows, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.kernels import masked_logits as benchmark
from idlm.kernels.masked_logits import Proposals, masked_logits


def problem() -> benchmark.Problem:
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(40, 32, generator=generator).bfloat16()
    weight_VD = (torch.randn(300, 32, generator=generator) / 4).bfloat16()
    return benchmark.Problem(
        hidden_RD=hidden_RD,
        rows_X=torch.arange(0, 40, 4),
        weight_VD=weight_VD,
        forbidden_S=torch.tensor([5]),
    )


@pytest.mark.parametrize("fault", [None, "token_X", "own_X"])
def test_gates(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(*given: Any, route: str, **options: Any) -> Proposals:
        found = masked_logits(*given, **options)
        if route == "chunks" or fault is None:
            return found
        if fault == "own_X":
            return replace(found, own_X=found.own_X * 0.5)
        return replace(found, token_X=(found.token_X + 1) % 300)

    monkeypatch.setattr(benchmark, "masked_logits", on_cpu)
    monkeypatch.setattr(benchmark, "FORBIDDEN_ID", 5)
    assert benchmark.check(problem()) == {"chunks": True, "fused": fault is None}
