"""Ops of the step and of its rows in plain torch against the references."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import SEEDED, seeds


@pytest.mark.parametrize(("name", "seed"), seeds(1))
def test_plain_torch_equals_the_references(name: str, seed: int) -> None:
    SEEDED[name][0](seed, "cpu")
