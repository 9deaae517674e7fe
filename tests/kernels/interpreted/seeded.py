"""Kernels of the step and of its rows in Triton's interpreter: started by test_interpreted.py."""

from __future__ import annotations

import pytest

from tests.kernels.cases.sparse.seeded import SEEDED, seeds


@pytest.mark.sweep_but(19)
@pytest.mark.parametrize(("name", "seed"), seeds(2))
def test_kernels_equal_the_references(name: str, seed: int) -> None:
    SEEDED[name][0](seed, "cpu")
