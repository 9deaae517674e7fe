"""The kernels of step_rows in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.step_rows import op
from tests.kernels.cases.step_rows import Case, commit_many


@pytest.mark.sweep_but(4)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_equal_plain_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Case(seed, "cpu").run()
    monkeypatch.setattr(op, "runs_kernels", lambda x: False)
    expected = Case(seed, "cpu").run()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_commit_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit_many("cpu")
    monkeypatch.setattr(op, "runs_kernels", lambda x: False)
    for one, expected in zip(found, commit_many("cpu"), strict=True):
        assert torch.equal(one, expected)
