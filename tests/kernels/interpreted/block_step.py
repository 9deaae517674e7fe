"""The kernels of block_step in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.block_step import op
from tests.kernels.cases.block_step import Case, run


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_equal_plain_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(Case(seed, "cpu"))
    monkeypatch.setattr(op, "runs_kernels", lambda x: False)
    expected = run(Case(seed, "cpu"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
