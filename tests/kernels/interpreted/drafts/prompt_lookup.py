"""The kernel of prompt_lookup in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels import backend
from idlm.kernels.prompt_lookup import op
from tests.kernels.drafts.lookups import check_lookups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lookups(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches within a tile of positions and across tiles."""
    monkeypatch.setattr(backend, "has_kernels", lambda device: True)
    monkeypatch.setattr(op, "TILE", 32)
    assert sum(check_lookups(seed, dtype=dtype) for seed in range(8)) > 8
