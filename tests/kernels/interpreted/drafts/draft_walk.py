"""The kernels of draft_walk in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels import backend
from idlm.kernels.draft_walk import top_candidates
from idlm.kernels.sampling import Tuning
from tests.kernels.cases.draft_walk import Case


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_kernels", lambda device: True)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("seed", range(2))
def test_walks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and what is stored; draws from the store follow it."""
    from idlm.kernels.draft_walk import op

    monkeypatch.setattr(op, "GROUP", 8)
    monkeypatch.setattr(op, "TILE", 4)
    case = Case(seed, "cpu", tuning=Tuning(chunk=32), width=24 + 8 * (seed % 2))
    case.check(filters=seed != 1)


def test_zeros_of_both_signs_are_equal_and_nan_comes_last() -> None:
    logits_XV = torch.zeros(1, 20)
    logits_XV[0, ::2] = -0.0
    logits_XV[0, 1] = float("nan")
    found = top_candidates(logits_XV, torch.zeros(1, dtype=torch.int64), 16)
    assert found.ids_MK[0].tolist() == [0, *range(2, 17)]
